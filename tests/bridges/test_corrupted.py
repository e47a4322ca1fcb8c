"""Lists and keys that do not agree, as crashes in the middle of the published clients' steps leave them."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from penstock.bridges.redis_work_queue import Cleaned, Item, WorkQueue
from penstock.bridges.redis_work_queue.layout import Cleaner
from tests.bridges.peers import Peer


class Wire:
    """The keys of a queue, to be written by hand."""

    def __init__(self, db: redis.Redis, prefix: str) -> None:
        self._db = db
        self._prefix = prefix

    def item(self, *ids: str) -> None:
        for id in ids:
            self._db.set(f"{self._prefix}:item:{id}", f"data of {id}")

    def entry(self, name: str, *ids: str) -> None:
        self._db.lpush(f"{self._prefix}:{name}", *ids)

    def entries(self, name: str) -> list[Any]:
        answer: list[Any] = self._db.lrange(f"{self._prefix}:{name}", 0, -1)
        return answer

    def lease(self, id: str, *, name: str = "leased_by_session") -> None:
        self._db.set(f"{self._prefix}:{name}:{id}", "somebody", ex=30)

    def end_lease(self, id: str) -> None:
        self._db.delete(f"{self._prefix}:leased_by_session:{id}", f"{self._prefix}:lease:{id}")


@pytest.fixture
def wire(db: redis.Redis, prefix: str) -> Wire:
    return Wire(db, prefix)


async def drained(queue: WorkQueue) -> list[str]:
    """The ids of everything that can be leased and completed, in order."""
    ids = []
    while (item := await queue.lease("30s", wait=0)) is not None:
        assert item.data == f"data of {item.id}".encode()
        assert await queue.complete(item)
        ids.append(item.id)
    return ids


async def test_ids_without_an_item_are_stepped_over_and_removed(ours: WorkQueue, wire: Wire) -> None:
    wire.item("a")
    wire.entry("queue", *(f"ghost-{number}" for number in range(3000)), "a", "ghost")

    assert await drained(ours) == ["a"]
    assert await ours.lengths() == (0, 0)


async def test_a_waiting_lease_steps_over_ids_without_an_item(ours: WorkQueue, wire: Wire) -> None:
    wire.entry("queue", "ghost")

    assert await ours.lease("30s", wait="100ms") is None
    assert await ours.lengths() == (0, 0)


async def test_a_deep_clean_removes_ids_without_an_item_from_all_lists(ours: WorkQueue, wire: Wire) -> None:
    wire.item("a")
    wire.entry("queue", "ghost-1", "a", "ghost-2", "ghost-1")
    wire.entry("processing", "ghost-3")
    wire.entry("cleaning", "ghost-4", "ghost-3")

    assert await ours.deep_clean(grace=0) == Cleaned(dropped=6)
    assert (wire.entries("queue"), wire.entries("processing"), wire.entries("cleaning")) == (["a"], [], [])


async def test_an_item_in_no_list_comes_back_by_a_deep_clean_only(ours: WorkQueue, wire: Wire) -> None:
    wire.item("a")

    assert await ours.light_clean(grace=0) == Cleaned()
    assert await ours.lease("30s", wait=0) is None
    assert await ours.deep_clean(grace=0) == Cleaned(returned=1)
    assert await ours.deep_clean(grace=0) == Cleaned()
    assert await drained(ours) == ["a"]


async def test_an_item_in_no_list_is_left_to_the_holder_of_its_lease(ours: WorkQueue, wire: Wire) -> None:
    wire.item("a")
    wire.lease("a")

    assert await ours.deep_clean(grace=0) == Cleaned()
    wire.end_lease("a")
    assert await ours.deep_clean(grace=0) == Cleaned(returned=1)


async def test_an_item_being_processed_without_a_lease_comes_back(ours: WorkQueue, wire: Wire) -> None:
    wire.item("a", "b")
    wire.entry("processing", "a", "b")
    wire.lease("b")

    assert await ours.light_clean(grace=0) == Cleaned(returned=1)
    assert (wire.entries("queue"), wire.entries("processing")) == (["a"], ["b"])
    assert await drained(ours) == ["a"]


@pytest.mark.parametrize("name", ["leased_by_session", "lease"])
async def test_a_lease_counts_under_both_names(ours: WorkQueue, wire: Wire, name: str) -> None:
    wire.item("a")
    wire.entry("processing", "a")
    wire.lease("a", name=name)

    assert await ours.light_clean(grace=0) == Cleaned()
    assert await ours.deep_clean(grace=0) == Cleaned()


@pytest.mark.parametrize("name", ["leased_by_session", "lease"])
async def test_half_a_lease_of_ours_holds_no_item(
    ours: WorkQueue, db: redis.Redis, prefix: str, name: str
) -> None:
    await ours.add_item(Item("data", "a"))
    assert await ours.lease("30s", wait=0) is not None
    db.delete(f"{prefix}:{name}:a")

    assert await ours.light_clean(grace=0) == Cleaned(returned=1)


async def test_an_item_put_back_goes_to_the_end_of_the_queue(ours: WorkQueue, wire: Wire) -> None:
    wire.item("old", "next")
    wire.entry("queue", "next")
    wire.entry("processing", "old")

    await ours.light_clean(grace=0)

    assert await drained(ours) == ["next", "old"]


async def test_an_item_listed_several_times_comes_once(ours: WorkQueue, wire: Wire) -> None:
    wire.item("a", "b")
    wire.entry("queue", "a", "b", "a", "a")
    wire.entry("processing", "b", "b")

    assert await drained(ours) == ["a", "b"]
    assert await ours.lengths() == (0, 0)


async def test_a_deep_clean_keeps_the_oldest_of_several_entries(ours: WorkQueue, wire: Wire) -> None:
    wire.item("a", "b")
    wire.entry("queue", "a", "b", "a", "b", "a")

    assert await ours.deep_clean(grace=0) == Cleaned(surplus=3)
    assert wire.entries("queue") == ["b", "a"]


async def test_an_item_that_waits_and_is_listed_as_processed_waits_once(ours: WorkQueue, wire: Wire) -> None:
    wire.item("a")
    wire.entry("queue", "a")
    wire.entry("processing", "a", "a")

    assert await ours.light_clean(grace=0) == Cleaned()
    assert (wire.entries("queue"), wire.entries("processing")) == (["a"], [])


async def test_a_light_clean_does_not_walk_along_a_long_queue(ours: WorkQueue, wire: Wire) -> None:
    wire.item("a")
    wire.entry("queue", "a", *(f"ghost-{number}" for number in range(10_000)))
    wire.entry("processing", "a")

    assert await ours.light_clean(grace=0) == Cleaned(returned=1)
    assert wire.entries("queue").count("a") == 2
    assert (await ours.deep_clean(grace=0)).surplus == 1
    assert await drained(ours) == ["a"]


async def test_two_concurrent_cleaners_return_an_item_once(
    ours: WorkQueue, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire.item("a", "stray")
    wire.entry("processing", "a")
    cleaned = []

    async def let_another_first(cleaner: Cleaner) -> None:
        monkeypatch.undo()
        cleaned.append(await ours.deep_clean(grace=0))

    monkeypatch.setattr(Cleaner, "_wait_grace", let_another_first)

    assert await ours.deep_clean() == Cleaned()
    assert cleaned == [Cleaned(returned=2)]
    assert sorted(wire.entries("queue")) == ["a", "stray"]


async def test_a_waiting_item_whose_lease_lives_is_held_back_until_it_is_over(
    ours: WorkQueue, wire: Wire
) -> None:
    wire.item("a")
    wire.entry("queue", "a")
    wire.lease("a")

    assert await ours.lease("30s", wait=0) is None
    assert (wire.entries("queue"), wire.entries("processing")) == ([], ["a"])
    wire.end_lease("a")
    assert await ours.light_clean(grace=0) == Cleaned(returned=1)
    assert await drained(ours) == ["a"]


async def test_what_a_cleaner_had_in_hand_when_it_died_comes_back(ours: WorkQueue, wire: Wire) -> None:
    wire.item("a", "b", "c", "d")
    wire.entry("cleaning", "a", "b", "c", "d")
    wire.entry("processing", "b")
    wire.entry("queue", "c")
    wire.lease("d")

    assert await ours.light_clean(grace=0) == Cleaned(returned=2)
    assert wire.entries("cleaning") == ["d"]
    assert sorted(await drained(ours)) == ["a", "b", "c"]
    wire.end_lease("d")
    assert await ours.light_clean(grace=0) == Cleaned(returned=1)


async def test_entries_that_are_not_text_do_not_stop_a_reader(
    ours: WorkQueue, db: redis.Redis, prefix: str, wire: Wire
) -> None:
    wire.item("a")
    db.lpush(f"{prefix}:queue", b"\xff\xfe", "a")
    db.lpush(f"{prefix}:processing", b"\xff")

    assert await ours.deep_clean(grace=0) == Cleaned(dropped=2)
    assert await drained(ours) == ["a"]


@pytest.mark.parametrize("id", [b"", b"\xff\xfe"])
async def test_an_item_with_an_id_that_we_would_not_give_is_worked_off(
    ours: WorkQueue, db: redis.Redis, prefix: str, id: bytes
) -> None:
    db.set(prefix.encode() + b":item:" + id, "data")
    assert await ours.deep_clean(grace=0) == Cleaned(returned=1)

    item = await ours.lease("30s", wait=0)

    assert item is not None
    assert item.data == b"data"
    assert await ours.complete(item)
    assert await ours.lengths() == (0, 0)


async def test_a_deep_clean_keeps_to_its_own_keys(ours: WorkQueue, db: redis.Redis, prefix: str) -> None:
    star = WorkQueue(ours._server._target, f"{prefix}*?[a-z]")
    db.set(f"{prefix}*?[a-z]:item:own", "data")
    db.set(f"{prefix}-other:item:foreign", "data")
    db.set(f"{prefix}*?k:item:foreign", "data")
    db.hset(f"{prefix}*?[a-z]:item:hash", "field", "value")

    assert await star.deep_clean(grace=0) == Cleaned(returned=1)
    item = await star.lease("30s", wait=0)
    assert item is not None
    assert item.id == "own"
    await star.close()


@pytest.mark.parametrize("deep", [False, True])
async def test_a_clean_leaves_what_is_marked_within_the_grace(
    ours: WorkQueue, wire: Wire, monkeypatch: pytest.MonkeyPatch, deep: bool
) -> None:
    """Their lease takes two steps, the move and the mark; a clean may look in between."""
    wire.item("a")
    wire.entry("processing", "a")

    async def mark(cleaner: Cleaner) -> None:
        wire.lease("a")

    monkeypatch.setattr(Cleaner, "_wait_grace", mark)

    assert await (ours.deep_clean if deep else ours.light_clean)() == Cleaned()
    assert (wire.entries("queue"), wire.entries("processing")) == ([], ["a"])


@pytest.mark.parametrize("deep", [False, True])
async def test_a_clean_leaves_what_is_being_completed_at_its_second_look(
    ours: WorkQueue, wire: Wire, db: redis.Redis, prefix: str, monkeypatch: pytest.MonkeyPatch, deep: bool
) -> None:
    """Their completion takes two steps, and after the first the item is in no list and still there."""
    wire.item("a")
    wire.entry("processing", "a")

    async def complete_halfway(cleaner: Cleaner) -> None:
        db.lrem(f"{prefix}:processing", 0, "a")

    monkeypatch.setattr(Cleaner, "_wait_grace", complete_halfway)

    assert await (ours.deep_clean if deep else ours.light_clean)() == Cleaned()
    assert wire.entries("queue") == []


async def test_a_deep_clean_leaves_what_is_added_or_completed_within_the_grace(
    ours: WorkQueue, wire: Wire, db: redis.Redis, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Node client writes the data and then the entry, and removes the entry and then the data."""
    wire.item("added", "completed")

    async def second_step(cleaner: Cleaner) -> None:
        wire.entry("queue", "added")
        db.delete(f"{prefix}:item:completed")

    monkeypatch.setattr(Cleaner, "_wait_grace", second_step)

    assert await ours.deep_clean() == Cleaned()
    assert wire.entries("queue") == ["added"]


@pytest.mark.parametrize("deep", [False, True])
async def test_what_their_cleaner_corrupts_ours_mends(
    ours: WorkQueue, theirs: Peer, wire: Wire, deep: bool
) -> None:
    wire.item("a", "b")
    wire.entry("processing", "a", "ghost", "b", "b")

    theirs.ask("light_clean")  # puts the ghost back too; the Node one also pushes an id "0" with each
    if deep:
        await ours.deep_clean(grace=0)
        assert await ours.lengths() == (2, 0)

    assert sorted(await drained(ours)) == ["a", "b"]
    assert theirs.ask("lengths") == [0, 0]
