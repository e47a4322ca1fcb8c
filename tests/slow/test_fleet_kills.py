"""Kill Spark's executors, the JVM or the Python in it, while they write and while they work."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pyarrow.parquet as pq
import pytest

from penstock import App
from penstock.client.info import WorkerInfo
from penstock.core.lifecycle import EventType, State
from penstock.storage.values import Counts
from tests.slow.drivers import PAST_LEASES_MS
from tests.slow.local_processes import ROOT, check_history, read_log
from tests.slow.spark_driver import JOBS, ROWS
from tests.slow.spark_tasks import square
from tests.spark.stores import ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# The Python of an executor, whichever daemon has forked it: `python -m pyspark.daemon`, or tests/spark/preloading.py.
JVM, PYTHON = "CoarseGrainedExecutorBackend", " pyspark.worker"
PATIENCE_S = 300
T = TypeVar("T")


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
        ours = psutil.Process(self._process.pid).children(recursive=True)
        max((one for one in ours if is_of(kind, one)), key=lambda one: one.create_time()).kill()

    def kill_at_work(self, queue: str, *, whole: bool) -> None:
        """SIGKILL to the Python of an executor that holds jobs of the queue, and with ``whole`` to its JVM too."""
        worker = self.wait_until(lambda: self._catch_at_work(queue))
        executor = next(one for one in worker.parents() if is_of(JVM, one))
        worker.kill()
        if whole:
            executor.kill()

    def _catch_at_work(self, queue: str) -> psutil.Process | None:
        """One that is stopped while the store is asked, so that what it holds is not settled before it dies."""
        workers = {
            one.id: one.pid for one in map(WorkerInfo, ask(self.url, lambda storage: storage.workers(queue)))
        }
        for worker in psutil.Process(self._process.pid).children(recursive=True):
            if worker.pid not in workers.values():
                continue
            worker.suspend()
            active = ask(self.url, lambda storage: storage.list_jobs(queue, State.ACTIVE, limit=1000)).jobs
            if any(workers.get(job.worker) == worker.pid for job in active):
                return worker
            worker.resume()
        return None

    def wait_until(self, reached: Callable[[], T | None]) -> T:
        """What it answers, once that is something."""
        deadline = time.monotonic() + PATIENCE_S
        while not (answer := reached()):
            assert self._process.poll() is None, self._said()
            assert time.monotonic() < deadline, self._said()
            time.sleep(0.02)
        return answer

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


def is_of(kind: str, process: psutil.Process) -> bool:
    try:
        return kind in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


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
    ids = {handle.id for handle in task.sync.enqueue_many([task.job(n) for n in range(JOBS)])}
    app.sync.close()
    driver.begin("fleet")
    driver.wait_until(lambda: driver.counts("worked").completed > JOBS // 20)
    driver.kill_at_work("worked", whole=True)
    driver.wait_until(lambda: driver.counts("worked").completed > JOBS // 4)
    driver.kill_at_work("worked", whole=False)
    driver.finish("fleet")
    events = ask(driver.url, lambda storage: read_log(storage, "worked"))
    check_history(events, ids)
    assert EventType.STALLED in {event.type for event in events}


def test_a_run_whose_executors_are_killed_has_every_row_in_its_output_once(driver: Driver) -> None:
    driver.begin("process")
    driver.wait_until(lambda: driver.counts("rows").completed > JOBS // 20)
    driver.kill_at_work("rows", whole=True)
    # What its worker had claimed is free again: now, instead of after half a minute.
    ask(driver.url, lambda storage: storage.shift_clock("rows", PAST_LEASES_MS))
    driver.finish("process")
    names = ("n", "penstock_value", "penstock_state")
    table = pq.read_table(driver.directory / "cubes", columns=list(names))
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    assert sorted(rows) == [(n, n**3, "completed") for n in range(JOBS)]
