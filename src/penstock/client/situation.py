"""The state of a queue that explains why its jobs do not run, and the commands that answers print."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from penstock.core.command import COMMAND_TASK
from penstock.core.job import EMPTY_EXTRAS
from penstock.core.lifecycle import EventType, State
from penstock.core.limits import EVERY_GROUP, Bucket, GroupState, Limit, LimitsOfQueue, Rate
from penstock.core.text import without_password
from penstock.core.units import describe
from penstock.errors import StorageError

if TYPE_CHECKING:
    from penstock.core.event import Event
    from penstock.core.flow import DependencyRecord
    from penstock.core.job import Job
    from penstock.storage.contract import Storage
    from penstock.storage.values import Budget, WorkerRecord


MOST_CHILDREN: Final = 1000
"""The maximum number of children that an answer reads."""
NAMED: Final = 3
"""The number of jobs that an answer names."""
SEEN_LATELY_MS: Final = 60_000
"""A worker that has not renewed its record for this long does not count as live."""
_MOST_ACTIVE: Final = 100
_MOST_GROUPS: Final = 100
_EVENTS_READ: Final = 1000
_AFTER_ALL: Final = 2**52
_SAME_INSTANT_MS: Final = 2_000


def spent_budgets(budgets: Iterable[Budget], flow: str = "") -> Iterator[Budget]:
    """Yield the spent budgets of a queue, or of a flow in it."""
    return (budget for budget in budgets if budget.flow == flow and budget.spent >= budget.micros)


class Pause(NamedTuple):
    """The start of a pause. ``job`` is the job whose handler asked for it, as ``queue/id``; empty for other pauses."""

    at_ms: int
    job: str = ""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a queue. ``groups`` has the queue itself under ``""``.

    ``live`` has the info of each live worker, with its ``id``. ``active`` holds the first of the active jobs.
    ``pause`` is the pause that holds back the job; ``None`` if it was not read or not found. ``children`` are the
    dependencies of one job; ``None`` if only the queue was read.
    """

    queue: str
    now_ms: int
    groups: Mapping[str, GroupState]
    limits: LimitsOfQueue
    budgets: Sequence[Budget]
    workers: Sequence[WorkerRecord]
    live: Sequence[Mapping[str, Any]]
    active: Sequence[Job]
    pause: Pause | None = None
    children: Sequence[DependencyRecord] | None = None

    @property
    def gate(self) -> GroupState:
        """The queue's own pause and limits."""
        return self.groups[""]

    @property
    def slots(self) -> tuple[int, int]:
        """Return the number of slots of the live workers, and how many of them are in use.

        The workers' own numbers are as old as their last heartbeat; the number of active jobs in the queue is exact.
        """
        slots = sum(worker.get("concurrency", 0) for worker in self.live)
        running = max(sum(worker.get("active", 0) for worker in self.live), self.gate.active)
        return slots, min(running, slots) if slots else running

    @property
    def workload(self) -> str:
        """Return the number of live workers and of the jobs they run, as text."""
        slots, running = self.slots
        many = len(self.live) != 1
        jobs = f"{running} of {counted(slots, 'job')}" if slots else counted(running, "job")
        return f"{counted(len(self.live), 'worker')} run{'s' * (not many)} {jobs}"

    def started_ms(self, worker: Mapping[str, Any]) -> int:
        """Return when a live worker started, by the queue's clock, because the clock of its machine may be wrong."""
        age_ms = next(record.age_ms for record in self.workers if record.id == worker["id"])
        return self.now_ms - age_ms - int(worker.get("up_ms", self.now_ms))

    def limit_of(self, group: str) -> Limit:
        """Return the limit of a group: its own, or that of every group without one."""
        return self.limits.get(group) or self.limits.get(EVERY_GROUP, Limit())

    def limit_command(self, bound: Literal["concurrency", "rate", "bucket"], group: str = "") -> str:
        """Return the command that doubles a bound of the queue, or of this group alone."""
        limit = self.limit_of(group) if group else self.limits.get("", Limit())
        bounds: dict[str, str] = {bound: _DOUBLED[bound](limit)}
        if group not in self.limits and group:
            # A group's own limit replaces that of every group, so the command repeats the other bounds.
            bounds = {
                name: str(value) for name, value in msgspec.structs.asdict(limit).items() if value
            } | bounds
        options = [word for name, value in bounds.items() for word in (f"--{name}", value)]
        return command_line(
            "limit", "set", "-q", self.queue, *(("--group", group) if group else ()), *options
        )

    def after(self, wait_ms: int | None) -> datetime | None:
        """Return the instant in ``wait_ms`` from now."""
        return None if wait_ms is None else instant(self.now_ms + wait_ms)

    def until(self, wait_ms: int | None) -> str:
        """Return the words after "until"."""
        return "a running job finishes" if wait_ms is None else self.moment(self.now_ms + wait_ms)

    def moment(self, at_ms: int) -> str:
        """Return a future instant and the time left until then, as text."""
        return f"{at_second(at_ms)} (in {in_units(at_ms - self.now_ms)})"


async def read_situation(storage: Storage, queue: str, *, groups: Iterable[str] = ()) -> Situation:
    """Read a queue and these groups of it in one round of concurrent calls. The queue must exist."""
    keys = ("", *sorted(set(groups) - {""})[:_MOST_GROUPS])
    clock, states, limits, budgets, workers, active = await asyncio.gather(
        storage.clock(queue),
        _read_groups(storage, queue, keys),
        storage.limits(queue),
        read_budgets(storage, queue),
        storage.workers(queue),
        storage.list_jobs(queue, State.ACTIVE, limit=_MOST_ACTIVE if len(keys) > 1 else NAMED),
    )
    return Situation(
        queue=queue,
        now_ms=clock.now_ms,
        groups={state.key: state for state in states},
        limits=limits,
        budgets=budgets,
        workers=workers,
        live=live_workers(workers),
        active=active.jobs,
    )


def live_workers(workers: Iterable[WorkerRecord]) -> list[dict[str, Any]]:
    """Return what each live worker says about itself, with its ``id``."""
    return [
        {"id": worker.id, **(msgspec.json.decode(worker.info) if worker.info else {})}
        for worker in workers
        if not worker.dead and worker.age_ms < SEEN_LATELY_MS
    ]


async def _read_groups(storage: Storage, queue: str, keys: Sequence[str]) -> list[GroupState]:
    """Return the queue and the groups of ``keys``; on a read-only store, such as a replica, the queue alone."""
    try:
        return (await storage.groups(queue, keys=keys)).groups
    except StorageError:
        # An engine may delete old starts as it reads, which a read-only store refuses.
        counts, limits = await storage.counts(queue), await storage.limits(queue)
        concurrency = limits.get("", Limit()).concurrency
        is_full = concurrency is not None and counts.active >= concurrency
        why: Literal["paused", "concurrency", ""] = "concurrency" if is_full else ""
        why = "paused" if counts.paused else why
        return [GroupState("", counts.waiting, counts.active, 0, counts.blocked, counts.paused, why)]


async def read_budgets(storage: Storage, queue: str) -> Sequence[Budget]:
    """Return the budgets; none on a read-only store, because an engine may renew a budget as it reads it."""
    try:
        return await storage.budgets(queue)
    except StorageError:
        return ()


async def read_pause(storage: Storage, situation: Situation, group: str) -> Pause | None:
    """Return the pause of a queue or a group, if the newest events of the queue have it; else ``None``."""
    last = (await storage.read_events(situation.queue, after=_AFTER_ALL, limit=1)).last
    page = await storage.read_events(situation.queue, after=max(0, last - _EVENTS_READ), limit=_EVENTS_READ)
    state, newest = situation.groups[group], page.events[::-1]
    paused = [event for event in newest if event.type == EventType.PAUSED and event.group == group]
    if state.why != "asked":
        return next((Pause(event.at_ms) for event in paused if not event.data), None)
    until_ms = situation.now_ms + (state.wait_ms or 0)
    for event in paused:
        if event.data and abs(_end_of(event) - until_ms) < _SAME_INSTANT_MS:
            return Pause(event.at_ms)
    # A job of a group may have asked for a pause of the whole queue.
    limited = (event for event in newest if event.type == EventType.LIMITED and group in ("", event.group))
    return next((Pause(event.at_ms, event.ref) for event in limited), None)


def _end_of(paused: Event) -> int:
    return paused.at_ms + int(msgspec.json.decode(paused.data).get("for_ms", 0))


def _doubled_count(limit: Limit) -> str:
    return str(2 * (limit.concurrency or 1))


def _doubled_rate(limit: Limit) -> str:
    rate = limit.rate or Rate(1, 1000)
    return str(Rate(2 * rate.count, rate.per_ms))


def _doubled_bucket(limit: Limit) -> str:
    bucket = limit.bucket or Bucket(1, 1, 1000)
    return str(Bucket(2 * bucket.capacity, 2 * bucket.refill, bucket.per_ms))


_DOUBLED: Final = {"concurrency": _doubled_count, "rate": _doubled_rate, "bucket": _doubled_bucket}


def group_of(job: Job) -> str:
    """Return the key of the job's group; empty if it has none."""
    return (job.extras or EMPTY_EXTRAS).group


def instant(ms: int) -> datetime:
    """Return an instant of the store in UTC."""
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms)


def at_second(ms: int) -> str:
    """Return an instant in local time, to the second, as text."""
    return datetime.fromtimestamp(ms / 1000).strftime("%Y-%m-%d %H:%M:%S")


def in_units(ms: int) -> str:
    """Return a duration as text, cut to whole seconds if it is at least one."""
    return describe(ms if ms < 1000 else ms // 1000 * 1000)


class CommandContext(NamedTuple):
    """Options that a printed command repeats to reach the same store, and the app if it is known.

    ``names_app``: the app was given as an option. ``code_names_store``: the code of the app names the same store.
    ``defines``: return whether the app defines the task of this name.
    """

    options: tuple[str, ...] = ()
    app: str = ""
    names_app: bool = False
    code_names_store: bool = False
    defines: Callable[[str], bool] = lambda _: True

    @property
    def all_options(self) -> tuple[str, ...]:
        return (*self.options, "--app", self.app) if self.names_app else self.options


_NO_CONTEXT: Final = CommandContext()
command_context: ContextVar[CommandContext] = ContextVar("penstock_command_context", default=_NO_CONTEXT)
"""The command line sets this, so that the commands in its answers work when they are pasted."""


@contextmanager
def commands_from_code(options: tuple[str, ...]) -> Iterator[None]:
    """Make printed commands repeat ``options``, unless the command line has set a context."""
    is_set = command_context.get() is not _NO_CONTEXT
    before = command_context.set(
        command_context.get() if is_set else CommandContext(options, code_names_store=True)
    )
    try:
        yield
    finally:
        command_context.reset(before)


def command_line(*words: str) -> str:
    """Return a command to run, as it is typed into a shell."""
    options = command_context.get().all_options
    return f"`penstock {_typed((*words, *options))}`{_with_url(options)}"


def _typed(words: Iterable[str]) -> str:
    """Return words as they are typed into a shell. The environment stands for a URL with a password."""
    return " ".join(
        shlex.quote(word) if without_password(word) == word else '"$PENSTOCK_URL"' for word in words
    )


def _with_url(words: Iterable[str]) -> str:
    """Return a note for a command whose URL is hidden because of its password."""
    hidden = any(without_password(word) != word for word in words)
    return " (with the URL of the store in PENSTOCK_URL)" if hidden else ""


def worker_command(*queues: str, target: str = "MODULE:APP") -> str:
    """Return the command that starts a worker for these queues. A known app takes the place of ``MODULE:APP``."""
    context = command_context.get()
    store = context.all_options
    if context.app and target != "--commands":
        target, store = shlex.quote(context.app), context.options
    elif context.code_names_store and target != "--commands":
        store = ()
    options = _typed([*(word for queue in queues for word in ("-q", queue)), *store])
    return f"`penstock worker {target}{f' {options}' * bool(options)}`{_with_url(store)}"


def start_command(job: Job) -> str:
    """Return the command that starts a worker for this job; without a task, a description of the script."""
    if not job.options.task:
        return f'an app that has `@app.handler("{job.queue}")`: the job has no task'
    target = "--commands" if job.options.task == COMMAND_TASK else "MODULE:APP"
    return worker_command(job.queue, target=target)


def listed(names: Sequence[str], count: int) -> str:
    """Return these names as text, with the number of those left out of ``count``."""
    more = count - len(names)
    return f"{', '.join(names)}{f' and {more} more' if more > 0 else ''}"


def counted(number: int, what: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number} {what}{'s' * (number != 1)}"
