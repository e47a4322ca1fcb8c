"""What the verbs of the storage contract take and give: plain values, the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from penstock.core.event import Event
from penstock.core.job import Enqueued, Job, Lease
from penstock.core.lifecycle import State
from penstock.core.limits import GroupState
from penstock.core.outcome import Failure, Outcome

CancelAnswer = Literal[
    "cancelled",
    "requested",
    "completed",
    "failed",
    "already_cancelled",
    "not_found",
    "rerun_cancelled",
    "no_rerun",
]
RetryAnswer = Literal["retried", "not_failed", "not_found"]
PromoteAnswer = Literal["promoted", "not_scheduled", "not_found"]
ChangeAnswer = Literal["changed", "wrong_state", "not_found"]
AttachAnswer = Literal["attached", "ended", "not_found"]
RemoveAnswer = Literal["removed", "active", "not_found"]
UnchangedAnswer = Literal["removed", "changed", "held", "not_found"]
SchedulerAnswer = Literal["created", "updated", "unchanged"]
SignalAnswer = Literal["resumed", "kept", "full", "ended", "not_found"]
HoldAnswer = Literal["held", "not_found"]
ReleaseAnswer = Literal["released", "not_held", "not_found"]
Extended = Literal["extended", "cancel", "expired", "lost"]


class Ticket(NamedTuple):
    """Names a call, so that its repetition is known as such. A lane has one call under way at a time."""

    lane: str
    number: int


class Take(msgspec.Struct, frozen=True):
    """Ask for up to ``count`` ready jobs, leased to ``worker`` for ``lease_ms``."""

    worker: str
    count: int
    lease_ms: int


class Claimed(msgspec.Struct, frozen=True):
    """What a claim got. ``wait_ms``: come again after that long (``None``: nothing is due at any known time).

    ``paused``, ``over_budget`` and ``limited`` (by a limit of the queue) are why there may be less than was asked for
    although jobs wait.
    """

    leases: list[Lease]
    wait_ms: int | None = None
    paused: bool = False
    over_budget: bool = False
    limited: bool = False


class Settlement(msgspec.Struct, frozen=True):
    """One outcome, with the token that entitles to it."""

    id: str
    token: int
    outcome: Outcome


class Settled(msgspec.Struct, frozen=True):
    """``applied`` is false if the lease was lost: nothing changed. ``state`` is the job's afterwards
    (``None``: it has no record any more)."""

    applied: bool
    state: State | None


class SettledBatch(msgspec.Struct, frozen=True):
    """The answers in the order of the settlements, and the next jobs if any were asked for."""

    answers: list[Settled]
    claimed: Claimed | None = None


class Held(NamedTuple):
    """A lease as its holder names it."""

    id: str
    token: int


class Unchanged(NamedTuple):
    """A finished job as somebody has read it."""

    id: str
    incarnation: int
    finished_at_ms: int


class Report(msgspec.Struct, frozen=True):
    """What a running job says of itself. ``progress`` is JSON; ``log`` lines are appended; ``payload`` replaces
    the stored one (the next run sees it); ``usage`` is added to what was used, in millionths (``core.usage``).
    ``log_skipped`` lines came before those of ``log`` and were not reported: they count as written, not as kept."""

    id: str
    token: int
    progress: bytes | None = None
    log: tuple[str, ...] = ()
    payload: bytes | None = None
    usage: Mapping[str, int] | None = None
    log_skipped: int = 0


class LogPage(msgspec.Struct, frozen=True):
    """Consecutive lines of a job's log. ``start`` is the number of the first of them, counted from 0; ``written`` is
    the number of lines that the job ever wrote, including those that are no longer kept."""

    lines: list[str] = []
    start: int = 0
    written: int = 0


class Usage(msgspec.Struct, frozen=True):
    """What the jobs of a queue, task, group or flow have used of ``name``, in millionths."""

    kind: Literal["queue", "task", "group", "flow"]
    key: str
    name: str
    micros: int


class Budget(msgspec.Struct, frozen=True):
    """At most ``micros`` of ``name`` are to be used, by a queue (``flow`` empty) or a flow, in all or in every
    ``per_ms``. ``spent`` is what counts against it now, and ``until_ms`` (0: never) when that begins from zero."""

    name: str
    micros: int
    per_ms: int = 0
    flow: str = ""
    spent: int = 0
    until_ms: int = 0


class Change(msgspec.Struct, frozen=True):
    """What to change of a job; ``None`` leaves a field as it is. ``delay_ms`` counts from now."""

    payload: bytes | None = None
    priority: int | None = None
    delay_ms: int | None = None
    result_ttl_ms: int | None = None
    failure_ttl_ms: int | None = None


class DueScheduler(msgspec.Struct, frozen=True):
    """A scheduler whose slot has come, for the caller to fire. ``now_ms`` is the store's wall clock; a slot
    after it is to be computed again."""

    name: str
    slot_ms: int
    now_ms: int
    spec: bytes


class Swept(msgspec.Struct, frozen=True):
    """What one sweep did. ``more``: it stopped at its bound. ``wait_ms``: when time brings the next thing.

    ``due``: schedulers to fire now. ``slot_wait_ms``: when the next slot of another comes. ``awaiting``: one has its
    next slot when a job has ended, which nobody knows before. ``delivered``: messages to other queues. ``damaged``:
    records that could not be read and were put aside, so that the sweep could go on.
    """

    promoted: int = 0
    rescued: int = 0
    expired: int = 0
    pruned: int = 0
    trimmed: int = 0
    delivered: int = 0
    more: bool = False
    wait_ms: int | None = None
    unblocked: int = 0
    due: tuple[DueScheduler, ...] = ()
    slot_wait_ms: int | None = None
    awaiting: bool = False
    damaged: int = 0


class Finished(msgspec.Struct, frozen=True):
    """News of a job's end for a listener. ``expired`` tells a failure by ttl from others."""

    id: str
    incarnation: int
    state: State
    result: bytes | None = None
    failure: Failure | None = None


class Counts(msgspec.Struct, frozen=True):
    """How many jobs there are by state; ``staged`` are those of writes that are not whole yet, which count in no other
    figure. ``due``: how many of the scheduled ones a claim would take, because their time has come.
    ``oldest_waiting_ms``: how long the next in line has been ready, or due if that is longer. ``next_ms``: in how long
    time moves the next job, one that is scheduled, whose group has room again, or whose suspension times out; ``None``
    if time moves none."""

    scheduled: int = 0
    waiting: int = 0
    blocked: int = 0
    active: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    paused: bool = False
    oldest_waiting_ms: int = 0
    due: int = 0
    next_ms: int | None = None
    staged: int = 0

    @property
    def open(self) -> int:
        """Jobs that have not ended; 0 means drained."""
        return self.scheduled + self.waiting + self.blocked + self.active


class JobPage(msgspec.Struct, frozen=True):
    """Some jobs, and the cursor for the next page (empty: that was all)."""

    jobs: list[Job]
    cursor: str = ""


class GroupPage(msgspec.Struct, frozen=True):
    """Some groups, and the cursor for the next page (empty: that was all)."""

    groups: list[GroupState]
    cursor: str = ""


class WorkerRecord(msgspec.Struct, frozen=True):
    """A worker as it last described itself. ``info`` is JSON of its own making. ``dead``: its process is known to have
    died (``Storage.lives``); false if it lives, or if nobody can tell."""

    id: str
    info: bytes
    seen_at_ms: int
    age_ms: int
    dead: bool = False


class Gap(NamedTuple):
    """Events ``first`` to ``last`` are no longer kept."""

    first: int
    last: int


class EventPage(msgspec.Struct, frozen=True):
    """Events in order after the asked offset. ``next``: the offset to go on from. ``last``: the newest there is.

    ``gap`` names what was trimmed before it could be read. ``epoch`` changes when the store may have gone
    back in time; offsets of another epoch mean nothing.
    """

    events: list[Event]
    next: int
    last: int
    epoch: str
    gap: Gap | None = None


class Consumer(msgspec.Struct, frozen=True):
    """A named reader of the log: events after ``offset`` are kept for it until ``expires_at_ms``."""

    name: str
    offset: int
    expires_at_ms: int


class QueueSettings(msgspec.Struct, frozen=True):
    """What is kept, and how much. ``None`` means no bound.

    ``keep_completed``/``keep_failed``: at most so many, whatever their ttl. ``events_*``: how much of the log is
    kept; named consumers hold it back up to ``events_hard_cap`` entries. ``dead_letter``: the queue that jobs which
    failed for good are put into as well, for the task ``dead_letter_task`` (empty: for a handler of that queue).
    ``dead_letter_options``: how that task's jobs are treated, see ``core.deadletter``; empty is as by default.
    """

    keep_completed: int | None = None
    keep_failed: int | None = None
    events_count: int | None = 1_000_000
    events_age_ms: int | None = None
    events_bytes: int | None = None
    events_hard_cap: int = 10_000_000
    dead_letter: str | None = None
    dead_letter_task: str = ""
    dead_letter_options: str = ""


class NewScheduler(msgspec.Struct, frozen=True):
    """A scheduler as it is put. Instants are epoch milliseconds of the store; 0 in ``next_ms`` is no slot, in ``limit``
    and ``end_ms`` no bound. ``repeat_ms``: the rest after a completion; ``None`` if it does not go by that.

    ``keep_next``: if there is one of that name, its next slot stays what it is.
    """

    name: str
    spec: bytes
    next_ms: int
    keep_next: bool = False
    limit: int = 0
    end_ms: int = 0
    repeat_ms: int | None = None


class Scheduler(msgspec.Struct, frozen=True):
    """A scheduler as the store has it. ``last_id``: the job of the last slot. ``awaiting``: the next slot is counted
    from that job's end."""

    name: str
    spec: bytes
    next_ms: int
    paused: bool
    fired: int
    limit: int
    end_ms: int
    repeat_ms: int | None
    last_id: str
    awaiting: bool


class Schedulers(msgspec.Struct, frozen=True):
    """All schedulers of a queue, by name, and the store's wall clock, which slots compare with."""

    now_ms: int
    schedulers: list[Scheduler]


class QueueClock(msgspec.Struct, frozen=True):
    """A queue's time, and the wall clock of its store."""

    now_ms: int
    wall_ms: int

    @property
    def ahead_ms(self) -> int:
        """By how much queue time is ahead of the wall clock."""
        return self.now_ms - self.wall_ms


class Fired(msgspec.Struct, frozen=True):
    """Whether the slot was fired by this call, and what became of its job."""

    fired: bool
    enqueued: Enqueued | None = None


class Bulk(msgspec.Struct, frozen=True):
    """How far a bulk verb got. Call it again with ``cursor`` until that is empty.

    A bulk verb touches only jobs that were there at its first call: the cursor carries where it started.
    """

    done: int
    cursor: str = ""


class Checked(msgspec.Struct, frozen=True):
    """What a full check found, by kind, and whether it was mended."""

    records: int
    problems: Mapping[str, int]
    repaired: bool


def with_deaths(workers: list[WorkerRecord], lives: Mapping[str, bool]) -> list[WorkerRecord]:
    """Return the records with ``dead`` as ``Storage.lives`` tells."""
    return [msgspec.structs.replace(one, dead=lives.get(one.id) is False) for one in workers]
