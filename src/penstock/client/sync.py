"""The sync faces: the same methods and implementation for synchronous code.

``app.sync``, ``task.sync``, ``queue.sync`` and the objects they return have the methods of their asynchronous originals
and run them on one loop thread per process (``loopthread``). Any number of threads may call them. Simultaneous calls
share round trips, as they do in asynchronous code.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

from penstock.client.admin import QueueAdmin
from penstock.client.app import App
from penstock.client.claim import Claim, ClaimedJob, LeasedJob
from penstock.client.flow import Ending, Whole
from penstock.client.flow.handle import FlowHandle
from penstock.client.handle import JobHandle
from penstock.client.hints import Hinting
from penstock.client.info import Field
from penstock.client.limits import QueueLimits
from penstock.client.loopthread import Face, as_sync, as_sync_iterator, run
from penstock.client.options import DispatchOptions, JobOptions
from penstock.client.queue import Queue
from penstock.client.schedules import QueueSchedulers, SchedulerInfo
from penstock.client.search import Searching
from penstock.client.steps import QueueSteps
from penstock.client.subscription import Subscription, SubscriptionOptions
from penstock.client.task import Dispatch, JobSpec
from penstock.core.job import EnqueueStatus
from penstock.core.lifecycle import State
from penstock.core.units import Duration

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


def sync_handles(handles: Iterable[JobHandle[R]]) -> list[SyncJobHandle[R]]:
    """Return the sync faces of these handles."""
    return [SyncJobHandle(handle) for handle in handles]


def sync_handle(handle: JobHandle[Any]) -> SyncJobHandle[Any]:
    """Return the sync face of a handle."""
    return SyncJobHandle(handle)


class SyncJobHandle(Hinting, Face[JobHandle[R]], Generic[R]):
    """See ``JobHandle``."""

    __slots__ = ()
    hints_for = "job"

    id = Field[str]("_target.id")
    queue = Field[str]("_target.queue")
    ref = Field[str]("_target.ref")
    status = Field[EnqueueStatus | None]("_target.status")
    state = Field[State | None]("_target.state")

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
    steps = as_sync(JobHandle.steps)
    reset_step = as_sync(JobHandle.reset_step)
    fork = as_sync(JobHandle.fork, sync_handle)
    keep_result = as_sync(JobHandle.keep_result)
    children = as_sync(JobHandle.children)
    add_children = as_sync(JobHandle.add_children, sync_handles)
    logs = as_sync(JobHandle.logs)
    events = as_sync_iterator(JobHandle.events)


class SyncDispatch(Hinting, Face[Dispatch[P, R]], Generic[P, R]):
    """See ``Dispatch`` and ``Task``."""

    __slots__ = ()

    def options(self, **options: Unpack[DispatchOptions]) -> SyncDispatch[P, R]:
        """See ``Dispatch.options``."""
        return SyncDispatch(self._target.options(**options))

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> SyncJobHandle[R]:
        """See ``Dispatch.enqueue``."""
        return SyncJobHandle(run(self._target.enqueue(*args, **kwargs)))

    def enqueue_many(self, jobs: Iterable[JobSpec[R]]) -> list[SyncJobHandle[R]]:
        """See ``Dispatch.enqueue_many``."""
        return sync_handles(run(self._target.enqueue_many(jobs)))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """See ``Dispatch.call``."""
        return run(self._target.call(*args, **kwargs))

    def schedule(self, name: str, /, *args: P.args, **kwargs: P.kwargs) -> SchedulerInfo:
        """See ``Dispatch.schedule``."""
        return run(self._target.schedule(name, *args, **kwargs))

    def job(self, *args: P.args, **kwargs: P.kwargs) -> JobSpec[R]:
        """See ``Dispatch.job``."""
        return self._target.job(*args, **kwargs)

    def partial(self: SyncDispatch[Concatenate[Any, Q], R], *args: Q.args, **kwargs: Q.kwargs) -> JobSpec[R]:
        """See ``Dispatch.partial``."""
        return self._target.partial(*args, **kwargs)


class SyncClaimedJob(LeasedJob, Face[ClaimedJob]):
    """See ``ClaimedJob``."""

    __slots__ = ("_lease",)

    def __init__(self, target: ClaimedJob) -> None:
        self._target = target
        self._lease = target._lease

    queue = Field[str]("_target.queue")
    ref = Field[str]("_target.ref")
    payload = Field[Any]("_target.payload")
    cancelled = Field[bool]("_target.cancelled")
    settled = Field[bool]("_target.settled")

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
    add_children = as_sync(ClaimedJob.add_children, sync_handles)
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


class SyncQueue(Hinting, Face[Queue]):
    """See ``Queue`` and ``QueueAdmin``."""

    __slots__ = ()
    hints_for = "queue"

    name = Field[str]("_target.name")

    enqueue = as_sync(Queue.enqueue, SyncJobHandle)
    enqueue_many = as_sync(Queue.enqueue_many, sync_handles)
    call = as_sync(Queue.call)

    def prepare(self, payload: Any, *, task: str = "", **options: Unpack[JobOptions]) -> JobSpec[Any]:
        """See ``Queue.prepare``."""
        return self._target.prepare(payload, task=task, **options)

    def job(self, id: str) -> SyncJobHandle[Any]:
        """See ``Queue.job``."""
        return SyncJobHandle(self._target.job(id))

    def claim(
        self, *, lease: Duration = "30s", wait: Duration | None = None, worker: str | None = None
    ) -> SyncClaim:
        """See ``Queue.claim``. Use a ``with`` block; the loop thread extends the lease."""
        if wait is None:
            return SyncClaim(self._target.claim(lease=lease, worker=worker))
        return SyncClaim(self._target.claim(lease=lease, wait=wait, worker=worker))

    claim_one = as_sync(Queue.claim_one, lambda job: None if job is None else SyncClaimedJob(job))
    claim_many = as_sync(Queue.claim_many, lambda jobs: [SyncClaimedJob(job) for job in jobs])
    list_jobs = as_sync_iterator(QueueAdmin.list_jobs)
    held = as_sync_iterator(QueueAdmin.held)
    groups = as_sync_iterator(QueueLimits.groups)
    events = as_sync_iterator(QueueAdmin.events)
    get = as_sync(QueueAdmin.get)
    get_or_none = as_sync(QueueAdmin.get_or_none)
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
    steps = as_sync(QueueSteps.steps)
    reset_step = as_sync(QueueSteps.reset_step)
    fork = as_sync(QueueSteps.fork, SyncJobHandle)
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
    search = as_sync(Searching.search)
    errors = as_sync(Searching.errors)
    retry_all = as_sync(Searching.retry_all)
    remove_all = as_sync(Searching.remove_all)
    drain = as_sync(QueueAdmin.drain)
    clean = as_sync(QueueAdmin.clean)
    obliterate = as_sync(QueueAdmin.obliterate)
    settings = as_sync(QueueAdmin.settings)
    configure = as_sync(QueueAdmin.configure)
    check = as_sync(QueueAdmin.check)
    hold_events = as_sync(QueueAdmin.hold_events)
    release_events = as_sync(QueueAdmin.release_events)
    consumers = as_sync(QueueAdmin.consumers)
    schedule = as_sync(Queue.schedule)
    schedulers = as_sync(QueueSchedulers.schedulers)
    scheduler = as_sync(QueueSchedulers.scheduler)
    pause_scheduler = as_sync(QueueSchedulers.pause_scheduler)
    resume_scheduler = as_sync(QueueSchedulers.resume_scheduler)
    remove_scheduler = as_sync(QueueSchedulers.remove_scheduler)
    fire_now = as_sync(QueueSchedulers.fire_now, SyncJobHandle)


class SyncFlowHandle(Hinting, Face[FlowHandle[R_co]], Generic[R_co]):
    """See ``FlowHandle``."""

    __slots__ = ()
    hints_for = "flow handle"

    ref = Field[str]("_target.ref")
    status = Field[EnqueueStatus | None]("_target.status")
    root = Field[SyncJobHandle[Any]](lambda face: SyncJobHandle(face._target.root))
    ends = Field[list[SyncJobHandle[Any]]](lambda face: sync_handles(face._target.ends))
    jobs = Field[list[SyncJobHandle[Any]]](lambda face: sync_handles(face._target.jobs))

    @property
    def names(self) -> dict[str, SyncJobHandle[Any]]:
        return {name: SyncJobHandle(job) for name, job in self._target.names.items()}

    def result(self, timeout: Duration | None = None) -> R_co:
        """See ``FlowHandle.result``."""
        return run(self._target.result(timeout))

    usage = as_sync(FlowHandle.usage)
    set_budget = as_sync(FlowHandle.set_budget)
    tree = as_sync(FlowHandle.tree)
    cancel = as_sync(FlowHandle.cancel)
    retry = as_sync(FlowHandle.retry)


class SyncWhole(Hinting, Face[Whole[R_co]], Generic[R_co]):
    """See ``Whole``."""

    __slots__ = ()
    hints_for = "flow"

    def enqueue(self) -> SyncFlowHandle[R_co]:
        """See ``Whole.enqueue``."""
        return SyncFlowHandle(run(self._target.enqueue()))


class SyncSubscription(Face[Subscription]):
    """See ``Subscription``. ``run()`` blocks until another thread calls ``stop()``."""

    __slots__ = ("on", "on_lost", "stop")

    def __init__(self, target: Subscription) -> None:
        super().__init__(target)
        self.on = target.on
        self.on_lost = target.on_lost
        self.stop = target.stop

    positions = Field[dict[str, int]]("_target.positions")
    run = as_sync(Subscription.run)


class SyncApp(Hinting, Face[App]):
    """See ``App``."""

    __slots__ = ()
    hints_for = "app"

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

    def job(self, ref: str) -> SyncJobHandle[Any]:
        """See ``App.job``."""
        return SyncJobHandle(self._target.job(ref))

    def flow(self, ref: str | list[str] | tuple[str, ...]) -> SyncFlowHandle[Any]:
        """See ``App.flow``."""
        return SyncFlowHandle(self._target.flow(ref))

    def enqueue_flow(self, flow: Ending[R]) -> SyncFlowHandle[R]:
        """See ``App.enqueue_flow``."""
        return SyncFlowHandle(run(self._target.enqueue_flow(flow)))

    def subscribe(self, *queues: str, **options: Unpack[SubscriptionOptions]) -> SyncSubscription:
        """See ``App.subscribe``."""
        return SyncSubscription(self._target.subscribe(*queues, **options))

    enqueue_flows = as_sync(App.enqueue_flows, lambda flows: [SyncFlowHandle(flow) for flow in flows])
    events = as_sync_iterator(App.events)
    schedule = as_sync(App.schedule)
    schedulers = as_sync(App.schedulers)
    close = as_sync(App.close)
    queues = as_sync(App.queues)
