"""The Valkey engine on a client that somebody else made, and what its URL shows."""

from __future__ import annotations

import asyncio
import uuid

import pytest
import redis.asyncio
from redis.asyncio import RedisCluster

from penstock.core.job import NewJob
from penstock.core.outcome import Complete
from penstock.errors import InvalidName
from penstock.storage.valkey.engine import ValkeyStorage
from penstock.storage.values import Settlement, Take
from tests.servers import HOST

QUEUE = "mail"


def namespace() -> str:
    return f"t{uuid.uuid4().hex[:12]}"


async def run_one_job(store: ValkeyStorage) -> bytes | None:
    await store.open()
    waiting = asyncio.create_task(store.listen(QUEUE, "ear", timeout_ms=5000))
    await store.enqueue(QUEUE, [NewJob("a", b"payload", notify="ear")])
    [lease] = (await store.claim(QUEUE, Take("worker", 10, 60_000))).leases
    await store.settle(QUEUE, [Settlement(lease.id, lease.token, Complete(b"result" * 20_000))])
    [news] = await waiting
    await store.close()
    return news.result


async def test_a_client_passed_in_does_the_same_work_and_stays_open(valkey_url: str) -> None:
    async with redis.asyncio.Redis.from_url(valkey_url.replace("valkey://", "redis://")) as client:
        store = ValkeyStorage(client, namespace=namespace())
        assert await run_one_job(store) == b"result" * 20_000
        assert await client.ping()


@pytest.mark.cluster
async def test_a_cluster_client_passed_in_does_the_same_work(cluster_url: str) -> None:
    port = int(cluster_url.rpartition(":")[2])
    async with RedisCluster(host=HOST, port=port) as client:
        assert await run_one_job(ValkeyStorage(client, namespace=namespace())) == b"result" * 20_000


async def test_a_waiting_call_is_woken_by_an_enqueue_from_another_client(valkey_url: str) -> None:
    name = namespace()
    one = ValkeyStorage.from_url(valkey_url, namespace=name)
    other = ValkeyStorage.from_url(valkey_url, namespace=name)
    await one.open()
    await other.open()
    waiting = asyncio.create_task(one.wait(QUEUE, timeout_ms=20_000))
    await other.enqueue(QUEUE, [NewJob("a")])
    async with asyncio.timeout(15):
        assert await waiting is True
    assert await other.wait(QUEUE, timeout_ms=1) is False
    await one.close()
    await other.close()


def test_the_url_shown_has_no_password() -> None:
    store = ValkeyStorage.from_url("valkey://ada:secret@example.org:7000/2?namespace=shop")
    assert store.url == "valkey://example.org:7000"
    assert store.namespace == "shop"
    assert "secret" not in repr(vars(store))


def test_a_namespace_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(InvalidName):
        ValkeyStorage.from_url("valkey://localhost", namespace="a/b")
