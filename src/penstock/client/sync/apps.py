"""The sync faces of an app and its queues."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from penstock.client.admin import QueueAdmin
from penstock.client.app import App
from penstock.client.events import After, EventTypes, Offsets
from penstock.client.hints import Hinting
from penstock.client.info import JobInfo
from penstock.client.limits import QueueLimits
from penstock.client.loopthread import run
from penstock.client.options import JobOptions
from penstock.client.queue import Queue
from penstock.client.schedules import QueueSchedulers
from penstock.client.subscription import SyncSubscription
from penstock.client.sync.face import Face, as_sync, iterate
from penstock.client.sync.jobs import SyncClaim, SyncClaimedJob, SyncJobHandle
from penstock.client.task import JobSpec
from penstock.core.lifecycle import State
from penstock.core.units import Duration

if TYPE_CHECKING:
    from penstock.client.flow.handle import SyncFlowHandle
    from penstock.client.flow.parts import Ending, Part
    from penstock.client.subscription import SubscriptionOptions
    from penstock.core.event import Event
    from penstock.core.limits import GroupState


R = TypeVar("R")


class SyncQueue(Hinting, Face[Queue]):
    """See ``Queue`` and ``QueueAdmin``."""

    __slots__ = ()
    hints_for = "queue"

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
        return iterate(self._target.list_jobs(state, limit=limit, reverse=reverse))

    def held(self, consumer: str, *, limit: int | None = None) -> Generator[JobInfo, None, None]:
        """See ``Queue.held``."""
        return iterate(self._target.held(consumer, limit=limit))

    def groups(self) -> Generator[GroupState, None, None]:
        """See ``Queue.groups``."""
        return iterate(self._target.groups())

    def events(
        self, *, after: After = 0, follow: bool = True, types: EventTypes = None, id: str | None = None
    ) -> Generator[Event, None, None]:
        """See ``Queue.events``."""
        return iterate(self._target.events(after=after, follow=follow, types=types, id=id))

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

    def events(
        self,
        *queues: str,
        after: Offsets = 0,
        follow: bool = True,
        types: EventTypes = None,
        id: str | None = None,
    ) -> Generator[Event, None, None]:
        """See ``App.events``."""
        return iterate(self._target.events(*queues, after=after, follow=follow, types=types, id=id))

    def subscribe(self, *queues: str, **options: Unpack[SubscriptionOptions]) -> SyncSubscription:
        """See ``App.subscribe``."""
        return SyncSubscription(self._target.subscribe(*queues, **options))

    schedule = as_sync(App.schedule)
    schedulers = as_sync(App.schedulers)

    def flow(self, ref: str) -> SyncFlowHandle[Any]:
        """See ``App.flow``."""
        from penstock.client.flow.handle import SyncFlowHandle

        return SyncFlowHandle(self._target.flow(ref))

    def enqueue_flow(self, flow: Ending[R]) -> SyncFlowHandle[R]:
        """See ``App.enqueue_flow``."""
        from penstock.client.flow.handle import SyncFlowHandle

        return SyncFlowHandle(run(self._target.enqueue_flow(flow)))

    def enqueue_flows(self, flows: Iterable[Part]) -> list[SyncFlowHandle[Any]]:
        """See ``App.enqueue_flows``."""
        from penstock.client.flow.handle import SyncFlowHandle

        return [SyncFlowHandle(handle) for handle in run(self._target.enqueue_flows(flows))]

    close = as_sync(App.close)
    queues = as_sync(App.queues)
