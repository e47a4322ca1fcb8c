"""The driver of ``history.sync`` is killed over and over: nothing is in the tables twice, and nothing is missing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from penstock.spark.store import Store
from tests.spark.busywork import happen

pytestmark = [pytest.mark.slow_spark, pytest.mark.timeout(1500)]

KILLS = 20
QUEUES = ("mail", "report")


class Driver:
    """A process with a session of its own. Its JVM is in its process group and goes with it."""

    def __init__(self, url: str, folder: Path, mode: str) -> None:
        script = Path(__file__).with_name("history_driver.py")
        command = [sys.executable, str(script), url, str(folder), mode]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def go(self) -> None:
        """Wait until the session is there, then let it begin."""
        output, orders = _pipe(self.process.stdout), _pipe(self.process.stdin)
        assert output.readline() == "ready\n"
        orders.write("go\n")
        orders.flush()

    def synced(self) -> None:
        """Wait until it has done one."""
        assert _pipe(self.process.stdout).readline().startswith("SyncReport")

    def kill(self) -> None:
        assert self.process.poll() is None, "it ended before it was killed"
        os.killpg(self.process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> int:
        code = self.process.wait()
        _pipe(self.process.stdout).close()
        _pipe(self.process.stdin).close()
        return code


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def test_a_driver_killed_at_random_points_leaves_every_event_in_the_tables_once(tmp_path: Path) -> None:
    url, folder = f"sqlite:///{tmp_path}/jobs.db", tmp_path / "history"
    happen(url, seed=0, steps=300, queues=QUEUES)
    standby, longest_s = Driver(url, folder, "sync"), 0.0
    for kill in range(1, KILLS + 1):
        driver, standby = standby, Driver(url, folder, "sync" if kill < KILLS else "verify")
        driver.go()
        happen(url, seed=kill, steps=40, queues=QUEUES)
        if kill == 1:
            began = time.monotonic()
            driver.synced()
            longest_s = min(time.monotonic() - began, 60)
        # In a session that has just begun every step takes its time, so that all of them are hit.
        time.sleep(longest_s * random.random())
        driver.kill()
    standby.go()
    assert standby.close() == 0

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
    listed = json.loads(max((folder / "bronze" / "_manifests").iterdir()).read_text())["files"]
    assert sorted(path.name for path in (folder / "bronze").glob("*.parquet")) == sorted(
        file["path"] for file in listed
    )
