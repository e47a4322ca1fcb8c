"""The verbs of ``SqliteStorage`` that operate and read. Each hands a function to the session, which runs it in a
group."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from penstock.core.event import EntryPage, EventPage
from penstock.core.job import DAY_MS, Job
from penstock.core.lifecycle import State
from penstock.core.limits import Limit, LimitsOfQueue
from penstock.storage.metrics import Minute
from penstock.storage.sqlite import (
    budgets,
    dedup,
    eventlog,
    holds,
    job_verbs,
    limits,
    queries,
    queue_verbs,
    suspend,
    usage,
)
from penstock.storage.sqlite.database import Session
from penstock.storage.sqlite.repair import check
from penstock.storage.values import (
    Budget,
    Bulk,
    CancelAnswer,
    Change,
    ChangeAnswer,
    Checked,
    Consumer,
    Counts,
    Finished,
    Found,
    GroupPage,
    HoldAnswer,
    JobPage,
    LogPage,
    PromoteAnswer,
    Query,
    QueueClock,
    QueueSettings,
    ReleaseAnswer,
    RemoveAnswer,
    RetryAnswer,
    SignalAnswer,
    Unchanged,
    UnchangedAnswer,
    Usage,
)

_CHECK_WEIGHT = 1_000_000
"""Marks calls that read the whole database, so that they never run on a loop's thread."""


class Verbs:
    """Base of the classes that hold the engine's verbs."""

    _namespace: str

    @property
    def _opened(self) -> Session:
        """Return the session of this process. Raise ``StorageError`` if the storage is not open."""
        raise NotImplementedError


class Operating(Verbs):
    """The verbs that operate on jobs and queues. ``storage.contract`` describes them."""

    # Jobs

    async def cancel(self, queue: str, ids: Sequence[str], *, rerun_only: bool = False) -> list[CancelAnswer]:
        act = job_verbs.cancel_rerun if rerun_only else job_verbs.cancel
        return await self._opened.write(queue, lambda unit: act(unit, ids), weight=len(ids), ids=ids)

    async def retry(self, queue: str, ids: Sequence[str]) -> list[RetryAnswer]:
        return await self._opened.write(
            queue, lambda unit: job_verbs.retry(unit, ids), weight=len(ids), ids=ids
        )

    async def retry_all(self, queue: str, *, limit: int = 1000, cursor: str = "") -> Bulk:
        return await self._opened.write(
            queue, lambda unit: queue_verbs.retry_all(unit, limit=limit, cursor=cursor), weight=limit
        )

    async def promote(self, queue: str, ids: Sequence[str]) -> list[PromoteAnswer]:
        return await self._opened.write(
            queue, lambda unit: job_verbs.promote(unit, ids), weight=len(ids), ids=ids
        )

    async def dedup_of(self, queue: str, key: str) -> str | None:
        return await self._opened.read(lambda sql: dedup.dedup_of(sql, self._namespace, queue, key))

    async def clear_dedup(self, queue: str, key: str) -> bool:
        return await self._opened.write(queue, lambda unit: dedup.clear_dedup(unit, key))

    async def change(self, queue: str, id: str, change: Change) -> ChangeAnswer:
        return await self._opened.write(queue, lambda unit: job_verbs.change(unit, id, change), ids=[id])

    async def remove(self, queue: str, ids: Sequence[str]) -> list[RemoveAnswer]:
        return await self._opened.write(
            queue, lambda unit: job_verbs.remove(unit, ids), weight=len(ids), ids=ids
        )

    async def remove_unchanged(
        self, queue: str, jobs: Sequence[Unchanged], *, consumer: str = ""
    ) -> list[UnchangedAnswer]:
        return await self._opened.write(
            queue, lambda unit: job_verbs.remove_unchanged(unit, jobs, consumer=consumer), weight=len(jobs)
        )

    async def unstage(
        self, queue: str, write_id: str, *, keep: bool, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        return await self._opened.write(
            queue,
            lambda unit: queue_verbs.unstage(unit, write_id, keep=keep, limit=limit, cursor=cursor),
            weight=limit,
        )

    async def signal(self, queue: str, id: str, name: str, data: bytes) -> SignalAnswer:
        return await self._opened.write(queue, lambda unit: suspend.signal(unit, id, name, data))

    # Holding finished jobs

    async def hold(self, queue: str, consumer: str, ids: Sequence[str], *, ttl_ms: int) -> list[HoldAnswer]:
        return await self._opened.write(
            queue, lambda unit: holds.hold(unit, consumer, ids, ttl_ms=ttl_ms), weight=len(ids)
        )

    async def release(self, queue: str, consumer: str, ids: Sequence[str]) -> list[ReleaseAnswer]:
        return await self._opened.write(
            queue, lambda unit: holds.release(unit, consumer, ids), weight=len(ids)
        )

    # Queues

    async def pause(self, queue: str, *, group: str = "", duration_ms: int = 0) -> None:
        await self._opened.write(queue, lambda unit: queue_verbs.pause(unit, group, duration_ms))

    async def resume(self, queue: str, *, group: str = "") -> None:
        await self._opened.write(queue, lambda unit: queue_verbs.resume(unit, group))

    async def limit(
        self, queue: str, group: str, limit: Limit | None, *, expected: Limit | UnsetType | None = UNSET
    ) -> bool:
        return await self._opened.write(
            queue, lambda unit: limits.set_limit(unit, group, limit, expected=expected)
        )

    async def limits(self, queue: str) -> LimitsOfQueue:
        return await self._opened.read(lambda sql: limits.limits(sql, self._namespace, queue))

    async def groups(
        self, queue: str, *, cursor: str = "", limit: int = 100, keys: Sequence[str] = ()
    ) -> GroupPage:
        if keys:
            return await self._opened.write(
                queue, lambda unit: limits.read_groups(unit, keys), weight=len(keys)
            )
        return await self._opened.write(
            queue, lambda unit: limits.list_groups(unit, cursor=cursor, limit=limit), weight=limit
        )

    async def drain(
        self, queue: str, *, scheduled: bool = False, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        return await self._opened.write(
            queue,
            lambda unit: queue_verbs.drain(unit, scheduled=scheduled, limit=limit, cursor=cursor),
            weight=limit,
        )

    async def clean(
        self, queue: str, state: State, *, older_than_ms: int = 0, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        return await self._opened.write(
            queue,
            lambda unit: queue_verbs.clean(
                unit, state, older_than_ms=older_than_ms, limit=limit, cursor=cursor
            ),
            weight=limit,
        )

    async def obliterate(self, queue: str, *, force: bool = False) -> int:
        return await self._opened.write(
            queue, lambda unit: queue_verbs.obliterate(unit, force=force), weight=_CHECK_WEIGHT
        )

    async def configure(self, queue: str, settings: QueueSettings) -> None:
        await self._opened.write(queue, lambda unit: queue_verbs.configure(unit, settings))

    async def settings(self, queue: str) -> QueueSettings:
        return await self._opened.read(lambda sql: queries.settings(sql, self._namespace, queue))

    async def check(self, queue: str, *, repair: bool = False) -> Checked:
        session = self._opened
        damaged = await session.mend(queue, weight=_CHECK_WEIGHT) if repair else {}
        checked = await session.write(queue, lambda unit: check(unit, repair=repair), weight=_CHECK_WEIGHT)
        return Checked(checked.records, {**checked.problems, **damaged}, repair)

    # Usage

    async def usage(self, queue: str) -> list[Usage]:
        return await self._opened.read(lambda sql: usage.usage(sql, self._namespace, queue))

    async def reset_usage(self, queue: str) -> None:
        await self._opened.write(queue, usage.reset_usage)

    async def set_budget(self, queue: str, budget: Budget) -> None:
        await self._opened.write(queue, lambda unit: budgets.set_budget(unit, budget))

    async def remove_budget(self, queue: str, name: str, *, flow: str = "") -> bool:
        return await self._opened.write(queue, lambda unit: budgets.remove_budget(unit, name, flow))

    async def budgets(self, queue: str) -> list[Budget]:
        return await self._opened.write(queue, budgets.budgets)


class Reading(Verbs):
    """The verbs that read and wait, and those of the event log. ``storage.contract`` describes them."""

    def __init__(self) -> None:
        self._news_seen: dict[tuple[str, str], int] = {}

    # Looking

    async def get(self, queue: str, ids: Sequence[str]) -> list[Job | None]:
        return await self._opened.read(lambda sql: queries.get(sql, self._namespace, queue, ids))

    async def list_jobs(
        self, queue: str, state: State, *, cursor: str = "", limit: int = 100, reverse: bool = False
    ) -> JobPage:
        return await self._opened.read(
            lambda sql: queries.list_jobs(
                sql, self._namespace, queue, state, cursor=cursor, limit=limit, reverse=reverse
            )
        )

    async def scan_jobs(
        self, queue: str, *, states: frozenset[State] | None = None, part: int = 0, parts: int = 1,
        cursor: str = "", limit: int = 1000, light: bool = False,
    ) -> JobPage:  # fmt: skip
        return await self._opened.read(
            lambda sql: queries.scan_jobs(
                sql, self._namespace, queue, states=states, part=part, parts=parts, cursor=cursor, limit=limit,
                light=light,
            )
        )  # fmt: skip

    async def held(self, queue: str, consumer: str, *, cursor: str = "", limit: int = 100) -> JobPage:
        return await self._opened.read(
            lambda sql: holds.held(sql, self._namespace, queue, consumer, cursor=cursor, limit=limit)
        )

    async def counts(self, queue: str) -> Counts:
        return await self._opened.read(lambda sql: queries.counts(sql, self._namespace, queue))

    async def search(
        self, queue: str, query: Query, *, cursor: str = "", limit: int = 100, scan: int = 10_000
    ) -> Found:
        return await self._opened.read(
            lambda sql: queries.search(
                sql, self._namespace, queue, query, cursor=cursor, limit=limit, scan=scan
            )
        )

    async def errors(self, queue: str) -> dict[str, int]:
        return await self._opened.read(lambda sql: queries.errors(sql, self._namespace, queue))

    async def metrics(self, queue: str, *, last_ms: int = DAY_MS) -> list[Minute]:
        return await self._opened.read(
            lambda sql: queries.metrics(sql, self._namespace, queue, last_ms=last_ms)
        )

    async def queues(self) -> list[str]:
        return await self._opened.read(lambda sql: queries.queues(sql, self._namespace))

    async def attended(self) -> list[str]:
        return await self._opened.read(lambda sql: queries.attended(sql, self._namespace))

    async def clock(self, queue: str) -> QueueClock:
        return await self._opened.read(lambda sql: queries.clock(sql, self._namespace, queue))

    async def logs(self, queue: str, id: str, *, start: int = 0, limit: int = 1000) -> LogPage:
        return await self._opened.read(
            lambda sql: queries.logs(sql, self._namespace, queue, id, start=start, limit=limit)
        )

    # Waiting

    async def wait(self, queue: str, *, timeout_ms: int) -> bool:
        session = self._opened

        async def look() -> bool:
            return await session.read(lambda sql: queries.has_work(sql, self._namespace, queue))

        # A signal is enough: it may stand for a job that is due sooner than the waiter knew.
        return await session.until("w", queue, look, timeout_ms=timeout_ms, signalled=True)

    async def listen(self, queue: str, listener: str, *, timeout_ms: int) -> list[Finished]:
        session = self._opened

        async def look() -> list[Finished]:
            seen = self._news_seen.get((queue, listener), 0)
            last, found = await session.read(
                lambda sql: queries.news_after(sql, self._namespace, queue, listener, key=seen)
            )
            self._news_seen[queue, listener] = last
            return found

        return await session.until("n", queue, look, timeout_ms=timeout_ms)

    async def watch(self, queue: str, ids: Sequence[str], *, listener: str) -> list[Finished | None]:
        return await self._opened.write(
            queue, lambda unit: queries.watch(unit, ids, listener=listener), weight=len(ids)
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
            queue, lambda unit: eventlog.hold_events(unit, consumer, offset=offset, ttl_ms=ttl_ms)
        )

    async def release_events(self, queue: str, consumer: str) -> None:
        await self._opened.write(queue, lambda unit: eventlog.release_events(unit, consumer))

    async def consumers(self, queue: str) -> list[Consumer]:
        return await self._opened.read(lambda sql: eventlog.consumers(sql, self._namespace, queue))
