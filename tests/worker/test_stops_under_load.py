"""Stops of workers that share a store and are busy: each ends as soon as its jobs do, and settles all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import uuid7
from tests.worker.stop_fleet import GRACE_S, stop_workers

# A stop that hangs lasts for the whole grace. The rest is room for a busy machine.
LATEST_S = GRACE_S / 3


@pytest.fixture(params=["sqlite", "valkey"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/stops.db"
    return f"{request.getfixturevalue('valkey_url')}?namespace=stops-{uuid7()}"


async def test_workers_that_are_stopped_under_load_end_with_their_jobs(url: str, tmp_path: Path) -> None:
    late_s = await stop_workers(url, tmp_path, stops=20, signals=2)
    assert max(late_s) < LATEST_S, sorted(late_s)[-5:]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_hundred_stops_under_load_end_with_their_jobs(url: str, tmp_path: Path) -> None:
    late_s = sorted(await stop_workers(url, tmp_path, stops=180, signals=20))
    print(
        f"{len(late_s)} stops, late by {late_s[len(late_s) // 2]:.3f} s (median), {late_s[-1]:.3f} s (worst)"
    )
    assert len(late_s) == 200
    assert late_s[-1] < LATEST_S
