"""The extras of a job travel with it through every engine, unchanged."""

from __future__ import annotations

from penstock.core.job import Extras
from penstock.core.lifecycle import State
from penstock.core.outcome import Complete, Snooze
from tests.contract.factories import Bench, redispatch

HEADERS = Extras(headers={"traceparent": "00-ab-cd-01", "naïve": "żółw"})
GROUPED = Extras(group="tenant 7", cost=3, headers={"a": "b"})


async def test_a_lease_and_a_record_have_the_extras_of_the_enqueue(bench: Bench) -> None:
    await bench.put("headers", extras=HEADERS, payload=b"payload")
    await bench.put("grouped", extras=GROUPED)
    assert (await bench.job("headers")).extras == HEADERS
    leases = {lease.id: lease for lease in await bench.claim_all()}
    assert leases["headers"].extras == HEADERS
    assert leases["headers"].payload == b"payload"
    assert leases["grouped"].extras == GROUPED
    assert (await bench.job("grouped")).extras == GROUPED


async def test_jobs_without_extras_have_none(bench: Bench) -> None:
    await bench.put_all([bench.new("with", extras=HEADERS), bench.new("without")])
    assert (await bench.job("without")).extras is None
    assert [lease.extras for lease in await bench.claim_all()] == [HEADERS, None]


async def test_the_extras_survives_being_put_back_and_the_end(bench: Bench) -> None:
    await bench.put(extras=GROUPED, payload=b"payload")
    await bench.settle(await bench.claim(), Snooze(0))
    lease = await bench.claim()
    assert (lease.extras, lease.payload) == (GROUPED, b"payload")
    await bench.settle(lease, Complete(b"done"))
    job = await bench.job()
    assert (job.extras, job.state, job.result) == (GROUPED, State.COMPLETED, b"done")


async def test_a_rerun_keeps_what_the_user_said(bench: Bench) -> None:
    await bench.put(extras=GROUPED)
    lease = await bench.claim()
    await bench.put(conflict=redispatch(), payload=b"again")
    await bench.settle(lease, Complete(b""))
    again = await bench.claim()
    assert (again.extras, again.payload) == (GROUPED, b"again")


async def test_a_new_life_has_the_extras_of_its_own_enqueue(bench: Bench) -> None:
    await bench.put(extras=GROUPED)
    await bench.storage.cancel(bench.queue, ["job"])
    await bench.put()
    assert (await bench.job()).extras is None
