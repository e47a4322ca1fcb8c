"""The storage contract: the promises that an engine makes to the rest of Penstock.

Every verb is atomic and appends its events to the queue's log in the same step. The hot verbs are batched: they take
and return lists, and act as if the items came one after the other. The caller validates arguments (``core.names``,
sizes, options); an engine checks only what it alone can know. ``storage.values`` holds the arguments and answers,
docs/verbs.md describes every verb in full, and ``tests/contract`` checks an engine against both.

The store's clock decides: ``now`` is the time of the queue, and never goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import UNSET, UnsetType

from penstock.core.event import EntryPage, EventPage
from penstock.core.flow import DependencyRecord, Node
from penstock.core.job import DAY_MS, Dependency, Enqueued, Job, NewJob
from penstock.core.lifecycle import (
    AttachAnswer,
    CancelAnswer,
    ChangeAnswer,
    CopyStepsAnswer,
    HoldAnswer,
    PromoteAnswer,
    ReleaseAnswer,
    RemoveAnswer,
    ResetAnswer,
    RetryAnswer,
    SchedulerAnswer,
    SignalAnswer,
    State,
    StepAnswer,
    UnchangedAnswer,
)
from penstock.core.limits import Limit, LimitsOfQueue
from penstock.core.step import NewStep, Step
from penstock.storage.metrics import Minute
from penstock.storage.values import (
    Budget,
    Bulk,
    Change,
    Checked,
    Claimed,
    Consumer,
    Counts,
    Extended,
    Finished,
    Fired,
    Found,
    GroupPage,
    Held,
    JobPage,
    LogPage,
    NewScheduler,
    Query,
    QueueClock,
    QueueSettings,
    Report,
    Schedulers,
    SettledBatch,
    Settlement,
    Swept,
    Take,
    Ticket,
    Unchanged,
    Usage,
    WorkerRecord,
)


class VerbsOnIds(Protocol):
    """The verbs that take nothing but ids, and give one answer for each: ``on_ids`` runs them by name."""

    async def on_ids(self, queue: str, verb: str, ids: Sequence[str], answers: Any) -> list[Any]:
        """Run the engine's rule of this name. ``answers`` is the type of the answers."""

    async def retry(self, queue: str, ids: Sequence[str]) -> list[RetryAnswer]:
        """Queue failed and cancelled jobs again, with counts and ttl from zero and the same incarnation."""
        return await self.on_ids(queue, "retry", ids, RetryAnswer)

    async def promote(self, queue: str, ids: Sequence[str]) -> list[PromoteAnswer]:
        """Make scheduled jobs wait from now on."""
        return await self.on_ids(queue, "promote", ids, PromoteAnswer)

    async def remove(self, queue: str, ids: Sequence[str]) -> list[RemoveAnswer]:
        """Delete records. Active jobs stay."""
        return await self.on_ids(queue, "remove", ids, RemoveAnswer)


class Storage(VerbsOnIds, Protocol):
    """One namespace of one store, made by ``penstock.storage.open_storage(url)``. It belongs to the event loop that
    opened it. Its methods raise ``StorageError`` and subclasses."""

    url: str
    """The URL for display, without secrets."""
    capabilities: frozenset[str]
    """Optional abilities: ``shared`` (several machines), ``processes`` (several processes)."""

    async def open(self) -> None:
        """Connect, and create or migrate the data. Refuse data of a newer format with ``StorageVersion``."""

    async def close(self) -> None:
        """Release all resources and end pending waits."""

    # Running jobs

    async def enqueue(
        self, queue: str, jobs: Sequence[NewJob], *, ticket: Ticket | None = None
    ) -> list[Enqueued]:
        """Add jobs: all of them, or none. Return one answer per job, in order.

        A job carries the run id and write id of the newest dispatch that queued or updated it. Repeating that write is
        a duplicate; repeating an earlier one is not. Raise ``CostTooHigh`` if a job costs more than the bucket of its
        group can hold.
        """

    async def claim(
        self, queue: str, take: Take, *, wait_ms: int = 0, ticket: Ticket | None = None
    ) -> Claimed:
        """Promote due jobs, then lease the first jobs in line. Jobs past their ttl end as expired instead.

        With ``wait_ms``, first ``wait`` for up to that long. If that is cancelled or fails, the call may have leased
        jobs anyway: ``leases_of`` names them.
        """

    async def settle(
        self, queue: str, settlements: Sequence[Settlement], *,
        take: Take | None = None, ticket: Ticket | None = None,
    ) -> SettledBatch:  # fmt: skip
        """Apply the outcomes of leased jobs, then claim the next ones in the same step.

        Only the holder of the current token can settle. Repeating a settle with a settled token returns the first
        answer for as long as the job's record shows it.
        """

    async def extend(
        self, queue: str, held: Sequence[Held], *, worker: str, lease_ms: int, info: bytes | None = None
    ) -> list[Extended]:
        """Renew leases, and return for each whether its run should continue.

        ``cancel``: renewed, but the run should stop. ``expired``: renewed, but past its ttl. ``lost``: not renewed.
        ``info`` renews the worker's record, which the store forgets an hour after the last renewal.
        """

    async def sweep(self, queue: str, *, limit: int = 1000) -> Swept:
        """Run time-based maintenance, about ``limit`` items of each kind at most.

        Promote due jobs, time out suspensions, rescue expired leases, expire and prune jobs, trim the log, forget old
        consumers and workers. Return the due schedulers: the caller fires them. Then deliver all messages between
        this queue and others; raise if a queue cannot be reached.
        """

    async def report(self, queue: str, reports: Sequence[Report]) -> list[bool]:
        """Store progress, log lines, payloads and usage of running jobs. Return false for each lost lease."""

    async def leases_of(self, queue: str, worker: str) -> list[Held]:
        """Return the leases that the worker holds, for a worker that has lost its connection."""

    async def depart(self, queue: str, worker: str) -> None:
        """Forget the worker's record. Its leases stay."""

    async def announce(self, queue: str, worker: str, *, lost: Callable[[], None]) -> None:
        """Let ``lives`` detect the death of this process, if the engine can. Call it with every heartbeat, and
        immediately when the engine calls ``lost``. Never raises."""

    async def lives(self, queue: str) -> dict[str, bool]:
        """Return whether the processes of announced workers live. False is proof of death; unknown ones are absent."""

    # Steps

    async def record_steps(
        self, queue: str, steps: Sequence[NewStep], *, lease_ms: int = 0
    ) -> list[StepAnswer]:
        """Record steps of running jobs, and extend their leases to at least ``lease_ms`` from now (0: as they are).

        The first final record of a step stays: a later one changes nothing (``known``). ``lost``: the lease is lost.
        The caller keeps the limits on the number and size of steps.
        """

    async def steps(self, queue: str, id: str, *, names: Sequence[str] | None = None) -> list[Step]:
        """Return the steps of a job in their order, or those of ``names``, which then have large results too. Raise
        ``StorageDamaged`` if one cannot be read."""

    async def reset_step(self, queue: str, id: str, name: str) -> ResetAnswer:
        """Forget a step of a job that is not active, so that the next run runs it again."""

    async def copy_steps(self, queue: str, id: str, to: str, *, before: str) -> CopyStepsAnswer:
        """Copy the steps that a job recorded before the first one with a name, whatever its key, to another job.

        The other job must not be active. Steps that it has already stay as they are.
        """

    # Flows

    async def enqueue_flows(
        self, queue: str, flows: Sequence[Sequence[Node]], *, ticket: Ticket | None = None
    ) -> list[Enqueued]:
        """Add whole flows: all of them, or none. Return the answer of each root.

        ``core.flow.link_nodes`` prepares a flow: dependents before dependencies, the root, a job of this queue, first.
        If the root is not queued afresh, the rest of its flow is not added. Jobs of other queues arrive when ``sweep``
        delivers them. Raise ``JobNotFound`` for a dependency that is neither in this queue nor in the flow.
        """

    async def attach(
        self, queue: str, id: str, after: Sequence[Dependency], *, nodes: Sequence[Node] = (), flow: str
    ) -> AttachAnswer:
        """Add dependencies to an open job: existing jobs, and new ``nodes`` in the order of a flow, not yet linked.

        ``flow`` applies if the job has none. Raise as ``enqueue_flows``.
        """

    async def dependencies(
        self, queue: str, id: str, *, start: int = 0, limit: int = 1000
    ) -> list[DependencyRecord]:
        """Return the dependencies of a job in their order, without the first ``start``."""

    # Schedulers

    async def put_scheduler(self, queue: str, scheduler: NewScheduler) -> SchedulerAnswer:
        """Create the scheduler, or change the one of that name. An equal spec changes nothing."""

    async def schedulers(self, queue: str, names: Sequence[str] | None = None) -> Schedulers:
        """Return all schedulers, or those of ``names`` that exist."""

    async def pause_scheduler(self, queue: str, name: str) -> bool:
        """Stop firing slots. Return false if the scheduler does not exist."""

    async def resume_scheduler(self, queue: str, name: str, *, next_ms: int | None = None) -> bool:
        """End the pause. ``next_ms`` replaces a slot that has passed since."""

    async def move_slot(self, queue: str, name: str, *, slot_ms: int, next_ms: int) -> bool:
        """Make ``next_ms`` the next slot if it still is ``slot_ms``. Return whether it was."""

    async def remove_scheduler(self, queue: str, name: str) -> bool:
        """Forget the scheduler; its jobs stay."""

    async def fire(self, queue: str, name: str, *, slot_ms: int, next_ms: int, job: NewJob) -> Fired:
        """Enqueue the job of a slot and move on to the next, if the slot is still the scheduler's next."""

    # Operating on jobs (see also ``VerbsOnIds``)

    async def cancel(self, queue: str, ids: Sequence[str], *, rerun_only: bool = False) -> list[CancelAnswer]:
        """End pending jobs, and ask active ones to stop (``requested``); the request outlives rescue and retry.

        ``rerun_only`` drops only the reruns that wait behind active jobs (``rerun_cancelled``, ``no_rerun``).
        """

    async def retry_all(self, queue: str, *, limit: int = 1000, cursor: str = "") -> Bulk:
        """Retry up to ``limit`` failed jobs. A job that fails again is not retried twice."""

    async def dedup_of(self, queue: str, key: str) -> str | None:
        """Return the id of the job that holds a dedup key; ``None`` if the key is free."""

    async def clear_dedup(self, queue: str, key: str) -> bool:
        """Free a dedup key without touching its job. Return false if it was free."""

    async def change(self, queue: str, id: str, change: Change) -> ChangeAnswer:
        """Change one job: all of ``change``, or nothing.

        The ttls can change in every state and move a finished job's expiry; the payload while the job is open; the
        priority unless it is active; ``delay_ms`` while it waits or is scheduled.
        """

    async def remove_unchanged(
        self, queue: str, jobs: Sequence[Unchanged], *, consumer: str = ""
    ) -> list[UnchangedAnswer]:
        """Delete the records of finished jobs that have not changed since they were read.

        A job has not changed if its incarnation and end time are the same. Only ``consumer`` may hold it.
        """

    async def unstage(
        self, queue: str, write_id: str, *, discard: bool = False, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        """Release up to ``limit`` staged jobs of a write into the queue, or with ``discard``, remove them."""

    async def signal(self, queue: str, id: str, name: str, data: bytes) -> SignalAnswer:
        """Resume a job that waits for this signal, or keep the signal for an open job, up to 100 per job (``full``)."""

    async def hold(self, queue: str, consumer: str, ids: Sequence[str], *, ttl_ms: int) -> list[HoldAnswer]:
        """Keep jobs for a consumer, whatever their retention, until it releases them, or ``ttl_ms`` have passed since
        their end (since now, if they have ended)."""

    async def release(self, queue: str, consumer: str, ids: Sequence[str]) -> list[ReleaseAnswer]:
        """End the holds: normal retention applies."""

    # Operating on queues

    async def pause(self, queue: str, *, group: str = "", duration_ms: int = 0) -> None:
        """Stop claims of the queue, or of one ``group``, on all workers; with ``duration_ms``, for that long."""

    async def resume(self, queue: str, *, group: str = "") -> None:
        """End a pause, with or without a duration."""

    async def limit(
        self, queue: str, group: str, limit: Limit | None, *, expected: Limit | UnsetType | None = UNSET
    ) -> bool:
        """Set a limit: of the queue (group ``""``), of every group without its own (``"*"``), or of one group.

        ``None`` removes the limit. Applies from the next claim on. With ``expected``, set it only if the current limit
        equals that (``None``: no limit). Return whether it was set.
        """

    async def limits(self, queue: str) -> LimitsOfQueue:
        """Return the limits that are set."""

    async def groups(
        self, queue: str, *, cursor: str = "", limit: int = 100, keys: Sequence[str] = ()
    ) -> GroupPage:
        """Return the groups that have members, are paused, or have starts that still count, by key.

        With ``keys``, return exactly these groups, in that order. The key ``""`` stands for the queue: its ``why`` is
        the pause or queue limit that holds back claims, whether or not jobs wait.
        """

    async def drain(
        self, queue: str, *, scheduled: bool = False, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        """Remove up to ``limit`` jobs that wait for a worker or for room in their group, optionally scheduled ones."""

    async def clean(
        self, queue: str, state: State, *, older_than_ms: int = 0, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        """Remove up to ``limit`` jobs of a terminal state that ended at least ``older_than_ms`` ago."""

    async def obliterate(self, queue: str, *, force: bool = False) -> int:
        """Remove all jobs of the queue. Raise ``StorageError`` while jobs are active, unless ``force``.

        Counters, log, epoch, pause and settings stay: tokens and sequence numbers never repeat.
        """

    async def configure(self, queue: str, settings: QueueSettings) -> None: ...

    async def settings(self, queue: str) -> QueueSettings: ...

    async def check(self, queue: str, *, repair: bool = False) -> Checked:
        """Compare every record with every index, in both directions. With ``repair``, fix the differences."""

    # Usage and budgets

    async def usage(self, queue: str) -> list[Usage]:
        """Return the sums by queue, task, group and flow, then by key and name. A sum that has not grown for 30 days is
        forgotten."""

    async def reset_usage(self, queue: str) -> None:
        """Set all sums, and the amounts spent of budgets, to zero. Jobs keep their own usage."""

    async def set_budget(self, queue: str, budget: Budget) -> None:
        """Set a budget. Earlier usage counts, unless it has a new period: that begins now. The same one goes on."""

    async def remove_budget(self, queue: str, name: str, *, flow: str = "") -> bool:
        """Remove a budget. Return whether it existed."""

    async def budgets(self, queue: str) -> list[Budget]:
        """Return the budgets: the queue's first, then by flow and name."""

    # Reading

    async def get(self, queue: str, ids: Sequence[str]) -> list[Job | None]: ...

    async def list_jobs(
        self, queue: str, state: State, *, cursor: str = "", limit: int = 100, reverse: bool = False
    ) -> JobPage:
        """Return the jobs of a state in the order in which they will run, come due, or expire from the store."""

    async def scan_jobs(
        self, queue: str, *, states: frozenset[State] | None = None, part: int = 0, parts: int = 1,
        cursor: str = "", limit: int = 1000, light: bool = False,
    ) -> JobPage:  # fmt: skip
        """Return the jobs of one of ``parts`` by identity, so that no job is missed because its state changes.

        An id always belongs to the same part, and may appear more than once. ``limit`` is approximate: even an empty
        page may not be the last. ``light`` leaves out payloads and results.
        """

    async def held(self, queue: str, consumer: str, *, cursor: str = "", limit: int = 100) -> JobPage:
        """Return the finished jobs that a consumer holds, in the order in which they ended."""

    async def counts(self, queue: str) -> Counts: ...

    async def search(
        self, queue: str, query: Query, *, cursor: str = "", limit: int = 100, scan: int = 10_000
    ) -> Found:
        """Return up to ``limit`` matches among the next ``scan`` jobs of the state or error class."""

    async def errors(self, queue: str) -> dict[str, int]:
        """Return the number of failed jobs by error class."""

    async def metrics(self, queue: str, *, last_ms: int = DAY_MS) -> list[Minute]:
        """Return the minutes of the last ``last_ms`` (at most 24 hours) in which something happened."""

    async def queues(self) -> list[str]:
        """Return every queue that ever had a job, sorted."""

    async def attended(self) -> list[str]:
        """Return every queue that ever had a worker's heartbeat, sorted, with or without jobs."""

    async def clock(self, queue: str) -> QueueClock:
        """Return the queue's time and the store's wall clock."""

    async def workers(self, queue: str) -> list[WorkerRecord]:
        """Return the workers seen within about the last hour, by id."""

    async def logs(self, queue: str, id: str, *, start: int = 0, limit: int = 1000) -> LogPage:
        """Return up to ``limit`` kept lines from number ``start`` on, counted from the first line ever written."""

    # Waiting

    async def wait(self, queue: str, *, timeout_ms: int) -> bool:
        """Wait until there may be a job to claim (true) or the timeout passes (false). May wake up for nothing."""

    async def listen(self, queue: str, listener: str, *, timeout_ms: int) -> list[Finished]:
        """Return the next finished jobs enqueued with ``notify`` or watched; empty when the timeout passes.

        News wait a minute for the listener. After that, or after a reconnect, ``watch`` again.
        """

    async def watch(self, queue: str, ids: Sequence[str], *, listener: str) -> list[Finished | None]:
        """Tell the listener when these jobs end. Return those that have ended; ``None`` for open ones. Raise
        ``JobNotFound`` for an unknown id, and then watch none."""

    # The event log

    async def read_events(self, queue: str, *, after: int, limit: int = 10_000) -> EventPage:
        """Return the events after sequence number ``after``. ``limit`` is approximate: entries are not split."""

    async def read_entries(self, queue: str, *, after: int, limit: int = 10_000) -> EntryPage:
        """Return the same page as stored, for ``core.event.columns``."""

    async def tail(self, queue: str, *, after: int, timeout_ms: int) -> EventPage:
        """Return the same page, after waiting for the first event."""

    async def hold_events(self, queue: str, consumer: str, *, offset: int, ttl_ms: int) -> None:
        """Keep the events after ``offset`` for this consumer and renew its expiry. An offset never moves back."""

    async def release_events(self, queue: str, consumer: str) -> None: ...

    async def consumers(self, queue: str) -> list[Consumer]: ...

    # Tests

    async def shift_clock(self, queue: str, ms: int, *, jump: bool = False) -> None:
        """Move this queue's clock forward, so that tests need not sleep.

        With ``jump``, instead make the wall clock that the queue sees wrong by ``ms``, in either direction.
        """
