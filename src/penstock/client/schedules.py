"""Schedulers, which enqueue jobs by cron, at an interval, or some time after the last one finished.

The store keeps them, and every worker fires them. ``app.schedule`` and ``queue.schedule`` create them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Never, Protocol, TypeVar, Unpack, get_args

from msgspec.structs import replace

from penstock.client.firing import job_of_slot
from penstock.client.handle import JobHandle
from penstock.client.info import Field, moment_field
from penstock.client.job_verbs import QueuePart
from penstock.client.options import refuse_unknown
from penstock.client.parsers import epoch_ms, whole_number
from penstock.client.situation import instant
from penstock.client.task import JobSpec, Task
from penstock.core.names import check_scheduler
from penstock.core.schedule import (
    AfterCompletion,
    Cron,
    Every,
    Missed,
    Schedule,
    ScheduleSpec,
    Timing,
    When,
    pack_spec,
    unpack_spec,
)
from penstock.core.text import get_logger, shown
from penstock.core.units import describe, milliseconds
from penstock.errors import InvalidInput, InvalidOption
from penstock.storage.values import NewScheduler

if TYPE_CHECKING:
    from penstock.client.queue import Queue
    from penstock.storage.contract import Storage
    from penstock.storage.values import Scheduler


logger = get_logger("penstock.worker")

_FURTHEST: Final = 2**31 - 1
_CRON_FIELDS: Final = 5


def read_schedule(when: When) -> Schedule:
    """Return the checked schedule. Raise ``InvalidOption`` if it is not valid."""
    refuse_unknown(when, When.__annotations__, where="a schedule")
    start, end, limit = when.get("start"), when.get("end"), when.get("limit")
    start_ms = 0 if start is None else epoch_ms("start", start)
    end_ms = 0 if end is None else epoch_ms("end", end)
    missed = when.get("missed", "skip")
    if missed not in get_args(Missed):
        raise InvalidOption(f"missed must be 'skip' or 'catch_up', got {shown(missed)}.")
    if start_ms and end_ms and end_ms < start_ms:
        raise InvalidOption(f"end={end} is before start={start}, which leaves no slots.")
    return Schedule(
        _timing(when, start_ms),
        start_ms=start_ms,
        end_ms=end_ms,
        limit=0 if limit is None else whole_number("limit", limit, least=1, most=_FURTHEST),
        missed=missed,
    )


def _timing(when: When, start_ms: int) -> Timing:
    given = [name for name in ("cron", "every", "after_completion") if name in when]
    if len(given) != 1:
        raise InvalidOption(
            f"a schedule needs one of cron, every and after_completion, got {' and '.join(given) or 'none'}."
        )
    if "tz" in when and "cron" not in when:
        raise InvalidOption("tz applies only to cron: intervals are the same in every time zone.")
    if "cron" in when:
        return Cron.of(when["cron"], when.get("tz", "UTC"))
    if "every" in when:
        every_ms = milliseconds(when["every"], what="every")
        if every_ms < 1:
            raise InvalidOption(f"every must be longer than 0, got {shown(when['every'])}.")
        return Every(every_ms, start_ms)
    return AfterCompletion(milliseconds(when["after_completion"], what="after_completion"))


def schedule_spec(when: When, spec: JobSpec[Any]) -> ScheduleSpec:
    """Return the schedule and the job that it repeats, checked.

    Raises:
        InvalidOption: the schedule is not valid, or the job has ``run_at``, ``after`` or one time as its ``deadline``.
        InvalidInput: a rule of the task would be computed once, for all jobs.
    """
    schedule, job = read_schedule(when), spec.job
    if job.run_at_ms is not None:
        raise InvalidOption(
            "run_at is a single time, but the job repeats. Use start=, or a delay after the slot."
        )
    if job.after:
        raise InvalidOption(
            "after names existing jobs, but the job repeats. Schedule a task that enqueues the flow."
        )
    if isinstance(deadline := spec.given.get("deadline"), datetime):
        raise InvalidOption(
            f"deadline={deadline.isoformat()} is a single time, but the job repeats. Use ttl=..., which counts from "
            "each enqueue."
        )
    if spec.rules is not None:
        spec.rules.check_repeated()
    return ScheduleSpec(schedule, replace(job, id="", notify="", unchecked=False))


async def put_scheduler(storage: Storage, queue: str, name: str, spec: ScheduleSpec) -> SchedulerInfo:
    """Create the scheduler, or change the one with that name if it differs.

    A changed schedule starts again from now. A changed job applies to future slots. Raise ``InvalidOption`` if the
    schedule has no future slot.
    """
    schedule = spec.schedule
    found = await storage.schedulers(queue, [name])
    known = unpack_spec(found.schedulers[0].spec) if found.schedulers else None
    is_same = known is not None and known.schedule == schedule
    next_ms = schedule.first(found.now_ms)
    if next_ms is None and not is_same:
        raise InvalidOption(f"scheduler {shown(name)} has no slots: its end has passed.")
    new = NewScheduler(
        name,
        pack_spec(spec),
        next_ms or 0,
        keep_next=is_same,
        limit=schedule.limit,
        end_ms=schedule.end_ms,
        repeat_ms=schedule.repeat_ms,
    )
    await storage.put_scheduler(queue, new)
    return SchedulerInfo(queue, (await storage.schedulers(queue, [name])).schedulers[0])


class SchedulerInfo:
    """A snapshot of a scheduler. ``raw`` is the record of the store, ``spec`` its decoded schedule and job."""

    __slots__ = ("queue", "raw", "spec")

    def __init__(self, queue: str, raw: Scheduler) -> None:
        self.queue = queue
        self.raw = raw
        self.spec = unpack_spec(raw.spec)

    def __repr__(self) -> str:
        return f"<SchedulerInfo {self.queue}/{self.name} {self.when}{', paused' if self.paused else ''}>"

    name = Field[str]("raw.name")

    @property
    def when(self) -> str:
        """Return the schedule as text: ``cron 0 3 * * * Europe/Berlin``, ``every 10m``, ``5m after completion``."""
        match self.spec.schedule.timing:
            case Cron(expression, tz):
                return f"cron {expression} {tz}"
            case Every(every_ms):
                return f"every {describe(every_ms)}"
            case AfterCompletion(delay_ms):
                return f"{describe(delay_ms)} after completion"

    next = moment_field("raw.next_ms")
    """The next slot; ``None`` if there is none, or if it depends on the end of the running job."""
    paused = Field[bool]("raw.paused")
    fired = Field[int]("raw.fired")
    """The number of fired slots since it was created."""

    @property
    def ended(self) -> bool:
        """Return whether it has no more slots: its end has passed, or its limit is reached."""
        return not self.raw.next_ms and not self.raw.awaiting

    last_job = Field[str]("raw.last_id")
    """The id of the job of the last slot; empty before the first."""
    start = moment_field("spec.schedule.start_ms")
    end = moment_field("spec.schedule.end_ms")

    @property
    def limit(self) -> int | None:
        return self.spec.schedule.limit or None

    missed = Field[Missed]("spec.schedule.missed")
    task = Field[str]("spec.job.options.task")
    """The task of its jobs."""

    def slots(self, count: int, *, after: datetime | None = None) -> list[datetime]:
        """Return the next slots of its schedule; empty for ``after_completion``."""
        whole_number("count", count, least=1)
        slots: list[datetime] = []
        at_ms = self.raw.next_ms - 1 if after is None else epoch_ms("after", after)
        while len(slots) < count and (slot_ms := self.spec.schedule.next_after(at_ms)) is not None:
            slots.append(instant(slot_ms))
            at_ms = slot_ms
        return slots


class _WithoutArguments(Protocol):
    """A task that can be enqueued without arguments."""

    def job(self) -> JobSpec[Any]: ...


S = TypeVar("S", bound=_WithoutArguments)


def _refuse_unnamed(unnamed: Sequence[Any], form: str) -> None:
    """Raise ``InvalidOption`` for a schedule that is given by position, or not at all."""
    if unnamed:
        given = unnamed[0]
        if isinstance(given, str) and len(given.split()) == _CRON_FIELDS:
            use = form.format(f"cron={given!r}") + "."
        else:
            is_interval = isinstance(given, int | float | timedelta)
            use = form.format(f"every={given!r}" if is_interval else "every=...") + ", or cron=...."
        raise InvalidOption(f"a schedule is given by name, got {shown(given)}. Use {use}")


class AppSchedulers:
    """The scheduler methods of ``App``."""

    if TYPE_CHECKING:

        async def connect(self) -> Storage: ...
        async def queues(self) -> list[str]: ...
        def queue(self, name: str) -> Queue: ...

    def __init__(self) -> None:
        self._declared: dict[tuple[str, str], ScheduleSpec] = {}

    async def schedule(
        self, name: str, job: JobSpec[Any], *unnamed: Never, **when: Unpack[When]
    ) -> SchedulerInfo:
        """Repeat a job: ``await app.schedule("nightly", report.job(), cron="0 3 * * *", tz="Europe/Berlin")``.

        ``job`` is a template. It may have any options except ``run_at`` and ``after``. The id of each job consists of
        the name of the scheduler and the slot. See ``When`` for the times. The scheduler belongs to the job's queue.
        If the queue has one with that name, it is changed if it differs.

        Raises:
            InvalidInput: a name, an expression, a time zone or an option is not valid. Nothing was written.
        """
        _refuse_unnamed(unnamed, "app.schedule(name, job, {})")
        name = check_scheduler(name)
        if not isinstance(job, JobSpec):
            raise InvalidInput(
                f"{shown(job)} cannot be scheduled. Give task.job(...); for a flow, of a task that enqueues it."
            )
        spec = schedule_spec(when, job)
        return await put_scheduler(await self.connect(), job.queue, name, spec)

    def scheduled(self, *unnamed: Never, name: str | None = None, **when: Unpack[When]) -> Callable[[S], S]:
        """Schedule a task without arguments: ``@app.scheduled(cron="0 3 * * *")`` above ``@app.task``.

        A worker of the task's queue creates the scheduler when it starts, or replaces the one with its name. The
        default name is that of the task. Without ``tz``, ``cron`` is in UTC.
        """
        _refuse_unnamed(unnamed, "@app.scheduled({})")
        read_schedule(when)

        def declare(task: S) -> S:
            if not isinstance(task, Task):
                raise InvalidInput(f"{shown(task)} is not a task. Put @app.scheduled(...) above @app.task.")
            try:
                job = task.job()
            except InvalidInput as error:
                raise InvalidInput(
                    f"task {shown(task.name)} takes arguments, and @app.scheduled(...) gives none. Use "
                    f"app.schedule(name, {task.name}.job(...), ...) in a function under @app.on_start."
                ) from error
            self._declared[job.queue, check_scheduler(name or task.name)] = schedule_spec(when, job)
            return task

        return declare

    async def schedulers(self) -> list[SchedulerInfo]:
        """Return the schedulers of all queues, sorted by queue and name."""
        return [info for queue in await self.queues() for info in await self.queue(queue).schedulers()]

    async def put_declared(self, storage: Storage, queues: Collection[str] | None = None) -> None:
        """Create the schedulers of ``@app.scheduled`` on these queues, or on all. Workers call it when they start."""
        for (queue, name), spec in self._declared.items():
            if queues is None or queue in queues:
                known = (await storage.schedulers(queue, [name])).schedulers
                info = await put_scheduler(storage, queue, name, spec)
                if known and known[0].spec != info.raw.spec:
                    _log_replaced(SchedulerInfo(queue, known[0]), info)


def _log_replaced(before: SchedulerInfo, now: SchedulerInfo) -> None:
    """Log a scheduler that the code has changed: it may have been added by hand, in another time zone."""
    logger.info(
        "the scheduler %r of queue %r is replaced by that of the code: %s, task %s; it was: %s, task %s",
        *(now.name, now.queue, now.when, now.task, before.when, before.task),
        extra={"queue": now.queue, "scheduler": now.name},
    )


class QueueSchedulers(QueuePart):
    """The scheduler methods of ``Queue``."""

    async def schedulers(self) -> list[SchedulerInfo]:
        """Return the schedulers of this queue, sorted by name."""
        found = await (await self._storage()).schedulers(self.name)
        return [SchedulerInfo(self.name, raw) for raw in found.schedulers]

    async def scheduler(self, name: str) -> SchedulerInfo | None:
        """Return the scheduler with that name, or ``None``."""
        found, _ = await self._scheduler(name)
        return found

    async def pause_scheduler(self, name: str) -> bool:
        """Pause a scheduler, and return whether it exists. Jobs that are already enqueued run."""
        return await (await self._storage()).pause_scheduler(self.name, check_scheduler(name))

    async def resume_scheduler(self, name: str) -> bool:
        """Resume a scheduler, and return whether it exists. Slots of the pause are skipped, whatever ``missed`` is."""
        found, now_ms = await self._scheduler(name)
        if found is None:
            return False
        schedule = found.spec.schedule
        is_repeating = isinstance(schedule.timing, AfterCompletion)
        next_ms = None if is_repeating else schedule.next_after(now_ms) or 0
        return await (await self._storage()).resume_scheduler(self.name, name, next_ms=next_ms)

    async def remove_scheduler(self, name: str) -> bool:
        """Remove a scheduler, and return whether it existed. Its jobs stay."""
        return await (await self._storage()).remove_scheduler(self.name, check_scheduler(name))

    async def fire_now(self, name: str) -> JobHandle[Any]:
        """Enqueue one extra job of a scheduler, even if it is paused. Its ``limit`` does not count it.

        Raises ``InvalidOption`` if the queue does not have that scheduler.
        """
        found, now_ms = await self._scheduler(name)
        if found is None:
            raise InvalidOption(
                f"queue {shown(self.name)} has no scheduler {shown(name)}. See queue.schedulers()."
            )
        session = await self._source.app.session()
        answer = await session.enqueue(self.name, job_of_slot(found.spec, name, now_ms))
        return JobHandle(self._source, answer.id, answer)

    async def _scheduler(self, name: str) -> tuple[SchedulerInfo | None, int]:
        """Return the scheduler with that name, and the time of the store."""
        found = await (await self._storage()).schedulers(self.name, [check_scheduler(name)])
        info = SchedulerInfo(self.name, found.schedulers[0]) if found.schedulers else None
        return info, found.now_ms
