"""The part of the storage contract that shows what is there, waits for more, and follows the event log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.core.job import DAY_MS, Job
from penstock.core.lifecycle import State
from penstock.storage.metrics import Minute
from penstock.storage.pages import EntryPage, Found, Query
from penstock.storage.values import (
    Consumer,
    Counts,
    EventPage,
    Finished,
    JobPage,
    LogPage,
    QueueClock,
    WorkerRecord,
)


class Reading(Protocol):
    """Part of ``Storage``, which says what holds for all verbs."""

    # Looking

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

    async def held(self, queue: str, consumer: str, *, cursor: str = "", limit: int = 100) -> JobPage:
        """Finished jobs that are held for a consumer, in the order they ended."""
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

    async def attended(self) -> list[str]:
        """Return the queues that workers have sent a heartbeat for, sorted, including those without a job so far.

        The workers of some of them may be gone by now.
        """
        ...

    async def clock(self, queue: str) -> QueueClock:
        """Return the queue's time and the store's wall clock."""
        ...

    async def workers(self, queue: str) -> list[WorkerRecord]:
        """Return the workers that were seen within the last hour or so, by id."""
        ...

    async def logs(self, queue: str, id: str, *, start: int = 0, limit: int = 1000) -> LogPage:
        """Return up to ``limit`` kept lines from number ``start`` on, counted from the first line ever written."""
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
