"""wait: sleep until there may be something to claim."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.core.lifecycle import State
from penstock.core.outcome import Fail, Outcome, Release, Snooze
from penstock.errors import StorageError
from penstock.storage import open_storage
from penstock.storage.contract import Storage
from penstock.storage.values import Change, Take
from tests.contract.factories import BOOM, LEASE_MS, MINUTE_MS, Bench

S = State

LONG_MS = 30_000


async def fall_asleep(bench: Bench) -> None:
    """Use up the hints there are. Waking for nothing is allowed, but not for ever."""
    for _ in range(20):
        if not await bench.storage.wait(bench.queue, timeout_ms=20):
            return
    raise AssertionError("wait never lets its time run out")


async def test_it_ends_when_its_time_is_over(bench: Bench) -> None:
    await fall_asleep(bench)

    assert await bench.storage.wait(bench.queue, timeout_ms=1) is False


async def test_a_job_enqueued_before_the_wait_is_not_missed(bench: Bench) -> None:
    await fall_asleep(bench)
    await bench.put()

    async with asyncio.timeout(10):
        assert await bench.storage.wait(bench.queue, timeout_ms=LONG_MS)


@pytest.mark.parametrize(
    "how",
    ["enqueue", "promote", "retry", "release", "retry now", "snooze 0", "rescue", "due", "change", "resume"],
)
async def test_whatever_puts_a_job_into_line_wakes_a_waiter(bench: Bench, how: str) -> None:
    storage, queue = bench.storage, bench.queue
    lease = await bench.bring(STARTS[how])
    if how == "resume":
        await storage.pause(queue)
    await fall_asleep(bench)
    waiting = asyncio.create_task(storage.wait(queue, timeout_ms=LONG_MS))
    await storage.counts(queue)  # a round trip: the waiter has gone to sleep

    match how:
        case "enqueue":
            await bench.put("another")
        case "promote":
            await storage.promote(queue, ["job"])
        case "retry":
            await storage.retry(queue, ["job"])
        case "change":
            await storage.change(queue, "job", Change(delay_ms=0))
        case "resume":
            await storage.resume(queue)
        case "rescue" | "due":
            await bench.shift(max(LEASE_MS, MINUTE_MS))
            await storage.sweep(queue)
        case _:
            assert lease
            await bench.settle(lease, OUTCOMES[how])

    async with asyncio.timeout(10):
        assert await waiting


OUTCOMES: dict[str, Outcome] = {"release": Release(), "retry now": Fail(BOOM), "snooze 0": Snooze(0)}
STARTS = {
    "enqueue": S.ACTIVE,
    "promote": S.SCHEDULED,
    "retry": S.FAILED,
    "release": S.ACTIVE,
    "retry now": S.ACTIVE,
    "snooze 0": S.ACTIVE,
    "rescue": S.ACTIVE,
    "due": S.SCHEDULED,
    "change": S.SCHEDULED,
    "resume": S.WAITING,
}


async def test_a_claim_that_leaves_jobs_behind_wakes_the_next_waiter(bench: Bench) -> None:
    await fall_asleep(bench)
    await bench.put_all([bench.new(str(i)) for i in range(4)])
    async with asyncio.timeout(20):
        for _ in range(4):
            assert await bench.storage.wait(bench.queue, timeout_ms=LONG_MS)
            await bench.claim()


async def test_a_waiter_of_another_queue_sleeps_on(bench: Bench) -> None:
    other = Bench(bench.storage, f"{bench.queue}-2")
    await fall_asleep(bench)
    await other.put()

    assert await bench.storage.wait(bench.queue, timeout_ms=20) is False


async def test_a_waiter_in_another_connection_is_woken(bench: Bench, store_url: str) -> None:
    if "processes" not in bench.storage.capabilities:
        pytest.skip("the engine's data is seen by one storage only")
    other = open_storage(store_url)
    await other.open()
    try:
        await fall_asleep(Bench(other, bench.queue))
        waiting = asyncio.create_task(other.wait(bench.queue, timeout_ms=LONG_MS))
        await other.counts(bench.queue)
        await bench.put()
        async with asyncio.timeout(10):
            assert await waiting
    finally:
        await other.close()


@pytest.mark.parametrize("verb", ["wait", "listen", "tail"])
async def test_closing_the_storage_ends_what_waits(store_url: str, verb: str) -> None:
    storage = open_storage(store_url)
    await storage.open()
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "wait": lambda: storage.wait("q", timeout_ms=LONG_MS),
        "listen": lambda: storage.listen("q", "ear", timeout_ms=LONG_MS),
        "tail": lambda: storage.tail("q", after=0, timeout_ms=LONG_MS),
    }
    waiting = asyncio.create_task(_ended(calls[verb]))
    await storage.counts("q")

    await storage.close()

    ended, _ = await asyncio.wait({waiting}, timeout=10)
    assert ended


async def _ended(call: Callable[[], Awaitable[object]]) -> None:
    try:
        await call()
    except StorageError:  # as good an end as an empty answer
        pass


async def test_several_waiters_are_woken_until_the_jobs_are_gone(bench: Bench, storage: Storage) -> None:
    async def work() -> str:
        while True:
            assert await storage.wait(bench.queue, timeout_ms=LONG_MS)
            for lease in await bench.claim_all(1):
                return lease.id

    await fall_asleep(bench)
    workers = [asyncio.create_task(work()) for _ in range(3)]
    await storage.counts(bench.queue)

    await bench.put_all([bench.new(id) for id in "abc"])

    async with asyncio.timeout(10):
        assert sorted(await asyncio.gather(*workers)) == ["a", "b", "c"]


async def test_a_waiting_claim_takes_ready_jobs_immediately(bench: Bench) -> None:
    put = await bench.put()

    async with asyncio.timeout(10):
        claimed = await bench.storage.claim(bench.queue, Take("w", 1, LEASE_MS), wait_ms=LONG_MS)

    assert [lease.id for lease in claimed.leases] == [put.id]


async def test_a_claim_that_waits_gets_the_job_that_comes(bench: Bench) -> None:
    await fall_asleep(bench)
    waiting = asyncio.create_task(bench.storage.claim(bench.queue, Take("w", 5, LEASE_MS), wait_ms=LONG_MS))
    await asyncio.sleep(0)
    put = await bench.put()

    async with asyncio.timeout(10):
        claimed = await waiting

    assert [lease.id for lease in claimed.leases] == [put.id]


async def test_a_claim_that_waits_ends_empty_when_its_time_is_over(bench: Bench) -> None:
    await fall_asleep(bench)

    claimed = await bench.storage.claim(bench.queue, Take("w", 5, LEASE_MS), wait_ms=1)

    assert claimed.leases == []


async def test_a_job_that_is_due_before_all_others_wakes(bench: Bench) -> None:
    await bench.put("late", delay_ms=2 * MINUTE_MS)
    await fall_asleep(bench)
    waiting = asyncio.create_task(bench.storage.wait(bench.queue, timeout_ms=LONG_MS))
    await asyncio.sleep(0)
    await bench.put("soon", delay_ms=MINUTE_MS)

    async with asyncio.timeout(10):
        assert await waiting is True


async def test_a_job_that_is_due_after_another_does_not_wake(bench: Bench) -> None:
    await bench.put("soon", delay_ms=MINUTE_MS)
    await fall_asleep(bench)
    await bench.put("late", delay_ms=2 * MINUTE_MS)

    assert await bench.storage.wait(bench.queue, timeout_ms=20) is False
