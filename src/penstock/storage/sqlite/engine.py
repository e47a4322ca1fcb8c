"""``SqliteStorage``: the storage contract on a SQLite file, or on a database in memory.

Thin: each verb hands a function of the module of its name to the session, which runs it in a group.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from typing import Self

from penstock.core.flow import DependencyRecord, Node
from penstock.core.job import Dependency, Enqueued, NewJob
from penstock.core.lifecycle import State
from penstock.core.limits import Limit, LimitsOfQueue
from penstock.errors import StorageError
from penstock.storage.sqlite import (
    attach,
    budgets,
    bulk,
    claim,
    dedup,
    enqueue,
    eventlog,
    flows,
    govern,
    holds,
    limits,
    memo,
    news,
    operate,
    read,
    schedulers,
    settle,
    steps,
    sweep,
    usage,
)
from penstock.storage.sqlite.address import Address
from penstock.storage.sqlite.check import check
from penstock.storage.sqlite.database import keep_untouched, open_database
from penstock.storage.sqlite.looking import Looking
from penstock.storage.sqlite.session import Session
from penstock.storage.sqlite.wake import CAN_SIGNAL
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
    EntryPage,
    EventPage,
    Extended,
    Finished,
    Fired,
    GroupPage,
    Held,
    HoldAnswer,
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
)

__all__ = ["SqliteStorage"]

_CHECK_WEIGHT = 1_000_000
"""Reads the whole database: never on a loop's thread."""


class SqliteStorage(Looking):
    """One namespace of one database. See ``storage.base.Storage`` for what each verb promises."""

    def __init__(self, address: Address) -> None:
        self.url = address.shown
        waking = "wakes" if CAN_SIGNAL or address.in_memory else "polls"
        self.capabilities = frozenset({waking} if address.in_memory else {"processes", waking})
        self._address = address
        self._namespace = address.namespace
        self._session: Session | None = None
        self._news_seen: dict[tuple[str, str], int] = {}

    @classmethod
    def from_url(cls, url: str, *, namespace: str | None = None) -> Self:
        """A storage for ``sqlite:///relative``, ``sqlite:////absolute``, ``memory://`` or ``memory://name``."""
        return cls(Address.parse(url, namespace=namespace))

    async def open(self) -> None:
        """Open the database, creating or migrating it. Opening twice does nothing."""
        if self._session is None or self._session.pid != os.getpid():
            self._session = self._open()

    def _open(self) -> Session:
        if self._session is not None:
            keep_untouched(self._session)  # Forked: what we inherited is the parent's.
        address = self._address
        database = open_database(address.path, memory_name=address.memory_name, timeout_s=address.timeout_s)
        return Session(database, self._namespace, timeout_s=address.timeout_s)

    async def close(self) -> None:
        """Let go of the database. Closing twice does nothing."""
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
        return session

    # The way of a job

    async def enqueue(
        self, queue: str, jobs: Sequence[NewJob], *, ticket: Ticket | None = None
    ) -> list[Enqueued]:
        return await self._opened.write(
            queue,
            lambda step: memo.enqueued_once(step, ticket, lambda: enqueue.enqueue(step, jobs)),
            weight=len(jobs),
        )

    async def claim(
        self, queue: str, take: Take, *, wait_ms: int = 0, ticket: Ticket | None = None
    ) -> Claimed:
        if wait_ms > 0:
            await self.wait(queue, timeout_ms=wait_ms)
        return await self._opened.write(
            queue,
            lambda step: memo.claimed_once(step, ticket, lambda: claim.claim(step, take)),
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
            lambda step: memo.settled_once(step, ticket, lambda: settle.settle(step, settlements, take=take)),
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
            lambda step: claim.extend(step, held, worker=worker, lease_ms=lease_ms, info=info),
            weight=len(held),
        )

    async def sweep(self, queue: str, *, limit: int = 1000) -> Swept:
        return await self._opened.write(queue, lambda step: sweep.sweep(step, limit=limit), weight=limit)

    async def report(self, queue: str, reports: Sequence[Report]) -> list[bool]:
        return await self._opened.write(queue, lambda step: settle.report(step, reports), weight=len(reports))

    async def usage(self, queue: str) -> list[Usage]:
        return await self._opened.read(lambda sql: usage.usage(sql, self._namespace, queue))

    async def reset_usage(self, queue: str) -> None:
        await self._opened.write(queue, usage.reset_usage)

    async def set_budget(self, queue: str, budget: Budget) -> None:
        await self._opened.write(queue, lambda step: budgets.set_budget(step, budget))

    async def remove_budget(self, queue: str, name: str, *, flow: str = "") -> bool:
        return await self._opened.write(queue, lambda step: budgets.remove_budget(step, name, flow))

    async def budgets(self, queue: str) -> list[Budget]:
        return await self._opened.write(queue, budgets.budgets)

    async def leases_of(self, queue: str, worker: str) -> list[Held]:
        return await self._opened.read(lambda sql: read.leases_of(sql, self._namespace, queue, worker))

    async def depart(self, queue: str, worker: str) -> None:
        await self._opened.write(queue, lambda step: govern.depart(step, worker))

    # Flows

    async def enqueue_flows(
        self, queue: str, flows: Sequence[Sequence[Node]], *, ticket: Ticket | None = None
    ) -> list[Enqueued]:
        return await self._opened.write(
            queue,
            lambda step: memo.enqueued_once(step, ticket, lambda: enqueue.enqueue_flows(step, flows)),
            weight=sum(map(len, flows)),
        )

    async def attach(
        self, queue: str, id: str, after: Sequence[Dependency], *, nodes: Sequence[Node] = (), flow: str
    ) -> AttachAnswer:
        return await self._opened.write(
            queue,
            lambda step: attach.attach(step, id, after, nodes=nodes, flow=flow),
            weight=len(after) + len(nodes),
        )

    async def dependencies(
        self, queue: str, id: str, *, start: int = 0, limit: int = 1000
    ) -> list[DependencyRecord]:
        return await self._opened.read(
            lambda sql: flows.dependencies(sql, self._namespace, queue, id, start=start, limit=limit)
        )

    # Waiting

    async def wait(self, queue: str, *, timeout_ms: int) -> bool:
        session = self._opened

        async def look() -> bool:
            return await session.read(lambda sql: read.has_work(sql, self._namespace, queue))

        # Not looked at again: what was signalled may be a due time that came nearer.
        return await session.until("w", queue, look, timeout_ms=timeout_ms, signalled=True)

    async def listen(self, queue: str, listener: str, *, timeout_ms: int) -> list[Finished]:
        session = self._opened

        async def look() -> list[Finished]:
            return await session.read(lambda sql: self._news(sql, queue, listener))

        return await session.until("n", queue, look, timeout_ms=timeout_ms)

    def _news(self, sql: sqlite3.Connection, queue: str, listener: str) -> list[Finished]:
        seen = self._news_seen.get((queue, listener), 0)
        last, found = news.news_after(sql, self._namespace, queue, listener, key=seen)
        self._news_seen[queue, listener] = last
        return found

    async def watch(self, queue: str, ids: Sequence[str], *, listener: str) -> list[Finished | None]:
        return await self._opened.write(
            queue, lambda step: news.watch(step, ids, listener=listener), weight=len(ids)
        )

    # Operating on jobs

    async def cancel(self, queue: str, ids: Sequence[str]) -> list[CancelAnswer]:
        return await self._opened.write(queue, lambda step: operate.cancel(step, ids), weight=len(ids))

    async def retry(self, queue: str, ids: Sequence[str]) -> list[RetryAnswer]:
        return await self._opened.write(queue, lambda step: operate.retry(step, ids), weight=len(ids))

    async def retry_all(self, queue: str, *, limit: int = 1000, cursor: str = "") -> Bulk:
        return await self._opened.write(
            queue, lambda step: bulk.retry_all(step, limit=limit, cursor=cursor), weight=limit
        )

    async def promote(self, queue: str, ids: Sequence[str]) -> list[PromoteAnswer]:
        return await self._opened.write(queue, lambda step: operate.promote(step, ids), weight=len(ids))

    async def dedup_of(self, queue: str, key: str) -> str | None:
        return await self._opened.read(lambda sql: dedup.dedup_of(sql, self._namespace, queue, key))

    async def clear_dedup(self, queue: str, key: str) -> bool:
        return await self._opened.write(queue, lambda step: dedup.clear_dedup(step, key))

    async def change(self, queue: str, id: str, change: Change) -> ChangeAnswer:
        return await self._opened.write(queue, lambda step: operate.change(step, id, change))

    async def remove(self, queue: str, ids: Sequence[str]) -> list[RemoveAnswer]:
        return await self._opened.write(queue, lambda step: operate.remove(step, ids), weight=len(ids))

    async def signal(self, queue: str, id: str, name: str, data: bytes) -> SignalAnswer:
        return await self._opened.write(queue, lambda step: steps.signal(step, id, name, data))

    # Holding finished jobs

    async def hold(self, queue: str, consumer: str, ids: Sequence[str], *, ttl_ms: int) -> list[HoldAnswer]:
        return await self._opened.write(
            queue, lambda step: holds.hold(step, consumer, ids, ttl_ms=ttl_ms), weight=len(ids)
        )

    async def release(self, queue: str, consumer: str, ids: Sequence[str]) -> list[ReleaseAnswer]:
        return await self._opened.write(
            queue, lambda step: holds.release(step, consumer, ids), weight=len(ids)
        )

    # Operating on queues

    async def pause(self, queue: str, *, group: str = "") -> None:
        await self._opened.write(queue, lambda step: govern.pause(step, group))

    async def resume(self, queue: str, *, group: str = "") -> None:
        await self._opened.write(queue, lambda step: govern.resume(step, group))

    async def limit(self, queue: str, group: str, limit: Limit | None) -> None:
        await self._opened.write(queue, lambda step: limits.set_limit(step, group, limit))

    async def limits(self, queue: str) -> LimitsOfQueue:
        return await self._opened.read(lambda sql: limits.limits(sql, self._namespace, queue))

    async def groups(self, queue: str, *, cursor: str = "", limit: int = 100) -> GroupPage:
        return await self._opened.write(
            queue, lambda step: limits.list_groups(step, cursor=cursor, limit=limit), weight=limit
        )

    async def drain(
        self, queue: str, *, scheduled: bool = False, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        return await self._opened.write(
            queue,
            lambda step: bulk.drain(step, scheduled=scheduled, limit=limit, cursor=cursor),
            weight=limit,
        )

    async def clean(
        self, queue: str, state: State, *, older_than_ms: int = 0, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        return await self._opened.write(
            queue,
            lambda step: bulk.clean(step, state, older_than_ms=older_than_ms, limit=limit, cursor=cursor),
            weight=limit,
        )

    async def obliterate(self, queue: str, *, force: bool = False) -> int:
        return await self._opened.write(
            queue, lambda step: bulk.obliterate(step, force=force), weight=_CHECK_WEIGHT
        )

    async def configure(self, queue: str, settings: QueueSettings) -> None:
        await self._opened.write(queue, lambda step: govern.configure(step, settings))

    async def settings(self, queue: str) -> QueueSettings:
        return await self._opened.read(lambda sql: read.settings(sql, self._namespace, queue))

    async def check(self, queue: str, *, repair: bool = False) -> Checked:
        return await self._opened.write(queue, lambda step: check(step, repair=repair), weight=_CHECK_WEIGHT)

    # Schedulers

    async def put_scheduler(self, queue: str, scheduler: NewScheduler) -> SchedulerAnswer:
        return await self._opened.write(queue, lambda step: schedulers.put_scheduler(step, scheduler))

    async def schedulers(self, queue: str, names: Sequence[str] | None = None) -> Schedulers:
        return await self._opened.read(lambda sql: schedulers.schedulers(sql, self._namespace, queue, names))

    async def pause_scheduler(self, queue: str, name: str) -> bool:
        return await self._opened.write(queue, lambda step: schedulers.pause_scheduler(step, name))

    async def resume_scheduler(self, queue: str, name: str, *, next_ms: int | None = None) -> bool:
        return await self._opened.write(
            queue, lambda step: schedulers.resume_scheduler(step, name, next_ms=next_ms)
        )

    async def remove_scheduler(self, queue: str, name: str) -> bool:
        return await self._opened.write(queue, lambda step: schedulers.remove_scheduler(step, name))

    async def fire(self, queue: str, name: str, *, slot_ms: int, next_ms: int, job: NewJob) -> Fired:
        return await self._opened.write(
            queue, lambda step: schedulers.fire(step, name, slot_ms=slot_ms, next_ms=next_ms, job=job)
        )

    # The event log

    async def read_entries(self, queue: str, *, after: int, limit: int = 10_000) -> EntryPage:
        return await self._opened.read(
            lambda sql: eventlog.read_entries(sql, self._namespace, queue, after=after, limit=limit)
        )

    async def read_events(self, queue: str, *, after: int, limit: int = 10_000) -> EventPage:
        page = await self.read_entries(queue, after=after, limit=limit)
        return page.events(queue, after=after)

    async def tail(self, queue: str, *, after: int, timeout_ms: int) -> EventPage:
        session = self._opened
        page: EventPage | None = None

        async def look() -> bool:
            nonlocal page
            page = await self.read_events(queue, after=after)
            return bool(page.events) or page.gap is not None

        await session.until("e", queue, look, timeout_ms=timeout_ms)
        assert page is not None
        return page

    async def hold_events(self, queue: str, consumer: str, *, offset: int, ttl_ms: int) -> None:
        await self._opened.write(
            queue, lambda step: eventlog.hold_events(step, consumer, offset=offset, ttl_ms=ttl_ms)
        )

    async def release_events(self, queue: str, consumer: str) -> None:
        await self._opened.write(queue, lambda step: eventlog.release_events(step, consumer))

    async def consumers(self, queue: str) -> list[Consumer]:
        return await self._opened.read(lambda sql: eventlog.consumers(sql, self._namespace, queue))

    # For tests

    async def shift_clock(self, queue: str, ms: int) -> None:
        await self._opened.write(queue, lambda step: govern.shift_clock(step, ms))
