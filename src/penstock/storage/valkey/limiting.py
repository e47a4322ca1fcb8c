"""The verbs that set limits and show what they hold up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from penstock.core.limits import Bucket, GroupState, Limit, LimitsOfQueue
from penstock.core.rate import Rate
from penstock.storage.valkey.calls import Calls
from penstock.storage.values import GroupPage

__all__ = ["Limiting"]

_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(tuple[int, int, int, int, int, int]).decode
_COLUMNS: Final = 8


class Limiting:
    """Mixed into the engine."""

    _calls: Calls

    async def limit(
        self, queue: str, group: str, limit: Limit | None, *, expected: Limit | UnsetType | None = UNSET
    ) -> bool:
        """As ``Storage.limit``."""
        shown = msgspec.json.encode({"limit": limit})
        condition = () if expected is UNSET else (_encode(expected),)
        return bool(await self._calls.call(queue, "limit", group, _encode(limit), shown, *condition))

    async def limits(self, queue: str) -> LimitsOfQueue:
        """As ``Storage.limits``."""
        key = self._calls.keys.part(queue, "limits")
        rows = await self._calls.plain(key, "HGETALL", key)
        found = {group.decode(): _decode(packed) for group, packed in zip(rows[::2], rows[1::2], strict=True)}
        return dict(sorted(found.items()))

    async def groups(
        self, queue: str, *, cursor: str = "", limit: int = 100, keys: Sequence[str] = ()
    ) -> GroupPage:
        """As ``Storage.groups``. A cursor is the last key shown."""
        more, *rows = await self._calls.call(queue, "groups", limit, cursor, *keys)
        groups = [_state(*rows[at : at + _COLUMNS]) for at in range(0, len(rows), _COLUMNS)]
        return GroupPage(groups, groups[-1].key if more else "")


def _state(key: bytes, *rest: Any) -> GroupState:
    waiting, active, held, blocked, paused, why, wait_ms = rest
    reason = why.decode()
    return GroupState(
        key.decode(), waiting, active, held, blocked, paused == 1, reason, None if wait_ms < 0 else wait_ms
    )


def _encode(limit: Limit | None) -> bytes:
    """Return a limit as lua/groups.lua reads it: six numbers, 0 for a bound that is not set; no bytes for ``None``."""
    if limit is None:
        return b""
    rate = limit.rate or Rate(0, 0)
    bucket = limit.bucket or Bucket(0, 0, 0)
    return _pack(
        (limit.concurrency or 0, rate.count, rate.per_ms, bucket.capacity, bucket.refill, bucket.per_ms)
    )


def _decode(packed: bytes) -> Limit:
    concurrency, count, per_ms, capacity, refill, bucket_per_ms = _unpack(packed)
    return Limit(
        concurrency or None,
        Rate(count, per_ms) if count else None,
        Bucket(capacity, refill, bucket_per_ms) if capacity else None,
    )
