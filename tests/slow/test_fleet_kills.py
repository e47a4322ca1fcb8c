"""Kill Spark's executors, the JVM or the Python in it, while they write and while they work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock import App
from penstock.core.lifecycle import EventType
from penstock.storage.values import Counts
from tests.slow.crew import ROOT, check_history, read_log
from tests.slow.drivers import PAST_LEASES_MS
from tests.slow.spark_driver import JOBS, ROWS
from tests.slow.spark_tasks import square
from tests.spark.stores import ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JVM, PYTHON = "CoarseGrainedExecutorBackend", "pyspark.daemon"
PATIENCE_S = 300


class Driver:
    """A Spark driver that we have started, with all it has started."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self._log = directory / "driver.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.slow.spark_driver", str(directory)],
                cwd=ROOT,
                env={**os.environ, "PENSTOCK_URL": url},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def begin(self, role: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{role}\n".encode())
        self._process.stdin.flush()

    def finish(self, role: str) -> None:
        self.wait_until((self.directory / f"{role}.done").exists)

    def kill(self, kind: str) -> None:
        """SIGKILL to the youngest of its descendants of this kind."""
        *_, youngest = self._descendants(kind)
        os.kill(youngest, signal.SIGKILL)

    def _descendants(self, kind: str) -> list[int]:
        listed = subprocess.run(
            ["ps", "-ww", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
        )
        rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
        parents = {int(pid): int(parent) for pid, parent, *_ in rows}
        found = [int(pid) for pid, _, *args in rows if args and kind in args[0]]
        return sorted(pid for pid in found if self._is_ours(pid, parents))

    def _is_ours(self, pid: int, parents: dict[int, int]) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == self._process.pid:
                return True
        return False

    def wait_until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            assert self._process.poll() is None, self._said()
            assert time.monotonic() < deadline, self._said()
            time.sleep(0.02)

    def _said(self) -> str:
        return self._log.read_text()[-6000:]

    def counts(self, queue: str) -> Counts:
        return ask(self.url, lambda storage: storage.counts(queue))

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def driver(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    directory = tmp_path_factory.mktemp("kills")
    made = Driver(f"{valkey_url}?namespace={directory.name}-{os.getpid()}", directory)
    yield made
    made.end()


def test_a_write_whose_executors_are_killed_loses_no_row_and_doubles_none(driver: Driver) -> None:
    driver.begin("write")
    driver.wait_until(lambda: driver.counts("written").waiting > ROWS // 20)
    driver.kill(JVM)
    driver.wait_until(lambda: driver.counts("written").waiting > ROWS // 4)
    assert driver.counts("written").waiting < ROWS
    driver.kill(PYTHON)
    driver.finish("write")
    events = ask(driver.url, lambda storage: read_log(storage, "written"))
    assert [event.type for event in events] == [EventType.ENQUEUED] * ROWS
    assert len({event.id for event in events}) == ROWS
    assert driver.counts("written").waiting == ROWS


def test_a_fleet_whose_executors_are_killed_does_every_job_once(driver: Driver) -> None:
    app = App(driver.url)
    task = app.task(queue="worked", name="square", max_stalls=20)(square.func)
    ids = {handle.id for handle in task.sync.enqueue_many([(n,) for n in range(JOBS)])}
    app.sync.close()
    driver.begin("fleet")
    driver.wait_until(lambda: driver.counts("worked").completed > JOBS // 20)
    driver.kill(JVM)
    driver.wait_until(lambda: driver.counts("worked").completed > JOBS // 4)
    driver.kill(PYTHON)
    driver.finish("fleet")
    events = ask(driver.url, lambda storage: read_log(storage, "worked"))
    check_history(events, ids)
    assert EventType.STALLED in {event.type for event in events}


def test_a_run_whose_executors_are_killed_has_every_row_in_its_output_once(driver: Driver) -> None:
    driver.begin("process")
    driver.wait_until(lambda: driver.counts("rows").completed > JOBS // 20)
    driver.kill(JVM)
    # What its worker had claimed is free again: now, instead of after half a minute.
    ask(driver.url, lambda storage: storage.shift_clock("rows", PAST_LEASES_MS))
    driver.finish("process")
    table = pq.read_table(driver.directory / "cubes", columns=["n", "value", "state"])
    rows = zip(*(table[name].to_pylist() for name in ("n", "value", "state")), strict=True)
    assert sorted(rows) == [(n, n**3, "completed") for n in range(JOBS)]
