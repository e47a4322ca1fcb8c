"""The function library of the Valkey engine: loaded, shared by versions, and loaded again when it is gone."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from importlib import resources

import pytest

from penstock.core.job import NewJob
from penstock.core.outcome import Complete
from penstock.errors import StorageVersion
from penstock.storage.valkey.calls import Calls
from penstock.storage.valkey.engine import ValkeyStorage
from penstock.storage.valkey.library import assemble, library
from penstock.storage.values import Settlement, Take
from tests.servers import ValkeyCluster, ValkeyServer

QUEUE = "mail"
TAKE = Take("worker", 10, 60_000)


@pytest.fixture
async def storage(valkey_url: str) -> AsyncIterator[ValkeyStorage]:
    store = ValkeyStorage.from_url(valkey_url, namespace=f"t{uuid.uuid4().hex[:12]}")
    await store.open()
    yield store
    await store.close()


def lua_files() -> dict[str, str]:
    folder = resources.files("penstock.storage.valkey") / "lua"
    return {entry.name.removesuffix(".lua"): entry.read_text() for entry in folder.iterdir()}


def test_every_name_carries_the_hash_of_the_content() -> None:
    files = lua_files()
    ours, other = assemble(files), assemble({**files, "claim": files["claim"] + "-- a later version\n"})
    assert ours == library()
    assert ours.name != other.name
    assert ours.name in ours.code
    assert other.name not in ours.code


def test_every_verb_says_its_arguments_and_what_it_returns() -> None:
    for name, text in lua_files().items():
        assert text.startswith("-- "), name
        if "register(" in text and name != "prelude":
            assert "-- returns:" in text or "{" in text.split("\n\n", 1)[0], name


async def test_clients_of_two_versions_share_a_queue(storage: ValkeyStorage) -> None:
    files = lua_files()
    newer = assemble({**files, "claim": files["claim"] + "-- a later version\n"})
    calls = storage._calls
    await storage.enqueue(QUEUE, [NewJob("first"), NewJob("second")])

    storage._calls = Calls(storage._router, calls.keys, functions=newer)
    [lease] = (await storage.claim(QUEUE, Take("new", 1, 60_000))).leases
    storage._calls = calls
    [other] = (await storage.claim(QUEUE, Take("old", 1, 60_000))).leases
    batch = await storage.settle(QUEUE, [Settlement(lease.id, lease.token, Complete(b"by the old one"))])

    assert (lease.id, other.id) == ("first", "second")
    assert batch.answers[0].applied
    names = {row[1].decode() for row in await storage._router.call(b"", "FUNCTION", "LIST")}
    assert {newer.name, library().name} <= names


async def test_a_library_that_was_flushed_is_loaded_again() -> None:
    with ValkeyServer() as server:
        store = ValkeyStorage.from_url(server.url)
        await store.open()
        await store.enqueue(QUEUE, [NewJob("a")])
        with server.client() as client:
            client.function_flush()
        [lease] = (await store.claim(QUEUE, TAKE)).leases
        assert lease.id == "a"
        await store.close()


@pytest.mark.cluster
async def test_a_flushed_library_is_loaded_into_every_primary() -> None:
    with ValkeyCluster() as cluster:
        store = ValkeyStorage.from_url(cluster.url)
        await store.open()
        queues = [f"queue-{i}" for i in range(12)]
        for node in cluster.nodes:
            with node.client() as client:
                client.function_flush()
        for queue in queues:
            await store.enqueue(queue, [NewJob("a")])
        assert [(await store.counts(queue)).waiting for queue in queues] == [1] * 12
        assert await store.queues() == sorted(queues)
        await store.close()


async def test_data_of_a_newer_format_is_refused(storage: ValkeyStorage) -> None:
    await storage.enqueue(QUEUE, [NewJob("a")])
    meta = storage._calls.keys.part(QUEUE, "meta")
    counters: bytes = await storage._router.call(meta, "HGET", meta, "counters")
    await storage._router.call(meta, "HSET", meta, "counters", b"\x02" + counters[1:] + b"more")

    with pytest.raises(StorageVersion, match="format 2"):
        await storage.enqueue(QUEUE, [NewJob("b")])
    with pytest.raises(StorageVersion, match="Update Penstock"):
        await storage.counts(QUEUE)
    await storage._router.call(meta, "HSET", meta, "counters", counters)
    assert (await storage.counts(QUEUE)).waiting == 1
