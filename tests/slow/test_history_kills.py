"""The driver of ``history.sync`` is killed over and over: nothing is in the tables twice, and nothing is missing."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slow.drivers import Driver
from tests.spark.busywork import fill_days, happen
from tests.spark.objectstore import object_store

# By hand: HISTORY_EVENTS=10000000 HISTORY_DAYS=10 make test-slow ARGS=tests/slow/test_history_kills.py;
# with HISTORY_STORE=s3 on an S3 server.
KILLS = int(os.environ.get("HISTORY_KILLS", "20"))
EVENTS = int(os.environ.get("HISTORY_EVENTS", "0"))
DAYS = int(os.environ.get("HISTORY_DAYS", "1"))
STORE = os.environ.get("HISTORY_STORE", "disk")
PER_SYNC = max(EVENTS // KILLS, 60)
PATIENCE_S = 240 + EVENTS // 2000
QUEUES = ("mail", "report")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 + EVENTS // 500)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the history is. Drivers find the S3 server in their environment."""
    if STORE != "s3":
        yield str(tmp_path / "history")
        return
    with object_store() as options:
        for name, value in options.items():
            monkeypatch.setenv(name.upper(), value)
        yield "s3://bucket/history"


@pytest.fixture
def start(tmp_path: Path, folder: str) -> Iterator[Callable[[str], Driver]]:
    drivers: list[Driver] = []

    def start(mode: str) -> Driver:
        log = tmp_path / f"driver-{len(drivers)}.log"
        url = f"sqlite:///{tmp_path}/jobs.db"
        drivers.append(Driver("tests.slow.history_driver", url, folder, str(PER_SYNC), mode, log=log))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()


def synced(driver: Driver) -> bool:
    return any(line.startswith("SyncReport") for line in driver.said())


def test_a_driver_killed_at_random_points_leaves_every_event_in_the_tables_once(
    tmp_path: Path, start: Callable[[str], Driver]
) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    chance = random.Random()
    happen(url, seed=0, steps=300, queues=QUEUES)
    if EVENTS:
        fill_days(url, "many", events=EVENTS, start_ms=0, length_ms=DAYS * 86_400_000)
    standby, longest_s = start("sync"), 0.0
    for kill in range(1, KILLS + 1):
        driver, standby = standby, start("sync" if kill < KILLS else "verify")
        # After every other kill nothing is new, and what was left of silver and gold is begun with.
        if kill % 2:
            happen(url, seed=kill, steps=40, queues=QUEUES)
        driver.go()
        began = time.monotonic()
        if not longest_s:
            driver.wait_until(lambda driver=driver: synced(driver))  # type: ignore[misc]
            longest_s = time.monotonic() - began
        # In a session that has just begun every step takes its time, so that all of them are hit.
        time.sleep(longest_s * chance.random() ** 2)
        driver.kill_all()
    standby.go()
    standby.finish(PATIENCE_S)

    (verdict,) = (
        json.loads(line.removeprefix("verdict ")) for line in standby.said() if line.startswith("verdict ")
    )
    assert verdict["faults"] == []
    assert verdict["again"] == 0
    assert verdict["versions"][0] == verdict["versions"][1]
