"""check: every record against every index. What a damaged store looks like is each engine's own test."""

from __future__ import annotations

import pytest

from penstock.core.lifecycle import State
from tests.contract.factories import LEASE_MS, STATES, Bench, redispatch

S = State


@pytest.mark.parametrize("repair", [False, True])
async def test_a_sound_queue_has_no_problems_and_is_left_alone(bench: Bench, repair: bool) -> None:
    await bench.bring_all()
    await bench.put("active", conflict=redispatch())
    picture = await bench.picture()

    checked = await bench.storage.check(bench.queue, repair=repair)

    assert checked.records == len(STATES)
    assert not any(checked.problems.values()), checked.problems
    assert await bench.picture() == picture


async def test_a_queue_is_sound_after_every_job_has_moved(bench: Bench) -> None:
    await bench.bring_all()
    await bench.shift(LEASE_MS)
    await bench.storage.sweep(bench.queue)
    await bench.storage.retry(bench.queue, ["failed", "cancelled"])
    await bench.claim_all(2)
    await bench.storage.cancel(bench.queue, ["active", "waiting"])
    await bench.storage.remove(bench.queue, ["completed"])

    checked = await bench.storage.check(bench.queue)

    assert checked.records == len(STATES) - 1
    assert not any(checked.problems.values()), checked.problems


async def test_an_empty_queue_is_sound(bench: Bench) -> None:
    assert (await bench.storage.check(bench.queue)).records == 0
