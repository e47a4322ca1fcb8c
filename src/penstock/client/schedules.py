"""Schedulers: jobs that come again, by cron, by an interval, or a while after the last one ended.

The store keeps them; every worker's sweeper fires them. ``app.schedule`` and ``queue.schedule`` put them in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Never, Protocol, TypedDict, TypeVar, Unpack, get_args

from msgspec.structs import replace

from penstock.client.firing import job_of_slot
from penstock.client.handle import JobHandle
from penstock.client.options import refuse_unknown
from penstock.client.optionvalues import epoch_ms, whole_number
from penstock.client.task import JobSpec, Task
from penstock.core.names import check_scheduler
from penstock.core.schedule import (
    AfterCompletion,
    Cron,
    Every,
    Missed,
    Plan,
    Schedule,
    Timing,
    pack_plan,
    unpack_plan,
)
from penstock.core.text import shown
from penstock.core.units import Duration, describe, milliseconds
from penstock.errors import InvalidInput, InvalidOption
from penstock.storage.values import NewScheduler

if TYPE_CHECKING:
    from penstock.client.codec import JobCodec
    from penstock.client.queue import Queue
    from penstock.core.job import NewJob
    from penstock.storage.contract import Storage
    from penstock.storage.values import Scheduler


_FURTHEST: Final = 2**31 - 1


class When(TypedDict, total=False):
    """When a scheduler's jobs come. One of the first three is needed.

    - ``cron``: an expression of five fields, or of six with the seconds first, or ``@daily`` and the like, read in
      the zone ``tz`` (UTC).
    - ``every``: an interval, counted from ``start``, or from the epoch: ``"1h"`` is on the hour, UTC.
    - ``after_completion``: that long after the end of the job before, however it ended. The first comes at once.
    - ``start``, ``end``: no slot before, none after; times with a zone. ``limit``: how many slots in all.
    - ``missed``: of slots that nobody was there to fire, ``"skip"`` fires the newest, ``"catch_up"`` all, in order.
    """

    cron: str
    tz: str
    every: Duration
    after_completion: Duration
    start: datetime | None
    end: datetime | None
    limit: int | None
    missed: Missed


def read_schedule(when: When) -> Schedule:
    """What ``when`` says, checked. Raises ``InvalidOption``."""
    refuse_unknown(when, When.__annotations__, where="a schedule")
    start, end, limit = when.get("start"), when.get("end"), when.get("limit")
    start_ms = 0 if start is None else epoch_ms("start", start)
    end_ms = 0 if end is None else epoch_ms("end", end)
    missed = when.get("missed", "skip")
    if missed not in get_args(Missed):
        raise InvalidOption(f"missed={shown(missed)} is not valid. Give 'skip' or 'catch_up'.")
    if start_ms and end_ms and end_ms < start_ms:
        raise InvalidOption(f"end={end} lies before start={start}: there would be no slot.")
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
        said = f"{' and '.join(given)} are given" if given else "none is given"
        raise InvalidOption(
            f"a schedule goes by cron, by every or by after_completion; {said}. Give one of them."
        )
    if "tz" in when and "cron" not in when:
        raise InvalidOption("tz is for cron alone: intervals are the same in every time zone.")
    if "cron" in when:
        return Cron.of(when["cron"], when.get("tz", "UTC"))
    if "every" in when:
        every_ms = milliseconds(when["every"], what="every")
        if every_ms < 1:
            raise InvalidOption(
                f"every={shown(when['every'])} is not valid: the interval must be longer than 0."
            )
        return Every(every_ms, start_ms)
    return AfterCompletion(milliseconds(when["after_completion"], what="after_completion"))


async def put_scheduler(
    storage: Storage, queue: str, name: str, *, schedule: Schedule, job: NewJob
) -> SchedulerInfo:
    """Create the scheduler or change the one of that name, unless it is the same already.

    A changed schedule begins anew from now; a changed job is that of the slots to come.

    Raises:
        InvalidOption: a schedule without a slot to come, or a job that is to run at one time or after others.
    """
    if job.run_at_ms is not None:
        raise InvalidOption(
            "run_at is one instant, but the job comes again. Use start=, or a delay after the slot."
        )
    if job.after:
        raise InvalidOption(
            "after names jobs that are there now, but the job comes again. Schedule a task that puts in the flow."
        )
    plan = Plan(schedule, replace(job, id="", notify="", unchecked=False))
    found = await storage.schedulers(queue, [name])
    known = unpack_plan(found.schedulers[0].spec) if found.schedulers else None
    is_same = known is not None and known.schedule == schedule
    next_ms = schedule.first(found.now_ms)
    if next_ms is None and not is_same:
        raise InvalidOption(f"scheduler {shown(name)} would have no slot: its end has passed.")
    new = NewScheduler(
        name,
        pack_plan(plan),
        next_ms or 0,
        keep_next=is_same,
        limit=schedule.limit,
        end_ms=schedule.end_ms,
        repeat_ms=schedule.repeat_ms,
    )
    await storage.put_scheduler(queue, new)
    return SchedulerInfo(queue, (await storage.schedulers(queue, [name])).schedulers[0])


class SchedulerInfo:
    """A scheduler as it was when asked for. ``raw`` is what the store said, ``plan`` what it means."""

    __slots__ = ("plan", "queue", "raw")

    def __init__(self, queue: str, raw: Scheduler) -> None:
        self.queue = queue
        self.raw = raw
        self.plan = unpack_plan(raw.spec)

    def __repr__(self) -> str:
        return f"<SchedulerInfo {self.queue}/{self.name} {self.when}{', paused' if self.paused else ''}>"

    @property
    def name(self) -> str:
        return self.raw.name

    @property
    def when(self) -> str:
        """What it goes by, in words: ``cron 0 3 * * * Europe/Berlin``, ``every 10m``, ``5m after completion``."""
        match self.plan.schedule.timing:
            case Cron(expression, tz):
                return f"cron {expression} {tz}"
            case Every(every_ms):
                return f"every {describe(every_ms)}"
            case AfterCompletion(delay_ms):
                return f"{describe(delay_ms)} after completion"

    @property
    def next(self) -> datetime | None:
        """The next slot. ``None``: there is none any more, or the end of the running job says when."""
        return _instant(self.raw.next_ms)

    @property
    def paused(self) -> bool:
        return self.raw.paused

    @property
    def fired(self) -> int:
        """How many slots were fired, since it was first put in."""
        return self.raw.fired

    @property
    def ended(self) -> bool:
        """Whether no slot will come again: its end has passed, or its limit was reached."""
        return not self.raw.next_ms and not self.raw.awaiting

    @property
    def last_job(self) -> str:
        """The id of the last slot's job; empty before the first."""
        return self.raw.last_id

    @property
    def start(self) -> datetime | None:
        return _instant(self.plan.schedule.start_ms)

    @property
    def end(self) -> datetime | None:
        return _instant(self.plan.schedule.end_ms)

    @property
    def limit(self) -> int | None:
        return self.plan.schedule.limit or None

    @property
    def missed(self) -> Missed:
        return self.plan.schedule.missed

    @property
    def task(self) -> str:
        """The task of its jobs."""
        return self.plan.job.options.task

    def slots(self, count: int, *, after: datetime | None = None) -> list[datetime]:
        """The next slots by its schedule, as they would be if nothing is changed. None for ``after_completion``."""
        whole_number("count", count, least=1)
        found: list[datetime] = []
        at_ms = self.raw.next_ms - 1 if after is None else epoch_ms("after", after)
        while len(found) < count and (slot_ms := self.plan.schedule.next_after(at_ms)) is not None:
            found.append(_datetime(slot_ms))
            at_ms = slot_ms
        return found


def _instant(ms: int) -> datetime | None:
    return _datetime(ms) if ms else None


def _datetime(ms: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms)


# What apps and queues do with schedulers.


class _WithoutArguments(Protocol):
    """A task that can be enqueued without arguments."""

    def job(self) -> JobSpec[Any]: ...


S = TypeVar("S", bound=_WithoutArguments)


def _refuse_unnamed(unnamed: Sequence[Any], form: str) -> None:
    """Raise ``InvalidOption`` for a schedule that is given by position, or not at all."""
    if unnamed:
        is_interval = isinstance(unnamed[0], int | float | timedelta)
        option = f"every={unnamed[0]!r}" if is_interval else "every=..."
        raise InvalidOption(
            f"a schedule is given by name, got {shown(unnamed[0])}. Use {form.format(option)}, or cron=...."
        )


class AppSchedulers:
    """The schedulers of an app. ``App`` has all of this."""

    if TYPE_CHECKING:

        async def connect(self) -> Storage: ...
        async def queues(self) -> list[str]: ...
        def queue(self, name: str) -> Queue: ...

    def __init__(self) -> None:
        self._declared: dict[tuple[str, str], Plan] = {}

    async def schedule(
        self, name: str, job: JobSpec[Any], *unnamed: Never, **when: Unpack[When]
    ) -> SchedulerInfo:
        """Have a job come again: ``await app.schedule("nightly", report.job(), cron="0 3 * * *", tz="Europe/Berlin")``.

        ``job`` is a template, with whatever options it was made with but ``run_at``; the id of each job is the
        scheduler's name and the slot. ``when`` is in ``When``. A scheduler belongs to the job's queue; one of that
        name there is changed if it differs, and left alone if not.

        Raises:
            InvalidInput: a name, an expression, a zone or an option that is not valid. Nothing was written.
        """
        _refuse_unnamed(unnamed, "app.schedule(name, job, {})")
        schedule = read_schedule(when)
        name = check_scheduler(name)
        if not isinstance(job, JobSpec):
            raise InvalidInput(
                f"{shown(job)} cannot be scheduled. Give task.job(...); for a flow, of a task that puts it in."
            )
        return await put_scheduler(await self.connect(), job.queue, name, schedule=schedule, job=job.job)

    def scheduled(self, *unnamed: Never, name: str | None = None, **when: Unpack[When]) -> Callable[[S], S]:
        """Decorates a task that takes no arguments: ``@app.scheduled(cron="0 3 * * *")`` above ``@app.task``.

        A worker of the task's queue puts the scheduler in when it starts; it is called what the task is called.
        """
        _refuse_unnamed(unnamed, "@app.scheduled({})")
        schedule = read_schedule(when)

        def declare(task: S) -> S:
            if not isinstance(task, Task):
                raise InvalidInput(f"{shown(task)} is not a task. Put @app.scheduled(...) above @app.task.")
            try:
                job = task.job()
            except InvalidInput as error:
                raise InvalidInput(
                    f"Task {shown(task.name)} takes arguments, and @app.scheduled(...) gives none. Use "
                    f"app.schedule(name, {task.name}.job(...), ...) in a function under @app.on_start."
                ) from error
            self._declared[job.queue, check_scheduler(name or task.name)] = Plan(schedule, job.job)
            return task

        return declare

    async def schedulers(self) -> list[SchedulerInfo]:
        """The schedulers of all queues, by queue and name."""
        return [info for queue in await self.queues() for info in await self.queue(queue).schedulers()]

    async def put_declared(self, storage: Storage, queues: Collection[str] | None = None) -> None:
        """Put in the schedulers that decorators asked for on these queues, or all: what a starting worker does."""
        for (queue, name), plan in self._declared.items():
            if queues is None or queue in queues:
                await put_scheduler(storage, queue, name, schedule=plan.schedule, job=plan.job)


class QueueSchedulers:
    """The schedulers of one queue. ``Queue`` has all of this."""

    _source: JobCodec

    async def schedulers(self) -> list[SchedulerInfo]:
        """All of them, by name."""
        storage, queue = await self._source.app.connect(), self._source.queue
        return [SchedulerInfo(queue, raw) for raw in (await storage.schedulers(queue)).schedulers]

    async def scheduler(self, name: str) -> SchedulerInfo | None:
        """The one of that name."""
        storage, queue = await self._source.app.connect(), self._source.queue
        found = (await storage.schedulers(queue, [check_scheduler(name)])).schedulers
        return SchedulerInfo(queue, found[0]) if found else None

    async def pause_scheduler(self, name: str) -> bool:
        """Fire no slot until it is resumed; false if there is none of that name. Jobs that are in go on."""
        storage = await self._source.app.connect()
        return await storage.pause_scheduler(self._source.queue, check_scheduler(name))

    async def resume_scheduler(self, name: str) -> bool:
        """The end of a pause. Slots of the time between are left out, whatever ``missed`` says."""
        storage, queue = await self._source.app.connect(), self._source.queue
        found = await storage.schedulers(queue, [check_scheduler(name)])
        if not found.schedulers:
            return False
        schedule = unpack_plan(found.schedulers[0].spec).schedule
        is_repeating = isinstance(schedule.timing, AfterCompletion)
        next_ms = None if is_repeating else schedule.next_after(found.now_ms) or 0
        return await storage.resume_scheduler(queue, name, next_ms=next_ms)

    async def remove_scheduler(self, name: str) -> bool:
        """Forget it; false if there is none of that name. Its jobs stay."""
        storage = await self._source.app.connect()
        return await storage.remove_scheduler(self._source.queue, check_scheduler(name))

    async def fire_now(self, name: str) -> JobHandle[Any]:
        """Put in one of its jobs beside its slots, also while it is paused. Counts in no limit.

        Raises ``InvalidOption`` if there is none of that name.
        """
        storage, queue = await self._source.app.connect(), self._source.queue
        found = await storage.schedulers(queue, [check_scheduler(name)])
        if not found.schedulers:
            raise InvalidOption(
                f"queue {shown(queue)} has no scheduler {shown(name)}. Look at queue.schedulers()."
            )
        job = job_of_slot(unpack_plan(found.schedulers[0].spec), name, found.now_ms)
        answer = await (await self._source.app.session()).enqueue(queue, job)
        return JobHandle(self._source, answer.id, answer)

    async def _put_scheduler(self, name: str, job: NewJob, when: When) -> SchedulerInfo:
        schedule = read_schedule(when)
        storage = await self._source.app.connect()
        return await put_scheduler(
            storage, self._source.queue, check_scheduler(name), schedule=schedule, job=job
        )
