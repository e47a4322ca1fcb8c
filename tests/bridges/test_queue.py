"""Our side alone: what each operation does, and leaves on the wire."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
import redis
import redis.asyncio

from penstock import InvalidInput, InvalidName, InvalidOption, SerializationError
from penstock.bridges.redis_work_queue import Cleaned, Item, WorkQueue
from penstock.errors import StorageError, StorageFull
from tests.bridges.polling import clean_until_something, until_blocked
from tests.servers import ValkeyServer


async def test_an_item_is_on_the_wire_as_the_layout_says(
    ours: WorkQueue, db: redis.Redis, prefix: str
) -> None:
    await ours.add_item(Item("data", "a"))
    await ours.add_item(Item("data", "b"))

    assert db.lrange(f"{prefix}:queue", 0, -1) == ["b", "a"]
    assert db.get(f"{prefix}:item:a") == "data"

    item = await ours.lease("30s", wait=0)

    assert item is not None
    assert db.lrange(f"{prefix}:queue", 0, -1) == ["b"]
    assert db.lrange(f"{prefix}:processing", 0, -1) == ["a"]
    for lease_key in (f"{prefix}:leased_by_session:a", f"{prefix}:lease:a"):
        assert db.get(lease_key) == item.lease
        assert 29_000 < db.pttl(lease_key) <= 30_000

    assert await ours.complete(item)
    assert sorted(db.keys(f"{prefix}:*")) == [f"{prefix}:item:b", f"{prefix}:queue"]


async def test_items_come_in_the_order_they_were_added(ours: WorkQueue) -> None:
    ids = [str(number) for number in range(1200)]
    assert await ours.add_items(Item(b"", id) for id in ids) == [True] * 1200

    leased = [await ours.lease("30s", wait=0) for _ in ids]

    assert [item.id for item in leased if item is not None] == ids


async def test_items_of_one_call_are_checked_against_each_other(ours: WorkQueue) -> None:
    assert await ours.add_items([Item("1", "a"), Item("2", "b"), Item("3", "a")]) == [True, True, False]
    assert await ours.queue_len() == 2


async def test_data_may_be_any_bytes(ours: WorkQueue) -> None:
    data = bytes(range(256))
    await ours.add_item(Item(data))

    item = await ours.lease("30s", wait=0)

    assert item is not None
    assert item.data == data


async def test_an_id_may_be_any_text(ours: WorkQueue) -> None:
    id = " {ünï}:*?[a]\\ \n"
    await ours.add_item(Item("data", id))

    item = await ours.lease("30s", wait=0)

    assert item is not None
    assert item.id == id
    assert await ours.complete(item)


async def test_a_lease_without_waiting_finds_nothing_in_an_empty_queue(ours: WorkQueue) -> None:
    assert await ours.lease("30s", wait=0) is None


async def test_a_lease_call_waits_no_longer_than_asked(ours: WorkQueue) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()

    assert await ours.lease("30s", wait="200ms") is None
    assert 0.2 <= loop.time() - start < 2


async def test_waiting_leases_get_an_item_each(ours: WorkQueue, db: redis.Redis) -> None:
    waiting = [asyncio.create_task(ours.lease("30s", wait="30s")) for _ in range(5)]
    await until_blocked(db, count=5)

    await ours.add_items(Item(b"", str(number)) for number in range(5))

    items = await asyncio.gather(*waiting)
    assert sorted(item.id for item in items if item is not None) == ["0", "1", "2", "3", "4"]


async def test_complete_is_true_for_one_of_many_concurrent_callers(ours: WorkQueue) -> None:
    await ours.add_item(Item("data", "a"))
    item = await ours.lease("30s", wait=0)
    assert item is not None

    answers = await asyncio.gather(*(ours.complete(item) for _ in range(20)))

    assert sorted(answers) == [False] * 19 + [True]


async def test_a_lease_that_is_over_counts_until_a_cleaner_has_seen_it(ours: WorkQueue) -> None:
    await ours.add_items([Item("1", "a"), Item("2", "b")])
    first, second = await ours.lease("1ms", wait=0), await ours.lease("1ms", wait=0)
    assert first is not None
    assert second is not None

    assert await ours.complete(first) is True
    assert (await clean_until_something(ours)).returned == 1
    assert await ours.complete(second) is False
    assert await ours.lengths() == (1, 0)


async def test_the_former_holder_does_not_complete_for_the_present_one(ours: WorkQueue) -> None:
    await ours.add_item(Item("data", "a"))
    former = await ours.lease("1ms", wait=0)
    await clean_until_something(ours)
    present = await ours.lease("30s", wait=0)
    assert former is not None
    assert present is not None

    assert await ours.complete(former) is False
    assert await ours.complete(present) is True


async def test_an_item_that_came_again_is_not_completed_by_a_holder_of_the_one_before(
    ours: WorkQueue,
) -> None:
    await ours.add_item(Item("old", "a"))
    slow = await ours.lease("1ms", wait=0)
    await clean_until_something(ours)
    quick = await ours.lease("30s", wait=0)
    assert slow is not None
    assert quick is not None
    await ours.complete(quick)
    await ours.add_item(Item("new", "a"))

    assert await ours.complete(slow) is False

    item = await ours.lease("30s", wait=0)
    assert item == Item("new", "a")


async def test_an_item_built_by_hand_completes_the_lease_of_any_holder(ours: WorkQueue) -> None:
    await ours.add_item(Item("data", "a"))
    await ours.lease("30s", wait=0)

    assert await ours.complete(Item(b"", "a")) is True


async def test_an_item_that_was_not_leased_is_not_completed(ours: WorkQueue) -> None:
    await ours.add_item(Item("data", "a"))

    assert await ours.complete(Item("data", "a")) is False
    assert await ours.queue_len() == 1


async def test_a_cancelled_lease_loses_nothing(ours: WorkQueue, db: redis.Redis) -> None:
    waiting = [asyncio.create_task(ours.lease("30s")) for _ in range(10)]
    await until_blocked(db, count=10)
    adding = asyncio.create_task(ours.add_items(Item(b"", str(number)) for number in range(10)))
    for task in waiting[::2]:
        task.cancel()
    await adding

    leased = {id for task in waiting if (id := await _leased(task)) is not None}
    async with asyncio.timeout(20):
        while len(leased) < 10:
            await ours.light_clean(grace=0)
            item = await ours.lease("30s", wait=0)
            if item is not None:
                leased.add(item.id)

    assert leased == {str(number) for number in range(10)}


@pytest.mark.parametrize("taken", [False, True])
async def test_an_item_that_a_cleaner_puts_back_before_the_mark_is_handed_out_once(
    ours: WorkQueue, db: redis.Redis, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    move_next, others = ours._move_next, []

    async def move_and_be_overtaken(seconds: float) -> bytes:
        moved = await move_next(seconds)
        if moved:
            assert (await ours.light_clean(grace=0)).returned == 1
            if taken:
                others.append(await ours.lease("30s", wait=0))
        return moved

    monkeypatch.setattr(ours, "_move_next", move_and_be_overtaken)
    waiting = asyncio.create_task(ours.lease("30s", wait="1s"))
    await until_blocked(db)
    await ours.add_item(Item("data", "a"))

    mine = await waiting
    leased = [item for item in [mine, *others] if item is not None]
    assert leased == [Item("data", "a")]
    assert await ours.lengths() == (0, 1)
    assert await ours.complete(leased[0]) is True


def test_the_sync_face_does_the_same(valkey_url: str, prefix: str) -> None:
    with WorkQueue(valkey_url, prefix).sync as queue:
        assert queue.add_item(Item("1", "a")) is True
        assert queue.add_items([Item("1", "a"), Item("2", "b")]) == [False, True]
        queue.add_unique_item(Item("3", "c"))
        assert (queue.queue_len(), queue.processing(), queue.lengths()) == (3, 0, (3, 0))

        item = queue.lease("30s", wait="1s")

        assert item == Item("1", "a")
        assert queue.complete(item) is True
        assert queue.complete(item) is False
        assert queue.light_clean(grace=0) == Cleaned()
        assert queue.deep_clean(grace=0) == Cleaned()
        assert prefix in repr(queue)
        assert queue.prefix == prefix


def test_a_missing_package_is_named_with_its_remedy() -> None:
    code = "import sys; sys.modules['hiredis'] = None; import penstock.bridges.redis_work_queue"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert run.returncode == 1
    assert "penstock[valkey]" in run.stderr.splitlines()[-1]


def test_one_queue_serves_several_event_loops(valkey_url: str, prefix: str) -> None:
    queue = WorkQueue(valkey_url, prefix)

    asyncio.run(queue.add_item(Item("data", "a")))

    assert asyncio.run(queue.lease("30s")) == Item("data", "a")


@pytest.mark.parametrize("decode_responses", [False, True])
async def test_a_client_passed_in_serves_as_well(
    valkey_url: str, prefix: str, decode_responses: bool
) -> None:
    url = valkey_url.replace("valkey://", "redis://")
    async with redis.asyncio.Redis.from_url(url, decode_responses=decode_responses) as client:
        queue = WorkQueue(client, prefix)
        waiting = asyncio.create_task(queue.lease("1ms", wait="30s"))
        await queue.add_item(Item(b"\xff", "a"))
        item = await waiting
        assert item == Item(b"\xff", "a")
        assert (await clean_until_something(queue, deep=True)).returned == 1
        assert await queue.lengths() == (1, 0)
        await queue.close()
        assert await client.ping()


def test_what_cannot_be_a_server_is_refused_at_the_door(prefix: str) -> None:
    with pytest.raises(InvalidOption, match=r"redis\.asyncio"), redis.Redis() as client:
        WorkQueue(client, prefix)
    with pytest.raises(InvalidOption, match="scheme"):
        WorkQueue("http://localhost", prefix)
    with pytest.raises(InvalidName, match="empty"):
        WorkQueue("valkey://localhost", "")


def test_what_cannot_be_an_item_is_refused_at_the_door() -> None:
    with pytest.raises(InvalidInput, match="from_json"):
        Item({"a": 1})  # type: ignore[arg-type]
    with pytest.raises(InvalidName):
        Item(b"", "")
    with pytest.raises(InvalidName):
        Item(b"", "\ud800")
    with pytest.raises(SerializationError):
        Item.from_json(float("nan"))
    with pytest.raises(SerializationError):
        Item("{").json()


async def test_a_lease_of_no_time_is_refused(ours: WorkQueue) -> None:
    with pytest.raises(InvalidOption, match="lease must be longer than 0"):
        await ours.lease(0)


async def test_a_full_server_takes_nothing_new_and_lets_work_go_on(prefix: str) -> None:
    with ValkeyServer() as server, server.client() as client:
        queue = WorkQueue(server.url, prefix)
        await queue.add_items([Item("data", "a"), Item("data", "b")])
        client.config_set("maxmemory", 1)

        with pytest.raises(StorageFull):
            await queue.add_item(Item("data", "c"))
        item = await queue.lease("1ms", wait=0)
        assert item is not None
        assert (await clean_until_something(queue)).returned == 1
        again = await queue.lease("30s", wait=0)
        assert again is not None
        assert await queue.complete(again)
        assert await queue.lengths() == (1, 0)
        await queue.close()


async def test_a_key_of_another_kind_is_reported(ours: WorkQueue, db: redis.Redis, prefix: str) -> None:
    db.set(f"{prefix}:queue", "not a list")

    with pytest.raises(StorageError, match="WRONGTYPE"):
        await ours.add_item(Item("data"))


async def test_scripts_are_sent_again_to_a_server_that_lost_them(ours: WorkQueue, db: redis.Redis) -> None:
    await ours.add_item(Item("data", "a"))
    db.script_flush()

    item = await ours.lease("30s", wait=0)
    assert item is not None
    assert await ours.complete(item)


async def _leased(task: asyncio.Task[Item | None]) -> str | None:
    """The id it got; one that still waits is cancelled."""
    await asyncio.wait([task], timeout=0.2)
    task.cancel()
    await asyncio.wait([task])
    item = None if task.cancelled() else task.result()
    return None if item is None else item.id
