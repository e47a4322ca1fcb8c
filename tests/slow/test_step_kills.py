"""Jobs of five steps whose workers are killed at every boundary of a step: no recorded step runs again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
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


Place = tuple[str, int]
"""The id of a job, and the number of its step."""


def check_journal(lines: list[str], records: list[tuple[Place, int]]) -> int:
    """No step ran after the store had recorded it. Return how often one ran again because it was not recorded.

    Each effect is written with the token of its lease, before the step returns, and so before the store can have its
    record. ``records`` are the store's, each with the token of the lease that wrote it. Tokens rise, so the effect of
    that lease must be the last one.
    """
    ran: defaultdict[Place, list[int]] = defaultdict(list)
    for line in lines:
        what, step, job, lease = line.split()
        if what == "ran":
            ran[job, int(step)].append(int(lease))
    recorded = dict(records)
    assert len(recorded) == len(records), "a step was recorded twice"
    assert recorded.keys() == ran.keys()
    for place, token in recorded.items():
        assert ran[place][-1] == token, f"{place} was recorded by lease {token}, and ran in {ran[place]}"
        assert ran[place].count(token) == 1, f"{place} ran twice in lease {token}"
        assert ran[place] == sorted(ran[place])
    return sum(len(tokens) - 1 for tokens in ran.values())


def test_the_check_sees_a_step_that_runs_after_its_record() -> None:
    first, again = "ran 0 j 7", "ran 0 j 9"
    assert check_journal([first, again], [(("j", 0), 9)]) == 1
    for lines, records in (
        ([first, again], [(("j", 0), 7)]),
        ([first, first], [(("j", 0), 7)]),
        ([first], [(("j", 0), 9)]),
        ([first], [(("j", 0), 7), (("j", 0), 7)]),
        ([first], []),
        ([], [(("j", 0), 7)]),
    ):
        with pytest.raises(AssertionError):
            check_journal(lines, records)


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

        records: list[tuple[Place, int]] = []
        async for event in queue.events(types="recorded", follow=False):
            data = json.loads(event.data)
            assert data["status"] in ("completed", "started")
            if data["status"] == "completed":
                records.append(((event.id, int(data["step"][4:-1])), event.token))
        assert len(records) == JOBS * STEPS
        again = check_journal(journal.read_text().splitlines(), records)
        # A worker that dies between effect and record has to run the step again: at most its 20 jobs each.
        assert again <= len(deaths) * 20
        assert (await queue.counts()).completed == JOBS
        async for job in queue.list_jobs("completed"):
            assert await app.job(job.ref).result() == [f"{job.id}:{n}" for n in range(STEPS)]
        assert not any((await queue.check()).problems.values())
