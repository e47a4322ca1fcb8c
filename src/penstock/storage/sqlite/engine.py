"""``SqliteStorage``: the storage contract on a SQLite file, or on a database in memory.

Almost every verb is a function of the module of its subject. ``_writes`` and ``_reads`` make methods of them: a call
that writes runs on a ``Unit`` in the next group, one that reads on a ``View`` immediately. ``storage.contract.Storage``
describes the verbs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, Protocol, Self, TypeVar, cast

from penstock.core.event import EventPage
from penstock.core.flow import Node
from penstock.core.job import Enqueued, NewJob
from penstock.core.lifecycle import ChangeAnswer
from penstock.errors import StorageError
from penstock.storage.contract import VerbsOnIds
from penstock.storage.sqlite import (
    claim,
    dedup,
    enqueue,
    eventlog,
    flows,
    holds,
    job_verbs,
    limits,
    queries,
    queue_verbs,
    replay,
    schedules,
    settle,
    steps,
    sweep,
    usage,
)
from penstock.storage.sqlite.connection import Address
from penstock.storage.sqlite.database import Session, keep_untouched, open_database
from penstock.storage.sqlite.queuerow import View
from penstock.storage.sqlite.repair import check
from penstock.storage.sqlite.unit import Unit
from penstock.storage.sqlite.wake import CAN_SIGNAL
from penstock.storage.values import (
    Change,
    Checked,
    Claimed,
    Finished,
    SettledBatch,
    Settlement,
    Take,
    Ticket,
    WorkerRecord,
    with_deaths,
)

P = ParamSpec("P")
Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)

_WHOLE: Final = 1_000_000
"""The weight of calls that use the whole database, so that they never run on a loop's thread."""


class Verb(Protocol[P, Answer_co]):
    """A verb as a method: it takes the queue, then the parameters of the function behind it."""

    def __call__(self, queue: str, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Answer_co]: ...


def _writes(
    verb: Callable[Concatenate[Unit, P], Answer], *, weight: int = 0, names_jobs: bool = False
) -> Verb[P, Answer]:
    """Return the method for a function that writes.

    The weight of a call is the number of items that it lists, or its limit. With ``names_jobs`` these items are ids,
    which are checked first if a record is damaged.
    """
    limit = (getattr(verb, "__kwdefaults__", None) or {}).get("limit", 1)

    @wraps(verb)
    async def method(storage: SqliteStorage, queue: str, *args: P.args, **kwargs: P.kwargs) -> Answer:
        values = (*args, *kwargs.values())
        items = [item for value in values if isinstance(value, (list, tuple)) for item in value]
        return await storage._opened.write(
            queue,
            lambda unit: verb(unit, *args, **kwargs),
            weight=weight or len(items) or cast("int", kwargs.get("limit", limit)),
            ids=items if names_jobs else (),
        )

    return cast("Verb[P, Answer]", method)


def _reads(look: Callable[Concatenate[View, P], Answer]) -> Verb[P, Answer]:
    """Return the method for a function that reads."""

    @wraps(look)
    async def method(storage: SqliteStorage, queue: str, *args: P.args, **kwargs: P.kwargs) -> Answer:
        return await storage._opened.read(queue, lambda view: look(view, *args, **kwargs))

    return cast("Verb[P, Answer]", method)


class SqliteStorage(VerbsOnIds):
    """One namespace of one database."""

    # Running jobs

    extend = _writes(claim.extend)
    report = _writes(settle.report)
    record_steps = _writes(steps.record_steps)
    reset_step = _writes(steps.reset_step)
    copy_steps = _writes(steps.copy_steps)
    steps = _reads(steps.steps)
    depart = _writes(queue_verbs.depart)
    leases_of = _reads(queries.leases_of)
    sweep = _writes(sweep.sweep)

    # Flows and schedulers

    attach = _writes(enqueue.attach)
    dependencies = _reads(flows.dependencies)
    put_scheduler = _writes(schedules.put_scheduler)
    schedulers = _reads(schedules.schedulers)
    pause_scheduler = _writes(schedules.pause_scheduler)
    resume_scheduler = _writes(schedules.resume_scheduler)
    move_slot = _writes(schedules.move_slot)
    remove_scheduler = _writes(schedules.remove_scheduler)
    fire = _writes(schedules.fire)

    # Jobs

    cancel = _writes(job_verbs.cancel, names_jobs=True)
    retry_all = _writes(queue_verbs.retry_all)
    dedup_of = _reads(dedup.dedup_of)
    clear_dedup = _writes(dedup.clear_dedup)
    remove_unchanged = _writes(job_verbs.remove_unchanged)
    unstage = _writes(queue_verbs.unstage)
    signal = _writes(job_verbs.signal)
    hold = _writes(holds.hold)
    release = _writes(holds.release)

    # Queues

    pause = _writes(queue_verbs.pause)
    resume = _writes(queue_verbs.resume)
    limit = _writes(limits.set_limit)
    groups = _writes(limits.list_groups)
    limits = _reads(limits.limits)
    drain = _writes(queue_verbs.drain)
    clean = _writes(queue_verbs.clean)
    obliterate = _writes(queue_verbs.obliterate, weight=_WHOLE)
    configure = _writes(queue_verbs.configure)
    settings = _reads(queries.settings)
    reset_usage = _writes(usage.reset_usage)
    set_budget = _writes(usage.set_budget)
    remove_budget = _writes(usage.remove_budget)
    budgets = _writes(usage.budgets)
    usage = _reads(usage.usage)
    shift_clock = _writes(queue_verbs.shift_clock)

    # Looking

    get = _reads(queries.get)
    list_jobs = _reads(queries.list_jobs)
    scan_jobs = _reads(queries.scan_jobs)
    held = _reads(holds.held)
    counts = _reads(queries.counts)
    search = _reads(queries.search)
    errors = _reads(queries.errors)
    metrics = _reads(queries.metrics)
    clock = _reads(queries.clock)
    logs = _reads(queries.logs)

    # The event log

    read_entries = _reads(eventlog.read_entries)
    hold_events = _writes(eventlog.hold_events)
    release_events = _writes(eventlog.release_events)
    consumers = _reads(eventlog.consumers)

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
        """Return the session of this process. Raise ``StorageError`` if the storage is not open."""
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

    async def on_ids(self, queue: str, verb: str, ids: Sequence[str], answers: Any) -> list[Any]:
        rule: Callable[[Unit, Sequence[str]], list[Any]] = getattr(job_verbs, verb)
        return await self._opened.write(queue, lambda unit: rule(unit, ids), weight=len(ids) or 1, ids=ids)

    async def enqueue(
        self, queue: str, jobs: Sequence[NewJob], *, ticket: Ticket | None = None
    ) -> list[Enqueued]:
        return await self._opened.write(
            queue, lambda unit: replay.enqueue(unit, jobs, ticket=ticket), weight=len(jobs)
        )

    async def claim(
        self, queue: str, take: Take, *, wait_ms: int = 0, ticket: Ticket | None = None
    ) -> Claimed:
        if wait_ms > 0:
            await self.wait(queue, timeout_ms=wait_ms)
        return await self._opened.write(
            queue, lambda unit: replay.claim(unit, take, ticket=ticket), weight=take.count
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
            lambda unit: replay.settle(unit, settlements, take=take, ticket=ticket),
            weight=len(settlements) + (take.count if take else 0),
        )

    async def enqueue_flows(
        self, queue: str, flows: Sequence[Sequence[Node]], *, ticket: Ticket | None = None
    ) -> list[Enqueued]:
        return await self._opened.write(
            queue, lambda unit: replay.enqueue_flows(unit, flows, ticket=ticket), weight=sum(map(len, flows))
        )

    async def change(self, queue: str, id: str, change: Change) -> ChangeAnswer:
        return await self._opened.write(queue, lambda unit: job_verbs.change(unit, id, change), ids=[id])

    async def check(self, queue: str, *, repair: bool = False) -> Checked:
        session = self._opened
        damaged = await session.mend(queue, weight=_WHOLE) if repair else {}
        checked = await session.write(queue, lambda unit: check(unit, repair=repair), weight=_WHOLE)
        return Checked(checked.records, {**checked.problems, **damaged}, repair)

    async def queues(self) -> list[str]:
        return await self._opened.read("", queries.queues)

    async def attended(self) -> list[str]:
        return await self._opened.read("", queries.attended)

    # Workers

    async def announce(self, queue: str, worker: str, *, lost: Callable[[], None]) -> None:
        try:
            locks = self._opened.locks
        except StorageError:
            return
        if locks is not None:
            locks.hold(worker)

    async def lives(self, queue: str) -> dict[str, bool]:
        locks = self._opened.locks
        return {} if locks is None else locks.look(await self._opened.read(queue, queries.worker_ids))

    async def workers(self, queue: str) -> list[WorkerRecord]:
        workers = await self._opened.read(queue, queries.workers)
        return with_deaths(workers, await self.lives(queue))

    # Waiting

    async def wait(self, queue: str, *, timeout_ms: int) -> bool:
        session = self._opened

        async def look() -> bool:
            return await session.read(queue, queries.has_work)

        # A signal is enough: it may stand for a job that is due sooner than the waiter knew.
        return await session.until("w", queue, look, timeout_ms=timeout_ms, signalled=True)

    async def watch(self, queue: str, ids: Sequence[str], *, listener: str) -> list[Finished | None]:
        # Only a job that is still open takes the writer, which registers the listener.
        if (
            ids
            and self._opened.reads_beside
            and (ends := await self._opened.read(queue, lambda view: queries.ends(view, ids)))
        ):
            return ends
        return await self._opened.write(
            queue, lambda unit: queries.watch(unit, ids, listener=listener), weight=len(ids) or 1
        )

    async def listen(self, queue: str, listener: str, *, timeout_ms: int) -> list[Finished]:
        session = self._opened

        async def look() -> list[Finished]:
            seen = self._news_seen.get((queue, listener), 0)
            last, found = await session.read(queue, lambda view: queries.news_after(view, listener, key=seen))
            self._news_seen[queue, listener] = last
            return found

        return await session.until("n", queue, look, timeout_ms=timeout_ms)

    # The event log

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
