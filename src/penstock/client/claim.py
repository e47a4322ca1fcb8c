"""Claimed jobs: a job under a lease, for workers and for custom worker loops."""

from __future__ import annotations

import asyncio
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from penstock.client.hints import Hinting
from penstock.client.info import ExtrasFields, Field, Parent, ref_field
from penstock.client.situation import instant
from penstock.core.job import EMPTY_EXTRAS, Extras, Lease
from penstock.core.limits import amounts as in_millionths
from penstock.core.names import check_stage
from penstock.core.outcome import Await, Complete, Fail, Limited, Outcome, Release, Snooze, failed, suspension
from penstock.core.text import get_logger, storable_value, text_of
from penstock.core.units import Duration, milliseconds
from penstock.errors import (
    Directive,
    InvalidInput,
    LeaseLost,
    RateLimited,
    SerializationError,
    StorageError,
    Suspend,
)
from penstock.storage.values import Held, Report, Settlement

if TYPE_CHECKING:
    from penstock.client.codec import JobCodec
    from penstock.client.queue import Claiming
    from penstock.client.session import Session


class Signal(NamedTuple):
    """The signal that ended a job's suspension. ``raw`` is JSON."""

    name: str
    raw: bytes

    @property
    def data(self) -> Any:
        """Return the data of the signal, or ``None``."""
        return msgspec.json.decode(self.raw) if self.raw else None


class LeasedJob(ExtrasFields, Hinting):
    """The fields that a worker's ``JobContext`` and a ``ClaimedJob`` share."""

    __slots__ = ()
    hints_for = "job context"

    _lease: Lease

    id = Field[str]("_lease.id")
    task = Field[str]("_lease.options.task")
    """The name of the task; empty for a payload without a task."""
    run = Field[int]("_lease.run")
    """The number of this run, from 1. Snoozed and released runs count, too."""
    failures = Field[int]("_lease.failures")
    """The number of failed runs before this one."""
    attempts = Field[int]("_lease.options.attempts")
    """The number of failures after which the job fails for good."""
    token = Field[int]("_lease.token")
    """The fencing token of this run, for your own stores. It increases with every claim of the queue."""

    @property
    def signal(self) -> Signal | None:
        """Return the signal that ended its last suspension. It stays until the next suspension."""
        data = self._lease.signal
        return None if data is None else Signal(self._extras.received, data)

    timed_out = Field[bool]("_extras.timed_out")
    """True if its last suspension timed out."""

    @property
    def _extras(self) -> Extras:
        return self._lease.extras or EMPTY_EXTRAS

    enqueued_at = Field[datetime](lambda job: instant(job._lease.enqueued_at_ms))


def encode_progress(value: Any) -> bytes:
    """Return ``value`` as JSON, its texts made storable. Raise ``SerializationError`` if JSON cannot hold it."""
    try:
        try:
            return msgspec.json.encode(value)
        except UnicodeEncodeError:
            return msgspec.json.encode(storable_value(msgspec.to_builtins(value)))
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise SerializationError(
            f"progress of type {type(value).__qualname__} cannot be encoded as JSON: {error}. "
            "Pass a number, a string or a dict."
        ) from error


# Write your own worker loop:
#
# ::
#
#     while True:
#         async with queue.claim(lease="30s") as job:
#             job.result = await work(job.payload)


_log = get_logger(__name__)

_UNSET: Final = object()

J = TypeVar("J", "ClaimedJob", "ClaimedJob | None")


class ClaimedJob(LeasedJob, Parent):
    """A job that this process claimed. Settle it once, with ``complete``, ``fail``, ``release``, ``snooze``,
    ``suspend`` or ``rate_limited``.

    Each of them returns whether it took effect. If it returns false, the lease was lost, or the job was settled
    before. ``complete`` returns true for exactly one of all holders of the job.
    ``async with`` completes the job with ``result``. Use it on the event loop that claimed it.
    """

    __slots__ = (
        "_lease",
        "_lease_ms",
        "_payload",
        "_session",
        "_source",
        "_worker",
        "cancelled",
        "result",
        "settled",
    )

    def __init__(
        self, source: JobCodec, session: Session, lease: Lease, *, lease_ms: int, worker: str
    ) -> None:
        self._lease = lease
        self._source = source
        self._session = session
        self._lease_ms = lease_ms
        self._worker = worker
        self._payload: Any = _UNSET
        self.result: Any = None
        self.settled = False
        self.cancelled = lease.cancelling
        """True if the handler should stop: the job was cancelled, has expired, or is lost. ``extend`` updates it."""

    def __repr__(self) -> str:
        return f"<ClaimedJob {self.ref} run {self.run}>"

    _source: JobCodec
    queue = Field[str]("_source.queue")
    ref = ref_field()
    """Queue and id as one string: ``app.job(ref)`` accepts it."""

    @property
    def payload(self) -> Any:
        """Return the payload. Raise ``SerializationError`` if it cannot be decoded; then ``fail`` the job."""
        if self._payload is _UNSET:
            self._payload = self._source.decode_payload(self._lease.payload)
        return self._payload

    async def complete(self, result: Any = None, *, ttl: Duration | None = None) -> bool:
        """Complete the job. Keep the result for ``ttl`` (default: the option ``result_ttl``).

        Raises ``SerializationError`` or ``PayloadTooLarge`` for a result that cannot be stored.
        """
        return await self._settle(Complete(self._source.encode_result(result), _ttl_ms(ttl)))

    async def fail(
        self,
        error: BaseException | str,
        *,
        retry_in: Duration | None = None,
        final: bool = False,
        ttl: Duration | None = None,
    ) -> bool:
        """Fail the run. While attempts are left, the job runs again after its backoff, or ``retry_in``.

        ``final`` fails the job for good. An error decides itself, as in a worker, if it is a ``Retry``, ``Snooze``,
        ``Suspend`` or ``Unrecoverable``. The last failure is kept for ``ttl`` (default: ``failure_ttl``).
        """
        cause = _Failed(error) if isinstance(error, str) else error
        outcome = failed(cause, self._lease, discarded=False, backoffs=self._source.app.backoffs)
        if isinstance(outcome, Fail):
            rest = outcome.retry_in_ms if retry_in is None else milliseconds(retry_in, what="retry_in")
            outcome = Fail(outcome.failure, rest, final or outcome.final, _ttl_ms(ttl))
        return await self._settle(outcome)

    async def release(self) -> bool:
        """Hand the job back to the head of the queue. No counter changes."""
        return await self._settle(Release())

    async def rate_limited(self, retry_in: Duration, *, scope: Literal["group", "queue"] = "group") -> bool:
        """Hand the job back as ``release`` does, and start no job of its group, or of the queue, for ``retry_in``."""
        error = RateLimited(retry_in, scope=scope)
        return await self._settle(Limited(milliseconds(error.retry_in, what="retry_in"), error.scope))

    async def snooze(self, delay: Duration, *, stage: str | None = None) -> bool:
        """Run the job again after ``delay``, at ``stage`` (default: the same). No counter changes."""
        return await self._settle(Snooze(milliseconds(delay, what="delay"), check_stage(stage)))

    async def suspend(
        self, signal: str, *, timeout: Duration | None = None, stage: str | None = None
    ) -> bool:
        """Run the job again when ``signal`` arrives, or after ``timeout``. No counter changes."""
        return await self._settle(suspension(Suspend(signal, timeout=timeout, stage=stage)))

    async def wait_for_children(self) -> bool:
        """Run the job again when its children have finished. No counter changes."""
        return await self._settle(Await())

    async def extend(self, lease: Duration | None = None) -> Literal["extended", "cancel", "expired"]:
        """Extend the lease to ``lease`` from now (default: as in the claim).

        ``cancel`` and ``expired`` mean that the lease was extended, but the job should stop. Raises ``LeaseLost``.
        """
        lease_ms = self._lease_ms if lease is None else milliseconds(lease, what="lease")
        held = Held(self.id, self.token)
        answer = await self._session.extend(self.queue, held, worker=self._worker, lease_ms=lease_ms)
        self.cancelled = answer != "extended"
        if answer == "lost":
            raise self._lost()
        return answer

    async def progress(self, value: Any) -> None:
        """Store ``value``, which JSON can encode, as the progress of the job. Raise ``LeaseLost``."""
        await self._report(Report(self.id, self.token, progress=encode_progress(value)))

    async def log(self, *lines: str) -> None:
        """Append lines to the job's log. Raise ``LeaseLost``."""
        await self._report(Report(self.id, self.token, log=tuple(text_of(line) for line in lines)))

    async def update_payload(self, payload: Any) -> None:
        """Replace the stored payload, for the next run. Raise ``LeaseLost``."""
        await self._report(Report(self.id, self.token, payload=self._source.encode_payload(payload)))

    async def use(self, /, **amounts: float) -> None:
        """Add to the usage of this job, such as ``tokens=812, usd=0.0042``. Raise ``LeaseLost``."""
        await self._report(Report(self.id, self.token, usage=in_millionths(amounts)))

    async def _report(self, report: Report) -> None:
        [heard] = await self._session.storage.report(self.queue, [report])
        if not heard:
            raise self._lost()

    async def _settle(self, outcome: Outcome) -> bool:
        if self.settled:
            return False
        self.settled = True  # before the answer: of two concurrent calls, one may settle
        try:
            settled = await self._session.settle(self.queue, Settlement(self.id, self.token, outcome))
        except BaseException:
            self.settled = False
            raise
        return settled.applied

    def _lost(self) -> LeaseLost:
        return LeaseLost(
            f"the lease on job {self.id!r} of queue {self.queue!r} is lost: it expired, or the job has finished. "
            "Nothing was changed; another worker may be running it."
        )


def _ttl_ms(ttl: Duration | None) -> int | None:
    return None if ttl is None else milliseconds(ttl, what="ttl")


class _Failed(Exception):
    """An error that was given as a string."""


class Claim(Generic[J]):
    """The context manager of ``queue.claim(...)``. It extends the lease of the job while the block runs.

    | the block | the job |
    |---|---|
    | ends normally | completes with ``job.result``; raises ``LeaseLost`` if the lease was lost |
    | raises ``Retry``, ``Snooze``, ``Suspend``, ``RateLimited`` or ``Unrecoverable`` | as it says |
    | raises another exception | fails and may be retried; the exception propagates |
    | is cancelled or interrupted | is handed back |
    | settles the job | stays as it was settled |
    """

    __slots__ = ("_claiming", "_heartbeat", "_job")

    def __init__(self, claiming: Claiming) -> None:
        self._claiming = claiming
        self._job: ClaimedJob | None = None
        self._heartbeat: asyncio.Task[None] | None = None

    async def __aenter__(self) -> J:
        jobs = await self._claiming.claim(1)
        if jobs:
            self._job = jobs[0]
            self._heartbeat = asyncio.create_task(_beat(self._job, self._claiming.lease_ms / 3000))
        return self._job  # type: ignore[return-value]  # None only after a limited wait

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.gather(self._heartbeat, return_exceptions=True)
        job = self._job
        if job is None or job.settled:
            return False
        if error is None:
            await _finish(job)
        elif isinstance(error, Exception):
            await job.fail(error)
        else:
            await job.release()
        return isinstance(error, Directive)


async def _finish(job: ClaimedJob) -> None:
    try:
        applied = await job.complete(job.result)
    except InvalidInput as error:  # The result cannot be stored.
        await job.fail(error)
        raise
    if not applied:
        raise job._lost()


async def _beat(job: ClaimedJob, every_s: float) -> None:
    while not job.settled:
        await asyncio.sleep(every_s)
        try:
            await job.extend()
        except LeaseLost:
            return
        except StorageError as error:
            _log.warning("queue %s: the lease on job %s could not be extended: %s", job.queue, job.id, error)
