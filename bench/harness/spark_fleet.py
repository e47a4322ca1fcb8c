"""Jobs that do nothing, run by Spark's executors as workers, and by as many plain worker processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from penstock.core.job import NewJob
from penstock.spark import fleet
from penstock.spark.store import Store
from penstock.storage.contract import Storage

from .spark_app import app, noop
from .spark_stage import CORES, Sample, Stage

__all__ = ["FleetPart"]

QUEUE = "default"
JOBS_AT_ONCE = 1000
CONCURRENCY = 200
WARMING = 2000


class FleetPart:
    """The clock is that of the event log, from the first claim to the last completion: neither the start of a process
    nor that of Spark's tasks is in it. ``whole``: from the start to the end of all of it, with both."""

    def __init__(self, stage: Stage, *, rows: int, jobs: int) -> None:
        self.stage = stage
        self.jobs = jobs

    def measure(self, system: str, *, warming: bool = False) -> dict[str, Sample]:
        self.stage.empty()
        jobs = WARMING if warming else self.jobs
        with Store(self.stage.url) as store:
            before = store.run(put(store.storage, jobs))
            began = time.perf_counter()
            self.by_spark() if system == "spark" else self.by_hand()
            whole = time.perf_counter() - began
            seconds = store.run(logged_s(store.storage, before, jobs))
        return {
            "fleet": {"count": jobs, "seconds": seconds},
            "fleet, with its start": {"count": jobs, "seconds": whole},
        }

    def by_spark(self) -> None:
        # The fleet's workers go to the store that the app has here.
        app.url = self.stage.url
        fleet(self.stage.spark, app, size=CORES, concurrency=CONCURRENCY).wait()

    def by_hand(self) -> None:
        options = ["--burst", "--no-live", "--concurrency", str(CONCURRENCY)]
        command = [sys.executable, "-m", "penstock", "worker", f"{noop.func.__module__}:app", *options]
        environment = os.environ | {"PENSTOCK_URL": self.stage.url}
        log = self.stage.folder / "workers.log"
        with log.open("wb") as said:
            processes = [subprocess.Popen(command, env=environment, stderr=said) for _ in range(CORES)]
            codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"a worker failed: {log.read_text()[-800:]}")


async def put(storage: Storage, jobs: int) -> int:
    """The number of the log's last event after that."""
    for start in range(0, jobs, JOBS_AT_ONCE):
        numbers = range(start, min(start + JOBS_AT_ONCE, jobs))
        await storage.enqueue(QUEUE, [NewJob(f"job-{n}", b'{"n":%d}' % n, noop.defaults) for n in numbers])
    return (await storage.read_entries(QUEUE, after=0, limit=1)).last


async def logged_s(storage: Storage, before: int, jobs: int) -> float:
    """From the first event after ``before`` to the last one there is."""
    last = (await storage.read_entries(QUEUE, after=before, limit=1)).last
    if last - before != 2 * jobs:
        raise RuntimeError(f"{last - before} events of {jobs} jobs: not each was claimed and completed once")
    times = []
    for after in (before, last - 1):
        page = await storage.read_events(QUEUE, after=after, limit=1)
        times.append(page.events[0].at_ms)
    return (times[1] - times[0]) / 1000
