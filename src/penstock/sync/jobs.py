"""The sync faces of tasks, and of the jobs they make."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack

from penstock.core.duration import Duration
from penstock.core.lifecycle import State
from penstock.events import EventTypes
from penstock.handle import JobHandle
from penstock.hints import Hinting
from penstock.loopthread import run
from penstock.options import DispatchOptions
from penstock.sync.face import Face, as_sync, iterate
from penstock.task import Dispatch, JobSpec, Task

if TYPE_CHECKING:
    from penstock.core.event import Event
    from penstock.core.job import EnqueueStatus, Policy
    from penstock.flow.parts import Part

__all__ = ["SyncDispatch", "SyncJobHandle", "SyncTask"]

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
