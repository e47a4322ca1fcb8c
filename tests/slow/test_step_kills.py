"""Jobs of five steps whose workers are killed at every boundary of a step: no recorded step runs again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from penstock import App
from tests.slow import step_fleet
from tests.slow.step_fleet import BOUNDARIES, QUEUE, STEPS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

JOBS = 1000
KILLS_PER_BOUNDARY = 3


@pytest.fixture(params=["sqlite", "valkey"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/steps.db"
    url: str = request.getfixturevalue("valkey_url")
    return f"{url}?namespace=steps-{random.randrange(10**9)}"


def live(store_url: str, journal: Path, boundary: str, count: int) -> int:
    """One life of the worker. Return how it ended."""
    return subprocess.run(
        [sys.executable, "-m", "tests.slow.step_fleet", boundary, str(count)],
        env={**os.environ, "PENSTOCK_URL": store_url, "JOURNAL": str(journal)},
        timeout=300,
        check=False,
    ).returncode


def check_journal(lines: list[str]) -> int:
    """No step ran after its record was acknowledged. Return how often one ran again because it was not recorded."""
    recorded: set[tuple[str, str]] = set()
    ran: Counter[tuple[str, str]] = Counter()
    for line in lines:
        what, step, job = line.split()
        if what == "recorded":
            recorded.add((job, step))
        elif what == "ran":
            assert (job, step) not in recorded, f"step {step} of {job} ran after it had been recorded"
            ran[job, step] += 1
    assert len(ran) == JOBS * STEPS
    return sum(count - 1 for count in ran.values())


async def test_no_recorded_step_runs_again_whenever_the_worker_dies(store_url: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    chance = random.Random(15)
    async with App(store_url) as app:
        queue = app.queue(QUEUE)
        await queue.enqueue_many(
            [{} for _ in range(JOBS)], task=step_fleet.work.name, ids=[f"j{n:04}" for n in range(JOBS)],
            attempts=1, max_stalls=1000, result_ttl="1h",
        )  # fmt: skip
        deaths = chance.sample(BOUNDARIES * KILLS_PER_BOUNDARY, len(BOUNDARIES) * KILLS_PER_BOUNDARY)
        for boundary in deaths:
            assert live(store_url, journal, boundary, chance.randint(1, 25)) == -signal.SIGKILL
        assert live(store_url, journal, "", 0) == 0

        again = check_journal(journal.read_text().splitlines())
        # A worker that dies between effect and record has to run the step again: at most its 20 jobs each.
        assert again <= len(deaths) * 20
        assert (await queue.counts()).completed == JOBS
        recorded: Counter[tuple[str, str]] = Counter()
        async for event in queue.events(types="recorded", follow=False):
            data = json.loads(event.data)
            assert data["status"] == "completed"
            recorded[event.id, data["step"]] += 1
        assert len(recorded) == JOBS * STEPS
        assert set(recorded.values()) == {1}
        async for job in queue.list_jobs("completed"):
            assert await app.job(job.ref).result() == [f"{job.id}:{n}" for n in range(STEPS)]
        assert not any((await queue.check()).problems.values())
