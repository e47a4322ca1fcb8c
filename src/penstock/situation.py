"""The state of a queue that explains why its jobs do not run; ``penstock.why`` puts it into words."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from penstock.core.annex import EMPTY_ANNEX
from penstock.core.command import COMMAND_TASK
from penstock.core.duration import describe
from penstock.core.lifecycle import EventType, State
from penstock.core.limits import GroupState, Limit, LimitsOfQueue
from penstock.errors import StorageError

if TYPE_CHECKING:
    from penstock.core.flow import DependencyRecord
    from penstock.core.job import Job
    from penstock.storage.base import Storage
    from penstock.storage.values import Budget, WorkerRecord

__all__ = [
    "NAMED",
    "SEEN_LATELY_MS",
    "Situation",
    "at_second",
    "command_line",
    "counted",
    "group_of",
    "in_units",
    "instant",
    "listed",
    "pause_began_ms",
    "read_situation",
    "start_command",
]

NAMED: Final = 3
"""The number of jobs that an answer names."""
SEEN_LATELY_MS: Final = 60_000
"""A worker that has not renewed its record for this long does not count as live."""
_MOST_ACTIVE: Final = 100
_MOST_GROUPS: Final = 100
_EVENTS_READ: Final = 1000
_AFTER_ALL: Final = 2**52


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """A queue as it was when it was read. ``groups`` has the queue itself under ``""``.

    ``live`` has the info of each live worker, with its ``id``. ``active`` are the first of the active jobs.
    ``paused_at_ms`` is when the pause that holds back the job began (0: unknown). ``children`` are what the job that
    was asked for waits for; ``None`` if only the queue was read.
    """

    queue: str
    now_ms: int
    groups: Mapping[str, GroupState]
    limits: LimitsOfQueue
    budgets: Sequence[Budget]
    workers: Sequence[WorkerRecord]
    live: Sequence[Mapping[str, Any]]
    active: Sequence[Job]
    paused_at_ms: int = 0
    children: Sequence[DependencyRecord] | None = None

    @property
    def gate(self) -> GroupState:
        """The queue's own pause and limits."""
        return self.groups[""]

    def limit_command(self, bound: Literal["concurrency", "rate", "bucket"], group: str = "") -> str:
        """Return the command that raises a limit; N stands for a larger number."""
        value = {"concurrency": "N", "rate": "N/s", "bucket": "N:N/s"}[bound]
        of_group = ("--group", group) if group else ()
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


async def pause_began_ms(storage: Storage, queue: str, group: str) -> int:
    """Return when a pause without an end began, if the newest events of the queue tell; 0 otherwise."""
    last = (await storage.read_events(queue, after=_AFTER_ALL, limit=1)).last
    page = await storage.read_events(queue, after=max(0, last - _EVENTS_READ), limit=_EVENTS_READ)
    began = (
        event.at_ms
        for event in reversed(page.events)
        if event.type == EventType.PAUSED and event.group == group and not event.data
    )
    return next(began, 0)


def group_of(job: Job) -> str:
    """Return the key of the job's group; empty if it has none."""
    return (job.annex or EMPTY_ANNEX).group


def instant(ms: int) -> datetime:
    """Return an instant of the store for programs."""
    return datetime.fromtimestamp(ms / 1000, UTC)


def at_second(ms: int) -> str:
    """Return an instant in local time, to the second."""
    return datetime.fromtimestamp(ms / 1000).strftime("%Y-%m-%d %H:%M:%S")


def in_units(ms: int) -> str:
    """Return a duration, to the second if it is at least one."""
    return describe(ms if ms < 1000 else ms // 1000 * 1000)


def command_line(*words: str) -> str:
    """Return a command to run, as it is typed into a shell."""
    return f"`penstock {shlex.join(words)}`"


def start_command(job: Job) -> str:
    """Return the command that starts a worker which can run this job."""
    what = "--commands" if job.options.task == COMMAND_TASK else "MODULE:APP"
    return command_line("worker", what, "-q", job.queue)


def listed(names: Sequence[str], count: int) -> str:
    """Return these names, and how many of ``count`` they leave out."""
    more = count - len(names)
    return f"{', '.join(names)}{f' and {more} more' if more > 0 else ''}"


def counted(number: int, what: str) -> str:
    """Return a number with its noun."""
    return f"{number} {what}{'s' * (number != 1)}"
