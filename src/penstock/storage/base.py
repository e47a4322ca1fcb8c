"""The storage contract: what an engine promises to the rest of Penstock.

Every verb is atomic and appends its events to the queue's log in the same step. Hot verbs take and give
lists, and act as if their items came one after the other. Arguments have been validated by the caller
(``core.names``, sizes, options); an engine checks only what it alone can know. ``tests/contract`` is how an
engine knows that it is right. The verbs of jobs on their way are here, those to operate with in
``storage.operating``, those to look, wait and follow with in ``storage.reading``; what they take and give is in
``storage.values``.

Time is the store's: ``now`` is the store's clock, never going back within a queue.

Lost replies: ``enqueue``, ``claim`` and ``settle`` take a ``Ticket``. A call repeated with the same ticket
gets the first answer again and changes nothing, as long as it is the last call of its lane and no older than
a minute. Engines that talk over a network issue tickets of their own when they repeat a call themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.core.flow import DependencyRecord, Node
from penstock.core.job import Dependency, Enqueued, NewJob
from penstock.storage.operating import Operating
from penstock.storage.reading import Reading
from penstock.storage.values import (
    AttachAnswer,
    Claimed,
    Extended,
    Fired,
    Held,
    NewScheduler,
    Report,
    SchedulerAnswer,
    Schedulers,
    SettledBatch,
    Settlement,
    Swept,
    Take,
    Ticket,
)


class Storage(Operating, Reading, Protocol):
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

        A job is of the run and the write of its newest dispatch, whether that queued or updated it, or waits in its
        slot until the run under way is over; what repeats that write is a duplicate, and what repeats an earlier
        one is not.

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

    async def leases_of(self, queue: str, worker: str) -> list[Held]:
        """The leases the store believes this worker holds: what it asks after it lost its connection."""
        ...

    async def depart(self, queue: str, worker: str) -> None:
        """Forget the worker's record. Its leases are not touched."""
        ...

    async def announce(self, queue: str, worker: str, *, lost: Callable[[], None]) -> None:
        """Let others see it if this process dies, where the engine has a way to tell; see ``lives``.

        To be repeated with every heartbeat, which costs nothing as a rule, and at once when ``lost`` is called. Holds
        until the storage is closed. Raises nothing: without it a death is noticed when the leases run out.
        """
        ...

    async def lives(self, queue: str) -> dict[str, bool]:
        """Return whether the processes of announced workers live. False is proof of death; what nobody can tell, as of
        a worker that was never announced, is left out."""
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

    async def move_slot(self, queue: str, name: str, *, slot_ms: int, next_ms: int) -> bool:
        """Make ``next_ms`` the next slot, if that still is ``slot_ms``. Return whether it was."""
        ...

    async def remove_scheduler(self, queue: str, name: str) -> bool:
        """Forget the scheduler; its jobs stay."""
        ...

    async def fire(self, queue: str, name: str, *, slot_ms: int, next_ms: int, job: NewJob) -> Fired:
        """Put in the job of a slot and move on to the next, if that slot is still the scheduler's next."""
        ...

    # For tests

    async def shift_clock(self, queue: str, ms: int, *, jump: bool = False) -> None:
        """Move this queue's clock forward: what tests do instead of sleeping.

        With ``jump`` the wall clock that the queue sees is off by ``ms`` from now on, in either direction, and the
        queue is not told: what a wrong clock does.
        """
        ...
