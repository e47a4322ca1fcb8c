"""Looking at what is there: the verbs that only read."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.job import DAY_MS, Job
from penstock.core.lifecycle import State
from penstock.storage.minutes import Minute
from penstock.storage.search import Found, Query
from penstock.storage.sqlite import holds, read, scan, search
from penstock.storage.sqlite.session import Session
from penstock.storage.values import Counts, JobPage, WorkerRecord

__all__ = ["Looking"]


class Looking:
    """Mixed into the engine. See ``storage.base.Storage`` for what each verb promises."""

    _namespace: str

    @property
    def _opened(self) -> Session:
        raise NotImplementedError

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

    async def counts(self, queue: str) -> Counts:
        return await self._opened.read(lambda sql: read.counts(sql, self._namespace, queue))

    async def queues(self) -> list[str]:
        return await self._opened.read(lambda sql: read.queues(sql, self._namespace))

    async def workers(self, queue: str) -> list[WorkerRecord]:
        return await self._opened.read(lambda sql: read.workers(sql, self._namespace, queue))

    async def logs(self, queue: str, id: str, *, start: int = 0, limit: int = 1000) -> list[str]:
        return await self._opened.read(
            lambda sql: read.logs(sql, self._namespace, queue, id, start=start, limit=limit)
        )

    async def held(self, queue: str, consumer: str, *, cursor: str = "", limit: int = 100) -> JobPage:
        return await self._opened.read(
            lambda sql: holds.held(sql, self._namespace, queue, consumer, cursor=cursor, limit=limit)
        )

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
