"""The storage contract: what an engine promises to the rest of Penstock.

Every verb is atomic and appends its events to the queue's log in the same step. Hot verbs take and give
lists, and act as if their items came one after the other. Arguments have been validated by the caller
(``core.names``, sizes, options); an engine checks only what it alone can know. ``tests/contract`` is how an
engine knows that it is right. What the verbs take and give is in ``storage.values``.

Time is the store's: ``now`` is the store's clock, never going back within a queue.

Lost replies: ``enqueue``, ``claim`` and ``settle`` take a ``Ticket``. A call repeated with the same ticket
gets the first answer again and changes nothing, as long as it is the last call of its lane and no older than
a minute. Engines that talk over a network issue tickets of their own when they repeat a call themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.core.flow import DependencyRecord, Node
from penstock.core.job import DAY_MS, Dependency, Enqueued, Job, NewJob
from penstock.core.lifecycle import State
from penstock.core.limits import Limit, LimitsOfQueue
from penstock.storage.minutes import Minute
from penstock.storage.search import Found, Query
from penstock.storage.values import (
    AttachAnswer,
    Budget,
    Bulk,
    CancelAnswer,
    Change,
    ChangeAnswer,
    Checked,
    Claimed,
    Consumer,
    Counts,
    EntryPage,
    EventPage,
    Extended,
    Finished,
    Fired,
    GroupPage,
    Held,
    HoldAnswer,
    JobPage,
    NewScheduler,
    PromoteAnswer,
    QueueSettings,
    ReleaseAnswer,
    RemoveAnswer,
    Report,
    RetryAnswer,
    SchedulerAnswer,
    Schedulers,
    SettledBatch,
    Settlement,
    SignalAnswer,
    Swept,
    Take,
    Ticket,
    Usage,
    WorkerRecord,
)

__all__ = ["Storage"]


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
        """Put jobs in; each gets an answer of its own, in order. All are written, or none.

        Raises ``CostTooHigh`` if one costs more than the bucket of its group can hold.
        """
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
        """Do what time brings, at most about ``limit`` things of each kind: promote due jobs, end suspensions that
        timed out, rescue jobs of expired leases, expire, prune finished jobs, trim the log, forget old consumers and
        workers. Names the schedulers that are due: the caller fires them. Then deliver what this queue has to say to
        others, and they to that, to the end; raises if a queue cannot be reached."""
        ...

    async def report(self, queue: str, reports: Sequence[Report]) -> list[bool]:
        """Progress, log lines, payload and usage of running jobs; false where the lease was lost."""
        ...

    async def usage(self, queue: str) -> list[Usage]:
        """What was used, by queue, task, group and flow, in that order, then by key and name. Sums that nothing was
        added to for 30 days are forgotten."""
        ...

    async def reset_usage(self, queue: str) -> None:
        """Begin all sums from zero, and with them what counts against budgets. Jobs keep what they themselves used."""
        ...

    async def set_budget(self, queue: str, budget: Budget) -> None:
        """Set what may be used of ``budget.name``. What was used before counts, unless there is a period: that
        begins now."""
        ...

    async def remove_budget(self, queue: str, name: str, *, flow: str = "") -> bool:
        """Whether there was one."""
        ...

    async def budgets(self, queue: str) -> list[Budget]:
        """The queue's first, then by flow and name."""
        ...

    async def leases_of(self, queue: str, worker: str) -> list[Held]:
        """The leases the store believes this worker holds: what it asks after it lost its connection."""
        ...

    async def depart(self, queue: str, worker: str) -> None:
        """Forget the worker's record. Its leases are not touched."""
        ...

    # Flows

    async def enqueue_flows(
        self, queue: str, flows: Sequence[Sequence[Node]], *, ticket: Ticket | None = None
    ) -> list[Enqueued]:
        """Put whole flows in; each gets the answer of its root. All are written, or none.

        A flow is a list of nodes that ``core.flow.woven`` has tied: dependents before dependencies, the root,
        a job of this queue, first. If the root was not queued afresh, nothing else of its flow is put in. Jobs of
        other queues are there once they are delivered (``sweep``). Raises ``JobNotFound`` for a job that one of
        this queue is to wait for and that is neither here nor in the flow.
        """
        ...

    async def attach(
        self, queue: str, id: str, after: Sequence[Dependency], *, nodes: Sequence[Node] = (), flow: str
    ) -> AttachAnswer:
        """Have an open job wait for further ones: jobs that are there, and ``nodes`` that are put in with this
        call, not tied yet, in the order of a flow. ``flow`` is used if the job is in none. Raises as
        ``enqueue_flows``."""
        ...

    async def dependencies(
        self, queue: str, id: str, *, start: int = 0, limit: int = 1000
    ) -> list[DependencyRecord]:
        """What a job knows of those it waits for, in the order they were given, without the first ``start``."""
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

    async def dedup_of(self, queue: str, key: str) -> str | None:
        """The id of the job that stands for a dedup key; ``None``: a job under it would go in."""
        ...

    async def clear_dedup(self, queue: str, key: str) -> bool:
        """Forget the record of a dedup key; its job is left alone. False if there was none."""
        ...

    async def change(self, queue: str, id: str, change: Change) -> ChangeAnswer:
        """Change one job. ``result_ttl_ms`` and ``failure_ttl_ms`` work in every state and move a finished
        job's expiry; payload and priority on open jobs; ``delay_ms`` on waiting and scheduled ones. All of
        it, or nothing."""
        ...

    async def remove(self, queue: str, ids: Sequence[str]) -> list[RemoveAnswer]:
        """Delete records. Active jobs are left alone."""
        ...

    async def signal(self, queue: str, id: str, name: str, data: bytes) -> SignalAnswer:
        """Resume the job if it is suspended until that signal (``resumed``); keep it for later if it is open
        otherwise (``kept``), unless 100 are kept already (``full``)."""
        ...

    # Holding finished jobs

    async def hold(self, queue: str, consumer: str, ids: Sequence[str], *, ttl_ms: int) -> list[HoldAnswer]:
        """Keep these jobs for a consumer, once they have ended, until it releases them, or for ``ttl_ms`` after
        their end (from now, if they have ended). Neither age nor count nor ``clean`` takes them meanwhile."""
        ...

    async def release(self, queue: str, consumer: str, ids: Sequence[str]) -> list[ReleaseAnswer]:
        """Take back the holds: ordinary retention applies."""
        ...

    async def held(self, queue: str, consumer: str, *, cursor: str = "", limit: int = 100) -> JobPage:
        """Finished jobs that are held for a consumer, in the order they ended."""
        ...

    # Operating on queues

    async def pause(self, queue: str, *, group: str = "") -> None:
        """Claims get nothing from now on, everywhere; with ``group``, nothing of that group."""
        ...

    async def resume(self, queue: str, *, group: str = "") -> None: ...

    async def limit(self, queue: str, group: str, limit: Limit | None) -> None:
        """Set the limit of the queue itself (group ``""``), of every group without its own (``"*"``), or of one group;
        ``None`` removes it. Holds from the next claim on."""
        ...

    async def limits(self, queue: str) -> LimitsOfQueue:
        """The limits that were set."""
        ...

    async def groups(self, queue: str, *, cursor: str = "", limit: int = 100) -> GroupPage:
        """The groups that have members, are paused, or have starts that still count, by key."""
        ...

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

    # Schedulers

    async def put_scheduler(self, queue: str, scheduler: NewScheduler) -> SchedulerAnswer:
        """Create the scheduler, or change the one of that name. With the same spec nothing changes."""
        ...

    async def schedulers(self, queue: str, names: Sequence[str] | None = None) -> Schedulers:
        """The schedulers of these names, as far as they are known, or all."""
        ...

    async def pause_scheduler(self, queue: str, name: str) -> bool:
        """No slot is due from now on. False if there is none of that name."""
        ...

    async def resume_scheduler(self, queue: str, name: str, *, next_ms: int | None = None) -> bool:
        """The end of a pause. A slot that passed meanwhile gives way to ``next_ms``."""
        ...

    async def remove_scheduler(self, queue: str, name: str) -> bool:
        """Forget the scheduler; its jobs stay."""
        ...

    async def fire(self, queue: str, name: str, *, slot_ms: int, next_ms: int, job: NewJob) -> Fired:
        """Put in the job of a slot and move on to the next, if that slot is still the scheduler's next."""
        ...

    # Reading

    async def get(self, queue: str, ids: Sequence[str]) -> list[Job | None]: ...

    async def list_jobs(
        self, queue: str, state: State, *, cursor: str = "", limit: int = 100, reverse: bool = False
    ) -> JobPage:
        """Jobs of a state, in the order they will run, come due, or expire from the store."""
        ...

    async def scan_jobs(
        self, queue: str, *, states: frozenset[State] | None = None, part: int = 0, parts: int = 1,
        cursor: str = "", limit: int = 1000, light: bool = False,
    ) -> JobPage:  # fmt: skip
        """Every job of one of ``parts``, by its identity: no job is missed because it changes its state meanwhile.
        An id is always of the same part, and may come more than once. About ``limit``; a page may be empty and not be
        the last. ``light``: without payload and result."""
        ...

    async def counts(self, queue: str) -> Counts: ...

    async def search(
        self, queue: str, query: Query, *, cursor: str = "", limit: int = 100, scan: int = 10_000
    ) -> Found:
        """Up to ``limit`` jobs that match, among the next ``scan`` of their state or error class."""
        ...

    async def errors(self, queue: str) -> dict[str, int]:
        """How many failed jobs there are by error class."""
        ...

    async def metrics(self, queue: str, *, last_ms: int = DAY_MS) -> list[Minute]:
        """What happened in each minute of the last ``last_ms``, at most 24 hours; minutes in which nothing happened
        are left out."""
        ...

    async def queues(self) -> list[str]:
        """Every queue that was ever enqueued to, sorted."""
        ...

    async def workers(self, queue: str) -> list[WorkerRecord]: ...

    async def logs(self, queue: str, id: str, *, start: int = 0, limit: int = 1000) -> list[str]: ...

    # The event log

    async def read_events(self, queue: str, *, after: int, limit: int = 10_000) -> EventPage:
        """Events with a sequence number above ``after``, in order. About ``limit``: entries are not split."""
        ...

    async def read_entries(self, queue: str, *, after: int, limit: int = 10_000) -> EntryPage:
        """The same as they are stored, for readers of columns (``core.eventcolumns``)."""
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
