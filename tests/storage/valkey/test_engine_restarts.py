"""The Valkey engine after its server was restarted or replaced: no token comes back, and the epoch tells of a loss."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import redis.asyncio

from penstock.core.job import NewJob
from penstock.core.outcome import Complete
from penstock.storage.valkey.engine import ValkeyStorage
from penstock.storage.values import Settlement, Take
from tests.servers import HOST, Sentinel, ValkeyServer, wait_until

QUEUE = "mail"
JUMP = 2**20


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[ValkeyStorage]:
    store = ValkeyStorage.from_url(url)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def durable() -> Iterator[ValkeyServer]:
    with ValkeyServer(aof=True) as server:
        yield server


async def token_of(store: ValkeyStorage) -> int:
    """Put a job in, claim it, settle it. Returns the token of its lease."""
    id = uuid.uuid4().hex
    await store.enqueue(QUEUE, [NewJob(id)])
    [lease] = (await store.claim(QUEUE, Take("worker", 1, 60_000))).leases
    await store.settle(QUEUE, [Settlement(id, lease.token, Complete(b""))])
    return lease.token


async def epoch_of(store: ValkeyStorage) -> str:
    return (await store.read_events(QUEUE, after=0)).epoch


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_restart_that_loses_nothing_keeps_the_epoch_and_moves_tokens_ahead(
    durable: ValkeyServer, end: str
) -> None:
    async with opened(durable.url) as store:
        first, epoch = await token_of(store), await epoch_of(store)
        await asyncio.to_thread(getattr(durable, end))
        await asyncio.to_thread(durable.start)
        second = await token_of(store)
        assert second > first + JUMP
        assert await epoch_of(store) == epoch
        async with opened(durable.url) as other:
            assert second < await token_of(other) < second + JUMP
            assert await epoch_of(other) == epoch
        page = await store.read_events(QUEUE, after=0)
        assert [event.seq for event in page.events] == list(range(1, page.last + 1))


async def test_a_client_passed_in_notices_a_restart_between_two_calls(durable: ValkeyServer) -> None:
    async with redis.asyncio.Redis(host=HOST, port=durable.port) as client:
        store = ValkeyStorage(client)
        await store.open()
        first, epoch = await token_of(store), await epoch_of(store)
        await asyncio.to_thread(durable.restart)
        assert await token_of(store) > first + JUMP
        assert await epoch_of(store) == epoch


async def test_a_restart_from_an_old_snapshot_begins_a_new_epoch() -> None:
    with ValkeyServer() as server:
        async with opened(server.url) as store:
            await token_of(store)
            epoch = await epoch_of(store)
            with server.client() as client:
                client.save()
            last = [await token_of(store) for _ in range(5)][-1]
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
        async with opened(server.url) as later:  # nobody is left who knows what was lost
            assert await token_of(later) > last
            assert await epoch_of(later) != epoch


async def test_what_a_process_saw_is_compared_whenever_it_comes_back(durable: ValkeyServer) -> None:
    """Writes are lost although the server has an append-only file, and another process connects first."""
    async with opened(durable.url) as store, opened(durable.url) as other:
        await token_of(other)
        epoch = await epoch_of(other)
        with durable.client() as client:
            meta = "penstock:{default/mail/0}:meta"
            old = client.execute_command("DUMP", meta, NEVER_DECODE=True)
            last = [await token_of(store) for _ in range(5)][-1]
            client.execute_command("RESTORE", meta, 0, old, "REPLACE")
            client.delete("penstock:{default/mail/0}:events")
        await asyncio.to_thread(durable.restart)
        await other.counts(QUEUE)
        assert await epoch_of(other) == epoch
        assert await token_of(store) > last
        assert await epoch_of(store) != epoch


async def test_a_failover_that_loses_writes_reuses_no_token_and_begins_a_new_epoch() -> None:
    with ValkeyServer() as primary, ValkeyServer(replica_of=primary) as replica:
        tokens: list[int] = []
        async with opened(primary.url) as store:
            tokens.append(await token_of(store))
            epoch = await epoch_of(store)
            with primary.client() as client, replica.client() as other:
                assert client.wait(1, 5000) == 1
                other.execute_command("REPLICAOF", "NO", "ONE")  # it misses what follows
            tokens += [await token_of(store) for _ in range(5)]
        await asyncio.to_thread(primary.kill)
        async with opened(replica.url) as later:
            assert await token_of(later) > max(tokens)
            assert await epoch_of(later) != epoch


@pytest.mark.slow
async def test_a_process_that_follows_sentinel_gets_no_token_twice() -> None:
    with (
        ValkeyServer() as primary,
        ValkeyServer(replica_of=primary) as replica,
        Sentinel(primary) as sentinel,
    ):
        await asyncio.to_thread(wait_until, lambda: sentinel.knows_replicas(1), what="the replica known")
        async with opened(f"valkey+sentinel://{HOST}:{sentinel.port}/penstock") as store:
            first = await token_of(store)
            await store._router.call("k", "WAIT", 1, 5000)
            await asyncio.to_thread(primary.kill)
            assert await token_of(store) > first + JUMP
            assert replica.running
