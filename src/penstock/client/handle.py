"""A handle of one job: what an enqueue gives back, and the way to its result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, Never, TypeVar, cast

from msgspec.structs import replace

from penstock.client.causes import Reason
from penstock.client.events import EventTypes, Filter, job_events
from penstock.client.hints import Hinting, refuse_keywords
from penstock.client.info import Child, JobInfo, add_children, read_children
from penstock.client.optionvalues import whole_number
from penstock.core.lifecycle import TERMINAL, State
from penstock.core.names import check_signal, ref_of
from penstock.core.units import Duration, describe, milliseconds
from penstock.errors import (
    JobCancelled,
    JobError,
    JobExpired,
    JobFailed,
    JobNotFound,
    PenstockError,
    ResultTimeout,
)
from penstock.storage.values import Change, Finished

if TYPE_CHECKING:
    from penstock.client.codec import JobCodec
    from penstock.client.flow.parts import Part
    from penstock.client.waiter import Expected
    from penstock.core.event import Event
    from penstock.core.job import Enqueued, EnqueueStatus, NewJob, Policy
    from penstock.storage.values import CancelAnswer, PromoteAnswer, RemoveAnswer, RetryAnswer, SignalAnswer


R = TypeVar("R")
_ASK_WHY_S: Final = 2.0
"""The time limit for finding out what the job waits for once a wait is over."""

_OF_GET: Final = {
    "timeout": "It returns the record; use job.result(timeout=...) to wait for the result.",
    "propagate": "It returns the record; use job.result(), which raises JobFailed.",
}
_STOPS: Final = "A running function is stopped, too; a plain one has to look at context.cancelled."
_OF_CANCEL: Final = {"terminate": _STOPS, "signal": _STOPS}


class JobHandle(Hinting, Generic[R]):
    """One job, by its id. Light, and not tied to an event loop: it may be used from any.

    ``status`` and ``state`` are what the enqueue answered, ``refresh()`` renews the state; for a handle made of a
    known id both are ``None`` until then.
    """

    __slots__ = ("_answer", "_source", "_state", "id")
    hints_for = "job"

    def __init__(self, source: JobCodec, id: str, answer: Enqueued | None = None) -> None:
        self.id = id
        self._source = source
        self._answer = answer
        self._state: State | None = None

    def __repr__(self) -> str:
        return f"<JobHandle {self.ref} {self.status or 'known id'}>"

    @property
    def queue(self) -> str:
        return self._source.queue

    @property
    def ref(self) -> str:
        """Return queue and id as one string: ``app.job(ref)`` accepts it."""
        return ref_of(self.queue, self.id)

    @property
    def source(self) -> JobCodec:
        """Where the job comes from: for the parts of Penstock."""
        return self._source

    @property
    def status(self) -> EnqueueStatus | None:
        """``queued``, ``duplicate``, ``completed``, ``updated`` or ``rerun``, see ``Enqueued``."""
        return self._answer.status if self._answer is not None else None

    @property
    def state(self) -> State | None:
        """The state last heard of."""
        return self._answer.state if self._state is None and self._answer is not None else self._state

    async def result(self, timeout: Duration | None = None) -> R:
        """What the job returned, waiting for its end if need be.

        After a ``rerun`` this is the next end of the job.

        Raises:
            JobFailed, JobExpired, JobCancelled: it has ended otherwise.
            JobNotFound: the id is unknown, or what became of it is no longer kept.
            ResultTimeout: ``timeout`` is over. The job is left alone.
        """
        answer = self._answer
        if answer is not None and answer.status == "completed":
            return cast(R, self._source.decode_result(answer.result))
        session = await self._source.app.session()
        waiter = session.waiter(self.queue)
        expected = waiter.expect(self.id)
        try:
            async with _deadline(self, timeout, expected):
                await waiter.watch(expected)
                return self._conclude(await expected.future)
        finally:
            waiter.forget(expected)

    async def get(self, /, **other: Never) -> JobInfo:
        """Return the job as it is now. Raises ``JobNotFound``."""
        refuse_keywords(other, _OF_GET, where="job.get()")
        info = await self.get_or_none()
        if info is None:
            raise JobNotFound.in_queue(self.queue, self.id)
        return info

    async def get_or_none(self) -> JobInfo | None:
        """Return the job as it is now, or ``None`` if the id is unknown or the job is no longer kept."""
        storage = await self._source.app.connect()
        [job] = await storage.get(self.queue, [self.id])
        if job is None:
            return None
        self._state = job.state
        return JobInfo(self._source, job)

    async def why(self) -> Reason:
        """Return why the job does not run, in a sentence with the remedy; or that it runs, or how it ended.

        Raises ``JobNotFound``.
        """
        return await (await self.get()).why()

    async def refresh(self) -> State:
        """Renew ``state``. Raises ``JobNotFound``."""
        return (await self.get()).state

    async def cancel(self, /, *, rerun_only: bool = False, **other: Never) -> CancelAnswer:
        """End the job if it has not begun (``cancelled``), or ask it to stop (``requested``).

        With ``rerun_only``, leave the job alone and drop the rerun that waits behind it (``rerun_cancelled``).
        """
        refuse_keywords(other, _OF_CANCEL, where="job.cancel()")
        storage = await self._source.app.connect()
        [answer] = await storage.cancel(self.queue, [self.id], rerun_only=rerun_only)
        return answer

    async def retry(self) -> RetryAnswer:
        """Have a failed or cancelled job run again."""
        [answer] = await (await self._source.app.connect()).retry(self.queue, [self.id])
        return answer

    async def promote(self) -> PromoteAnswer:
        """Have a scheduled job wait for a worker from now on."""
        [answer] = await (await self._source.app.connect()).promote(self.queue, [self.id])
        return answer

    async def remove(self) -> RemoveAnswer:
        """Delete the job, unless it is active."""
        [answer] = await (await self._source.app.connect()).remove(self.queue, [self.id])
        return answer

    async def signal(self, name: str, data: Any = None) -> SignalAnswer:
        """Send the job a signal, with anything JSON can say; see ``Queue.signal``."""
        storage = await self._source.app.connect()
        return await storage.signal(self.queue, self.id, check_signal(name), self._source.encode_signal(data))

    async def add_children(
        self, children: Iterable[Part], *, on_failure: Policy = "fail"
    ) -> list[JobHandle[Any]]:
        """Have the job, which must be open, wait for further jobs: ``task.job(...)``, handles, whole flows.

        Raises ``JobNotFound``, ``JobError`` if it has ended, or ``InvalidInput``.
        """
        return await add_children(self._source, self.id, children, on_failure=on_failure)

    async def children(self) -> list[Child]:
        """The jobs it waits, or waited, for, in the order they were given."""
        return await read_children(self._source, self.id)

    async def keep_result(self, ttl: Duration) -> bool:
        """Keep the result for ``ttl`` from the job's end; false if the job is not known."""
        change = Change(result_ttl_ms=milliseconds(ttl, what="ttl"))
        return await (await self._source.app.connect()).change(self.queue, self.id, change) == "changed"

    async def logs(self, *, start: int = 0, limit: int = 1000) -> list[str]:
        """Return the lines the job logged, from number ``start`` on.

        Lines are counted from 0, from the first that the job ever wrote. The newest 1000 are kept.
        """
        whole_number("start", start, least=0)
        whole_number("limit", limit, least=1)
        storage = await self._source.app.connect()
        return (await storage.logs(self.queue, self.id, start=start, limit=limit)).lines

    def events(self, *, follow: bool = True, types: EventTypes = None) -> AsyncGenerator[Event, None]:
        """The job's life since it was enqueued, from the log, then what becomes of it until it ends.

        ``follow=False`` stops at what has happened so far. Raises ``JobNotFound`` for an id that neither the store
        nor the log knows, ``EventsLost`` if the log no longer has all of its life.
        """
        wanted = Filter.of(types)
        return job_events(self._source.app, self.queue, self.id, follow=follow, types=wanted.types)

    def _conclude(self, finished: Finished) -> R:
        self._state = finished.state
        if finished.state is State.COMPLETED:
            return cast(R, self._source.decode_result(finished.result))
        raise _error_of(finished, self.queue)


async def call(source: JobCodec, job: NewJob, timeout: Duration | None) -> Any:
    """Request and response: subscribe, then put ``job`` in, then wait for its end.

    A duplicate waits for the job that is there; a cached result returns at once. Raises what
    ``JobHandle.result`` raises.
    """
    session = await source.app.session()
    waiter = session.waiter(source.queue)
    handle: JobHandle[Any] = JobHandle(source, job.id)
    expected = waiter.expect(job.id)
    try:
        async with _deadline(handle, timeout, expected):
            answer = await session.enqueue(source.queue, replace(job, notify=waiter.listener))
            if answer.status == "completed":
                return source.decode_result(answer.result)
            if answer.id != job.id:  # by its dedup key it is another's duplicate
                handle.id = answer.id
                return await JobHandle[Any](source, answer.id, answer).result()
            if answer.state in TERMINAL:  # a duplicate of a job that has ended: the store says how
                await waiter.watch(expected)
            else:
                await waiter.begin(expected, answer.incarnation)
            return handle._conclude(await expected.future)
    finally:
        waiter.forget(expected)


@asynccontextmanager
async def _deadline(
    handle: JobHandle[Any], timeout: Duration | None, expected: Expected
) -> AsyncIterator[None]:
    if timeout is None:
        yield
        return
    ms = expected.within_ms = milliseconds(timeout, what="timeout")
    try:
        async with asyncio.timeout(ms / 1000):
            yield
    except TimeoutError as error:
        why = await _why(handle)
        raise ResultTimeout(
            f"job {handle.id!r} of queue {handle.queue!r} had not ended after {describe(ms)}. {why}"
            "The job is left alone: ask for its result again, or cancel it."
        ) from error


async def _why(handle: JobHandle[Any]) -> str:
    """Return a sentence for an error; empty if the store does not tell in time. Raises ``JobExpired``."""
    try:
        async with asyncio.timeout(_ASK_WHY_S):
            await _refuse_expired(handle)
            reason, session = await handle.why(), await handle.source.app.session()
            return f"{reason.text} {session.remedy or reason.remedy} ".replace("  ", " ")
    except JobExpired:
        raise
    except (PenstockError, TimeoutError):
        return ""


async def _refuse_expired(handle: JobHandle[Any]) -> None:
    """Raise ``JobExpired`` if the ttl of the job has passed, also where no worker has noticed."""
    if (await handle.get()).expires_at is None:
        return
    await (await handle.source.app.connect()).sweep(handle.queue)
    job = (await handle.get()).raw
    if job.failure is not None and job.failure.type == "Expired" and job.state is State.FAILED:
        raise _expired(handle.queue, handle.id)


def _expired(queue: str, id: str) -> JobExpired:
    return JobExpired(
        f"job {id!r} of queue {queue!r} expired: its ttl passed before it was finished.", job_id=id
    )


def _error_of(finished: Finished, queue: str) -> JobError:
    id, failure = finished.id, finished.failure
    if finished.state is State.CANCELLED:
        why = f": {failure.type.lower()} {failure.message}" if failure else ""
        return JobCancelled(f"job {id!r} of queue {queue!r} was cancelled{why}.", job_id=id)
    if failure is None:
        return JobFailed(f"job {id!r} of queue {queue!r} failed; why is not kept.", job_id=id)
    if failure.type == "Expired":
        return _expired(queue, id)
    return JobFailed(
        f"job {id!r} of queue {queue!r} failed: {failure.type}: {failure.message}",
        job_id=id,
        error_type=failure.type,
        traceback=failure.traceback,
    )
