"""Workers that are killed while they hold a lease, and everybody at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
import redis

from penstock.bridges.redis_work_queue import Item, WorkQueue
from tests.bridges.peers import KINDS, Peer
from tests.bridges.polling import clean_until_something
from tests.servers import wait_until

StartPeer = Callable[[str], Peer]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_killed_worker_of_theirs_held_comes_back_by_our_clean(
    ours: WorkQueue, start_peer: StartPeer, kind: str
) -> None:
    await ours.add_item(Item("data", "held"))
    theirs = start_peer(kind)
    assert theirs.ask("lease", 1) == ["held", "data"]
    theirs.kill()

    assert await ours.light_clean(grace=0) == (0, 0, 0)  # its lease is not over yet
    assert (await clean_until_something(ours)).returned == 1
    item = await ours.lease("30s", wait=0)
    assert item == Item("data", "held")
    assert await ours.complete(item)
    assert await ours.lengths() == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_killed_worker_of_ours_held_comes_back_by_their_clean(
    ours: WorkQueue, start_peer: StartPeer, kind: str
) -> None:
    theirs, worker = start_peer(kind), start_peer("ours")
    theirs.ask("add", "held", "data")
    assert worker.ask("lease", 1) == ["held", "data"]
    worker.kill()

    theirs.ask("light_clean")
    assert theirs.ask("lengths") == [0, 1]  # its lease is not over yet
    async with asyncio.timeout(20):
        while theirs.ask("lengths")[1]:
            theirs.ask("light_clean")
    leased = [theirs.ask("lease", 30)]
    if leased[0][0] == "0":  # the Node client pushes an id of no item first, with each that it puts back
        leased = [theirs.ask("lease", 30)]
    assert leased == [["held", "data"]]
    assert theirs.ask("complete", "held") is True


@pytest.mark.parametrize("deep", [False, True])
async def test_what_a_killed_worker_of_ours_held_comes_back_by_our_clean(
    ours: WorkQueue, start_peer: StartPeer, deep: bool
) -> None:
    worker = start_peer("ours")
    await ours.add_item(Item("data", "held"))
    assert worker.ask("lease", 1) == ["held", "data"]
    worker.kill()

    assert await ours.deep_clean(grace=0) == (0, 0, 0)
    assert (await clean_until_something(ours, deep=deep)).returned == 1
    assert await ours.lengths() == (1, 0)


@pytest.mark.timeout(180)
async def test_workers_and_cleaners_of_both_sides_complete_every_item_together(
    ours: WorkQueue, start_peer: StartPeer, db: redis.Redis, prefix: str
) -> None:
    """Workers, a cleaner and a producer of each kind; one worker of each is killed holding an item, one working."""
    ids = [f"item-{number}" for number in range(600)]
    stop, runs = f"{prefix}-stop", f"{prefix}-runs"
    kinds = [*KINDS, "ours"]
    await ours.add_items(Item("data", id) for id in ids[:60])
    holders, doomed, workers, cleaners = ([start_peer(kind) for kind in kinds] for _ in range(4))
    for holder in holders:
        assert holder.ask("lease", 1) is not None
    for worker in [*workers, *doomed]:
        worker.tell("work", 1, stop, runs)
    for cleaner in cleaners:
        cleaner.tell("clean", stop)

    producers = [start_peer(kind) for kind in KINDS]
    for number, id in enumerate(ids[60:]):
        if number == 100:
            for victim in [*holders, *doomed]:
                victim.kill()
        match number % 3:
            case 2:
                await ours.add_item(Item("data", id))
            case which:
                producers[which].ask("add", id, "data")
    wait_until(lambda: not db.keys(f"{prefix}:item:*"), what="every item completed", timeout_s=90)
    db.set(stop, 1)
    told = {kind: worker.answer() for kind, worker in zip(kinds, workers, strict=True)}
    for cleaner in cleaners:
        cleaner.answer()

    assert set(db.hkeys(runs)) == set(ids), "every item was run, those of the killed by others"
    assert all(told.values()), "every kind had a share"
    assert max(Counter(told["ours"]).values()) == 1
    await ours.deep_clean(grace=0)
    assert await ours.lengths() == (0, 0)
    assert [producer.ask("lengths") for producer in producers] == [[0, 0], [0, 0]]
    assert db.keys(f"{prefix}:item:*") == []
    db.delete(stop, runs)
