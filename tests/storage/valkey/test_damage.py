"""Damaged values on Valkey: what a function that fails midway leaves behind, and what only this engine has."""

from __future__ import annotations

import pytest

from penstock.core.job import Extras, Lease, NewJob
from penstock.core.lifecycle import State, StepAnswer
from penstock.core.outcome import Complete
from penstock.core.step import NewStep
from penstock.errors import StorageDamaged, StorageVersion
from penstock.storage.valkey.engine import ValkeyStorage
from tests.contract.damage import harm
from tests.contract.factories import Bench


@pytest.fixture
def bench(storage: ValkeyStorage) -> Bench:
    return Bench(storage, "q")


async def put_counters(storage: ValkeyStorage, change: bytes | int) -> bytes:
    """Replace the counters, or cut them off there; what they were."""
    key = storage._calls.keys.part("q", "meta")
    before: bytes = await storage._calls.plain(key, "HGET", key, "counters")
    after = before[:change] if isinstance(change, int) else change + before[len(change) :]
    await storage._calls.plain(key, "HSET", key, "counters", after)
    return before


@pytest.mark.parametrize("priority", [0, 3])
async def test_a_claim_that_fails_midway_loses_nothing(bench: Bench, priority: int) -> None:
    await bench.put_all([bench.new(f"job-{n}", priority=priority * (n % 2)) for n in range(9)])
    await harm(bench.storage, bench.queue, "job-4", "options")

    leases = await bench.claim_all(20)

    assert {lease.id for lease in leases} == {f"job-{n}" for n in range(9) if n != 4}
    assert len({lease.token for lease in leases}) == 8
    events = await bench.events()  # which are dense
    assert [event.type for event in events].count("claimed") == 8
    assert [event.type for event in events].count("failed") == 1
    for lease in leases:
        assert (await bench.settle(lease, Complete())).applied
    assert not (await bench.storage.check(bench.queue)).problems


async def test_what_a_settle_has_done_stays_if_its_claim_fails(bench: Bench) -> None:
    await bench.put("first", notify="ear")
    lease = await bench.claim()
    await bench.put_all([bench.new("bad", priority=1), bench.new("good", priority=2)])
    await harm(bench.storage, bench.queue, "bad", "options")

    await bench.settle(lease, Complete(b"1"))
    [next_one] = await bench.claim_all(5)

    assert next_one.id == "good"
    assert await bench.counts() == {State.ACTIVE: 1, State.COMPLETED: 1, State.FAILED: 1}
    [news] = await bench.storage.listen(bench.queue, "ear", timeout_ms=5000)
    assert news.id == "first"


async def test_data_of_a_newer_format_is_never_put_aside(bench: Bench, storage: ValkeyStorage) -> None:
    await bench.put("bad")
    await harm(storage, bench.queue, "bad", "record")
    await put_counters(storage, b"\x63")

    with pytest.raises(StorageVersion):
        await bench.claim_all()
    with pytest.raises(StorageVersion):
        await storage.check(bench.queue, repair=True)

    await put_counters(storage, b"\x01")
    assert await bench.counts() == {State.WAITING: 1}


async def test_counters_that_cannot_be_read_are_made_anew_by_repair(
    bench: Bench, storage: ValkeyStorage
) -> None:
    await bench.put_all([bench.new(f"job-{n}") for n in range(3)])
    lease = await bench.claim()
    await put_counters(storage, 20)

    with pytest.raises(StorageDamaged, match="doctor --repair"):
        await bench.claim_all()
    found = await storage.check(bench.queue)
    await storage.check(bench.queue, repair=True)

    assert found.problems == {"damaged_counters": 1}
    assert not (await storage.check(bench.queue)).problems
    assert (await bench.settle(lease, Complete())).applied
    assert all(one.token > lease.token for one in await bench.claim_all())


async def test_a_job_that_only_the_client_cannot_read_is_put_aside(
    bench: Bench, storage: ValkeyStorage
) -> None:
    await bench.put("bad", extras=Extras(headers={"a": "b"}))
    await bench.put("good")
    key = storage._calls.keys.part(bench.queue, "jobs")
    static: bytes = await storage._calls.plain(key, "HGET", key, "bad")
    assert b"\xa1a\xa1b" in static
    spoilt = static.replace(b"\xa1a\xa1b", b"\xa1a\xcc\x07")  # a number where a text is to be
    await storage._calls.plain(key, "HSET", key, "bad", spoilt)

    leases = await bench.claim_all()

    assert [lease.id for lease in leases] == ["good"]
    assert (await bench.job("bad")).state is State.FAILED
    assert not (await storage.check(bench.queue)).problems


@pytest.mark.parametrize("part", ["waiting", "line", "active", "expiring", "dedup", "metrics", "events"])
async def test_a_key_of_another_type_is_named_and_mended_by_repair(
    bench: Bench, storage: ValkeyStorage, part: str
) -> None:
    await storage.enqueue(bench.queue, [NewJob(f"job-{n}", ttl_ms=10**9) for n in range(20)])
    key = storage._calls.keys.part(bench.queue, part)
    await storage._calls.plain(key, "DEL", key)
    await storage._calls.plain(key, "SET", key, "what is this")

    with pytest.raises(StorageDamaged, match="doctor --repair"):
        await storage.sweep(bench.queue)
    await storage.check(bench.queue, repair=True)

    assert len(await bench.claim_all()) == 20


@pytest.mark.parametrize("part", ["steps", "step_results"])
async def test_a_key_of_another_type_in_place_of_recorded_steps_puts_their_job_aside(
    bench: Bench, storage: ValkeyStorage, part: str
) -> None:
    await bench.put("bad")
    lease = await bench.claim()
    await record(bench, lease, "load", b"z" * 5000)
    await bench.put_all([bench.new(f"job-{n}") for n in range(20)])
    await put_text(storage, f"{part}:bad")

    assert (await storage.check(bench.queue)).problems == {"damaged_jobs": 1}
    assert await record(bench, lease, "other", b"z" * 5000) == ["lost"]

    assert await bench.state("bad") is State.FAILED
    assert len(await bench.claim_all()) == 20
    assert not (await storage.check(bench.queue)).problems


@pytest.mark.parametrize("part", ["annex", "active", "events"])
async def test_recording_steps_checks_the_keys_that_it_writes_before_the_first_write(
    bench: Bench, storage: ValkeyStorage, part: str
) -> None:
    for id in ("first", "second"):
        await bench.put(id)
    first, second = await bench.claim_all()
    await record(bench, first, "load", b"1")  # In this second, no other call checks all keys.
    await put_text(storage, part)

    with pytest.raises(StorageDamaged, match=f"{part} is not a .*Nothing was written"):
        await record(bench, second, "load", b"1")
    assert await storage.steps(bench.queue, "second") == []


async def test_a_damaged_job_beside_others_does_not_leave_half_of_a_call(
    bench: Bench, storage: ValkeyStorage
) -> None:
    for id in ("good", "bad"):
        await bench.put(id)
    leases = await bench.claim_all()
    await harm(storage, bench.queue, "bad", "options")
    await bench.events()

    steps = [NewStep(lease.id, lease.token, "load", result=b"1") for lease in leases]
    assert await storage.record_steps(bench.queue, steps) == ["recorded", "lost"]

    assert [event.id for event in await bench.events() if event.type == "recorded"] == ["good"]


async def record(bench: Bench, lease: Lease, name: str, result: bytes) -> list[StepAnswer]:
    steps = [NewStep(lease.id, lease.token, name, result=result)]
    return await bench.storage.record_steps(bench.queue, steps)


async def put_text(storage: ValkeyStorage, part: str) -> None:
    """Put a string in the place of a key of the queue."""
    key = storage._calls.keys.part("q", part)
    await storage._calls.plain(key, "DEL", key)
    await storage._calls.plain(key, "SET", key, "what is this")
