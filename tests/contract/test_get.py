"""get: records by id."""

from __future__ import annotations

from penstock.core.lifecycle import State
from tests.contract.factories import STATES, Bench

S = State


async def test_jobs_come_in_the_order_asked_for_and_unknown_ones_are_none(bench: Bench) -> None:
    await bench.put("a", payload=b"1")
    await bench.put("b", payload=b"2")

    jobs = await bench.storage.get(bench.queue, ["b", "nobody", "a", "b"])

    assert [job and (job.id, job.payload) for job in jobs] == [("b", b"2"), None, ("a", b"1"), ("b", b"2")]
    assert await bench.storage.get(bench.queue, []) == []


async def test_every_state_is_shown_as_it_is(bench: Bench) -> None:
    await bench.bring_all()

    jobs = await bench.storage.get(bench.queue, [state.value for state in STATES])

    assert [job and job.state for job in jobs] == STATES


async def test_five_thousand_jobs_are_read_in_one_call(bench: Bench) -> None:
    ids = [str(i) for i in range(5000)]
    await bench.put_all([bench.new(id) for id in ids])

    assert [job and job.id for job in await bench.storage.get(bench.queue, ids)] == ids


async def test_another_queue_has_its_own_jobs(bench: Bench) -> None:
    await bench.put()

    assert await bench.storage.get(f"{bench.queue}-2", ["job"]) == [None]
