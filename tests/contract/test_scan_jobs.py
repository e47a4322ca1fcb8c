"""scan_jobs: every job by its identity."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from penstock.core.job import Extras, Job
from penstock.core.lifecycle import State
from penstock.core.outcome import Complete
from tests.contract.factories import Bench

S = State


async def scan(bench: Bench, **asked: Any) -> list[Job]:
    """All pages of a scan."""
    found: list[Job] = []
    cursor = ""
    while True:
        page = await bench.storage.scan_jobs(bench.queue, cursor=cursor, **asked)
        found += page.jobs
        cursor = page.cursor
        if not cursor:
            return found


async def test_an_unused_queue_has_no_jobs(bench: Bench) -> None:
    assert await scan(bench) == []


async def test_jobs_of_all_states_are_given_as_get_gives_them(bench: Bench) -> None:
    await bench.bring_all()
    await bench.put(
        "headed", payload=b"p", priority=-3, extras=Extras(headers={"a": "b"}), run_id="r", ttl_ms=9999
    )

    found = {job.id: job for job in await scan(bench)}

    ids = sorted(found)
    assert ids == sorted([*(state.value for state in State), "headed"])
    assert [found[id] for id in ids] == await bench.storage.get(bench.queue, ids)


@pytest.mark.parametrize("limit", [7, 1000])
async def test_pages_together_hold_every_job(bench: Bench, limit: int) -> None:
    await bench.put_all([bench.new(f"job-{i}", payload=b"x" * 80) for i in range(700)])

    found = await scan(bench, limit=limit)

    assert {job.id for job in found} == {f"job-{i}" for i in range(700)}
    assert len(found) == 700


async def test_the_work_of_a_call_is_bounded(bench: Bench) -> None:
    await bench.put_all([bench.new(f"job-{i}", payload=b"x" * 80) for i in range(700)])

    page = await bench.storage.scan_jobs(bench.queue, limit=20)

    assert 0 < len(page.jobs) < 100
    assert page.cursor


@pytest.mark.parametrize("parts", [2, 5])
async def test_each_part_has_its_own_share_of_the_ids(bench: Bench, parts: int) -> None:
    ids = {f"job-{i}" for i in range(600)}
    await bench.put_all([bench.new(id, payload=b"x" * 80) for id in ids])

    shares = [
        [job.id for job in await scan(bench, part=part, parts=parts, limit=50)] for part in range(parts)
    ]

    assert set().union(*shares) == ids
    assert sum(map(len, shares)) == 600
    assert min(map(len, shares)) > 300 / parts


async def test_an_id_is_of_the_same_part_in_every_life(bench: Bench) -> None:
    await bench.put_all([bench.new(f"job-{i}") for i in range(50)])
    before = {job.id for job in await scan(bench, part=1, parts=3)}
    await bench.storage.drain(bench.queue)
    await bench.put_all([bench.new(f"job-{i}") for i in reversed(range(50))])

    assert {job.id for job in await scan(bench, part=1, parts=3)} == before


async def test_a_job_that_changes_its_state_meanwhile_is_not_missed(bench: Bench) -> None:
    await bench.put_all([bench.new(f"job-{i:03}", payload=b"x" * 80) for i in range(600)])
    found: Counter[str] = Counter()
    cursor = ""
    while True:
        page = await bench.storage.scan_jobs(bench.queue, cursor=cursor, limit=50)
        found.update(job.id for job in page.jobs)
        cursor = page.cursor
        if not cursor:
            break
        for lease in await bench.claim_all(40):
            await bench.settle(lease, Complete(b"done"))
        await bench.put_all([bench.new(f"new-{found.total()}-{i}") for i in range(20)])

    assert {id for id in found if id.startswith("job")} == {f"job-{i:03}" for i in range(600)}


@pytest.mark.parametrize("state", list(State))
async def test_the_store_distinguishes_the_states(bench: Bench, state: State) -> None:
    await bench.bring_all()

    assert [job.id for job in await scan(bench, states=frozenset({state}))] == [state.value]


async def test_several_states_none_and_parts_go_together(bench: Bench) -> None:
    await bench.put_all([bench.new(f"w{i}") for i in range(40)])
    await bench.put_all([bench.new(f"s{i}", delay_ms=60_000) for i in range(40)])
    await bench.bring(S.CANCELLED, "x")
    wanted = frozenset({S.SCHEDULED, S.CANCELLED})

    found = [
        job.id for part in (0, 1) for job in await scan(bench, states=wanted, part=part, parts=2, limit=3)
    ]

    assert sorted(found) == sorted(["x", *(f"s{i}" for i in range(40))])
    assert await scan(bench, states=frozenset()) == []


@pytest.mark.parametrize("result", [b"short", b"long" * 100])
async def test_a_light_scan_leaves_out_payload_and_result(bench: Bench, result: bytes) -> None:
    await bench.put("plain", payload=b"payload")
    lease = await bench.claim()
    await bench.settle(lease, Complete(result))
    await bench.put("rich", payload=b"payload", run_id="run", write_id="w", extras=Extras(headers={"a": "b"}))
    heavy = await scan(bench)

    light = {job.id: job for job in await scan(bench, light=True)}

    assert {job.payload for job in light.values()} == {b""}
    assert light["plain"].result is None
    assert light["plain"].state is S.COMPLETED
    for job in heavy:
        shown = light[job.id]
        assert (shown.incarnation, shown.options, shown.extras, shown.run_id, shown.write_id) == (
            (job.incarnation, job.options, job.extras, job.run_id, job.write_id)
        )
