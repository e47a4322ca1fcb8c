"""The sync face: the same methods for synchronous code, one implementation.

``app.sync``, ``task.sync``, ``queue.sync`` and what they give have the methods of their asynchronous originals
and run them on one loop thread per process (``loopthread``), from any number of threads at once. Calls that
are made at the same time travel together, as they do in asynchronous code.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping
from datetime import datetime
from functools import update_wrapper
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, Unpack

from penstock.admin import QueueAdmin
from penstock.app import App
from penstock.claimed import Claim, ClaimedJob
from penstock.core.duration import Duration
from penstock.core.lifecycle import State
from penstock.events import After, EventTypes, Offsets
from penstock.handle import JobHandle
from penstock.info import JobInfo
from penstock.leased import Signal
from penstock.limiting import QueueLimits
from penstock.loopthread import run
from penstock.options import JobOptions
from penstock.queue import Queue
from penstock.schedulers import QueueSchedulers
from penstock.subscription import SyncSubscription
from penstock.task import Dispatch, JobSpec, Task

if TYPE_CHECKING:
    from penstock.core.event import Event
    from penstock.core.job import EnqueueStatus, Policy
    from penstock.core.limits import GroupState
    from penstock.flow.parts import Part
    from penstock.flow.sync import SyncFlowHandle
    from penstock.subscription import SubscriptionOptions

__all__ = [
    "Face",
    "SyncApp",
    "SyncClaimedJob",
    "SyncDispatch",
    "SyncJobHandle",
    "SyncQueue",
    "SyncTask",
    "as_sync",
]

A = TypeVar("A")
B = TypeVar("B")
P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)

_END: Final = object()


class Face(Generic[T_co]):
    """The sync face of ``_target``."""

    __slots__ = ("_target",)

    def __init__(self, target: T_co) -> None:
        self._target = target

    def __repr__(self) -> str:
        return f"{self._target!r}.sync"


def as_sync(
    method: Callable[Concatenate[A, Q], Coroutine[Any, Any, B]],
) -> Callable[Concatenate[Face[A], Q], B]:
    """``method`` for the face of its object: the same arguments, the same answer, without ``await``."""

    def call(face: Face[A], /, *args: Q.args, **kwargs: Q.kwargs) -> B:
        return run(method(face._target, *args, **kwargs))

    return update_wrapper(call, method)


class SyncJobHandle(Face[JobHandle[R]], Generic[R]):
    """See ``JobHandle``."""

    __slots__ = ()

    @property
    def id(self) -> str:
        return self._target.id

    @property
    def queue(self) -> str:
        return self._target.queue

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
    refresh = as_sync(JobHandle.refresh)
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
        return _iterate(self._target.events(follow=follow, types=types))


class SyncDispatch(Face[Dispatch[P, R]], Generic[P, R]):
    """See ``Dispatch``."""

    __slots__ = ()

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> SyncJobHandle[R]:
        """See ``Dispatch.enqueue``."""
        return SyncJobHandle(run(self._target.enqueue(*args, **kwargs)))

    def enqueue_many(
        self, jobs: Iterable[tuple[Any, ...] | Mapping[str, Any] | JobSpec]
    ) -> list[SyncJobHandle[R]]:
        """See ``Dispatch.enqueue_many``."""
        return [SyncJobHandle(handle) for handle in run(self._target.enqueue_many(jobs))]

    def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """See ``Dispatch.call``."""
        return run(self._target.call(*args, **kwargs))


class SyncTask(Face[Task[P, R]], Generic[P, R]):
    """See ``Task``."""

    __slots__ = ()

    def options(self, *, queue: str | None = None, **options: Unpack[JobOptions]) -> SyncDispatch[P, R]:
        """See ``Task.options``."""
        return SyncDispatch(self._target.options(queue=queue, **options))

    def enqueue(self, *args: Any, **kwargs: Any) -> SyncJobHandle[R]:
        """See ``Task.enqueue``."""
        return SyncJobHandle(run(self._target.enqueue(*args, **kwargs)))

    def enqueue_many(
        self, jobs: Iterable[tuple[Any, ...] | Mapping[str, Any] | JobSpec]
    ) -> list[SyncJobHandle[R]]:
        """See ``Task.enqueue_many``."""
        return [SyncJobHandle(handle) for handle in run(self._target.enqueue_many(jobs))]

    def call(self, *args: Any, **kwargs: Any) -> R:
        """See ``Task.call``."""
        return run(self._target.call(*args, **kwargs))


class SyncQueue(Face[Queue]):
    """See ``Queue`` and ``QueueAdmin``."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return self._target.name

    def enqueue(self, payload: Any, *, task: str = "", **options: Unpack[JobOptions]) -> SyncJobHandle[Any]:
        """See ``Queue.enqueue``."""
        return SyncJobHandle(run(self._target.enqueue(payload, task=task, **options)))

    def enqueue_many(
        self,
        payloads: Iterable[Any],
        *,
        ids: Iterable[str] | None = None,
        task: str = "",
        **options: Unpack[JobOptions],
    ) -> list[SyncJobHandle[Any]]:
        """See ``Queue.enqueue_many``."""
        handles = run(self._target.enqueue_many(payloads, ids=ids, task=task, **options))
        return [SyncJobHandle(handle) for handle in handles]

    call = as_sync(Queue.call)

    def prepare(self, payload: Any, *, task: str = "", **options: Unpack[JobOptions]) -> JobSpec:
        """See ``Queue.prepare``."""
        return self._target.prepare(payload, task=task, **options)

    def job(self, id: str) -> SyncJobHandle[Any]:
        """See ``Queue.job``."""
        return SyncJobHandle(self._target.job(id))

    def claim(
        self, *, lease: Duration = "30s", wait: Duration | None = None, worker: str | None = None
    ) -> SyncClaim:
        """See ``Queue.claim``; a ``with`` block. The lease is extended from the loop thread."""
        if wait is None:
            return SyncClaim(self._target.claim(lease=lease, worker=worker))
        return SyncClaim(self._target.claim(lease=lease, wait=wait, worker=worker))

    def claim_one(
        self, *, lease: Duration = "30s", wait: Duration | None = None, worker: str | None = None
    ) -> SyncClaimedJob | None:
        """See ``Queue.claim_one``."""
        job = run(self._target.claim_one(lease=lease, wait=wait, worker=worker))
        return None if job is None else SyncClaimedJob(job)

    def claim_many(
        self, count: int, *, lease: Duration = "30s", wait: Duration | None = None, worker: str | None = None
    ) -> list[SyncClaimedJob]:
        """See ``Queue.claim_many``."""
        jobs = run(self._target.claim_many(count, lease=lease, wait=wait, worker=worker))
        return [SyncClaimedJob(job) for job in jobs]

    def list_jobs(
        self, state: State | str, *, limit: int | None = None, reverse: bool = False
    ) -> Generator[JobInfo, None, None]:
        """See ``Queue.list_jobs``."""
        return _iterate(self._target.list_jobs(state, limit=limit, reverse=reverse))

    def held(self, consumer: str, *, limit: int | None = None) -> Generator[JobInfo, None, None]:
        """See ``Queue.held``."""
        return _iterate(self._target.held(consumer, limit=limit))

    def groups(self) -> Generator[GroupState, None, None]:
        """See ``Queue.groups``."""
        return _iterate(self._target.groups())

    def events(
        self, *, after: After = 0, follow: bool = True, types: EventTypes = None, id: str | None = None
    ) -> Generator[Event, None, None]:
        """See ``Queue.events``."""
        return _iterate(self._target.events(after=after, follow=follow, types=types, id=id))

    get = as_sync(QueueAdmin.get)
    get_many = as_sync(QueueAdmin.get_many)
    counts = as_sync(QueueAdmin.counts)
    metrics = as_sync(QueueAdmin.metrics)
    waiting = as_sync(QueueAdmin.waiting)
    active = as_sync(QueueAdmin.active)
    open = as_sync(QueueAdmin.open)
    workers = as_sync(QueueAdmin.workers)
    usage = as_sync(QueueAdmin.usage)
    reset_usage = as_sync(QueueAdmin.reset_usage)
    budgets = as_sync(QueueAdmin.budgets)
    set_budget = as_sync(QueueAdmin.set_budget)
    remove_budget = as_sync(QueueAdmin.remove_budget)
    logs = as_sync(QueueAdmin.logs)
    cancel = as_sync(QueueAdmin.cancel)
    retry = as_sync(QueueAdmin.retry)
    promote = as_sync(QueueAdmin.promote)
    remove = as_sync(QueueAdmin.remove)
    end_leases = as_sync(QueueAdmin.end_leases)
    signal = as_sync(QueueAdmin.signal)
    change = as_sync(QueueAdmin.change)
    dedup = as_sync(QueueAdmin.dedup)
    clear_dedup = as_sync(QueueAdmin.clear_dedup)
    hold = as_sync(QueueAdmin.hold)
    release = as_sync(QueueAdmin.release)
    limit = as_sync(QueueLimits.limit)
    unlimit = as_sync(QueueLimits.unlimit)
    limits = as_sync(QueueLimits.limits)
    pause = as_sync(QueueLimits.pause)
    resume = as_sync(QueueLimits.resume)
    search = as_sync(QueueAdmin.search)
    errors = as_sync(QueueAdmin.errors)
    retry_all = as_sync(QueueAdmin.retry_all)
    remove_all = as_sync(QueueAdmin.remove_all)
    drain = as_sync(QueueAdmin.drain)
    clean = as_sync(QueueAdmin.clean)
    obliterate = as_sync(QueueAdmin.obliterate)
    settings = as_sync(QueueAdmin.settings)
    configure = as_sync(QueueAdmin.configure)
    check = as_sync(QueueAdmin.check)
    schedule = as_sync(Queue.schedule)
    schedulers = as_sync(QueueSchedulers.schedulers)
    scheduler = as_sync(QueueSchedulers.scheduler)
    pause_scheduler = as_sync(QueueSchedulers.pause_scheduler)
    resume_scheduler = as_sync(QueueSchedulers.resume_scheduler)
    remove_scheduler = as_sync(QueueSchedulers.remove_scheduler)

    def fire_now(self, name: str) -> SyncJobHandle[Any]:
        """See ``Queue.fire_now``."""
        return SyncJobHandle(run(self._target.fire_now(name)))

    hold_events = as_sync(QueueAdmin.hold_events)
    release_events = as_sync(QueueAdmin.release_events)
    consumers = as_sync(QueueAdmin.consumers)


class SyncClaimedJob(Face[ClaimedJob]):
    """See ``ClaimedJob``."""

    __slots__ = ()

    @property
    def id(self) -> str:
        return self._target.id

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


class SyncApp(Face[App]):
    """See ``App``."""

    __slots__ = ()

    def __enter__(self) -> Self:
        run(self._target.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run(self._target.close())

    def queue(self, name: str, **options: Any) -> SyncQueue:
        """See ``App.queue``."""
        return SyncQueue(self._target.queue(name, **options))

    def job(self, queue: str, id: str) -> SyncJobHandle[Any]:
        """See ``App.job``."""
        return SyncJobHandle(self._target.job(queue, id))

    def events(
        self,
        *queues: str,
        after: Offsets = 0,
        follow: bool = True,
        types: EventTypes = None,
        id: str | None = None,
    ) -> Generator[Event, None, None]:
        """See ``App.events``."""
        return _iterate(self._target.events(*queues, after=after, follow=follow, types=types, id=id))

    def subscribe(self, *queues: str, **options: Unpack[SubscriptionOptions]) -> SyncSubscription:
        """See ``App.subscribe``."""
        return SyncSubscription(self._target.subscribe(*queues, **options))

    schedule = as_sync(App.schedule)
    schedulers = as_sync(App.schedulers)

    def flow(self, queue: str, id: str) -> SyncFlowHandle:
        """See ``App.flow``."""
        from penstock.flow.sync import SyncFlowHandle

        return SyncFlowHandle(self._target.flow(queue, id))

    def enqueue_flow(self, flow: Part) -> SyncFlowHandle:
        """See ``App.enqueue_flow``."""
        return self.enqueue_flows([flow])[0]

    def enqueue_flows(self, flows: Iterable[Part]) -> list[SyncFlowHandle]:
        """See ``App.enqueue_flows``."""
        from penstock.flow.sync import SyncFlowHandle

        return [SyncFlowHandle(handle) for handle in run(self._target.enqueue_flows(flows))]

    close = as_sync(App.close)
    queues = as_sync(App.queues)


def _iterate(items: AsyncGenerator[A, None]) -> Generator[A, None, None]:
    async def following() -> A | object:
        return await anext(items, _END)

    try:
        while (item := run(following())) is not _END:
            yield item  # type: ignore[misc]  # _END is gone
    finally:
        run(_close(items))


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()
