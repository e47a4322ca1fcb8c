"""The verbs that operate on jobs and on queues."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from penstock.core.lifecycle import State
from penstock.core.limits import Limit, LimitsOfQueue
from penstock.storage.sqlite import (
    budgets,
    bulk,
    dedup,
    govern,
    holds,
    limits,
    operate,
    read,
    steps,
    usage,
)
from penstock.storage.sqlite.check import check
from penstock.storage.sqlite.verbs import Verbs
from penstock.storage.values import (
    Budget,
    Bulk,
    CancelAnswer,
    Change,
    ChangeAnswer,
    Checked,
    GroupPage,
    HoldAnswer,
    PromoteAnswer,
    QueueSettings,
    ReleaseAnswer,
    RemoveAnswer,
    RetryAnswer,
    SignalAnswer,
    Unchanged,
    UnchangedAnswer,
    Usage,
)

__all__ = ["Operating"]

_CHECK_WEIGHT = 1_000_000
"""Reads the whole database: never on a loop's thread."""


class Operating(Verbs):
    """Mixed into the engine. See ``storage.operating`` for what each verb promises."""

    # Jobs

    async def cancel(self, queue: str, ids: Sequence[str], *, rerun_only: bool = False) -> list[CancelAnswer]:
        act = operate.cancel_rerun if rerun_only else operate.cancel
        return await self._opened.write(queue, lambda step: act(step, ids), weight=len(ids), ids=ids)

    async def retry(self, queue: str, ids: Sequence[str]) -> list[RetryAnswer]:
        return await self._opened.write(
            queue, lambda step: operate.retry(step, ids), weight=len(ids), ids=ids
        )

    async def retry_all(self, queue: str, *, limit: int = 1000, cursor: str = "") -> Bulk:
        return await self._opened.write(
            queue, lambda step: bulk.retry_all(step, limit=limit, cursor=cursor), weight=limit
        )

    async def promote(self, queue: str, ids: Sequence[str]) -> list[PromoteAnswer]:
        return await self._opened.write(
            queue, lambda step: operate.promote(step, ids), weight=len(ids), ids=ids
        )

    async def dedup_of(self, queue: str, key: str) -> str | None:
        return await self._opened.read(lambda sql: dedup.dedup_of(sql, self._namespace, queue, key))

    async def clear_dedup(self, queue: str, key: str) -> bool:
        return await self._opened.write(queue, lambda step: dedup.clear_dedup(step, key))

    async def change(self, queue: str, id: str, change: Change) -> ChangeAnswer:
        return await self._opened.write(queue, lambda step: operate.change(step, id, change), ids=[id])

    async def remove(self, queue: str, ids: Sequence[str]) -> list[RemoveAnswer]:
        return await self._opened.write(
            queue, lambda step: operate.remove(step, ids), weight=len(ids), ids=ids
        )

    async def remove_unchanged(
        self, queue: str, jobs: Sequence[Unchanged], *, consumer: str = ""
    ) -> list[UnchangedAnswer]:
        return await self._opened.write(
            queue, lambda step: operate.remove_unchanged(step, jobs, consumer=consumer), weight=len(jobs)
        )

    async def unstage(
        self, queue: str, write_id: str, *, keep: bool, limit: int = 1000, cursor: str = ""
    ) -> Bulk:
        return await self._opened.write(
            queue,
            lambda step: bulk.unstage(step, write_id, keep=keep, limit=limit, cursor=cursor),
            weight=limit,
        )

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

    # Queues

    async def pause(self, queue: str, *, group: str = "", duration_ms: int = 0) -> None:
        await self._opened.write(queue, lambda step: govern.pause(step, group, duration_ms))

    async def resume(self, queue: str, *, group: str = "") -> None:
        await self._opened.write(queue, lambda step: govern.resume(step, group))

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
