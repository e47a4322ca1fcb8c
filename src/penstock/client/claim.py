"""What is known of a job while somebody holds its lease."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from penstock.client.hints import Hinting
from penstock.client.info import Child, add_children, read_children
from penstock.core.job import EMPTY_EXTRAS, Extras, Lease, Policy
from penstock.core.limits import amounts as in_millionths
from penstock.core.names import check_step, ref_of
from penstock.core.outcome import Await, Complete, Fail, Limited, Outcome, Release, Snooze
from penstock.core.text import get_logger, storable_value, text_of
from penstock.core.units import Duration, milliseconds
from penstock.errors import (
    InvalidInput,
    LeaseLost,
    RateLimited,
    SerializationError,
    StorageError,
    Suspend,
    Verdict,
)
from penstock.storage.values import Held, Report, Settlement

if TYPE_CHECKING:
    from penstock.client.codec import JobCodec
    from penstock.client.flow.parts import Part
    from penstock.client.handle import JobHandle
    from penstock.client.queue import Claiming
    from penstock.client.session import Session


class Signal(NamedTuple):
    """What ended a job's suspension. ``raw`` is JSON."""

    name: str
    raw: bytes

    @property
    def data(self) -> Any:
        """What was sent along; ``None`` if nothing was."""
        return msgspec.json.decode(self.raw) if self.raw else None


class LeasedJob(Hinting):
    """The fields that a worker's ``JobContext`` and a ``ClaimedJob`` share."""

    __slots__ = ("_lease",)
    hints_for = "job context"

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    @property
    def id(self) -> str:
        return self._lease.id

    @property
    def task(self) -> str:
        """The task's name; empty for a payload without a task."""
        return self._lease.options.task

    @property
    def run(self) -> int:
        """Which run of the job this is, from 1. Counts runs that were snoozed or handed back, too."""
        return self._lease.run

    @property
    def failures(self) -> int:
        """How many runs have failed before."""
        return self._lease.failures

    @property
    def attempts(self) -> int:
        """How many failures end the job."""
        return self._lease.options.attempts

    @property
    def token(self) -> int:
        """The fencing token of this run: rises from claim to claim of a queue, for stores of one's own."""
        return self._lease.token

    @property
    def headers(self) -> Mapping[str, str]:
        """What was sent along for middleware and handlers."""
        return self._extras.headers or {}

    @property
    def group(self) -> str:
        """The key of the jobs it shares a limit with; empty if there is none."""
        return self._extras.group

    @property
    def cost(self) -> int:
        """What it takes from its group's bucket."""
        return self._extras.cost

    @property
    def step(self) -> str:
        """Where the job goes on: what it was snoozed or suspended with; empty at its beginning."""
        return self._extras.step

    @property
    def signal(self) -> Signal | None:
        """The signal that ended its last suspension; the same in every run until the next one."""
        data = self._lease.signal
        return None if data is None else Signal(self._extras.received, data)

    @property
    def timed_out(self) -> bool:
        """Whether its last suspension ended by the timeout, without the signal."""
        return self._extras.timed_out

    @property
    def _extras(self) -> Extras:
        return self._lease.extras or EMPTY_EXTRAS

    @property
    def scheduler(self) -> str:
        """The scheduler it comes from; empty if there is none."""
        return self._lease.extras.scheduler if self._lease.extras else ""

    @property
    def scheduled_for(self) -> datetime | None:
        """The slot of its scheduler that it stands for, however late it runs."""
        slot_ms = self._lease.extras.slot_ms if self._lease.extras else 0
        return datetime.fromtimestamp(slot_ms / 1000, UTC) if slot_ms else None

    @property
    def enqueued_at(self) -> datetime:
        return datetime.fromtimestamp(self._lease.enqueued_at_ms / 1000, UTC)


def encode_progress(value: Any) -> bytes:
    """Return ``value`` as JSON, its texts made storable. Raise ``SerializationError`` if JSON cannot hold it."""
    try:
        try:
            return msgspec.json.encode(value)
        except UnicodeEncodeError:
            return msgspec.json.encode(storable_value(msgspec.to_builtins(value)))
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise SerializationError(
            f"Progress of type {type(value).__qualname__} cannot be encoded as JSON: {error}. "
            "Pass a number, a string or a dict."
        ) from error


# A loop of one's own: jobs taken under a lease outside any worker.
#
# ::
#
#     while True:
#         async with queue.claim(lease="30s") as job:
#             job.result = await work(job.payload)


_log = get_logger(__name__)

_UNSET: Final = object()

J = TypeVar("J", "ClaimedJob", "ClaimedJob | None")


class ClaimedJob(LeasedJob):
    """A job under a lease of ours. Settle it once, by ``complete``, ``fail``, ``release``, ``snooze``,
    ``suspend`` or ``rate_limited``.

    Each of these says whether it counted: false means that the lease was lost, or that this job was settled here
    before; nothing changed then. ``complete`` is true for exactly one of all callers who ever held the job.
    ``result`` is what ``async with`` completes the job with. Belongs to the event loop it was claimed in.
    """

    __slots__ = (
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
        super().__init__(lease)
        self._source = source
        self._session = session
        self._lease_ms = lease_ms
        self._worker = worker
        self._payload: Any = _UNSET
        self.result: Any = None
        self.settled = False
        self.cancelled = lease.cancelling
        """Whether to stop: asked to, past its ttl, or no longer ours. Renewed by every ``extend``."""

    def __repr__(self) -> str:
        return f"<ClaimedJob {self.ref} run {self.run}>"

    @property
    def queue(self) -> str:
        return self._source.queue

    @property
    def ref(self) -> str:
        """Return queue and id as one string: ``app.job(ref)`` accepts it."""
        return ref_of(self.queue, self.id)

    @property
    def payload(self) -> Any:
        """Raises ``SerializationError`` if it cannot be decoded: then ``fail`` the job."""
        if self._payload is _UNSET:
            self._payload = self._source.decode_payload(self._lease.payload)
        return self._payload

    async def complete(self, result: Any = None, *, ttl: Duration | None = None) -> bool:
        """The work is done. The result is kept for ``ttl``, or as long as the job's options say.

        Raises ``SerializationError`` or ``PayloadTooLarge`` for a result that cannot be kept.
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
        """The run failed: the job runs again after its backoff, or ``retry_in``, as long as attempts are left.

        ``final`` ends it now. An error may say so itself, as in a worker (``Retry``, ``Snooze``, ``Suspend``,
        ``Unrecoverable``). If it is the job's end, the failure is kept for ``ttl``, or as its options say.
        """
        from penstock.core.verdict import failed

        cause = _Failed(error) if isinstance(error, str) else error
        outcome = failed(cause, self._lease, discarded=False, backoffs=self._source.app.backoffs)
        if isinstance(outcome, Fail):
            rest = outcome.retry_in_ms if retry_in is None else milliseconds(retry_in, what="retry_in")
            outcome = Fail(outcome.failure, rest, final or outcome.final, _ttl_ms(ttl))
        return await self._settle(outcome)

    async def release(self) -> bool:
        """Hand the job back unfinished: the next in line, counted in no limit."""
        return await self._settle(Release())

    async def rate_limited(self, retry_in: Duration, *, scope: Literal["group", "queue"] = "group") -> bool:
        """Hand the job back as ``release`` does; nothing of its group, or of the queue, starts before ``retry_in``."""
        error = RateLimited(retry_in, scope=scope)
        return await self._settle(Limited(milliseconds(error.retry_in, what="retry_in"), error.scope))

    async def snooze(self, delay: Duration, *, step: str | None = None) -> bool:
        """Run it again after ``delay``, at that ``step`` (where it is unless given); counted in no limit."""
        return await self._settle(Snooze(milliseconds(delay, what="delay"), check_step(step)))

    async def suspend(self, signal: str, *, timeout: Duration | None = None, step: str | None = None) -> bool:
        """Run it again when ``signal`` comes, or after ``timeout``; counted in no limit."""
        from penstock.core.verdict import suspension

        return await self._settle(suspension(Suspend(signal, timeout=timeout, step=step)))

    async def wait_for_children(self) -> bool:
        """Leave it until its children have ended; counted in no limit. Then it is claimed again."""
        return await self._settle(Await())

    async def add_children(
        self, children: Iterable[Part], *, on_failure: Policy = "fail"
    ) -> list[JobHandle[Any]]:
        """Have the job wait for further ones, once it is left by ``wait_for_children``."""
        return await add_children(self._source, self.id, children, on_failure=on_failure)

    async def children(self) -> list[Child]:
        """The jobs it waited for, in the order they were given."""
        return await read_children(self._source, self.id)

    async def extend(self, lease: Duration | None = None) -> Literal["extended", "cancel", "expired"]:
        """Push the lease's deadline to ``lease`` from now (as long as at the claim unless given).

        ``cancel`` and ``expired`` say that it was pushed, but that the job should be stopped. Raises ``LeaseLost``.
        """
        lease_ms = self._lease_ms if lease is None else milliseconds(lease, what="lease")
        held = Held(self.id, self.token)
        answer = await self._session.extend(self.queue, held, worker=self._worker, lease_ms=lease_ms)
        self.cancelled = answer != "extended"
        if answer == "lost":
            raise self._lost()
        return answer

    async def progress(self, value: Any) -> None:
        """Keep ``value`` (anything JSON can say) on the job as its progress. Raises ``LeaseLost``."""
        await self._report(Report(self.id, self.token, progress=encode_progress(value)))

    async def log(self, *lines: str) -> None:
        """Append lines to the job's log. Raises ``LeaseLost``."""
        await self._report(Report(self.id, self.token, log=tuple(text_of(line) for line in lines)))

    async def update_payload(self, payload: Any) -> None:
        """Replace the stored payload: the next run gets it. Raises ``LeaseLost``."""
        await self._report(Report(self.id, self.token, payload=self._source.encode_payload(payload)))

    async def use(self, /, **amounts: float) -> None:
        """Add to what this job has used, such as ``tokens=812, usd=0.0042``. Raises ``LeaseLost``."""
        await self._report(Report(self.id, self.token, usage=in_millionths(amounts)))

    async def _report(self, report: Report) -> None:
        [heard] = await self._session.storage.report(self.queue, [report])
        if not heard:
            raise self._lost()

    async def _settle(self, outcome: Outcome) -> bool:
        if self.settled:
            return False
        self.settled = True  # before the answer: of two calls at a time one is to count
        try:
            settled = await self._session.settle(self.queue, Settlement(self.id, self.token, outcome))
        except BaseException:
            self.settled = False
            raise
        return settled.applied

    def _lost(self) -> LeaseLost:
        return LeaseLost(
            f"the lease on job {self.id!r} of queue {self.queue!r} is lost: it expired, or the job has ended. "
            "Nothing was changed; somebody else may be running it."
        )


def _ttl_ms(ttl: Duration | None) -> int | None:
    return None if ttl is None else milliseconds(ttl, what="ttl")


class _Failed(Exception):
    """Stands for an error that was told in words."""


class Claim(Generic[J]):
    """``async with queue.claim(...) as job``: one job, its lease extended until the block is left.

    | how the block is left | what becomes of the job |
    |---|---|
    | normally | completed with ``job.result``; ``LeaseLost`` is raised if that did not count |
    | ``Retry``, ``Snooze``, ``Suspend``, ``RateLimited``, ``Unrecoverable`` raised | what they say; it ends here |
    | another exception | failed, to be retried as its options say; the exception goes on |
    | cancelled, interrupted | handed back |
    | settled inside the block | that counts |
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
        return self._job  # type: ignore[return-value]  # None only if a limit was set to the wait

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
        return isinstance(error, Verdict)


async def _finish(job: ClaimedJob) -> None:
    try:
        counted = await job.complete(job.result)
    except InvalidInput as error:  # a result that cannot be kept is the handler's failure
        await job.fail(error)
        raise
    if not counted:
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
