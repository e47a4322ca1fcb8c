"""Waiting for replicas with a client that somebody else made."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from redis.asyncio import RedisCluster

from penstock.core.job import NewJob
from penstock.core.outcome import Complete
from penstock.errors import InvalidOption, NotReplicated
from penstock.storage.valkey.engine import ValkeyStorage
from penstock.storage.values import Settlement, Take
from tests.servers import HOST, ValkeyServer

QUEUE = "mail"


@pytest.fixture
async def client(primary: ValkeyServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(primary.url.replace("valkey://", "redis://")) as client:
        yield client


async def test_a_client_passed_in_waits_for_replicas(
    client: redis.asyncio.Redis, replica: ValkeyServer
) -> None:
    store = ValkeyStorage(client, replicas=1, retry_for=5)
    await store.open()
    await store.enqueue(QUEUE, [NewJob("first")])
    [lease] = (await store.claim(QUEUE, Take("worker", 10, 60_000))).leases
    outcome = [Settlement("first", lease.token, Complete(b"done"))]
    assert (await store.settle(QUEUE, outcome)).answers[0].applied
    await store.close()


async def test_a_shortfall_is_reported_with_a_client_passed_in(
    client: redis.asyncio.Redis, replica: ValkeyServer
) -> None:
    store = ValkeyStorage(client, replicas=1, retry_for=0.3)
    await store.open()
    await store.enqueue(QUEUE, [NewJob("first")])
    os.kill(replica.pid, signal.SIGSTOP)
    try:
        with pytest.raises(NotReplicated, match="written, but 0 of 1"):
            await store.enqueue(QUEUE, [NewJob("second")])
        assert (await store.counts(QUEUE)).waiting == 2
    finally:
        os.kill(replica.pid, signal.SIGCONT)
    await store.close()


async def test_a_cluster_client_is_refused_where_replicas_are_waited_for() -> None:
    with pytest.raises(InvalidOption, match="cluster client"):
        ValkeyStorage(RedisCluster(host=HOST, port=1), replicas=1)


@pytest.mark.parametrize("replicas", [-1, "1", 1.5, True])
def test_an_invalid_number_of_replicas_is_refused(client: redis.asyncio.Redis, replicas: object) -> None:
    with pytest.raises(InvalidOption, match="replicas must be an integer"):
        ValkeyStorage(client, replicas=replicas)  # type: ignore[arg-type]
