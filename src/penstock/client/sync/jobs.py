"""The sync faces of tasks, job handles and claimed jobs."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack

from penstock.client.claim import Claim, ClaimedJob, Signal
from penstock.client.events import EventTypes
from penstock.client.handle import JobHandle
from penstock.client.hints import Hinting
from penstock.client.loopthread import run
from penstock.client.options import DispatchOptions
from penstock.client.sync.face import Face, as_sync, iterate
from penstock.client.task import Dispatch, JobSpec, Task
from penstock.core.lifecycle import State
from penstock.core.units import Duration

if TYPE_CHECKING:
    from penstock.client.flow.parts import Part
    from penstock.core.event import Event
    from penstock.core.job import EnqueueStatus, Policy


P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


class SyncJobHandle(Hinting, Face[JobHandle[R]], Generic[R]):
    """See ``JobHandle``."""

    __slots__ = ()
    hints_for = "job"

    @property
    def id(self) -> str:
        return self._target.id

    @property
    def queue(self) -> str:
        return self._target.queue

    @property
    def ref(self) -> str:
        return self._target.ref

    @property
    def status(self) -> EnqueueStatus | None:
        return self._target.status

    @property
    def state(self) -> State | None:
        return self._target.state

    def result(self, timeout: Duration | None = None) -> R:
        """See ``JobHandle.result``."""
        return run(self._target.result(timeout))

    get = as_sync(JobHandle.get)
    get_or_none = as_sync(JobHandle.get_or_none)
    refresh = as_sync(JobHandle.refresh)
    why = as_sync(JobHandle.why)
    cancel = as_sync(JobHandle.cancel)
    retry = as_sync(JobHandle.retry)
    promote = as_sync(JobHandle.promote)
    remove = as_sync(JobHandle.remove)
    signal = as_sync(JobHandle.signal)
    keep_result = as_sync(JobHandle.keep_result)
    children = as_sync(JobHandle.children)

    def add_children(
        self, children: Iterable[Part], *, on_failure: Policy = "fail"
    ) -> list[SyncJobHandle[Any]]:
        """See ``JobHandle.add_children``."""
        added = run(self._target.add_children(children, on_failure=on_failure))
        return [SyncJobHandle(handle) for handle in added]

    logs = as_sync(JobHandle.logs)

    def events(self, *, follow: bool = True, types: EventTypes = None) -> Generator[Event, None, None]:
        """See ``JobHandle.events``."""
        return iterate(self._target.events(follow=follow, types=types))


class SyncDispatch(Hinting, Face[Dispatch[P, R]], Generic[P, R]):
    """See ``Dispatch``."""

    __slots__ = ()

    def options(self, **options: Unpack[DispatchOptions]) -> SyncDispatch[P, R]:
        """See ``Dispatch.options``."""
        return SyncDispatch(self._target.options(**options))

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> SyncJobHandle[R]:
        """See ``Dispatch.enqueue``."""
        return SyncJobHandle(run(self._target.enqueue(*args, **kwargs)))

    def enqueue_many(self, jobs: Iterable[JobSpec[R]]) -> list[SyncJobHandle[R]]:
        """See ``Dispatch.enqueue_many``."""
        return [SyncJobHandle(handle) for handle in run(self._target.enqueue_many(jobs))]

    def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """See ``Dispatch.call``."""
        return run(self._target.call(*args, **kwargs))

    def job(self, *args: P.args, **kwargs: P.kwargs) -> JobSpec[R]:
        """See ``Dispatch.job``."""
        return self._target.job(*args, **kwargs)

    def partial(self: SyncDispatch[Concatenate[Any, Q], R], *args: Q.args, **kwargs: Q.kwargs) -> JobSpec[R]:
        """See ``Dispatch.partial``."""
        return self._target.partial(*args, **kwargs)


class SyncTask(Hinting, Face[Task[P, R]], Generic[P, R]):
    """See ``Task``."""

    __slots__ = ()

    def options(self, **options: Unpack[DispatchOptions]) -> SyncDispatch[P, R]:
        """See ``Task.options``."""
        return SyncDispatch(self._target.options(**options))

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> SyncJobHandle[R]:
        """See ``Task.enqueue``."""
        return SyncJobHandle(run(self._target.enqueue(*args, **kwargs)))

    def enqueue_many(self, jobs: Iterable[JobSpec[R]]) -> list[SyncJobHandle[R]]:
        """See ``Task.enqueue_many``."""
        return [SyncJobHandle(handle) for handle in run(self._target.enqueue_many(jobs))]

    def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """See ``Task.call``."""
        return run(self._target.call(*args, **kwargs))

    def job(self, *args: P.args, **kwargs: P.kwargs) -> JobSpec[R]:
        """See ``Task.job``."""
        return self._target.job(*args, **kwargs)

    def partial(self: SyncTask[Concatenate[Any, Q], R], *args: Q.args, **kwargs: Q.kwargs) -> JobSpec[R]:
        """See ``Task.partial``."""
        return self._target.partial(*args, **kwargs)


class SyncClaimedJob(Hinting, Face[ClaimedJob]):
    """See ``ClaimedJob``."""

    __slots__ = ()
    hints_for = "job context"

    @property
    def id(self) -> str:
        return self._target.id

    @property
    def queue(self) -> str:
        return self._target.queue

    @property
    def ref(self) -> str:
        return self._target.ref

    @property
    def task(self) -> str:
        return self._target.task

    @property
    def token(self) -> int:
        return self._target.token

    @property
    def run(self) -> int:
        return self._target.run

    @property
    def failures(self) -> int:
        return self._target.failures

    @property
    def attempts(self) -> int:
        return self._target.attempts

    @property
    def headers(self) -> Mapping[str, str]:
        return self._target.headers

    @property
    def group(self) -> str:
        return self._target.group

    @property
    def cost(self) -> int:
        return self._target.cost

    @property
    def scheduler(self) -> str:
        return self._target.scheduler

    @property
    def scheduled_for(self) -> datetime | None:
        return self._target.scheduled_for

    @property
    def enqueued_at(self) -> datetime:
        return self._target.enqueued_at

    @property
    def step(self) -> str:
        return self._target.step

    @property
    def signal(self) -> Signal | None:
        return self._target.signal

    @property
    def timed_out(self) -> bool:
        return self._target.timed_out

    @property
    def payload(self) -> Any:
        return self._target.payload

    @property
    def cancelled(self) -> bool:
        return self._target.cancelled

    @property
    def settled(self) -> bool:
        return self._target.settled

    @property
    def result(self) -> Any:
        return self._target.result

    @result.setter
    def result(self, value: Any) -> None:
        self._target.result = value

    complete = as_sync(ClaimedJob.complete)
    fail = as_sync(ClaimedJob.fail)
    release = as_sync(ClaimedJob.release)
    rate_limited = as_sync(ClaimedJob.rate_limited)
    snooze = as_sync(ClaimedJob.snooze)
    suspend = as_sync(ClaimedJob.suspend)
    wait_for_children = as_sync(ClaimedJob.wait_for_children)
    children = as_sync(ClaimedJob.children)

    def add_children(
        self, children: Iterable[Part], *, on_failure: Policy = "fail"
    ) -> list[SyncJobHandle[Any]]:
        """See ``ClaimedJob.add_children``."""
        added = run(self._target.add_children(children, on_failure=on_failure))
        return [SyncJobHandle(handle) for handle in added]

    extend = as_sync(ClaimedJob.extend)
    progress = as_sync(ClaimedJob.progress)
    log = as_sync(ClaimedJob.log)
    use = as_sync(ClaimedJob.use)
    update_payload = as_sync(ClaimedJob.update_payload)


class SyncClaim(Face[Claim[Any]]):
    """See ``Claim``: ``with queue.sync.claim() as job``."""

    __slots__ = ()

    def __enter__(self) -> Any:
        job = run(self._target.__aenter__())
        return None if job is None else SyncClaimedJob(job)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return run(self._target.__aexit__(kind, error, trace))
