"""The published Python and Node clients on one side, ours on the other, on one queue."""

from __future__ import annotations

import asyncio
import json

import pytest
import redis

from penstock.bridges.redis_work_queue import Item, Lengths, WorkQueue
from tests.bridges.peers import Peer
from tests.bridges.polling import until_blocked


async def test_what_they_add_we_lease_and_complete(ours: WorkQueue, theirs: Peer) -> None:
    theirs.ask("add", "a", '{"n": 1}')
    theirs.ask("add", "b", "grün")

    first = await ours.lease("30s", wait=0)
    second = await ours.lease("30s", wait=0)

    assert first is not None
    assert second is not None
    assert (first.id, first.json()) == ("a", {"n": 1})
    assert (second.id, second.data) == ("b", "grün".encode())
    assert theirs.ask("lengths") == [0, 2]
    assert await ours.complete(first)
    assert await ours.complete(second)
    assert theirs.ask("lengths") == [0, 0]


async def test_what_we_add_they_lease_and_complete(
    ours: WorkQueue, theirs: Peer, db: redis.Redis, prefix: str
) -> None:
    await ours.add_item(Item.from_json({"n": 1}, "a"))
    await ours.add_unique_item(Item("grün", "b"))

    first, second = theirs.ask("lease", 30), theirs.ask("lease", 30)

    assert (first[0], json.loads(first[1])) == ("a", {"n": 1})
    assert second == ["b", "grün"]
    assert await ours.lengths() == (0, 2)
    assert theirs.ask("complete", "a") is True
    assert theirs.ask("complete", "b") is True
    assert await ours.lengths() == (0, 0)
    assert db.keys(f"{prefix}:*") == []


async def test_lengths_are_the_same_to_both(ours: WorkQueue, theirs: Peer) -> None:
    await ours.add_items([Item(b"", str(number)) for number in range(5)])
    theirs.ask("add", "5", "data")
    await ours.lease("30s", wait=0)
    theirs.ask("lease", 30)

    assert await ours.lengths() == Lengths(queue=4, processing=2)
    assert theirs.ask("lengths") == [4, 2]


async def test_a_waiting_lease_of_ours_gets_what_they_add(
    ours: WorkQueue, theirs: Peer, db: redis.Redis
) -> None:
    waiting = asyncio.create_task(ours.lease("30s", wait="30s"))
    await until_blocked(db)

    theirs.ask("add", "late", "data")

    item = await waiting
    assert item is not None
    assert item.id == "late"
    assert await ours.complete(item)


async def test_a_waiting_lease_of_theirs_gets_what_we_add(
    ours: WorkQueue, theirs: Peer, db: redis.Redis
) -> None:
    theirs.tell("lease_and_wait", 30, 30)
    await until_blocked(db)

    await ours.add_item(Item("data", "late"))

    assert theirs.answer() == ["late", "data"]


async def test_their_cleaner_leaves_what_we_hold(ours: WorkQueue, theirs: Peer) -> None:
    await ours.add_item(Item("data", "held"))
    item = await ours.lease("30s", wait=0)
    assert item is not None

    theirs.ask("light_clean")

    assert theirs.ask("lengths") == [0, 1]
    assert await ours.complete(item)


async def test_our_cleaners_leave_what_they_hold(ours: WorkQueue, theirs: Peer) -> None:
    theirs.ask("add", "held", "data")
    theirs.ask("lease", 30)

    assert await ours.light_clean(grace=0) == (0, 0, 0)
    assert await ours.deep_clean(grace=0) == (0, 0, 0)
    assert theirs.ask("complete", "held") is True


@pytest.mark.parametrize("first", ["ours", "theirs"])
async def test_only_the_first_of_both_completes(ours: WorkQueue, theirs: Peer, first: str) -> None:
    theirs.ask("add", "once", "data")
    item = await ours.lease("30s", wait=0)
    assert item is not None

    if first == "ours":
        answers = [await ours.complete(item), theirs.ask("complete", "once")]
    else:
        answers = [theirs.ask("complete", "once"), await ours.complete(item)]

    assert answers == [True, False]


@pytest.mark.parametrize("again", ["ours", "theirs"])
async def test_an_item_added_again_after_they_completed_our_lease_is_handed_out(
    ours: WorkQueue, theirs: Peer, again: str
) -> None:
    await ours.add_item(Item("old", "a"))
    old = await ours.lease("30s", wait=0)
    assert old is not None
    assert theirs.ask("complete", "a") is True
    if again == "ours":
        assert await ours.add_item(Item("new", "a"))
    else:
        theirs.ask("add", "a", "new")

    item = await ours.lease("30s", wait=0)

    assert item == Item("new", "a")
    assert await ours.complete(old) is False
    assert await ours.complete(item) is True
    assert await ours.lengths() == (0, 0)


async def test_we_add_no_second_one_to_what_they_added(ours: WorkQueue, theirs: Peer) -> None:
    theirs.ask("add", "same", "theirs")

    assert await ours.add_item(Item("ours", "same")) is False
    assert theirs.ask("lease", 30) == ["same", "theirs"]
    assert await ours.add_item(Item("ours", "same")) is False
    theirs.ask("complete", "same")
    assert await ours.add_item(Item("ours", "same")) is True


async def test_an_id_they_added_twice_is_handed_out_once(ours: WorkQueue, theirs: Peer) -> None:
    theirs.ask("add", "twice", "data")
    theirs.ask("add", "twice", "data")
    assert await ours.queue_len() == 2

    item = await ours.lease("30s", wait=0)

    assert item is not None
    assert await ours.lease("30s", wait=0) is None
    assert await ours.complete(item)
    assert await ours.lengths() == (0, 0)


async def test_what_they_completed_after_an_early_clean_is_not_ours_to_complete(
    ours: WorkQueue, theirs: Peer, db: redis.Redis, prefix: str
) -> None:
    theirs.ask("add", "item", "data")
    theirs.ask("lease", 30)
    db.delete(f"{prefix}:leased_by_session:item")
    theirs.ask("light_clean")
    item = await ours.lease("30s", wait=0)
    assert item is not None

    assert theirs.ask("complete", "item") is True
    assert await ours.complete(item) is False
    assert await ours.lengths() == (0, 0)
