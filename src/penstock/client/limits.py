"""Usage, budgets and limits of a queue."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from penstock.client.job_verbs import QueuePart
from penstock.client.parsers import whole_number
from penstock.core.limits import (
    EVERY_GROUP,
    MILLION,
    Bucket,
    Limit,
    RateLike,
    amounts,
    check_usage_name,
    parse_rate,
)
from penstock.core.names import check_group, check_id
from penstock.core.text import shown
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidOption, StorageError
from penstock.storage.values import Budget

if TYPE_CHECKING:
    from penstock.core.limits import GroupState, LimitsOfQueue
    from penstock.storage.values import Usage


Amounts = Mapping[str, float]


class UsageReport(msgspec.Struct, frozen=True):
    """The usage of a queue by name: in total, and by task, group and flow."""

    total: Amounts
    by_task: Mapping[str, Amounts]
    by_group: Mapping[str, Amounts]
    by_flow: Mapping[str, Amounts]


class BudgetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A budget and what is spent of it. ``renews_at`` is when its next period begins, if it has periods."""

    name: str
    amount: float
    spent: float
    flow: str
    renews_at: datetime | None

    @property
    def is_spent(self) -> bool:
        """Return whether it keeps jobs from starting."""
        return self.spent >= self.amount


def in_units(micros: Mapping[str, int] | None) -> dict[str, float]:
    """Return amounts in the units in which they were reported."""
    return {name: value / MILLION for name, value in (micros or {}).items()}


def usage_report(sums: Iterable[Usage]) -> UsageReport:
    """Return a report of the sums of a queue."""
    kinds: dict[str, dict[str, dict[str, float]]] = {"queue": {}, "task": {}, "group": {}, "flow": {}}
    for usage in sums:
        kinds[usage.kind].setdefault(usage.key, {})[usage.name] = usage.micros / MILLION
    return UsageReport(kinds["queue"].get("", {}), kinds["task"], kinds["group"], kinds["flow"])


def budget_of(name: str, amount: float, *, per: Duration | None, flow: str) -> Budget:
    """Return a budget. Raise ``InvalidOption`` for an invalid amount or period."""
    name = check_usage_name(name)
    micros = amounts({name: amount}).get(name, 0)
    per_ms = 0 if per is None else milliseconds(per, what="per")
    if per is not None and per_ms == 0:
        raise InvalidOption(
            f"per must be longer than 0, got {shown(per)}. Give a period such as '1d', or leave it out for all time."
        )
    return Budget(name, micros, per_ms, check_flow(flow))


def check_flow(flow: Any) -> str:
    """Return ``flow``; the empty string means no flow. Raise ``InvalidName`` if it is not valid."""
    return "" if isinstance(flow, str) and not flow else check_id(flow)


def budget_info(budget: Budget) -> BudgetInfo:
    """Return the public form of a budget."""
    return BudgetInfo(
        name=budget.name,
        amount=budget.micros / MILLION,
        spent=budget.spent / MILLION,
        flow=budget.flow,
        renews_at=datetime.fromtimestamp(budget.until_ms / 1000, UTC) if budget.until_ms else None,
    )


_MOST: Final = 1_000_000
_TRIES: Final = 100
_LARGEST_BUCKET: Final = 2**46
"""The maximum of capacity times milliseconds: engines count fractions of tokens as integers."""

BucketLike: TypeAlias = tuple[int, RateLike] | Bucket
"""The capacity and the refill rate: ``(100, "10/s")``."""


class QueueLimits(QueuePart):
    """The limits of a queue and its groups; see docs/limits.md.

    Every method raises ``StorageError`` if the store does not answer.
    """

    async def limit(
        self,
        *,
        group: str | None = None,
        concurrency: int | UnsetType | None = UNSET,
        rate: RateLike | UnsetType | None = UNSET,
        bucket: BucketLike | UnsetType | None = UNSET,
    ) -> Limit:
        """Limit the queue, or a ``group`` of it (``"*"``: every group without its own limit). Return the new limit.

        ``concurrency`` is the number of jobs that run at a time; a group with 1 runs strictly in order. ``rate`` is
        the number of starts in any period. ``bucket``, for groups only, is a token bucket from which jobs take their
        ``cost``. Omitted bounds stay; ``None`` removes one. All workers apply the limit from the next claim. Of two
        concurrent changes of one bound, the later one wins; changes of different bounds both apply.
        """
        key = _key(group)
        changes = _changes(concurrency, rate, bucket)
        if group is None:
            _check_for_queue(changes)
        storage = await self._storage()
        for _ in range(_TRIES):
            known = (await storage.limits(self.name)).get(key)
            limit = replace(known or Limit(), **changes)
            is_gone = group is None and limit == Limit()
            if await storage.limit(self.name, key, None if is_gone else limit, expected=known):
                return limit
        raise StorageError(
            f"the limit of queue {self.name!r} was not set: other clients changed it {_TRIES} times "
            "in the meantime. Call limit() again."
        )

    async def unlimit(self, *, group: str | None = None) -> None:
        """Remove a limit. A group without its own limit has that of ``"*"``, if any."""
        await (await self._storage()).limit(self.name, _key(group), None)

    async def limits(self) -> LimitsOfQueue:
        """Return the limits by group: ``""`` is the queue, ``"*"`` is every group without its own limit."""
        return await (await self._storage()).limits(self.name)

    async def groups(self) -> AsyncGenerator[GroupState, None]:
        """Yield the groups that have jobs, are paused, or have recent starts that count towards a rate."""
        storage, cursor = await self._storage(), ""
        while True:
            page = await storage.groups(self.name, cursor=cursor)
            for group in page.groups:
                yield group
            cursor = page.cursor
            if not cursor:
                return

    async def pause(self, duration: Duration | None = None, *, group: str | None = None) -> None:
        """Pause the queue, or a ``group`` of it, for all workers. Active jobs go on.

        With a ``duration``, the pause ends by itself, as after a job that raised ``RateLimited``; a longer pause
        of this kind stays. Without one, ``resume`` ends it.
        """
        duration_ms = 0
        if duration is not None:
            duration_ms = milliseconds(duration, what="duration")
            if duration_ms < 1:
                raise InvalidOption(
                    f"duration must be longer than 0, got {shown(duration)}. Leave it out to pause until resume()."
                )
        storage = await self._storage()
        await storage.pause(self.name, group=_one_group(group), duration_ms=duration_ms)

    async def resume(self, *, group: str | None = None) -> None:
        """End a pause, including one that ``RateLimited`` started."""
        await (await self._storage()).resume(self.name, group=_one_group(group))


def _one_group(group: str | None) -> str:
    return "" if group is None else check_group(group)


def _key(group: str | None) -> str:
    return EVERY_GROUP if group == EVERY_GROUP else _one_group(group)


def _changes(
    concurrency: int | UnsetType | None,
    rate: RateLike | UnsetType | None,
    bucket: BucketLike | UnsetType | None,
) -> dict[str, Any]:
    """Return the fields of ``Limit`` that were given, checked."""
    given = {"concurrency": concurrency, "rate": rate, "bucket": bucket}
    return {
        name: None if value is None else _PARSERS[name](value)
        for name, value in given.items()
        if value is not UNSET
    }


def _check_for_queue(changes: Mapping[str, Any]) -> None:
    if changes.get("bucket") is not None:
        raise InvalidOption(
            "bucket applies only to groups: a queue has concurrency and rate. Give a group, or '*' for all groups."
        )
    if not changes:
        raise InvalidOption("limit() needs concurrency or rate. Use unlimit() to remove the limit.")


def _parse_bucket(value: Any) -> Bucket:
    match value:
        case Bucket(capacity=capacity, refill=refill, per_ms=per_ms):
            rate = parse_rate((refill, per_ms / 1000), what="bucket")
        case (capacity, refill):
            rate = parse_rate(refill, what="bucket")
        case _:
            raise InvalidOption(
                f"bucket must be a capacity and a refill rate, such as (100, '10/s'), got {shown(value)}."
            )
    whole_number("capacity of the bucket", capacity, least=1, most=_MOST)
    if capacity * rate.per_ms > _LARGEST_BUCKET:
        raise InvalidOption(
            f"bucket={shown(value)} refills too slowly to be counted exactly. Give the same rate per shorter period."
        )
    return Bucket(capacity, rate.count, rate.per_ms)


_PARSERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "concurrency": lambda value: whole_number("concurrency", value, least=1, most=_MOST),
    "rate": parse_rate,
    "bucket": _parse_bucket,
}
