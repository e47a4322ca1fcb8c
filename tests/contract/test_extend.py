"""extend: heartbeats of held leases, and the record of the worker that sends them."""

from __future__ import annotations

import pytest

from penstock.core.lifecycle import State
from penstock.core.outcome import Complete
from penstock.storage.values import Extended, Held
from tests.contract.factories import LEASE_MS, MINUTE_MS, STATES, Bench

S = State


async def extend(bench: Bench, *held: tuple[str, int], lease_ms: int = LEASE_MS) -> list[Extended]:
    leases = [Held(*item) for item in held]
    return await bench.storage.extend(bench.queue, leases, worker="worker", lease_ms=lease_ms)


async def test_the_deadline_of_a_held_lease_is_pushed(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.events()
    await bench.shift(LEASE_MS // 2)

    assert await extend(bench, ("job", lease.token), lease_ms=10 * LEASE_MS) == ["extended"]

    assert (await bench.job()).lease_until_ms >= lease.claimed_at_ms + 10 * LEASE_MS + LEASE_MS // 2
    await bench.shift(5 * LEASE_MS)
    assert (await bench.storage.sweep(bench.queue)).rescued == 0
    assert await bench.events() == []


async def test_a_lease_past_its_deadline_is_extended_while_its_token_is_the_current_one(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.shift(5 * LEASE_MS)

    assert await extend(bench, ("job", lease.token)) == ["extended"]
    assert (await bench.storage.sweep(bench.queue)).rescued == 0


@pytest.mark.parametrize("state", STATES)
async def test_a_lease_with_another_token_is_lost(bench: Bench, state: State) -> None:
    await bench.bring(state)
    picture = await bench.picture()

    assert await extend(bench, ("job", 123_456), ("nobody", 1)) == ["lost", "lost"]
    assert await bench.picture() == picture


async def test_a_lease_is_lost_once_it_was_settled_or_rescued(bench: Bench) -> None:
    await bench.put_all([bench.new(id) for id in ("settled", "rescued")])
    settled, rescued = await bench.claim_all()
    await bench.settle(settled, Complete())
    await bench.shift(LEASE_MS)
    await bench.storage.sweep(bench.queue)

    assert await extend(bench, ("settled", settled.token), ("rescued", rescued.token)) == ["lost", "lost"]


async def test_the_lease_of_a_job_to_cancel_is_extended_and_its_worker_notified(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, ttl_ms=MINUTE_MS)
    assert lease
    await bench.storage.cancel(bench.queue, ["job"])
    await bench.shift(5 * LEASE_MS)

    assert await extend(bench, ("job", lease.token)) == ["cancel"]
    assert (await bench.storage.sweep(bench.queue)).rescued == 0


async def test_the_lease_of_an_expired_job_is_extended_and_its_expiry_reported(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, ttl_ms=MINUTE_MS)
    assert lease
    await bench.shift(5 * LEASE_MS)

    assert await extend(bench, ("job", lease.token)) == ["expired"]
    assert (await bench.storage.sweep(bench.queue)).rescued == 0


async def test_each_lease_of_a_batch_gets_an_answer_of_its_own(bench: Bench) -> None:
    await bench.put_all([bench.new(id) for id in "abc"])
    a, b, c = await bench.claim_all()
    await bench.storage.cancel(bench.queue, ["b"])
    await bench.settle(c, Complete())

    answers = await extend(bench, ("c", c.token), ("b", b.token), ("a", a.token), ("a", a.token))

    assert answers == ["lost", "cancel", "extended", "extended"]
    assert await extend(bench) == []


async def test_five_thousand_leases_are_extended_in_one_call(bench: Bench) -> None:
    await bench.put_all([bench.new(str(i)) for i in range(5000)])
    leases = await bench.claim_all(5000)

    answers = await extend(bench, *[(lease.id, lease.token) for lease in leases], lease_ms=9 * LEASE_MS)

    assert answers == ["extended"] * 5000
    await bench.shift(LEASE_MS)
    assert (await bench.storage.sweep(bench.queue)).rescued == 0
