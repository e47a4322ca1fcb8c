"""The cleaners of a work queue: they bring back what dead workers and cleaners left behind.

Both look twice, ``grace`` apart, and act on what nobody held at either look. The published clients need several
commands for one step: an item may just have been taken and not yet marked as leased, or completed and its data
not yet removed. To act in that instant would lose nothing, but hand the item out twice, or leave the id of a
finished item in the queue.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

from penstock.bridges.redis_work_queue.layout import Keys, Verb, run_script
from penstock.storage.valkey.routers import Router

T = TypeVar("T")

_PAGE: Final = 1000
_ACTS_AT_ONCE: Final = 50
# These take a walk along the whole queue for each id; short calls let others in between.
_WALKS_AT_ONCE: Final = 4


class Cleaned(NamedTuple):
    """What a clean did."""

    returned: int = 0
    """Items put back into the queue, at its end."""
    dropped: int = 0
    """Entries removed from lists because their item does not exist."""
    surplus: int = 0
    """Entries removed from the queue because their item had more than one; by a deep clean only."""


class Cleaner:
    """One clean of the queue behind ``router``. Any number may run at once, beside workers and other cleaners."""

    def __init__(self, router: Router, keys: Keys, *, grace_ms: int) -> None:
        self._router = router
        self._keys = keys
        self._grace_ms = grace_ms

    async def clean_lightly(self) -> Cleaned:
        """Look at what is being processed, and at what another cleaner had in hand."""
        listed = await self._listed()
        return await self._reclaim(listed, strays=set())

    async def clean_deeply(self) -> Cleaned:
        """Look at every item and every entry."""
        # In this order: what is added meanwhile is in the lists but not among the items, which costs a second
        # look; the other way round it would pass for an item that no list has.
        items = await self._items()
        queue, listed = Counter(await self._entries(self._keys.queue)), await self._listed()
        reclaimed = await self._reclaim(listed, strays=items.difference(queue, listed))
        suspects = [id for id, count in queue.items() if count > 1 or id not in items]
        dropped, surplus = await self._act("tidy", ids=suspects, at_once=_WALKS_AT_ONCE)
        return Cleaned(reclaimed.returned, reclaimed.dropped + dropped, surplus)

    async def _listed(self) -> set[bytes]:
        """The ids that are being processed or cleaned."""
        _, processing, cleaning = self._keys.lists
        return {*await self._entries(processing), *await self._entries(cleaning)}

    async def _entries(self, key: bytes) -> list[bytes]:
        """A list in one look: page by page, entries would shift from one page to the next."""
        return cast(list[bytes], await self._router.call(key, "LRANGE", key, 0, -1))

    async def _items(self) -> set[bytes]:
        """The ids of all items that exist throughout."""
        keys, cursor, found = self._keys, b"0", set[bytes]()
        while True:
            command = ("SCAN", cursor, "MATCH", keys.data_pattern, "COUNT", _PAGE, "TYPE", "string")
            cursor, page = await self._router.call(keys.queue, *command)
            found.update(key[len(keys.data) :] for key in page)
            if cursor == b"0":
                return found

    async def _reclaim(self, listed: set[bytes], *, strays: set[bytes]) -> Cleaned:
        abandoned: list[bytes] = []
        for page in _chunks([*listed, *strays], _PAGE):
            abandoned += await self._run("reclaim", b"look", *page)
        if abandoned:
            await self._wait_grace()
        near = [id for id in abandoned if id in listed]
        far = [id for id in abandoned if id in strays]
        returned, dropped = await self._act("reclaim", b"listed", ids=near, at_once=_ACTS_AT_ONCE)
        found, _ = await self._act("reclaim", b"stray", ids=far, at_once=_WALKS_AT_ONCE)
        return Cleaned(returned + found, dropped)

    async def _wait_grace(self) -> None:
        await asyncio.sleep(self._grace_ms / 1000)

    async def _act(self, verb: Verb, *mode: bytes, ids: Sequence[bytes], at_once: int) -> tuple[int, int]:
        """Run a script over ``ids``, some at a time, and add up the two numbers it answers with."""
        answers = [await self._run(verb, *mode, *few) for few in _chunks(ids, at_once)]
        return sum(first for first, _ in answers), sum(second for _, second in answers)

    async def _run(self, verb: Verb, *args: bytes) -> list[Any]:
        args = (self._keys.prefix, *args)
        return cast(list[Any], await run_script(self._router, verb, keys=self._keys.lists, args=args))


def _chunks(values: Sequence[T], size: int) -> list[Sequence[T]]:
    return [values[start : start + size] for start in range(0, len(values), size)]
