"""Kill a driver of Spark while its fleet works: its workers end with it, and others take over what they had."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from penstock import App
from penstock.core.lifecycle import EventType
from penstock.storage.values import Counts
from tests.slow.local_processes import ROOT, check_history, read_log
from tests.slow.spark_tasks import square
from tests.spark.stores import ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

QUEUE = "worked"
JOBS = 2000


def test_a_driver_that_is_killed_takes_its_fleet_along_and_strands_no_job(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    app = App(url)
    task = app.task(queue=QUEUE, name="square", max_stalls=20)(square.func)
    ids = {handle.id for handle in task.sync.enqueue_many([task.job(n) for n in range(JOBS)])}
    with (tmp_path / "driver.log").open("wb") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.slow.fleet_driver"],
            cwd=ROOT,
            env={**os.environ, "PENSTOCK_URL": url},
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: counts(url).completed > JOBS // 20, "the fleet does not work")
        family = psutil.Process(driver.pid).children(recursive=True)
        assert len(family) > 2, "a JVM, and the Pythons in which its workers are"
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    wait_until(lambda: not any(map(lives, family)), f"left behind: {family}")
    left = counts(url)
    assert left.active > 0, "killed while they had jobs"
    assert left.completed + left.active + left.waiting == JOBS

    app.worker(queues=[QUEUE], concurrency=100, burst=True).run_sync()
    app.sync.close()
    events = ask(url, lambda storage: read_log(storage, QUEUE))
    check_history(events, ids)
    assert sum(event.type is EventType.STALLED for event in events) == left.active


def counts(url: str) -> Counts:
    return ask(url, lambda storage: storage.counts(QUEUE))


def wait_until(reached: Callable[[], bool], what: str, patience_s: float = 120) -> None:
    deadline = time.monotonic() + patience_s
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def lives(process: psutil.Process) -> bool:
    """It, not another one that has got its number."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
