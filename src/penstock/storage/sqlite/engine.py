"""``SqliteStorage``: the storage contract on a SQLite file, or on a database in memory.

Each verb hands a function of the module of its name to the session, which runs it in a group.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Self

from penstock.core.flow import DependencyRecord, Node
from penstock.core.job import Dependency, Enqueued, NewJob
from penstock.errors import StorageError
from penstock.storage.sqlite import (
    claim,
    enqueue,
    flows,
    queries,
    queue_verbs,
    replay,
    schedules,
    settle,
    sweep,
)
from penstock.storage.sqlite.address import Address
from penstock.storage.sqlite.database import Session, keep_untouched, open_database
from penstock.storage.sqlite.verbs import Operating, Reading
from penstock.storage.sqlite.wake import CAN_SIGNAL
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
    WorkerRecord,
    with_deaths,
)


class SqliteStorage(Operating, Reading):
    """One namespace of one database. ``storage.contract.Storage`` describes the verbs."""

    def __init__(self, address: Address) -> None:
        self.url = address.shown
        waking = "wakes" if CAN_SIGNAL or address.in_memory else "polls"
        self.capabilities = frozenset({waking} if address.in_memory else {"processes", waking})
        self._address = address
        self._namespace = address.namespace
        self._session: Session | None = None
        Reading.__init__(self)

    @classmethod
    def from_url(cls, url: str, *, namespace: str | None = None) -> Self:
        """Return a storage for ``sqlite:///relative``, ``sqlite:////absolute``, ``memory://`` or
        ``memory://name``."""
        return cls(Address.parse(url, namespace=namespace))

    async def open(self) -> None:
        """Open the database, creating or migrating it. Opening twice does nothing."""
        if self._session is None or self._session.pid != os.getpid():
            self._session = self._open()

    def _open(self) -> Session:
        if self._session is not None:
            keep_untouched(self._session)  # After a fork, the session is the parent's.
        address = self._address
        database = open_database(address.path, memory_name=address.memory_name, timeout_s=address.timeout_s)
        return Session(database, self._namespace, timeout_s=address.timeout_s)

    async def close(self) -> None:
        """Release the database. Closing twice does nothing."""
        session, self._session = self._session, None
        if session is not None and session.pid != os.getpid():
            keep_untouched(session)
        elif session is not None:
            session.close()

    @property
    def _opened(self) -> Session:
        session = self._session
        if session is None:
            raise StorageError(
                f"{self.url}: the storage is not open. Call open() first, and not after close()."
            )
        if session.pid != os.getpid():
            session = self._session = self._open()
        elif session.is_lost:
            session = self._session = session.reopened(timeout_s=self._address.timeout_s)
            self._news_seen.clear()  # Another file numbers its news from the start.
        return session

    # Running jobs

    async def enqueue(
        self, queue: str, jobs: Sequence[NewJob], *, ticket: Ticket | None = None
    ) -> list[Enqueued]:
        return await self._opened.write(
            queue,
            lambda unit: replay.enqueued_once(unit, ticket, lambda: enqueue.enqueue(unit, jobs)),
            weight=len(jobs),
        )

    async def claim(
        self, queue: str, take: Take, *, wait_ms: int = 0, ticket: Ticket | None = None
    ) -> Claimed:
        if wait_ms > 0:
            await self.wait(queue, timeout_ms=wait_ms)
        return await self._opened.write(
            queue,
            lambda unit: replay.claimed_once(unit, ticket, lambda: claim.claim(unit, take)),
            weight=take.count,
        )

    async def settle(
        self,
        queue: str,
        settlements: Sequence[Settlement],
        *,
        take: Take | None = None,
        ticket: Ticket | None = None,
    ) -> SettledBatch:
        return await self._opened.write(
            queue,
            lambda unit: replay.settled_once(
                unit, ticket, lambda: settle.settle(unit, settlements, take=take)
            ),
            weight=len(settlements) + (take.count if take else 0),
        )

    async def extend(
        self,
        queue: str,
        held: Sequence[Held],
        *,
        worker: str,
        lease_ms: int,
        info: bytes | None = None,
    ) -> list[Extended]:
        return await self._opened.write(
            queue,
            lambda unit: claim.extend(unit, held, worker=worker, lease_ms=lease_ms, info=info),
            weight=len(held),
        )

    async def sweep(self, queue: str, *, limit: int = 1000) -> Swept:
        return await self._opened.write(queue, lambda unit: sweep.sweep(unit, limit=limit), weight=limit)

    async def report(self, queue: str, reports: Sequence[Report]) -> list[bool]:
        return await self._opened.write(queue, lambda unit: settle.report(unit, reports), weight=len(reports))

    async def leases_of(self, queue: str, worker: str) -> list[Held]:
        return await self._opened.read(lambda sql: queries.leases_of(sql, self._namespace, queue, worker))

    async def depart(self, queue: str, worker: str) -> None:
        await self._opened.write(queue, lambda unit: queue_verbs.depart(unit, worker))

    async def announce(self, queue: str, worker: str, *, lost: Callable[[], None]) -> None:
        try:
            locks = self._opened.locks
        except StorageError:
            return
        if locks is not None:
            locks.hold(worker)

    async def lives(self, queue: str) -> dict[str, bool]:
        if (locks := self._opened.locks) is None:
            return {}
        return locks.look(
            await self._opened.read(lambda sql: queries.worker_ids(sql, self._namespace, queue))
        )

    async def workers(self, queue: str) -> list[WorkerRecord]:
        workers = await self._opened.read(lambda sql: queries.workers(sql, self._namespace, queue))
        return with_deaths(workers, await self.lives(queue))

    # Flows

    async def enqueue_flows(
        self, queue: str, flows: Sequence[Sequence[Node]], *, ticket: Ticket | None = None
    ) -> list[Enqueued]:
        return await self._opened.write(
            queue,
            lambda unit: replay.enqueued_once(unit, ticket, lambda: enqueue.enqueue_flows(unit, flows)),
            weight=sum(map(len, flows)),
        )

    async def attach(
        self, queue: str, id: str, after: Sequence[Dependency], *, nodes: Sequence[Node] = (), flow: str
    ) -> AttachAnswer:
        return await self._opened.write(
            queue,
            lambda unit: enqueue.attach(unit, id, after, nodes=nodes, flow=flow),
            weight=len(after) + len(nodes),
        )

    async def dependencies(
        self, queue: str, id: str, *, start: int = 0, limit: int = 1000
    ) -> list[DependencyRecord]:
        return await self._opened.read(
            lambda sql: flows.dependencies(sql, self._namespace, queue, id, start=start, limit=limit)
        )

    # Schedulers

    async def put_scheduler(self, queue: str, scheduler: NewScheduler) -> SchedulerAnswer:
        return await self._opened.write(queue, lambda unit: schedules.put_scheduler(unit, scheduler))

    async def schedulers(self, queue: str, names: Sequence[str] | None = None) -> Schedulers:
        return await self._opened.read(lambda sql: schedules.schedulers(sql, self._namespace, queue, names))

    async def pause_scheduler(self, queue: str, name: str) -> bool:
        return await self._opened.write(queue, lambda unit: schedules.pause_scheduler(unit, name))

    async def resume_scheduler(self, queue: str, name: str, *, next_ms: int | None = None) -> bool:
        return await self._opened.write(
            queue, lambda unit: schedules.resume_scheduler(unit, name, next_ms=next_ms)
        )

    async def move_slot(self, queue: str, name: str, *, slot_ms: int, next_ms: int) -> bool:
        return await self._opened.write(
            queue, lambda unit: schedules.move_slot(unit, name, slot_ms=slot_ms, next_ms=next_ms)
        )

    async def remove_scheduler(self, queue: str, name: str) -> bool:
        return await self._opened.write(queue, lambda unit: schedules.remove_scheduler(unit, name))

    async def fire(self, queue: str, name: str, *, slot_ms: int, next_ms: int, job: NewJob) -> Fired:
        return await self._opened.write(
            queue, lambda unit: schedules.fire(unit, name, slot_ms=slot_ms, next_ms=next_ms, job=job)
        )

    # For tests

    async def shift_clock(self, queue: str, ms: int, *, jump: bool = False) -> None:
        await self._opened.write(queue, lambda unit: queue_verbs.shift_clock(unit, ms, jump=jump))
