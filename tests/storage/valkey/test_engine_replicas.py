"""Jobs and results that are on a replica before they are answered: ``?replicas=1``."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from penstock.core.job import NewJob
from penstock.core.lifecycle import State
from penstock.core.outcome import Complete
from penstock.errors import InvalidOption, NotReplicated
from penstock.storage.valkey.endpoint import Endpoint
from penstock.storage.valkey.engine import ValkeyStorage
from penstock.storage.values import Settlement, Take
from tests.servers import ValkeyServer

QUEUE = "mail"
TAKE = Take("worker", 10, 60_000)


@asynccontextmanager
async def opened(
    server: ValkeyServer, *, options: str = "", retry_for: float = 20
) -> AsyncIterator[ValkeyStorage]:
    store = ValkeyStorage.from_url(f"{server.url}{options}", retry_for=retry_for)
    await store.open()
    yield store
    await store.close()


@contextmanager
def suspended(server: ValkeyServer) -> Iterator[None]:
    """The server's process stands still: it confirms nothing."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def test_what_was_answered_is_there_when_the_replica_is_promoted(
    primary: ValkeyServer, replica: ValkeyServer
) -> None:
    async with opened(primary, options="?replicas=1") as store:
        groups = [[NewJob(f"{group}-{i}") for i in range(3)] for group in range(20)]
        await asyncio.gather(*(store.enqueue(QUEUE, jobs) for jobs in groups))
        [lease] = (await store.claim(QUEUE, Take("worker", 1, 60_000))).leases
        await store.settle(QUEUE, [Settlement(lease.id, lease.token, Complete(b"done"))])
        await asyncio.to_thread(primary.kill)
    with replica.client() as client:
        client.execute_command("REPLICAOF", "NO", "ONE")
    async with opened(replica) as later:
        counts = await later.counts(QUEUE)
        assert (counts.open, counts.completed) == (59, 1)
        [job] = await later.get(QUEUE, [lease.id])
        assert job is not None
        assert job.result == b"done"


async def test_a_shortfall_says_that_the_call_was_carried_out_and_can_be_repeated(
    primary: ValkeyServer, replica: ValkeyServer
) -> None:
    async with opened(primary, options="?replicas=1", retry_for=0.3) as store:
        await store.enqueue(QUEUE, [NewJob("first")])
        [lease] = (await store.claim(QUEUE, TAKE)).leases
        outcome = [Settlement("first", lease.token, Complete(b"done"))]
        with suspended(replica):
            with pytest.raises(NotReplicated, match="written, but 0 of 1"):
                await store.enqueue(QUEUE, [NewJob("second")])
            with pytest.raises(
                NotReplicated
            ):  # a repeat that writes nothing waits for what was written before
                await store.enqueue(QUEUE, [NewJob("second")])
            with pytest.raises(NotReplicated):
                await store.settle(QUEUE, outcome, take=TAKE)
            assert (await store.counts(QUEUE)).waiting == 1  # other calls do not wait
        [again] = await store.enqueue(QUEUE, [NewJob("second")])
        batch = await store.settle(QUEUE, outcome, take=TAKE)
        assert batch.claimed is not None
        assert [lease.id for lease in batch.claimed.leases] == ["second"]  # the shortfall took none
        assert again.status == "duplicate"
        assert (batch.answers[0].applied, batch.answers[0].state) == (True, State.COMPLETED)


async def test_a_wait_does_not_hold_up_other_calls(primary: ValkeyServer, replica: ValkeyServer) -> None:
    async with opened(primary, options="?replicas=1") as store, asyncio.timeout(30):
        await store.enqueue(QUEUE, [NewJob("first")])
        with suspended(replica):
            waiting = asyncio.create_task(store.enqueue(QUEUE, [NewJob("second")]))
            while (await store.counts(QUEUE)).waiting < 2:
                await asyncio.sleep(0)
            assert len((await store.claim(QUEUE, TAKE)).leases) == 2
            assert not waiting.done()
        assert (await waiting)[0].status == "queued"


async def test_without_the_option_no_replica_is_waited_for(primary: ValkeyServer) -> None:
    async with opened(primary) as store:
        await store.enqueue(QUEUE, [NewJob("a")])
        assert primary.info("commandstats").get("cmdstat_wait") is None


def test_the_number_of_replicas_is_read_from_the_url() -> None:
    assert Endpoint.parse("valkey://localhost?replicas=2").replicas == 2
    assert Endpoint.parse("valkey+cluster://localhost").replicas == 0
    with pytest.raises(InvalidOption, match="'replicas' must be the number"):
        Endpoint.parse("valkey://localhost?replicas=all")


async def test_a_worker_warns_once_of_a_server_that_may_lose_jobs(
    primary: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    with primary.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    for queue in ("one", "two"):
        async with opened(primary) as store:
            await store.enqueue(queue, [NewJob("a")])
            await store.claim(queue, TAKE)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "append-only file" in caplog.text
    assert "allkeys-lru" in caplog.text


async def test_a_server_that_keeps_jobs_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with ValkeyServer(aof=True) as server:
        async with opened(server) as store:
            await store.claim(QUEUE, TAKE)
    assert not caplog.records
