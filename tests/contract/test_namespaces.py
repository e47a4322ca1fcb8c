"""Two namespaces of one store do not see each other; two storages of one namespace do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.core.lifecycle import State
from penstock.core.outcome import Complete
from penstock.storage import open_storage
from tests.contract.factories import Bench

S = State


@asynccontextmanager
async def opened(url: str, queue: str) -> AsyncIterator[Bench]:
    storage = open_storage(url)
    await storage.open()
    try:
        yield Bench(storage, queue)
    finally:
        await storage.close()


@pytest.fixture(autouse=True)
def _seen_by_several(bench: Bench) -> None:
    if "processes" not in bench.storage.capabilities:
        pytest.skip("the engine's data is seen by one storage only")


async def test_namespaces_are_apart(bench: Bench, store_url: str) -> None:
    await bench.put()
    url = store_url.partition("?")[0] + "?namespace=elsewhere-" + bench.queue

    async with opened(url, bench.queue) as other:
        assert await other.find() is None
        assert await other.storage.queues() == []
        assert await other.claim_all() == []
        assert await other.events() == []
        await other.put("theirs")

    assert await bench.find("theirs") is None
    assert await bench.storage.queues() == [bench.queue]


async def test_two_storages_of_a_namespace_work_on_the_same_jobs(bench: Bench, store_url: str) -> None:
    async with opened(store_url, bench.queue) as other:
        await bench.put()
        lease = await other.claim()
        assert await bench.claim_all() == []
        assert (await bench.settle(lease, Complete(b"r"))).applied
        assert (await other.job()).result == b"r"
        assert [event.seq for event in await other.events()] == [1, 2, 3]


async def test_jobs_are_still_there_when_the_storage_is_opened_again(bench: Bench, store_url: str) -> None:
    async with opened(store_url, bench.queue) as first:
        await first.put(payload=b"p")
        await first.storage.pause(bench.queue)

    async with opened(store_url, bench.queue) as second:
        assert (await second.job()).payload == b"p"
        assert (await second.storage.counts(bench.queue)).paused
        assert await second.state() is S.WAITING
