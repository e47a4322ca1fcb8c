"""The driver of ``history.sync`` is killed over and over: nothing is in the tables twice, and nothing is missing."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.spark.store import Store
from tests.slow.drivers import Driver
from tests.spark.busywork import happen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KILLS = 20
QUEUES = ("mail", "report")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Driver]]:
    drivers: list[Driver] = []

    def start(mode: str) -> Driver:
        log = tmp_path / f"driver-{len(drivers)}.log"
        url, folder = f"sqlite:///{tmp_path}/jobs.db", str(tmp_path / "history")
        drivers.append(Driver("tests.slow.history_driver", url, folder, mode, log=log))
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
    standby.finish()

    verdict = json.loads((tmp_path / "verdict.json").read_text())
    with Store(url) as store:
        lasts = {
            queue: store.run(store.storage.read_entries(queue, after=0, limit=1)).last for queue in QUEUES
        }
    expected = [[queue, seq] for queue in QUEUES for seq in range(1, lasts[queue] + 1)]
    assert sorted(verdict["numbers"]) == expected
    for name, (grown, from_scratch) in verdict["tables"].items():
        assert grown == from_scratch, name
    assert verdict["again"] == 0
    assert verdict["versions"][0] == verdict["versions"][1]
