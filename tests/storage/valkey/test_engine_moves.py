"""The Valkey engine on a cluster that moves a queue's slot to another node: key by key, and in one step."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import RedisCluster

from penstock.core.job import NewJob
from penstock.core.lifecycle import State
from penstock.core.outcome import Complete
from penstock.storage.valkey.engine import ValkeyStorage
from penstock.storage.valkey.routers import slot_of
from penstock.storage.values import Held, Settlement, Take
from tests.servers import HOST, SlotMove, ValkeyCluster, ValkeyServer

pytestmark = pytest.mark.cluster

QUEUE = "mail"
TAKE = Take("worker", 10, 60_000)
ROUTERS = ["ours", "client"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster() as running:
        yield running


@asynccontextmanager
async def opened(
    cluster: ValkeyCluster, router: str, *, keeps_connections: bool = True
) -> AsyncIterator[ValkeyStorage]:
    """A store with a namespace of its own, over our router or over a client of redis-py, which closes all of its
    connections at every fifth redirect unless it is told to keep them."""
    name = f"t{uuid.uuid4().hex[:12]}"
    if router == "ours":
        store = ValkeyStorage.from_url(cluster.url, namespace=name)
        await store.open()
        yield store
        await store.close()
        return
    steps = 1000 if keeps_connections else 5
    async with RedisCluster(host=HOST, port=cluster.nodes[0].port, reinitialize_steps=steps) as client:
        store = ValkeyStorage(client, namespace=name)
        await store.open()
        yield store
        await store.close()


def slot_in(store: ValkeyStorage) -> int:
    return slot_of(store._calls.keys.of(QUEUE))


def elsewhere(cluster: ValkeyCluster, slot: int) -> ValkeyServer:
    return next(node for node in cluster.nodes if not node.owns(slot))


async def claim_all(store: ValkeyStorage, count: int) -> list[Any]:
    return (await store.claim(QUEUE, Take("worker", count, 60_000))).leases


async def settle_all(store: ValkeyStorage, leases: list[Any]) -> int:
    outcomes = [Settlement(lease.id, lease.token, Complete(b"done")) for lease in leases]
    return sum(answer.applied for answer in (await store.settle(QUEUE, outcomes)).answers)


async def check_whole(store: ValkeyStorage, *, epoch: str) -> None:
    """Nothing is wrong with the records, and the log is dense and of one life."""
    assert (await store.check(QUEUE)).problems == {}
    page = await store.read_events(QUEUE, after=0, limit=1_000_000)
    assert [event.seq for event in page.events] == list(range(1, page.last + 1))
    assert page.epoch == epoch


@pytest.mark.parametrize("router", ROUTERS)
async def test_no_call_sees_a_part_of_a_queue_that_is_moved_key_by_key(
    cluster: ValkeyCluster, router: str
) -> None:
    async with opened(cluster, router) as store, asyncio.timeout(60):
        await store.enqueue(QUEUE, [NewJob(f"{i}", b"x", notify="ear") for i in range(30)])
        leases = await claim_all(store, 10)
        await settle_all(store, leases[:5])
        epoch = (await store.read_events(QUEUE, after=0)).epoch
        move = SlotMove(cluster, slot_in(store), elsewhere(cluster, slot_in(store)))
        await asyncio.to_thread(move.begin)
        new = asyncio.create_task(store.enqueue(QUEUE, [NewJob("new")]))
        claimed = asyncio.create_task(claim_all(store, 3))
        waited = asyncio.create_task(store.claim(QUEUE, Take("other", 4, 60_000), wait_ms=50))
        settled = asyncio.create_task(settle_all(store, leases[5:]))
        held = [Held(lease.id, lease.token) for lease in leases[5:6]]
        calls: list[asyncio.Task[Any]] = [
            new,
            claimed,
            waited,
            settled,
            asyncio.create_task(store.extend(QUEUE, held, worker="worker", lease_ms=60_000)),
            asyncio.create_task(store.sweep(QUEUE)),
            asyncio.create_task(store.counts(QUEUE)),
            asyncio.create_task(store.tail(QUEUE, after=0, timeout_ms=1000)),
        ]
        news = asyncio.create_task(store.listen(QUEUE, "ear", timeout_ms=20_000))
        while keys := await asyncio.to_thread(move.keys):
            await asyncio.to_thread(move.move_key, keys[0])
            assert not [call for call in calls if call.done()]
        await asyncio.to_thread(move.finish)
        await asyncio.gather(*calls)
        assert [answer.status for answer in new.result()] == ["queued"]
        assert settled.result() == 5
        taken = [*claimed.result(), *waited.result().leases]
        assert len({lease.id for lease in (*leases, *taken)}) == 17
        assert min(lease.token for lease in taken) > max(lease.token for lease in leases)
        assert len(await news) >= 5
        await check_whole(store, epoch=epoch)
        counts = await store.counts(QUEUE)
        assert (counts.waiting, counts.active, counts.completed) == (14, 7, 10)


@pytest.mark.parametrize("router", ROUTERS)
async def test_a_new_queue_is_made_only_where_its_slot_will_be(cluster: ValkeyCluster, router: str) -> None:
    async with opened(cluster, router) as store, asyncio.timeout(60):
        move = SlotMove(cluster, slot_in(store), elsewhere(cluster, slot_in(store)))
        await asyncio.to_thread(move.begin)
        new = asyncio.create_task(store.enqueue(QUEUE, [NewJob("a")]))
        done, _ = await asyncio.wait([new], timeout=1)
        assert not done
        assert await asyncio.to_thread(move.keys) == []
        await asyncio.to_thread(move.finish)
        assert (await new)[0].status == "queued"
        assert [lease.id for lease in await claim_all(store, 5)] == ["a"]


async def test_a_client_passed_in_follows_a_slot_to_a_node_that_joined_later() -> None:
    with ValkeyCluster() as cluster:
        async with opened(cluster, "client") as store, asyncio.timeout(60):
            await store.enqueue(QUEUE, [NewJob("a")])
            move = SlotMove(cluster, slot_in(store), await asyncio.to_thread(cluster.add_node))
            await asyncio.to_thread(move.begin)
            waiting = asyncio.create_task(store.listen(QUEUE, "ear", timeout_ms=10_000))
            new = asyncio.create_task(store.enqueue(QUEUE, [NewJob("b", notify="ear")]))
            for key in await asyncio.to_thread(move.keys):
                await asyncio.to_thread(move.move_key, key)
            assert not (await asyncio.wait([new], timeout=0.5))[0]
            await asyncio.to_thread(move.finish)
            assert (await new)[0].status == "queued"
            assert await settle_all(store, await claim_all(store, 5)) == 2
            assert [item.id for item in await waiting] == ["b"]


class Load:
    """A producer, workers and a heartbeat, which note what they were told."""

    def __init__(self, store: ValkeyStorage) -> None:
        self.store = store
        self.accepted: list[str] = []
        self.applied: list[str] = []
        self.tokens: list[int] = []
        self.progress = asyncio.Condition()
        self.stopping = False

    async def produce(self) -> None:
        while not self.stopping:
            ids = [uuid.uuid4().hex for _ in range(5)]
            answers = await self.store.enqueue(QUEUE, [NewJob(id, b"x" * 50) for id in ids])
            assert {answer.status for answer in answers} == {"queued"}
            self.accepted += ids

    async def work(self, name: str, *, wait_ms: int) -> None:
        take = Take(name, 10, 60_000)
        leases = (await self.store.claim(QUEUE, take)).leases
        while True:
            self.tokens += [lease.token for lease in leases]
            outcomes = [Settlement(lease.id, lease.token, Complete(b"")) for lease in leases]
            batch = await self.store.settle(QUEUE, outcomes, take=take)
            assert all(answer.applied for answer in batch.answers)
            await self._note([lease.id for lease in leases])
            assert batch.claimed is not None
            leases = batch.claimed.leases
            if not leases:
                leases = (await self.store.claim(QUEUE, take, wait_ms=wait_ms)).leases
            if not leases and self.stopping and len(self.applied) == len(self.accepted):
                return

    async def _note(self, ids: list[str]) -> None:
        async with self.progress:
            self.applied += ids
            self.progress.notify_all()

    async def more_done(self, count: int) -> None:
        """Return when so many more jobs are done."""
        target = len(self.applied) + count
        async with self.progress:
            await self.progress.wait_for(lambda: len(self.applied) >= target)


@pytest.mark.parametrize("way", ["key by key", "in one step"])
@pytest.mark.parametrize("router", ROUTERS)
async def test_a_queue_under_load_is_moved_and_nothing_is_lost_or_done_twice(
    cluster: ValkeyCluster, router: str, way: str
) -> None:
    async with opened(cluster, router, keeps_connections=False) as store, asyncio.timeout(120):
        load = Load(store)
        slot = slot_in(store)
        epoch = (await store.read_events(QUEUE, after=0)).epoch
        async with asyncio.TaskGroup() as group:
            group.create_task(load.produce())
            for number in range(3):
                group.create_task(load.work(f"worker-{number}", wait_ms=50 * number))
            for _ in range(4):
                await load.more_done(50)
                target = await asyncio.to_thread(elsewhere, cluster, slot)
                if way == "key by key":
                    await asyncio.to_thread(SlotMove(cluster, slot, target).run)
                else:
                    await asyncio.to_thread(cluster.move_slot, slot, target)
            await load.more_done(50)
            load.stopping = True
        assert sorted(load.applied) == sorted(load.accepted)
        assert len(set(load.tokens)) == len(load.tokens) == len(load.accepted)
        counts = await store.counts(QUEUE)
        assert (counts.open, counts.completed) == (0, len(load.accepted))
        await check_whole(store, epoch=epoch)


@pytest.mark.parametrize("router", ROUTERS)
async def test_a_waiting_claim_is_woken_after_a_move(cluster: ValkeyCluster, router: str) -> None:
    async with opened(cluster, router) as store, asyncio.timeout(60):
        await store.enqueue(QUEUE, [NewJob("a")])
        await settle_all(store, await claim_all(store, 1))
        slot = slot_in(store)
        waiting = asyncio.create_task(store.claim(QUEUE, TAKE, wait_ms=20_000))
        news = asyncio.create_task(store.listen(QUEUE, "ear", timeout_ms=20_000))
        last = (await store.read_events(QUEUE, after=0)).last
        tail = asyncio.create_task(store.tail(QUEUE, after=last, timeout_ms=20_000))
        await asyncio.to_thread(SlotMove(cluster, slot, elsewhere(cluster, slot)).run)
        await store.enqueue(QUEUE, [NewJob("b", notify="ear")])
        leases = (await waiting).leases
        assert [lease.id for lease in leases] == ["b"]
        assert (await tail).events
        await settle_all(store, leases)
        assert [(item.id, item.state) for item in await news] == [("b", State.COMPLETED)]
