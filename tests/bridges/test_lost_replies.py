"""A connection that goes after the server has acted: the call is repeated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.bridges.redis_work_queue import Item, WorkQueue
from penstock.errors import StorageUnavailable
from penstock.storage.valkey.commands import Again, Arg, Key, Router


class LosesReplies:
    """A router whose every first reply is lost; what it repeats is what it was told to."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def call(self, key: Key, *command: Arg, again: Again | None = None) -> Any:
        await self._router.call(key, *command)
        repeat: Sequence[Arg] = command if again is None else again()
        return await self._router.call(key, *repeat)


@pytest.fixture
async def losing(ours: WorkQueue, monkeypatch: pytest.MonkeyPatch) -> WorkQueue:
    # Once, so that the server knows the scripts.
    await ours.add_item(Item("data", "first"))
    item = await ours.lease("30s", wait=0)
    assert item is not None
    await ours.complete(item)
    router = await ours._server.router()

    async def lossy() -> Any:
        return LosesReplies(router)

    monkeypatch.setattr(ours._server, "router", lossy)
    return ours


async def test_an_item_is_added_once(losing: WorkQueue) -> None:
    await losing.add_unique_item(Item("data", "a"))
    await losing.add_item(Item("data", "b"))

    assert await losing.queue_len() == 2


async def test_a_possible_completion_is_never_reported_as_not_completed(losing: WorkQueue) -> None:
    await losing.add_item(Item("data", "a"))
    item = await losing.lease("30s", wait=0)
    # The repeat of a lease finds the queue empty: the item is held by nobody who knows, until the lease is over.
    assert item is None

    with pytest.raises(StorageUnavailable, match="'a'"):
        await losing.complete(Item(b"", "a"))
    assert await losing.lengths() == (0, 0)
