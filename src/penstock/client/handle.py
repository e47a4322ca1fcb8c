"""Handles of jobs, which an enqueue returns: wait for the result, inspect the job, operate on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Never, TypeVar, cast

from msgspec.structs import replace

from penstock.client.causes import Cause, Reason
from penstock.client.events import EventTypes, Filter, job_events
from penstock.client.hints import Hinting, refuse_keywords
from penstock.client.info import Field, JobInfo, Parent, ref_field
from penstock.client.job_verbs import JobVerbs
from penstock.client.parsers import whole_number
from penstock.client.situation import counted, live_workers
from penstock.client.steps import JobSteps
from penstock.core.lifecycle import TERMINAL, State
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
from penstock.storage.coalesce import MAX_BYTES, MAX_COUNT
from penstock.storage.values import Finished

if TYPE_CHECKING:
    from penstock.client.codec import JobCodec
    from penstock.client.waiter import ResultWait
    from penstock.core.event import Event
    from penstock.core.job import Enqueued, EnqueueStatus, NewJob
    from penstock.storage.contract import Storage


R = TypeVar("R")
_ASK_WHY_S: Final = 2.0
"""The time limit of the lookup for the message of ``ResultTimeout``."""

_GET_HINTS: Final = {
    "timeout": "It returns the record; use job.result(timeout=...) to wait for the result.",
    "propagate": "It returns the record; use job.result(), which raises JobFailed.",
}


class JobHandle(JobVerbs, JobSteps, Parent, Hinting, Generic[R]):
    """A handle of one job, by its id. Any event loop may use it.

    ``status`` and ``state`` are the answer of the enqueue; for a handle of a known id both are ``None``.
    ``refresh()`` updates the state.
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

    queue = Field[str]("_source.queue")
    ref = ref_field()
    """Queue and id as one string: ``app.job(ref)`` accepts it."""

    source = Field["JobCodec"]("_source")
    """The codec of the job. Internal."""

    @property
    def status(self) -> EnqueueStatus | None:
        """Return ``queued``, ``duplicate``, ``completed``, ``updated`` or ``rerun``; see ``Enqueued``."""
        return self._answer.status if self._answer is not None else None

    @property
    def state(self) -> State | None:
        """Return the last known state."""
        return self._answer.state if self._state is None and self._answer is not None else self._state

    async def result(self, timeout: Duration | None = None) -> R:
        """Wait for the job to finish, and return its result.

        After a ``rerun``, wait for the next time it finishes.

        Raises:
            JobFailed, JobExpired, JobCancelled: the job did not complete.
            JobNotFound: the id is unknown, or the job is no longer kept.
            ResultTimeout: the job did not finish within ``timeout``. It continues.
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
        """Return the job as it is now. Raise ``JobNotFound`` if the store does not have it."""
        refuse_keywords(other, _GET_HINTS, where="job.get()")
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
        """Return why the job does not run, with the remedy; or that it runs, or how it finished.

        Raises ``JobNotFound``.
        """
        return await (await self.get()).why()

    async def refresh(self) -> State:
        """Update ``state``, and return it. Raise ``JobNotFound`` if the store does not have the job."""
        return (await self.get()).state

    async def logs(self, *, start: int = 0, limit: int = 1000) -> list[str]:
        """Return the lines the job logged, from number ``start`` on.

        Line 0 is the first that the job ever logged. The newest 1000 lines are kept.
        """
        whole_number("start", start, least=0)
        whole_number("limit", limit, least=1)
        storage = await self._source.app.connect()
        return (await storage.logs(self.queue, self.id, start=start, limit=limit)).lines

    def events(self, *, follow: bool = True, types: EventTypes = None) -> AsyncGenerator[Event, None]:
        """Yield the events of the job since its enqueue, then new ones until it finishes.

        ``follow=False`` stops at the newest event. Raises ``JobNotFound`` if neither the store nor the log has the id,
        and ``EventsLost`` if the log no longer has all of its events.
        """
        checked = Filter.of(types).types
        return job_events(self._source.app, self.queue, self.id, follow=follow, types=checked)

    def _conclude(self, finished: Finished) -> R:
        self._state = finished.state
        if finished.state is State.COMPLETED:
            return cast(R, self._source.decode_result(finished.result))
        raise _error_of(finished, self.queue)


async def call(
    source: JobCodec,
    job: NewJob,
    timeout: Duration | None,
    check_answer: Callable[[Enqueued, str], None] | None = None,
) -> Any:
    """Subscribe, enqueue ``job``, and wait for its result. ``check_answer`` may raise for the answer of the enqueue.

    A duplicate waits for the existing job; a cached result returns immediately. Raises what
    ``JobHandle.result`` raises.
    """
    session = await source.app.session()
    waiter = session.waiter(source.queue)
    handle: JobHandle[Any] = JobHandle(source, job.id)
    expected = waiter.expect(job.id)
    try:
        async with _deadline(handle, timeout, expected):
            answer = await session.enqueue(source.queue, replace(job, notify=waiter.listener))
            if check_answer is not None:
                check_answer(answer, source.queue)
            if answer.status == "completed":
                return source.decode_result(answer.result)
            if answer.id != job.id:  # a duplicate of another job by its dedup key
                handle.id = answer.id
                return await JobHandle[Any](source, answer.id, answer).result()
            if answer.state in TERMINAL:  # a duplicate of a finished job
                await waiter.watch(expected)
            else:
                await waiter.begin(expected, answer.incarnation)
            return handle._conclude(await expected.future)
    finally:
        waiter.forget(expected)


@asynccontextmanager
async def _deadline(
    handle: JobHandle[Any], timeout: Duration | None, expected: ResultWait
) -> AsyncIterator[None]:
    if timeout is None:
        yield
        return
    ms = expected.within_ms = milliseconds(timeout, what="timeout")
    try:
        async with asyncio.timeout(ms / 1000):
            yield
    except TimeoutError as error:
        delay = await _delay(handle)
        raise ResultTimeout(
            f"job {handle.id!r} of queue {handle.queue!r} did not finish within {describe(ms)}. {delay.text}"
            "The job continues: wait for its result again, or cancel it.",
            started=delay.started,
            workers=delay.workers,
        ) from error


class _Delay(NamedTuple):
    """Why a job has not finished, whether it has run, and how many workers of its queue are alive."""

    text: str = ""
    started: bool | None = None
    workers: int | None = None


async def _delay(handle: JobHandle[Any]) -> _Delay:
    """Return why the job has not finished; empty if the store does not answer in time. Raise ``JobExpired``."""
    try:
        async with asyncio.timeout(_ASK_WHY_S):
            await _refuse_expired(handle)
            info, session = await handle.get(), await handle.source.app.session()
            reason = await info.why()
            workers = len(live_workers(await session.storage.workers(handle.queue)))
    except JobExpired:
        raise
    except (PenstockError, TimeoutError):
        return _Delay()
    begun = "" if reason.kind == "active" else f"{_begun(info.runs, reason.kind, workers)} "
    text = f"{reason.text} {session.remedy or reason.remedy} {begun}".replace("  ", " ")
    return _Delay(text, info.runs > 0, workers)


def _begun(runs: int, kind: Cause, workers: int) -> str:
    """Return whether the job has run, and whether there are workers, unless the reason of that ``kind`` says so."""
    begun = f"The job has started {counted(runs, 'time')}" if runs else "The job has not started"
    if kind == "no worker":
        return f"{begun}."
    alive = f"{counted(workers, 'worker')} of its queue {'is' if workers == 1 else 'are'} alive"
    return f"{begun}; {alive if workers else 'no worker of its queue is alive'}."


async def _refuse_expired(handle: JobHandle[Any]) -> None:
    """Raise ``JobExpired`` if the ttl of the job has passed, even if no worker has noticed."""
    if (await handle.get()).expires_at is None:
        return
    await (await handle.source.app.connect()).sweep(handle.queue)
    job = (await handle.get()).raw
    if job.failure is not None and job.failure.type == "Expired" and job.state is State.FAILED:
        raise _expired(handle.queue, handle.id)


def _expired(queue: str, id: str) -> JobExpired:
    return JobExpired(f"job {id!r} of queue {queue!r} expired: its ttl passed before it finished.", job_id=id)


def _error_of(finished: Finished, queue: str) -> JobError:
    id, failure = finished.id, finished.failure
    if finished.state is State.CANCELLED:
        why = f": {failure.type.lower()} {failure.message}" if failure else ""
        return JobCancelled(f"job {id!r} of queue {queue!r} was cancelled{why}.", job_id=id)
    if failure is None:
        return JobFailed(f"job {id!r} of queue {queue!r} failed; the reason is no longer kept.", job_id=id)
    if failure.type == "Expired":
        return _expired(queue, id)
    return JobFailed(
        f"job {id!r} of queue {queue!r} failed: {failure.type}: {failure.message}",
        job_id=id,
        error_type=failure.type,
        traceback=failure.traceback,
    )


# Many jobs: chunks of a bounded size, a few at a time


_CONCURRENT_CHUNKS: Final = 3


async def enqueue_many(source: JobCodec, jobs: Sequence[NewJob]) -> list[JobHandle[Any]]:
    """Enqueue checked ``jobs``, and return a handle for each, in order.

    Each chunk is written as a whole or not at all. After an error, no more chunks are sent, and a note on the error
    says how many jobs were written.
    """
    session = await source.app.session()
    storage, queue = session.storage, source.queue
    if session.enqueue_chain.layers and jobs:
        answers = await session.enqueue_chain.enqueue(queue, jobs, lambda jobs: _send(storage, queue, jobs))
    else:
        answers = await _send(storage, queue, jobs)
    return [JobHandle(source, answer.id, answer) for answer in answers]


async def _send(storage: Storage, queue: str, jobs: Sequence[NewJob]) -> Sequence[Enqueued]:
    chunks = list(_chunks(jobs))
    if len(chunks) <= 1:
        return await storage.enqueue(queue, jobs) if jobs else []
    return await _send_chunks(storage, queue, chunks)


def _chunks(jobs: Sequence[NewJob]) -> Iterator[Sequence[NewJob]]:
    start = weight = 0
    for index, job in enumerate(jobs):
        weight += len(job.payload)
        if index > start and (index - start >= MAX_COUNT or weight > MAX_BYTES):
            yield jobs[start:index]
            start, weight = index, len(job.payload)
    if start < len(jobs):
        yield jobs[start:]


async def _send_chunks(storage: Storage, queue: str, chunks: list[Sequence[NewJob]]) -> list[Enqueued]:
    answers: list[list[Enqueued]] = [[] for _ in chunks]
    chunks_left: Iterator[tuple[int, Sequence[NewJob]]] = iter(enumerate(chunks))

    async def send_some() -> None:
        for index, chunk in chunks_left:
            answers[index] = await storage.enqueue(queue, chunk)

    senders = [asyncio.create_task(send_some()) for _ in range(min(_CONCURRENT_CHUNKS, len(chunks)))]
    try:
        await asyncio.wait(senders, return_when=asyncio.FIRST_EXCEPTION)
        if any(sender.done() and sender.exception() for sender in senders):
            chunks_left = iter(())
            await asyncio.wait(senders)
    except asyncio.CancelledError:
        for sender in senders:
            sender.cancel()
        raise
    for error in filter(None, [sender.exception() for sender in senders]):
        written = sum(map(len, answers))
        error.add_note(f"{written} of {sum(map(len, chunks))} jobs had been written")
        raise error
    return [answer for chunk in answers for answer in chunk]
