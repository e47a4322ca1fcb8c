"""The Valkey engine when replies, memory or the whole server are lost."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

import pytest

from penstock.core.job import Extras, NewJob
from penstock.core.lifecycle import State
from penstock.core.outcome import Complete, Suspend
from penstock.errors import StorageError, StorageFull
from penstock.storage.valkey.commands import Again, Router
from penstock.storage.valkey.engine import ValkeyStorage
from penstock.storage.values import Settlement, Take
from tests.servers import ValkeyServer

QUEUE = "mail"
TAKE = Take("worker", 10, 60_000)


class Deaf:
    """A router that loses the reply of every call of a function, and repeats the call as ours do."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def __getattr__(self, name: str) -> Any:
        return getattr(self._router, name)

    async def call(self, key: str | bytes, *command: Any, again: Again | None = None) -> Any:
        reply = await self._router.call(key, *command)
        return reply if again is None else await self._router.call(key, *again())


@pytest.fixture
async def storage(valkey_url: str) -> AsyncIterator[ValkeyStorage]:
    store = ValkeyStorage.from_url(valkey_url, namespace=f"t{uuid.uuid4().hex[:12]}")
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def deaf(storage: ValkeyStorage) -> ValkeyStorage:
    storage._calls.router = Deaf(storage._router)
    return storage


async def test_an_enqueue_whose_reply_was_lost_gets_the_first_answer(deaf: ValkeyStorage) -> None:
    jobs = [NewJob("a", b"1"), NewJob("b", delay_ms=1000), NewJob("a", b"2")]
    answers = await deaf.enqueue(QUEUE, jobs)
    assert [answer.status for answer in answers] == ["queued", "queued", "duplicate"]
    [alone] = await deaf.enqueue(QUEUE, [NewJob("c")])
    assert alone.status == "queued"
    assert (await deaf.read_events(QUEUE, after=0)).last == 3


async def test_a_claim_whose_reply_was_lost_gets_the_same_leases(deaf: ValkeyStorage) -> None:
    await deaf.enqueue(QUEUE, [NewJob(f"{i}", b"payload", priority=i % 2, run_id="r") for i in range(20)])
    claimed = await deaf.claim(QUEUE, TAKE)
    assert [lease.id for lease in claimed.leases] == [f"{i}" for i in range(0, 20, 2)]
    assert {lease.run for lease in claimed.leases} == {1}
    assert (await deaf.counts(QUEUE)).active == 10


async def test_a_signal_whose_reply_was_lost_comes_once(deaf: ValkeyStorage) -> None:
    await deaf.enqueue(QUEUE, [NewJob("a")])
    assert await deaf.signal(QUEUE, "a", "early", b"1") == "kept"
    [lease] = (await deaf.claim(QUEUE, TAKE)).leases
    await deaf.settle(QUEUE, [Settlement("a", lease.token, Suspend("go"))])
    assert await deaf.signal(QUEUE, "a", "go", b"2") == "resumed"
    [lease] = (await deaf.claim(QUEUE, TAKE)).leases
    assert lease.extras == Extras(received="go", kept=1)


async def test_a_settle_whose_reply_was_lost_gets_the_same_answers_and_leases(deaf: ValkeyStorage) -> None:
    await deaf.enqueue(QUEUE, [NewJob(f"{i:02}") for i in range(20)])
    first = await deaf.claim(QUEUE, TAKE)
    batch = await deaf.settle(
        QUEUE,
        [Settlement(lease.id, lease.token, Complete(b"done")) for lease in first.leases],
        take=TAKE,
    )
    assert all(answer.applied and answer.state is State.COMPLETED for answer in batch.answers)
    assert batch.claimed is not None
    assert [lease.id for lease in batch.claimed.leases] == [f"{i:02}" for i in range(10, 20)]
    assert (await deaf.read_events(QUEUE, after=0)).last == 50


async def test_a_full_server_refuses_new_jobs_and_lets_old_ones_be_worked_off() -> None:
    with ValkeyServer() as server:
        store = ValkeyStorage.from_url(server.url, retry_for=1)
        await store.open()
        await store.enqueue(QUEUE, [NewJob("a"), NewJob("b")])
        with server.client() as client:
            client.config_set("maxmemory", "1")
            with pytest.raises(StorageFull):
                await store.enqueue(QUEUE, [NewJob("c")])
            [first, second] = (await store.claim(QUEUE, TAKE)).leases
            outcomes = [Settlement(lease.id, lease.token, Complete(b"ok")) for lease in (first, second)]
            batch = await store.settle(QUEUE, outcomes)
            await store.sweep(QUEUE)
            assert [answer.applied for answer in batch.answers] == [True, True]
            client.config_set("maxmemory", "0")
        assert (await store.get(QUEUE, ["c"])) == [None]
        [answer] = await store.enqueue(QUEUE, [NewJob("c")])
        assert answer.status == "queued"
        await store.close()


async def test_producer_and_worker_resume_by_themselves_after_a_restart() -> None:
    with ValkeyServer(aof=True) as server:
        store = ValkeyStorage.from_url(server.url)
        await store.open()
        accepted: list[str] = []
        finished: set[str] = set()
        enough = asyncio.Event()

        async def produce() -> None:
            while len(accepted) < 600:
                ids = [uuid.uuid4().hex for _ in range(5)]
                await store.enqueue(QUEUE, [NewJob(id) for id in ids])
                accepted.extend(ids)
                if len(accepted) >= 200:
                    enough.set()

        async def work() -> None:
            leases = (await store.claim(QUEUE, TAKE)).leases
            while len(finished) < 600:
                outcomes = [Settlement(lease.id, lease.token, Complete(b"")) for lease in leases]
                batch = await store.settle(QUEUE, outcomes, take=TAKE)
                finished.update(
                    lease.id for lease, answer in zip(leases, batch.answers, strict=True) if answer.applied
                )
                assert batch.claimed is not None
                leases = batch.claimed.leases
                if not leases:
                    await store.wait(QUEUE, timeout_ms=100)

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(produce())
            group.create_task(work())
            await enough.wait()
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
        assert finished == set(accepted)
        counts = await store.counts(QUEUE)
        assert (counts.open, counts.completed) == (0, 600)
        await store.close()


async def test_tokens_do_not_come_back_when_the_store_went_back_in_time() -> None:
    with ValkeyServer() as server:
        store = ValkeyStorage.from_url(server.url)
        await store.open()
        await store.enqueue(QUEUE, [NewJob(f"{i}") for i in range(50)])
        claimed = await store.claim(QUEUE, Take("worker", 50, 60_000))
        epoch = (await store.read_events(QUEUE, after=0)).epoch
        with server.client() as client:
            client.flushall()
        await store.enqueue(QUEUE, [NewJob("a"), NewJob("b")])
        again = await store.claim(QUEUE, TAKE)
        assert max(lease.token for lease in claimed.leases) < min(lease.token for lease in again.leases)
        assert (await store.read_events(QUEUE, after=0)).epoch != epoch
        assert await store.queues() == [QUEUE]
        await store.close()


async def test_a_queue_whose_counters_are_gone_is_not_taken_for_a_new_one(storage: ValkeyStorage) -> None:
    await storage.enqueue(QUEUE, [NewJob("a"), NewJob("b")])
    [lease] = (await storage.claim(QUEUE, Take("worker", 1, 60_000))).leases
    keys = storage._calls.keys
    meta = keys.part(QUEUE, "meta")
    await storage._calls.plain(meta, "DEL", meta)
    for refused in (storage.enqueue(QUEUE, [NewJob("c")]), storage.claim(QUEUE, TAKE), storage.sweep(QUEUE)):
        with pytest.raises(StorageError, match="other keys of the queue exist"):
            await refused
    assert await storage._calls.plain(meta, "EXISTS", meta) == 0
    assert await storage.obliterate(QUEUE, force=True) == 2
    await storage.enqueue(QUEUE, [NewJob("c")])
    [again] = (await storage.claim(QUEUE, TAKE)).leases
    assert (again.id, again.token > lease.token) == ("c", True)
    assert (await storage.check(QUEUE)).problems == {}


def test_the_list_of_keys_names_all_that_the_prelude_describes() -> None:
    source = (resources.files("penstock.storage.valkey") / "lua" / "prelude.lua").read_text()
    listed = (resources.files("penstock.storage.valkey") / "lua" / "parts.lua").read_text()
    described = re.findall(r"^--   ([a-z_, ]+?)  +(hash|zset|list|set|stream) ", source, re.MULTILINE)
    parts = {part: kind for names, kind in described for part in names.split(", ")}
    parts |= dict(re.findall(r";  ([a-z_]+)  (hash|zset|list|set) ", source))
    assert parts.pop("meta") == "hash"
    assert dict(re.findall(r"([a-z_]+) = '(\w+)'", listed)).items() >= parts.items()
