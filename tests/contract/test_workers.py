"""Workers: the record a heartbeat renews, and the leases a worker holds."""

from __future__ import annotations

from penstock.core.lifecycle import State
from penstock.core.outcome import Complete
from penstock.storage import open_storage
from penstock.storage.values import Held, WorkerRecord
from tests.contract.factories import LEASE_MS, MINUTE_MS, Bench

S = State
HOUR_MS = 60 * MINUTE_MS


async def beat(bench: Bench, worker: str, info: bytes | None = b"{}") -> None:
    await bench.storage.extend(bench.queue, [], worker=worker, lease_ms=LEASE_MS, info=info)


async def found(bench: Bench) -> dict[str, WorkerRecord]:
    return {record.id: record for record in await bench.storage.workers(bench.queue)}


async def test_a_heartbeat_with_info_makes_the_worker_known(bench: Bench) -> None:
    assert await found(bench) == {}
    await beat(bench, "ada", b'{"pid":1}')
    await beat(bench, "bob@host", b"{}")
    await bench.shift(MINUTE_MS)

    workers = await found(bench)

    assert set(workers) == {"ada", "bob@host"}
    assert workers["ada"].info == b'{"pid":1}'
    assert MINUTE_MS <= workers["ada"].age_ms < 2 * MINUTE_MS


async def test_a_queue_without_jobs_is_found_by_its_workers(bench: Bench) -> None:
    assert await bench.storage.attended() == []
    await beat(bench, "ada", None)
    assert await bench.storage.attended() == []

    await beat(bench, "ada")

    assert await bench.storage.attended() == [bench.queue]
    assert await bench.storage.queues() == []


async def test_a_heartbeat_renews_the_record_if_it_has_info(bench: Bench) -> None:
    await beat(bench, "ada", b"1")
    first = (await found(bench))["ada"]
    await bench.shift(MINUTE_MS)
    await beat(bench, "ada", None)
    assert (await found(bench))["ada"].seen_at_ms == first.seen_at_ms

    await beat(bench, "ada", b"2")

    again = (await found(bench))["ada"]
    assert again.info == b"2"
    assert again.seen_at_ms >= first.seen_at_ms + MINUTE_MS
    assert again.age_ms < MINUTE_MS


async def test_a_worker_that_departs_is_forgotten_but_its_leases_are_not(bench: Bench) -> None:
    await bench.bring(S.ACTIVE)
    await beat(bench, "worker")

    await bench.storage.depart(bench.queue, "worker")
    await bench.storage.depart(bench.queue, "nobody")

    assert await found(bench) == {}
    assert await bench.state() is S.ACTIVE


async def test_a_worker_not_seen_for_an_hour_is_forgotten_by_the_sweep(bench: Bench) -> None:
    await bench.put()
    await beat(bench, "gone")
    await bench.shift(HOUR_MS)
    await beat(bench, "here")

    await bench.storage.sweep(bench.queue)

    assert set(await found(bench)) == {"here"}


async def test_the_leases_of_a_worker_are_those_it_has_not_settled(bench: Bench) -> None:
    await bench.put_all([bench.new(id) for id in "abc"])
    a, b = await bench.claim_all(2, worker="ada")
    await bench.claim(worker="bob")
    await bench.settle(a, Complete())

    assert await bench.storage.leases_of(bench.queue, "ada") == [Held("b", b.token)]
    assert await bench.storage.leases_of(bench.queue, "nobody") == []


async def test_a_rescued_lease_is_held_no_longer(bench: Bench) -> None:
    await bench.bring(S.ACTIVE)
    await bench.shift(LEASE_MS)
    await bench.storage.sweep(bench.queue)

    assert await bench.storage.leases_of(bench.queue, "worker") == []


async def test_a_worker_that_has_announced_itself_is_not_dead(bench: Bench) -> None:
    """An engine that cannot tell leaves it out; none says that this process has died."""
    await beat(bench, "ada")
    await beat(bench, "bob")
    await bench.storage.announce(bench.queue, "ada", lost=lambda: None)
    await bench.storage.announce(bench.queue, "ada", lost=lambda: None)

    lives = await bench.storage.lives(bench.queue)

    assert lives in ({}, {"ada": True})
    assert [worker.dead for worker in await bench.storage.workers(bench.queue)] == [False, False]


async def test_what_was_announced_is_taken_back_when_the_storage_is_closed(
    bench: Bench, store_url: str
) -> None:
    other = open_storage(store_url)
    await other.open()
    await other.extend(bench.queue, [], worker="ada", lease_ms=LEASE_MS, info=b"{}")
    await other.announce(bench.queue, "ada", lost=lambda: None)

    await other.close()

    assert await bench.storage.lives(bench.queue) == {}


async def test_a_worker_that_departs_is_announced_no_longer(bench: Bench) -> None:
    await beat(bench, "ada")
    await bench.storage.announce(bench.queue, "ada", lost=lambda: None)

    await bench.storage.depart(bench.queue, "ada")

    assert await bench.storage.lives(bench.queue) == {}


async def test_announcing_a_worker_takes_no_job(bench: Bench) -> None:
    await bench.storage.announce(bench.queue, "ada", lost=lambda: None)
    await bench.put()
    await bench.storage.announce(bench.queue, "ada", lost=lambda: None)

    assert (await bench.claim()).id == "job"


async def test_a_worker_of_one_queue_is_not_seen_in_another(bench: Bench) -> None:
    await beat(bench, "ada")

    assert await bench.storage.workers(f"{bench.queue}-2") == []
