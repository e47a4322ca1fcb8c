"""The verbs that read, that wait, and those of the event log."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.job import DAY_MS, Job
from penstock.core.lifecycle import State
from penstock.storage.entries import EntryPage
from penstock.storage.minutes import Minute
from penstock.storage.search import Found, Query
from penstock.storage.sqlite import eventlog, holds, news, read, scan, search
from penstock.storage.sqlite.verbs import Verbs
from penstock.storage.values import (
    Consumer,
    Counts,
    EventPage,
    Finished,
    JobPage,
    LogPage,
    QueueClock,
)

__all__ = ["Reading"]


class Reading(Verbs):
    """Mixed into the engine. See ``storage.reading`` for what each verb promises."""

    def __init__(self) -> None:
        self._news_seen: dict[tuple[str, str], int] = {}

    # Looking

    async def get(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        return await self._opened.read(lambda sql: read.get(sql, self._namespace, queue, ids))

    async def list_jobs(
        self, queue: str, state: State, *, cursor: str = "", limit: int = 100, reverse: bool = False
    ) -> JobPage:
        return await self._opened.read(
            lambda sql: read.list_jobs(
                sql, self._namespace, queue, state, cursor=cursor, limit=limit, reverse=reverse
            )
        )

    async def scan_jobs(
        self, queue: str, *, states: frozenset[State] | None = None, part: int = 0, parts: int = 1,
        cursor: str = "", limit: int = 1000, light: bool = False,
    ) -> JobPage:  # fmt: skip
        return await self._opened.read(
            lambda sql: scan.scan_jobs(
                sql, self._namespace, queue, states=states, part=part, parts=parts, cursor=cursor, limit=limit,
                light=light,
            )
        )  # fmt: skip

    async def held(self, queue: str, consumer: str, *, cursor: str = "", limit: int = 100) -> JobPage:
        return await self._opened.read(
            lambda sql: holds.held(sql, self._namespace, queue, consumer, cursor=cursor, limit=limit)
        )

    async def counts(self, queue: str) -> Counts:
        return await self._opened.read(lambda sql: read.counts(sql, self._namespace, queue))

    async def search(
        self, queue: str, query: Query, *, cursor: str = "", limit: int = 100, scan: int = 10_000
    ) -> Found:
        return await self._opened.read(
            lambda sql: search.search(
                sql, self._namespace, queue, query, cursor=cursor, limit=limit, scan=scan
            )
        )

    async def errors(self, queue: str) -> dict[str, int]:
        return await self._opened.read(lambda sql: search.errors(sql, self._namespace, queue))

    async def metrics(self, queue: str, *, last_ms: int = DAY_MS) -> list[Minute]:
        return await self._opened.read(lambda sql: read.metrics(sql, self._namespace, queue, last_ms=last_ms))

    async def queues(self) -> list[str]:
        return await self._opened.read(lambda sql: read.queues(sql, self._namespace))

    async def attended(self) -> list[str]:
        return await self._opened.read(lambda sql: read.attended(sql, self._namespace))

    async def clock(self, queue: str) -> QueueClock:
        return await self._opened.read(lambda sql: read.clock(sql, self._namespace, queue))

    async def logs(self, queue: str, id: str, *, start: int = 0, limit: int = 1000) -> LogPage:
        return await self._opened.read(
            lambda sql: read.logs(sql, self._namespace, queue, id, start=start, limit=limit)
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
            seen = self._news_seen.get((queue, listener), 0)
            last, found = await session.read(
                lambda sql: news.news_after(sql, self._namespace, queue, listener, key=seen)
            )
            self._news_seen[queue, listener] = last
            return found

        return await session.until("n", queue, look, timeout_ms=timeout_ms)

    async def watch(self, queue: str, ids: Sequence[str], *, listener: str) -> list[Finished | None]:
        return await self._opened.write(
            queue, lambda step: news.watch(step, ids, listener=listener), weight=len(ids)
        )

    # The event log

    async def read_events(self, queue: str, *, after: int, limit: int = 10_000) -> EventPage:
        page = await self.read_entries(queue, after=after, limit=limit)
        return page.events(queue, after=after)

    async def read_entries(self, queue: str, *, after: int, limit: int = 10_000) -> EntryPage:
        return await self._opened.read(
            lambda sql: eventlog.read_entries(sql, self._namespace, queue, after=after, limit=limit)
        )

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
