"""The state of a queue that explains why its jobs do not run; ``why`` puts it into words."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
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


NAMED: Final = 3
"""The number of jobs that an answer names."""
SEEN_LATELY_MS: Final = 60_000
"""A worker that has not renewed its record for this long does not count as live."""
_MOST_ACTIVE: Final = 100
_MOST_GROUPS: Final = 100
_EVENTS_READ: Final = 1000
_AFTER_ALL: Final = 2**52
_SAME_INSTANT_MS: Final = 2_000


class Pause(NamedTuple):
    """The start of a pause. ``job`` is the job whose handler asked for it, as ``queue/id``; empty if a person did."""

    at_ms: int
    job: str = ""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """A queue as it was when it was read. ``groups`` has the queue itself under ``""``.

    ``live`` has the info of each live worker, with its ``id``. ``active`` are the first of the active jobs.
    ``pause`` is the pause that holds back the job; ``None`` if it was not looked for, or not found. ``children`` are
    what the job that was asked for waits for; ``None`` if only the queue was read.
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
        """Return how many jobs the live workers can run at a time, and how many they run now.

        What workers say is as old as their last heartbeat; the number of active jobs in the queue is exact.
        """
        slots = sum(worker.get("concurrency", 0) for worker in self.live)
        running = max(sum(worker.get("active", 0) for worker in self.live), self.gate.active)
        return slots, min(running, slots) if slots else running

    @property
    def workload(self) -> str:
        """Return how many jobs the live workers run, of how many they can."""
        slots, running = self.slots
        many = len(self.live) != 1
        jobs = f"{running} of {counted(slots, 'job')}" if slots else counted(running, "job")
        return f"{counted(len(self.live), 'worker')} run{'s' * (not many)} {jobs}"

    def started_ms(self, worker: Mapping[str, Any]) -> int:
        """Return when a live worker started, by the queue's clock: that of its machine may be wrong."""
        age_ms = next(record.age_ms for record in self.workers if record.id == worker["id"])
        return self.now_ms - age_ms - int(worker.get("up_ms", self.now_ms))

    def limit_command(self, bound: Literal["concurrency", "rate", "bucket"], group: str = "") -> str:
        """Return the command that doubles the limit which holds for the queue, or for a group of it."""
        key = group if group in self.limits else EVERY_GROUP if group else ""
        limit = self.limits.get(key, Limit())
        value = {"concurrency": _doubled_count, "rate": _doubled_rate, "bucket": _doubled_bucket}[bound](
            limit
        )
        of_group = ("--group", key) if key else ()
        return command_line("limit", "set", "-q", self.queue, *of_group, f"--{bound}", value)

    def after(self, wait_ms: int | None) -> datetime | None:
        """Return the instant in ``wait_ms`` from now."""
        return None if wait_ms is None else instant(self.now_ms + wait_ms)

    def until(self, wait_ms: int | None) -> str:
        """Return what follows the word "until"."""
        return "a running job ends" if wait_ms is None else self.moment(self.now_ms + wait_ms)

    def moment(self, at_ms: int) -> str:
        """Return an instant to come, and in how long that is."""
        return f"{at_second(at_ms)} (in {in_units(at_ms - self.now_ms)})"


async def read_situation(storage: Storage, queue: str, *, groups: Iterable[str] = ()) -> Situation:
    """Read what concerns all jobs of a queue, and of these groups, in one go. The queue must exist."""
    keys = ("", *sorted(set(groups) - {""})[:_MOST_GROUPS])
    clock, states, limits, budgets, workers, active = await asyncio.gather(
        storage.clock(queue),
        _read_groups(storage, queue, keys),
        storage.limits(queue),
        _read_budgets(storage, queue),
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
        live=_live(workers),
        active=active.jobs,
    )


def _live(workers: Iterable[WorkerRecord]) -> list[dict[str, Any]]:
    return [
        {"id": one.id, **(msgspec.json.decode(one.info) if one.info else {})}
        for one in workers
        if not one.dead and one.age_ms < SEEN_LATELY_MS
    ]


async def _read_groups(storage: Storage, queue: str, keys: Sequence[str]) -> list[GroupState]:
    """Return the queue and the groups of ``keys``; of a store that only reads, such as a replica, the queue alone."""
    try:
        return (await storage.groups(queue, keys=keys)).groups
    except StorageError:
        # An engine may drop starts that no longer count as it reads them, which such a store refuses.
        counts, limits = await storage.counts(queue), await storage.limits(queue)
        concurrency = limits.get("", Limit()).concurrency
        is_full = concurrency is not None and counts.active >= concurrency
        why: Literal["paused", "concurrency", ""] = "concurrency" if is_full else ""
        why = "paused" if counts.paused else why
        return [GroupState("", counts.waiting, counts.active, 0, counts.blocked, counts.paused, why)]


async def _read_budgets(storage: Storage, queue: str) -> Sequence[Budget]:
    """Return the budgets; none if the store only reads, because an engine may renew a budget as it reads it."""
    try:
        return await storage.budgets(queue)
    except StorageError:
        return ()


async def read_pause(storage: Storage, situation: Situation, group: str) -> Pause | None:
    """Return the pause of a queue or a group of it, if the newest events of the queue tell; ``None`` otherwise."""
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


def group_of(job: Job) -> str:
    """Return the key of the job's group; empty if it has none."""
    return (job.extras or EMPTY_EXTRAS).group


def instant(ms: int) -> datetime:
    """Return an instant of the store for programs."""
    return datetime.fromtimestamp(ms / 1000, UTC)


def at_second(ms: int) -> str:
    """Return an instant in local time, to the second."""
    return datetime.fromtimestamp(ms / 1000).strftime("%Y-%m-%d %H:%M:%S")


def in_units(ms: int) -> str:
    """Return a duration, to the second if it is at least one."""
    return describe(ms if ms < 1000 else ms // 1000 * 1000)


class CommandContext(NamedTuple):
    """Options that a printed command repeats to reach the same store, and the app if it is known.

    ``names_app``: the app was given as an option, too. ``code_names_store``: the code of the app has the same options.
    """

    options: tuple[str, ...] = ()
    app: str = ""
    names_app: bool = False
    code_names_store: bool = False

    @property
    def all_options(self) -> tuple[str, ...]:
        return (*self.options, "--app", self.app) if self.names_app else self.options


_NO_CONTEXT: Final = CommandContext()
command_context: ContextVar[CommandContext] = ContextVar("penstock_command_context", default=_NO_CONTEXT)
"""The command line sets this, so that the commands in its answers work when they are pasted."""


@contextmanager
def commands_from_code(options: tuple[str, ...]) -> Iterator[None]:
    """Have commands repeat the options that reach the store of an app, unless the command line has said which."""
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
    given = command_context.get().all_options
    return f"`penstock {_typed((*words, *given))}`{_with_url(given)}"


def _typed(words: Iterable[str]) -> str:
    """Return words as they are typed into a shell. A URL with a password is read from the environment instead."""
    return " ".join(
        shlex.quote(word) if without_password(word) == word else '"$PENSTOCK_URL"' for word in words
    )


def _with_url(words: Iterable[str]) -> str:
    """Return what to do before a command whose URL is not shown because of its password."""
    hidden = any(without_password(word) != word for word in words)
    return " (with the URL of the store in PENSTOCK_URL)" if hidden else ""


def worker_command(*queues: str, target: str = "[MODULE:APP]") -> str:
    """Return the command that starts a worker for these queues. A known app takes the place of ``target``."""
    context = command_context.get()
    given = context.all_options
    if context.app and target != "--commands":
        target, given = shlex.quote(context.app), context.options
    elif context.code_names_store and target != "--commands":
        given = ()
    options = [word for queue in queues for word in ("-q", queue)]
    # The target is not quoted: the reader replaces what is in brackets.
    return f"`{' '.join(['penstock worker', target, *filter(None, [_typed((*options, *given))])])}`{_with_url(given)}"


def start_command(job: Job) -> str:
    """Return the command that starts a worker which can run this job; for a job without a task, what else does."""
    if not job.options.task:
        return f'a script that adds `@worker.handler("{job.queue}")`: the job has no task, so no command can run it'
    return worker_command(
        job.queue, target="--commands" if job.options.task == COMMAND_TASK else "MODULE:APP"
    )


def listed(names: Sequence[str], count: int) -> str:
    """Return these names, and how many of ``count`` they leave out."""
    more = count - len(names)
    return f"{', '.join(names)}{f' and {more} more' if more > 0 else ''}"


def counted(number: int, what: str) -> str:
    """Return a number with its noun."""
    return f"{number} {what}{'s' * (number != 1)}"
