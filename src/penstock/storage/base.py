"""The storage contract: what an engine promises to the rest of Penstock.

Every verb is atomic and appends its events to the queue's log in the same step. Hot verbs take and give
lists, and act as if their items came one after the other. Arguments have been validated by the caller
(``core.names``, sizes, options); an engine checks only what it alone can know. ``tests/contract`` is how an
engine knows that it is right.

Time is the store's: ``now`` is the store's clock, never going back within a queue.

Lost replies: ``enqueue``, ``claim`` and ``settle`` take a ``Ticket``. A call repeated with the same ticket
gets the first answer again and changes nothing, as long as it is the last call of its lane and no older than
a minute. Engines that talk over a network issue tickets of their own when they repeat a call themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from penstock.core.event import Event
from penstock.core.job import Enqueued, Job, Lease, NewJob
from penstock.core.lifecycle import State
from penstock.core.outcome import Failure, Outcome

__all__ = [
    "Bulk",
    "CancelAnswer",
    "Change",
    "ChangeAnswer",
    "Checked",
    "Claimed",
    "Consumer",
    "Counts",
    "EventPage",
    "Extended",
    "Finished",
    "Gap",
    "Held",
    "JobPage",
    "PromoteAnswer",
    "QueueSettings",
    "RemoveAnswer",
    "Report",
    "RetryAnswer",
    "Settled",
    "SettledBatch",
    "Settlement",
    "Storage",
    "Swept",
    "Take",
    "Ticket",
    "WorkerRecord",
]

CancelAnswer = Literal["cancelled", "requested", "completed", "failed", "already_cancelled", "not_found"]
RetryAnswer = Literal["retried", "not_failed", "not_found"]
PromoteAnswer = Literal["promoted", "not_scheduled", "not_found"]
ChangeAnswer = Literal["changed", "wrong_state", "not_found"]
RemoveAnswer = Literal["removed", "active", "not_found"]
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

    ``paused`` is why there may be nothing although jobs wait.
    """

    leases: list[Lease]
    wait_ms: int | None = None
    paused: bool = False


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


class Report(msgspec.Struct, frozen=True):
    """What a running job says of itself. ``progress`` is JSON; ``log`` lines are appended; ``payload`` replaces
    the stored one (the next run sees it)."""

    id: str
    token: int
    progress: bytes | None = None
    log: tuple[str, ...] = ()
    payload: bytes | None = None


class Change(msgspec.Struct, frozen=True):
    """What to change of a job; ``None`` leaves a field as it is. ``delay_ms`` counts from now."""

    payload: bytes | None = None
    priority: int | None = None
    delay_ms: int | None = None
    result_ttl_ms: int | None = None


class Swept(msgspec.Struct, frozen=True):
    """What one sweep did. ``more``: it stopped at its bound. ``wait_ms``: when time brings the next thing."""

    promoted: int = 0
    rescued: int = 0
    expired: int = 0
    pruned: int = 0
    trimmed: int = 0
    more: bool = False
    wait_ms: int | None = None


class Finished(msgspec.Struct, frozen=True):
    """News of a job's end for a listener. ``expired`` tells a failure by ttl from others."""

    id: str
    incarnation: int
    state: State
    result: bytes | None = None
    failure: Failure | None = None


class Counts(msgspec.Struct, frozen=True):
    """How many jobs there are by state. ``oldest_waiting_ms``: how long the next in line has been ready."""

    scheduled: int = 0
    waiting: int = 0
    blocked: int = 0
    active: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    paused: bool = False
    oldest_waiting_ms: int = 0

    @property
    def open(self) -> int:
        """Jobs that have not ended; 0 means drained."""
        return self.scheduled + self.waiting + self.blocked + self.active


class JobPage(msgspec.Struct, frozen=True):
    """Some jobs, and the cursor for the next page (empty: that was all)."""

    jobs: list[Job]
    cursor: str = ""


class WorkerRecord(msgspec.Struct, frozen=True):
    """A worker as it last described itself. ``info`` is JSON of its own making."""

    id: str
    info: bytes
    seen_at_ms: int
    age_ms: int


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
    kept; named consumers hold it back up to ``events_hard_cap`` entries.
    """

    keep_completed: int | None = None
    keep_failed: int | None = None
    events_count: int | None = 1_000_000
    events_age_ms: int | None = None
    events_bytes: int | None = None
    events_hard_cap: int = 10_000_000


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


class Storage(Protocol):
    """One store, one namespace. Made by ``penstock.storage.open_storage(url)``.

    A storage belongs to the event loop it was opened in. Raises ``StorageError`` and its subclasses.
    """

    url: str
    """For display: without secrets."""
    capabilities: frozenset[str]
    """What this engine can do beyond the verbs: ``shared`` (several machines), ``processes`` (several processes)."""

    async def open(self) -> None:
        """Connect; create or migrate what is needed. Refuses data of a newer format with ``StorageVersion``."""
        ...

    async def close(self) -> None:
        """Let go of everything. Pending waits end."""
        ...

    # The way of a job

    async def enqueue(
        self, queue: str, jobs: Sequence[NewJob], *, ticket: Ticket | None = None
    ) -> list[Enqueued]:
        """Put jobs in; each gets an answer of its own, in order. All are written, or none."""
        ...

    async def claim(
        self, queue: str, take: Take, *, wait_ms: int = 0, ticket: Ticket | None = None
    ) -> Claimed:
        """Promote what is due, then lease the first jobs in line. Jobs past their ttl end as expired instead.

        With ``wait_ms``, first ``wait`` for that long. If such a call is cancelled or fails midway, jobs may have
        been leased all the same: ``leases_of`` names them.
        """
        ...

    async def settle(
        self,
        queue: str,
        settlements: Sequence[Settlement],
        *,
        take: Take | None = None,
        ticket: Ticket | None = None,
    ) -> SettledBatch:
        """Apply outcomes of leased jobs, then claim the next ones in the same step.

        Only the holder of the current token is heard. A settle repeated with a token that was settled gets
        the first answer again for as long as the job's record shows it.
        """
        ...

    async def extend(
        self,
        queue: str,
        held: Sequence[Held],
        *,
        worker: str,
        lease_ms: int,
        info: bytes | None = None,
    ) -> list[Extended]:
        """Heartbeat: push the deadlines of held leases; say of each whether to go on.

        ``cancel``: extended, but to be stopped. ``expired``: extended, but past its ttl. ``lost``: not ours.
        ``info`` renews the worker's record; it is forgotten when it has not been renewed for an hour.
        """
        ...

    async def sweep(self, queue: str, *, limit: int = 1000) -> Swept:
        """Do what time brings, at most about ``limit`` things of each kind: promote due jobs, rescue jobs of
        expired leases, expire, prune finished jobs, trim the log, forget old consumers and workers."""
        ...

    async def report(self, queue: str, reports: Sequence[Report]) -> list[bool]:
        """Progress, log lines and payload of running jobs; false where the lease was lost."""
        ...

    async def leases_of(self, queue: str, worker: str) -> list[Held]:
        """The leases the store believes this worker holds: what it asks after it lost its connection."""
        ...

    async def depart(self, queue: str, worker: str) -> None:
        """Forget the worker's record. Its leases are not touched."""
        ...

    # Waiting

    async def wait(self, queue: str, *, timeout_ms: int) -> bool:
        """Sleep until there may be something to claim (true) or the time is over (false). May wake for nothing."""
        ...

    async def listen(self, queue: str, listener: str, *, timeout_ms: int) -> list[Finished]:
        """The next news for ``listener``: ends of jobs enqueued with ``notify`` or watched. Empty: time is over.

        News wait for the listener for a minute; after that, or after a reconnect, ``watch`` again.
        """
        ...

    async def watch(self, queue: str, ids: Sequence[str], *, listener: str) -> list[Finished | None]:
        """Be told of these jobs' ends. The answer has those that have ended already; ``None``: still open, told
        later. An unknown id raises ``JobNotFound``, and nothing is watched."""
        ...

    # Operating on jobs

    async def cancel(self, queue: str, ids: Sequence[str]) -> list[CancelAnswer]:
        """Pending jobs end now; active ones are asked to stop (``requested``), and stay asked through rescue and
        retry."""
        ...

    async def retry(self, queue: str, ids: Sequence[str]) -> list[RetryAnswer]:
        """Failed and cancelled jobs wait again, with counts and ttl from zero and the same incarnation."""
        ...

    async def retry_all(self, queue: str, *, limit: int = 1000, cursor: str = "") -> Bulk:
        """Retry up to ``limit`` failed jobs. Those that fail again meanwhile are not retried twice."""
        ...

    async def promote(self, queue: str, ids: Sequence[str]) -> list[PromoteAnswer]:
        """Scheduled jobs wait from now on."""
        ...

    async def change(self, queue: str, id: str, change: Change) -> ChangeAnswer:
        """Change one job. ``result_ttl_ms`` works in every state and moves a completed job's expiry; payload and
        priority on open jobs; ``delay_ms`` on waiting and scheduled ones. All of it, or nothing."""
        ...

    async def remove(self, queue: str, ids: Sequence[str]) -> list[RemoveAnswer]:
        """Delete records. Active jobs are left alone."""
        ...

    # Operating on queues

    async def pause(self, queue: str) -> None:
        """Claims get nothing from now on, everywhere."""
        ...

    async def resume(self, queue: str) -> None: ...

    async def drain(
        self, queue: str, *, scheduled: bool = False, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        """Remove up to ``limit`` waiting (and scheduled) jobs."""
        ...

    async def clean(
        self, queue: str, state: State, *, older_than_ms: int = 0, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        """Remove up to ``limit`` jobs of a terminal state that ended at least so long ago."""
        ...

    async def obliterate(self, queue: str, *, force: bool = False) -> int:
        """Remove all jobs of the queue. Refused with ``StorageError`` while some are active, unless forced.

        Counters, log, epoch, pause flag and settings stay: tokens and sequence numbers never come back.
        """
        ...

    async def configure(self, queue: str, settings: QueueSettings) -> None: ...

    async def settings(self, queue: str) -> QueueSettings: ...

    async def check(self, queue: str, *, repair: bool = False) -> Checked:
        """Compare every record with every index: records no index points to, index entries without a record."""
        ...

    # Reading

    async def get(self, queue: str, ids: Sequence[str]) -> list[Job | None]: ...

    async def list_jobs(
        self, queue: str, state: State, *, cursor: str = "", limit: int = 100, reverse: bool = False
    ) -> JobPage:
        """Jobs of a state, in the order they will run, come due, or expire from the store."""
        ...

    async def counts(self, queue: str) -> Counts: ...

    async def queues(self) -> list[str]:
        """Every queue that was ever enqueued to, sorted."""
        ...

    async def workers(self, queue: str) -> list[WorkerRecord]: ...

    async def logs(self, queue: str, id: str, *, start: int = 0, limit: int = 1000) -> list[str]: ...

    # The event log

    async def read_events(self, queue: str, *, after: int, limit: int = 10_000) -> EventPage:
        """Events with a sequence number above ``after``, in order. About ``limit``: entries are not split."""
        ...

    async def tail(self, queue: str, *, after: int, timeout_ms: int) -> EventPage:
        """The same, but waits for the first one."""
        ...

    async def hold_events(self, queue: str, consumer: str, *, offset: int, ttl_ms: int) -> None:
        """Keep events after ``offset`` for this consumer; renews its expiry. Never moves an offset back."""
        ...

    async def release_events(self, queue: str, consumer: str) -> None: ...

    async def consumers(self, queue: str) -> list[Consumer]: ...

    # For tests

    async def shift_clock(self, queue: str, ms: int) -> None:
        """Move this queue's clock forward: what tests do instead of sleeping."""
        ...
