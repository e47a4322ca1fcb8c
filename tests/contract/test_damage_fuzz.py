"""Random damage to stored values: nothing but documented errors, and every job that was not hit completes.

``PENSTOCK_FUZZ_SEEDS=1000`` tries more seeds than a normal run does; the slow suite always tries some hundred.
"""

from __future__ import annotations

import os
import random

import pytest

from penstock.core.lifecycle import State
from tests.contract.engines import ENGINES
from tests.contract.factories import Bench
from tests.contract.fuzzing import fill, harm_some, take_apart, work_off

# Not on a cluster, whose nodes run the same functions as one server.
pytestmark = pytest.mark.parametrize(
    "engine", [engine for engine in ENGINES if isinstance(engine, str)], indirect=True
)

_SEEDS = int(os.environ.get("PENSTOCK_FUZZ_SEEDS", "12"))


@pytest.mark.parametrize("seed", range(_SEEDS))
async def test_jobs_beside_random_damage_complete(bench: Bench, seed: int) -> None:
    await hold_against_damage(bench, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300))
async def test_jobs_beside_more_random_damage_complete(bench: Bench, seed: int) -> None:
    await hold_against_damage(bench, seed)


async def hold_against_damage(bench: Bench, seed: int) -> None:
    expected = await fill(bench)
    expected -= await harm_some(bench, random.Random(seed))

    await work_off(bench, expected)

    completed = {
        job.id for job in (await bench.storage.list_jobs(bench.queue, State.COMPLETED, limit=1000)).jobs
    }
    assert expected <= completed, expected - completed
    await bench.storage.check(bench.queue, repair=True)
    assert not (await bench.storage.check(bench.queue)).problems
    await read_log(bench)
    await take_apart(bench)


async def read_log(bench: Bench) -> None:
    """Read the log to its end: every page goes on."""
    after = 0
    while True:
        page = await bench.storage.read_events(bench.queue, after=after, limit=20)
        if page.next == page.last:
            return
        assert page.next > after
        after = page.next
