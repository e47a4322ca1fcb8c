"""The arguments and answers of the storage contract: plain values, the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from penstock.core.job import Enqueued, Job, Lease
from penstock.core.lifecycle import State
from penstock.core.limits import GroupState
from penstock.core.outcome import Failure, Outcome
from penstock.errors import StorageDamaged, StorageError

Extended = Literal["extended", "cancel", "expired", "lost"]


class Ticket(NamedTuple):
    """Identifies a call, so that the engine recognises its repetition. A stream has one call under way at a time.

    A call repeated with the same ticket returns the first answer and changes nothing, as long as it is the last call
    of its stream and less than a minute old. Engines that use a network issue their own tickets when they repeat a
    call.
    """

    stream: str
    number: int


class Take(msgspec.Struct, frozen=True):
    """A request for up to ``count`` ready jobs, leased to ``worker`` for ``lease_ms``."""

    worker: str
    count: int
    lease_ms: int


class Claimed(msgspec.Struct, frozen=True):
    """The answer to a claim. Claim again after ``wait_ms`` (``None``: no job has a known time).

    ``paused``, ``over_budget`` and ``limited`` (by a limit of the queue) say why a claim returned fewer jobs than
    requested although jobs wait.
    """

    leases: list[Lease]
    wait_ms: int | None = None
    paused: bool = False
    over_budget: bool = False
    limited: bool = False


class Settlement(msgspec.Struct, frozen=True):
    """One outcome, with the token that proves the lease."""

    id: str
    token: int
    outcome: Outcome


class Settled(msgspec.Struct, frozen=True):
    """The answer to one settlement. ``applied`` is false if the lease was lost: nothing changed.

    ``state`` is the job's state afterwards (``None``: it has no record any more).
    """

    applied: bool
    state: State | None


class SettledBatch(msgspec.Struct, frozen=True):
    """The answers in the order of the settlements, and the next jobs if the call asked for them."""

    answers: list[Settled]
    claimed: Claimed | None = None


class Held(NamedTuple):
    """A lease as its holder names it."""

    id: str
    token: int


class Unchanged(NamedTuple):
    """A finished job as it was read."""

    id: str
    incarnation: int
    finished_at_ms: int


class Report(msgspec.Struct, frozen=True):
    """Data that a running job reports.

    ``progress`` is JSON. ``log`` lines are appended. ``payload`` replaces the stored one for the next run.
    ``usage`` is added to the sums, in millionths (``core.limits``). ``log_skipped`` lines came before those of
    ``log`` and were not reported: they count as written, not as kept.
    """

    id: str
    token: int
    progress: bytes | None = None
    log: tuple[str, ...] = ()
    payload: bytes | None = None
    usage: Mapping[str, int] | None = None
    log_skipped: int = 0


class LogPage(msgspec.Struct, frozen=True):
    """Consecutive lines of a job's log.

    ``start`` is the number of the first line, counted from 0. ``written`` is the number of lines that the job ever
    wrote, including those that are no longer kept.
    """

    lines: list[str] = []
    start: int = 0
    written: int = 0


class Usage(msgspec.Struct, frozen=True):
    """The usage of ``name`` by the jobs of a queue, task, group or flow, in millionths."""

    kind: Literal["queue", "task", "group", "flow"]
    key: str
    name: str
    micros: int


class Budget(msgspec.Struct, frozen=True):
    """An upper bound of ``micros`` on the usage of ``name`` by a queue (``flow`` empty) or a flow: in total, or per
    ``per_ms``.

    ``spent`` is the current usage, which returns to zero at ``until_ms`` (0: never).
    """

    name: str
    micros: int
    per_ms: int = 0
    flow: str = ""
    spent: int = 0
    until_ms: int = 0


class Change(msgspec.Struct, frozen=True):
    """The new values of a job; ``None`` leaves a field as it is. ``delay_ms`` counts from now."""

    payload: bytes | None = None
    priority: int | None = None
    delay_ms: int | None = None
    result_ttl_ms: int | None = None
    failure_ttl_ms: int | None = None


class DueScheduler(msgspec.Struct, frozen=True):
    """A due scheduler for the caller to fire.

    ``now_ms`` is the store's wall clock. The caller computes the next slot after it.
    """

    name: str
    slot_ms: int
    now_ms: int
    spec: bytes


class Swept(msgspec.Struct, frozen=True):
    """The result of one sweep. ``more``: it stopped at its limit. ``wait_ms``: the time until the next job is due.

    ``due``: schedulers to fire now. ``slot_wait_ms``: the time until the next slot. ``awaiting``: a scheduler's
    next slot depends on the end of a job. ``delivered``: messages to other queues. ``damaged``: unreadable records
    that the sweep quarantined.
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
    """News of a job's end for a listener."""

    id: str
    incarnation: int
    state: State
    result: bytes | None = None
    failure: Failure | None = None


class Counts(msgspec.Struct, frozen=True):
    """The number of jobs by state.

    ``staged``: jobs of incomplete writes, which no other figure includes. ``due``: the scheduled jobs that a claim
    would take. ``oldest_waiting_ms``: how long the next job in line has been ready or due, whichever is longer.
    ``next_ms``: the time until the next job is due, its group has room, or its suspension times out; ``None``
    without one.
    """

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
        """Return the number of jobs that have not ended; 0 means drained."""
        return self.scheduled + self.waiting + self.blocked + self.active


class JobPage(msgspec.Struct, frozen=True):
    """Some jobs, and the cursor for the next page (empty: the end)."""

    jobs: list[Job]
    cursor: str = ""


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """The criteria of a search. Times are epoch milliseconds, from (inclusive) and to (exclusive); 0 means unbounded.

    ``error_type`` needs the state ``failed``.
    """

    state: State
    task: str = ""
    error_type: str = ""
    enqueued_from_ms: int = 0
    enqueued_to_ms: int = 0
    finished_from_ms: int = 0
    finished_to_ms: int = 0

    def fits(self, task: str, enqueued_at_ms: int, finished_at_ms: int) -> bool:
        """Return whether a job of the state (and error class) matches."""
        return (
            (not self.task or task == self.task)
            and enqueued_at_ms >= self.enqueued_from_ms
            and not 0 < self.enqueued_to_ms <= enqueued_at_ms
            and finished_at_ms >= self.finished_from_ms
            and not 0 < self.finished_to_ms <= finished_at_ms
        )


class Found(msgspec.Struct, frozen=True):
    """The matching jobs, the number of jobs scanned, the cursor for the next page (empty: the end), and the queue's
    time."""

    jobs: list[Job]
    scanned: int
    cursor: str = ""
    now_ms: int = 0


class GroupPage(msgspec.Struct, frozen=True):
    """Some groups, and the cursor for the next page (empty: the end)."""

    groups: list[GroupState]
    cursor: str = ""


class WorkerRecord(msgspec.Struct, frozen=True):
    """A worker as it last described itself. ``info`` is the worker's own JSON.

    ``dead``: its process is known to have died (``Storage.lives``); false if it lives or if that is unknown.
    """

    id: str
    info: bytes
    seen_at_ms: int
    age_ms: int
    dead: bool = False


class Consumer(msgspec.Struct, frozen=True):
    """A named reader of the log. The store keeps events after ``offset`` for it until ``expires_at_ms``."""

    name: str
    offset: int
    expires_at_ms: int


class QueueSettings(msgspec.Struct, frozen=True):
    """Retention and dead letters. ``None`` means unbounded.

    ``keep_completed`` and ``keep_failed`` bound the number of jobs, whatever their ttl. ``events_*`` bound the log;
    named consumers hold back trimming up to ``events_hard_cap`` entries. ``dead_letter`` is the queue that also
    receives jobs which failed for good, for the task ``dead_letter_task`` (empty: for a handler of that queue).
    ``dead_letter_options`` are the options of those jobs (see ``core.deadletter``; empty: the defaults).
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
    """A scheduler to create or change.

    Times are the store's, in epoch milliseconds. 0 means no slot in ``next_ms``, and unbounded in ``limit`` and
    ``end_ms``. ``repeat_ms`` is the delay after a completion; ``None`` if slots do not depend on it. ``keep_next``:
    an existing scheduler keeps its next slot.
    """

    name: str
    spec: bytes
    next_ms: int
    keep_next: bool = False
    limit: int = 0
    end_ms: int = 0
    repeat_ms: int | None = None


class Scheduler(msgspec.Struct, frozen=True):
    """A scheduler as the store has it.

    ``last_id`` is the job of the last slot. ``awaiting``: the next slot is counted from that job's end.
    """

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
    """All schedulers of a queue, by name, and the store's wall clock, with which slots are compared."""

    now_ms: int
    schedulers: list[Scheduler]


class QueueClock(msgspec.Struct, frozen=True):
    """A queue's time, and the wall clock of its store."""

    now_ms: int
    wall_ms: int

    @property
    def ahead_ms(self) -> int:
        """Return by how much queue time is ahead of the wall clock."""
        return self.now_ms - self.wall_ms


class Fired(msgspec.Struct, frozen=True):
    """Tells whether this call fired the slot, and how the job was enqueued."""

    fired: bool
    enqueued: Enqueued | None = None


class Bulk(msgspec.Struct, frozen=True):
    """The progress of a bulk verb. Call it again with ``cursor`` until that is empty.

    A bulk verb touches only jobs that existed at its first call: the cursor carries where it started.
    """

    done: int
    cursor: str = ""


class Checked(msgspec.Struct, frozen=True):
    """The result of a full check: the number of problems by kind, and whether they were repaired."""

    records: int
    problems: Mapping[str, int]
    repaired: bool


def with_deaths(workers: list[WorkerRecord], lives: Mapping[str, bool]) -> list[WorkerRecord]:
    """Return the records with ``dead`` set from ``Storage.lives``."""
    return [msgspec.structs.replace(worker, dead=lives.get(worker.id) is False) for worker in workers]


def unreadable_step(queue: str, id: str) -> StorageDamaged:
    """Return the error to raise for a job with a step that cannot be read."""
    return StorageDamaged(
        f"queue {queue!r}: a step of job {id!r} cannot be read. Run `penstock doctor --repair`, which puts the job "
        "aside as failed (Damaged)"
    )


def jobs_active(queue: str, *, active: int) -> StorageError:
    """Return the error of an ``obliterate`` that found active jobs. Every engine raises it."""
    return StorageError(
        f"queue {queue!r} was not obliterated: {active} of its jobs {'is' if active == 1 else 'are'} active. "
        "Stop its workers first, or use force=True: their leases are then lost."
    )
