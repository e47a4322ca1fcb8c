"""The cleaners of a work queue, which return the items that dead workers and cleaners left behind, and ``forward``.

Both cleaners check twice, ``grace`` apart, and act only on items without a holder at both checks. The published
clients need several commands for one step: an item may have been taken but not yet marked as leased, or completed but
its data not yet removed. Acting at that moment would lose nothing, but hand out the item twice, or leave the id of a
finished item in the queue.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, Unpack, cast

from penstock.bridges.redis_work_queue.layout import Item, Keys, Verb, run_script
from penstock.core.units import Duration
from penstock.errors import InvalidInput, StorageUnavailable
from penstock.storage.valkey.routers import Router

if TYPE_CHECKING:
    from penstock.bridges.redis_work_queue.queue import WorkQueue
    from penstock.client.options import JobOptions
    from penstock.client.queue import Queue


T = TypeVar("T")

_PAGE: Final = 1000
_ACTS_AT_ONCE: Final = 50
# Each id takes a walk along the whole queue; short calls let other clients in between.
_WALKS_AT_ONCE: Final = 4


class Cleaned(NamedTuple):
    """The result of a clean."""

    returned: int = 0
    """Items returned to the end of the queue."""
    dropped: int = 0
    """Entries removed from lists because their item does not exist."""
    surplus: int = 0
    """Entries removed from the queue because their item had more than one; only by a deep clean."""


class Cleaner:
    """One clean of the queue behind ``router``. Any number may run in parallel with workers and other cleaners."""

    def __init__(self, router: Router, keys: Keys, *, grace_ms: int) -> None:
        self._router = router
        self._keys = keys
        self._grace_ms = grace_ms

    async def clean_lightly(self) -> Cleaned:
        """Check the items being processed, and those that another cleaner was handling."""
        listed = await self._listed()
        return await self._reclaim(listed, strays=set())

    async def clean_deeply(self) -> Cleaned:
        """Check every item and every entry."""
        # In this order: an item added meanwhile is in a list but not among the items, which only costs a second check.
        # The other way round it would look like an item in no list.
        items = await self._items()
        queue, listed = Counter(await self._entries(self._keys.queue)), await self._listed()
        reclaimed = await self._reclaim(listed, strays=items.difference(queue, listed))
        suspects = [id for id, count in queue.items() if count > 1 or id not in items]
        dropped, surplus = await self._act("tidy", ids=suspects, at_once=_WALKS_AT_ONCE)
        return Cleaned(reclaimed.returned, reclaimed.dropped + dropped, surplus)

    async def _listed(self) -> set[bytes]:
        """Return the ids that are being processed or cleaned."""
        _, processing, cleaning = self._keys.lists
        return {*await self._entries(processing), *await self._entries(cleaning)}

    async def _entries(self, key: bytes) -> list[bytes]:
        """Return a whole list in one call: page by page, entries would shift between pages."""
        return cast(list[bytes], await self._router.call(key, "LRANGE", key, 0, -1))

    async def _items(self) -> set[bytes]:
        """Return the ids of all items that exist during the whole scan."""
        keys, cursor, ids = self._keys, b"0", set[bytes]()
        while True:
            command = ("SCAN", cursor, "MATCH", keys.data_pattern, "COUNT", _PAGE, "TYPE", "string")
            cursor, page = await self._router.call(keys.queue, *command)
            ids.update(key[len(keys.data) :] for key in page)
            if cursor == b"0":
                return ids

    async def _reclaim(self, listed: set[bytes], *, strays: set[bytes]) -> Cleaned:
        abandoned: list[bytes] = []
        for page in _chunks([*listed, *strays], _PAGE):
            abandoned += await self._run("reclaim", b"look", *page)
        if abandoned:
            await self._wait_grace()
        listed_ids = [id for id in abandoned if id in listed]
        stray_ids = [id for id in abandoned if id in strays]
        returned, dropped = await self._act("reclaim", b"listed", ids=listed_ids, at_once=_ACTS_AT_ONCE)
        returned_strays, _ = await self._act("reclaim", b"stray", ids=stray_ids, at_once=_WALKS_AT_ONCE)
        return Cleaned(returned + returned_strays, dropped)

    async def _wait_grace(self) -> None:
        await asyncio.sleep(self._grace_ms / 1000)

    async def _act(self, verb: Verb, *mode: bytes, ids: Sequence[bytes], at_once: int) -> tuple[int, int]:
        """Run a script over ``ids`` in chunks, and add up the two numbers in each answer."""
        answers = [await self._run(verb, *mode, *chunk) for chunk in _chunks(ids, at_once)]
        return sum(first for first, _ in answers), sum(second for _, second in answers)

    async def _run(self, verb: Verb, *args: bytes) -> list[Any]:
        args = (self._keys.prefix, *args)
        return cast(list[Any], await run_script(self._router, verb, keys=self._keys.lists, args=args))


def _chunks(values: Sequence[T], size: int) -> list[Sequence[T]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


# Forwarding: move items from a work queue into a queue of Penstock while producers still write to the
# former.


class Forwarded(NamedTuple):
    """The number of items enqueued, and of those whose id was already known."""

    queued: int = 0
    known: int = 0


async def forward(
    source: WorkQueue,
    target: Queue,
    *,
    payload: Callable[[Item], Any] = Item.json,
    lease: Duration = "1m",
    wait: Duration | None = None,
    task: str = "",
    **options: Unpack[JobOptions],
) -> Forwarded:
    """Lease item after item, enqueue each with its id as the job's id, then complete it.

    No item is lost: an item is completed after its job was accepted, and a clean returns the items of a dead forwarder.
    No item is doubled: a returned item finds its job by id, in whatever state, for as long as the job is kept
    (``result_ttl``, default 1 h; make it longer than the lease and the interval of cleans). So an id that is added
    again while its old job is kept counts as known; ``on_conflict`` can change that.

    This runs until it is cancelled, or until no item arrives for ``wait``. Several may run in parallel. ``payload``
    turns an item into a payload: its JSON, or ``lambda item: item.data`` for a queue with ``serde="raw"``. ``task`` and
    further options are those of ``Queue.enqueue``.

    Raise ``InvalidInput`` for an item that cannot become a job: it stays in the work queue, and is leased again when
    its lease is over and a clean has returned it.
    """
    queued = known = 0
    options.setdefault("on_conflict", "absent")
    while (item := await source.lease(lease, wait=wait)) is not None:
        try:
            options["id"] = item.id
            job = await target.enqueue(payload(item), task=task, **options)
        except InvalidInput as error:
            error.add_note(f"Item {item.id!r} stays in work queue {source.prefix!r}.")
            raise
        try:
            await source.complete(item)
        except StorageUnavailable:
            # The item is completed, or returns and finds its job. If the server is away, the next lease raises.
            pass
        if job.status == "queued":
            queued += 1
        else:
            known += 1
    return Forwarded(queued, known)
