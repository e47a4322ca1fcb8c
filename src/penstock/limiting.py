"""Limits of a queue and of the groups in it. ``Queue`` has all of this; docs/limits.md shows what it is for."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from penstock.core.display import shown
from penstock.core.duration import Duration, milliseconds
from penstock.core.limits import EVERY_GROUP, Bucket, Limit
from penstock.core.names import check_group
from penstock.core.rate import RateLike, parse_rate
from penstock.errors import InvalidOption, StorageError
from penstock.optionvalues import whole_number

if TYPE_CHECKING:
    from penstock.core.limits import GroupState, LimitsOfQueue
    from penstock.source import Source
    from penstock.storage.base import Storage

__all__ = ["BucketLike", "QueueLimits"]

_MOST: Final = 1_000_000
_TRIES: Final = 100
_LARGEST_BUCKET: Final = 2**46
"""Tokens times milliseconds: engines count in parts of a token, in whole numbers."""

BucketLike: TypeAlias = tuple[int, RateLike] | Bucket
"""How many tokens it holds, and how fast they come in: ``(100, "10/s")``."""


class QueueLimits:
    """See the module. Every method raises ``StorageError`` if the store does not answer."""

    _source: Source

    async def limit(
        self,
        *,
        group: str | None = None,
        concurrency: int | UnsetType | None = UNSET,
        rate: RateLike | UnsetType | None = UNSET,
        bucket: BucketLike | UnsetType | None = UNSET,
    ) -> Limit:
        """Limit the queue as a whole; with ``group``, the jobs of that group (``"*"``: of every group without its own).

        ``concurrency``: so many at a time; a group of 1 runs strictly in order. ``rate``: so many starts in any stretch
        of time. ``bucket``, of groups only: jobs take their ``cost`` from it. What is not given stays as it is;
        ``None`` removes that bound. Return the limit that holds from the next claim on, for all workers. Of two
        changes of the same bound at a time, the later one wins; changes of different bounds both hold.
        """
        key = _key(group)
        changes = _changes(concurrency, rate, bucket)
        if group is None:
            _check_for_queue(changes)
        storage = await self._storage()
        for _ in range(_TRIES):
            known = (await storage.limits(self._source.queue)).get(key)
            limit = replace(known or Limit(), **changes)
            is_gone = group is None and limit == Limit()
            if await storage.limit(self._source.queue, key, None if is_gone else limit, expected=known):
                return limit
        raise StorageError(
            f"the limit of queue {self._source.queue!r} was not set: others changed it {_TRIES} times meanwhile. "
            "Call limit() again."
        )

    async def unlimit(self, *, group: str | None = None) -> None:
        """Remove a limit that was set. A group without its own has that of ``"*"``, if there is one."""
        await (await self._storage()).limit(self._source.queue, _key(group), None)

    async def limits(self) -> LimitsOfQueue:
        """The limits that were set: under ``""`` the queue's, under ``"*"`` that of every group without its own."""
        return await (await self._storage()).limits(self._source.queue)

    async def groups(self) -> AsyncGenerator[GroupState, None]:
        """The groups that have jobs, are paused, or have starts that still count: ``async for group in ...``."""
        storage, cursor = await self._storage(), ""
        while True:
            page = await storage.groups(self._source.queue, cursor=cursor)
            for group in page.groups:
                yield group
            cursor = page.cursor
            if not cursor:
                return

    async def pause(self, duration: Duration | None = None, *, group: str | None = None) -> None:
        """Claims get nothing from now on, everywhere; with ``group``, nothing of it. Jobs that run go on.

        With a ``duration`` that ends by itself, as after a job that raised ``RateLimited``; a longer such time that is
        running stays. Without one, ``resume`` ends it.
        """
        duration_ms = 0
        if duration is not None:
            duration_ms = milliseconds(duration, what="duration")
            if duration_ms < 1:
                raise InvalidOption(
                    f"duration={shown(duration)} is over at once. Leave it out to pause until resume()."
                )
        storage = await self._storage()
        await storage.pause(self._source.queue, group=_one_group(group), duration_ms=duration_ms)

    async def resume(self, *, group: str | None = None) -> None:
        """The end of a pause, and of a time that ``RateLimited`` set."""
        await (await self._storage()).resume(self._source.queue, group=_one_group(group))

    async def _storage(self) -> Storage:
        return await self._source.app.connect()


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
            "bucket is for groups: a queue has concurrency and rate. Give a group, or '*' for every one."
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
                f"bucket={shown(value)} is not valid. Give its capacity and how fast it refills: (100, '10/s')."
            )
    whole_number("capacity of the bucket", capacity, least=1, most=_MOST)
    if capacity * rate.per_ms > _LARGEST_BUCKET:
        raise InvalidOption(
            f"bucket={shown(value)} refills too slowly to be counted exactly. Give the same speed over a shorter time."
        )
    return Bucket(capacity, rate.count, rate.per_ms)


_PARSERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "concurrency": lambda value: whole_number("concurrency", value, least=1, most=_MOST),
    "rate": parse_rate,
    "bucket": _parse_bucket,
}
