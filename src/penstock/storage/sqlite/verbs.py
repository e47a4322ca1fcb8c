"""What the parts of the engine have in common."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from penstock.core.job import DAY_MS, Job
from penstock.core.lifecycle import State
from penstock.core.limits import Limit, LimitsOfQueue
from penstock.storage.metrics import Minute
from penstock.storage.pages import EntryPage, Found, Query
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
    EventPage,
    Finished,
    GroupPage,
    HoldAnswer,
    JobPage,
    LogPage,
    PromoteAnswer,
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


class Verbs:
    """A part of the engine: verbs that hand their work to the session of the storage they are mixed into."""

    _namespace: str

    @property
    def _opened(self) -> Session:
        """The session of this process. Raises ``StorageError`` if the storage is not open."""
        raise NotImplementedError


# The verbs that operate on jobs and on queues.


_CHECK_WEIGHT = 1_000_000
"""Reads the whole database: never on a loop's thread."""


class Operating(Verbs):
    """Mixed into the engine. See ``storage.contract`` for what each verb promises."""

    # Jobs

    async def cancel(self, queue: str, ids: Sequence[str], *, rerun_only: bool = False) -> list[CancelAnswer]:
        act = job_verbs.cancel_rerun if rerun_only else job_verbs.cancel
        return await self._opened.write(queue, lambda step: act(step, ids), weight=len(ids), ids=ids)

    async def retry(self, queue: str, ids: Sequence[str]) -> list[RetryAnswer]:
        return await self._opened.write(
            queue, lambda step: job_verbs.retry(step, ids), weight=len(ids), ids=ids
        )

    async def retry_all(self, queue: str, *, limit: int = 1000, cursor: str = "") -> Bulk:
        return await self._opened.write(
            queue, lambda step: queue_verbs.retry_all(step, limit=limit, cursor=cursor), weight=limit
        )

    async def promote(self, queue: str, ids: Sequence[str]) -> list[PromoteAnswer]:
        return await self._opened.write(
            queue, lambda step: job_verbs.promote(step, ids), weight=len(ids), ids=ids
        )

    async def dedup_of(self, queue: str, key: str) -> str | None:
        return await self._opened.read(lambda sql: dedup.dedup_of(sql, self._namespace, queue, key))

    async def clear_dedup(self, queue: str, key: str) -> bool:
        return await self._opened.write(queue, lambda step: dedup.clear_dedup(step, key))

    async def change(self, queue: str, id: str, change: Change) -> ChangeAnswer:
        return await self._opened.write(queue, lambda step: job_verbs.change(step, id, change), ids=[id])

    async def remove(self, queue: str, ids: Sequence[str]) -> list[RemoveAnswer]:
        return await self._opened.write(
            queue, lambda step: job_verbs.remove(step, ids), weight=len(ids), ids=ids
        )

    async def remove_unchanged(
        self, queue: str, jobs: Sequence[Unchanged], *, consumer: str = ""
    ) -> list[UnchangedAnswer]:
        return await self._opened.write(
            queue, lambda step: job_verbs.remove_unchanged(step, jobs, consumer=consumer), weight=len(jobs)
        )

    async def unstage(
        self, queue: str, write_id: str, *, keep: bool, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        return await self._opened.write(
            queue,
            lambda step: queue_verbs.unstage(step, write_id, keep=keep, limit=limit, cursor=cursor),
            weight=limit,
        )

    async def signal(self, queue: str, id: str, name: str, data: bytes) -> SignalAnswer:
        return await self._opened.write(queue, lambda step: suspend.signal(step, id, name, data))

    # Holding finished jobs

    async def hold(self, queue: str, consumer: str, ids: Sequence[str], *, ttl_ms: int) -> list[HoldAnswer]:
        return await self._opened.write(
            queue, lambda step: holds.hold(step, consumer, ids, ttl_ms=ttl_ms), weight=len(ids)
        )

    async def release(self, queue: str, consumer: str, ids: Sequence[str]) -> list[ReleaseAnswer]:
        return await self._opened.write(
            queue, lambda step: holds.release(step, consumer, ids), weight=len(ids)
        )

    # Queues

    async def pause(self, queue: str, *, group: str = "", duration_ms: int = 0) -> None:
        await self._opened.write(queue, lambda step: queue_verbs.pause(step, group, duration_ms))

    async def resume(self, queue: str, *, group: str = "") -> None:
        await self._opened.write(queue, lambda step: queue_verbs.resume(step, group))

    async def limit(
        self, queue: str, group: str, limit: Limit | None, *, expected: Limit | UnsetType | None = UNSET
    ) -> bool:
        return await self._opened.write(
            queue, lambda step: limits.set_limit(step, group, limit, expected=expected)
        )

    async def limits(self, queue: str) -> LimitsOfQueue:
        return await self._opened.read(lambda sql: limits.limits(sql, self._namespace, queue))

    async def groups(
        self, queue: str, *, cursor: str = "", limit: int = 100, keys: Sequence[str] = ()
    ) -> GroupPage:
        if keys:
            return await self._opened.write(
                queue, lambda step: limits.read_groups(step, keys), weight=len(keys)
            )
        return await self._opened.write(
            queue, lambda step: limits.list_groups(step, cursor=cursor, limit=limit), weight=limit
        )

    async def drain(
        self, queue: str, *, scheduled: bool = False, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        return await self._opened.write(
            queue,
            lambda step: queue_verbs.drain(step, scheduled=scheduled, limit=limit, cursor=cursor),
            weight=limit,
        )

    async def clean(
        self, queue: str, state: State, *, older_than_ms: int = 0, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        return await self._opened.write(
            queue,
            lambda step: queue_verbs.clean(
                step, state, older_than_ms=older_than_ms, limit=limit, cursor=cursor
            ),
            weight=limit,
        )

    async def obliterate(self, queue: str, *, force: bool = False) -> int:
        return await self._opened.write(
            queue, lambda step: queue_verbs.obliterate(step, force=force), weight=_CHECK_WEIGHT
        )

    async def configure(self, queue: str, settings: QueueSettings) -> None:
        await self._opened.write(queue, lambda step: queue_verbs.configure(step, settings))

    async def settings(self, queue: str) -> QueueSettings:
        return await self._opened.read(lambda sql: queries.settings(sql, self._namespace, queue))

    async def check(self, queue: str, *, repair: bool = False) -> Checked:
        session = self._opened
        damaged = await session.mend(queue, weight=_CHECK_WEIGHT) if repair else {}
        checked = await session.write(queue, lambda step: check(step, repair=repair), weight=_CHECK_WEIGHT)
        return Checked(checked.records, {**checked.problems, **damaged}, repair)

    # Usage

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


# The verbs that read, that wait, and those of the event log.


class Reading(Verbs):
    """Mixed into the engine. See ``storage.contract`` for what each verb promises."""

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

        # Not looked at again: what was signalled may be a due time that came nearer.
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
            queue, lambda step: queries.watch(step, ids, listener=listener), weight=len(ids)
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
