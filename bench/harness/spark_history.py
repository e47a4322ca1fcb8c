"""Events to bronze beside a plain exporter to Parquet; then silver and gold, which have no plain peer."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.event import NAMES, columns
from penstock.core.job import NewJob, Options
from penstock.core.outcome import Complete, Fail, Failure
from penstock.spark import history
from penstock.spark.history.gold import summarise
from penstock.spark.history.silver import fold
from penstock.spark.history.tables import open_history
from penstock.spark.store import Store
from penstock.storage import open_storage
from penstock.storage.contract import Storage
from penstock.storage.values import QueueSettings, Settlement, Take

from .spark_stage import Sample, Stage

__all__ = ["HistoryPart"]

QUEUE = "bench"
PAGE = 20_000
JOBS_AT_ONCE = 1000
SETTLED_AT_ONCE = 200
TASKS = [Options(task=f"task{n}", attempts=1) for n in range(5)]
FAILURE = Fail(Failure("TimeoutError", "no answer in 30 s"))
WARMING = 30_000
INSTANT = pa.timestamp("ms", "UTC")
TIMES = ("at_ms", "enqueued_at_ms")
TEXTS = (
    "type",
    "queue",
    "id",
    "run_id",
    "task",
    "version",
    "state",
    "worker",
    "error_type",
    "error",
    "group",
    "data",
    "by",
)
SCHEMA = pa.schema(
    [
        (name, pa.string() if name in TEXTS else pa.float64() if name == "cost" else pa.int64())
        for name in NAMES
    ]
)


class HistoryPart:
    """A log of jobs that were enqueued, claimed, and completed or failed: three events each."""

    def __init__(self, stage: Stage, *, rows: int, jobs: int) -> None:
        self.stage = stage
        self.numbers = itertools.count()
        self.last = asyncio.run(fill(stage.url, rows))

    def measure(self, system: str, *, warming: bool = False) -> dict[str, Sample]:
        folder = self.stage.folder / f"history{next(self.numbers)}"
        events = min(WARMING, self.last) if warming else self.last
        try:
            times = self.by_spark(folder, events) if system == "spark" else self.by_hand(folder, events)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return {name: {"count": events, "seconds": seconds} for name, seconds in times.items()}

    def by_spark(self, folder: Path, events: int) -> dict[str, float]:
        spark, times = self.stage.spark, {}
        began = time.perf_counter()
        report = history.sync(self.stage.url, folder, spark=spark, max_events=events, upto="bronze")
        times["bronze"] = time.perf_counter() - began
        if report.events != events:
            raise RuntimeError(f"{report.events} of {events} events are in bronze")
        opened = open_history(folder, create=False)
        for name, step in {"silver": fold, "gold": summarise}.items():
            began = time.perf_counter()
            step(spark, opened)
            times[name] = time.perf_counter() - began
        return times

    def by_hand(self, folder: Path, events: int) -> dict[str, float]:
        folder.mkdir()
        times = {}
        for name, processes in {"bronze": 1, "bronze, two processes": 2}.items():
            edges = [events * part // processes for part in range(processes + 1)]
            work = [
                (self.stage.url, f"{folder}/{after}.parquet", after, until)
                for after, until in itertools.pairwise(edges)
            ]
            began = time.perf_counter()
            rows = sum(self.stage.pool.starmap(export, work, chunksize=1))
            times[name] = time.perf_counter() - began
            if rows != events:
                raise RuntimeError(f"{rows} of {events} events were exported")
        return times


async def fill(url: str, events: int) -> int:
    """Put the events there; how many there are. The queue's clock goes over a few hours."""
    storage = open_storage(url)
    await storage.open()
    await storage.configure(QUEUE, QueueSettings(events_count=None))
    for start in range(0, events // 3, JOBS_AT_ONCE):
        await run_jobs(storage, start)
    last = (await storage.read_entries(QUEUE, after=0, limit=1)).last
    await storage.close()
    return last


async def run_jobs(storage: Storage, start: int) -> None:
    """So many jobs, done by one worker with another run time for every 200 of them, of which 4 fail."""
    numbers = range(start, start + JOBS_AT_ONCE)
    await storage.enqueue(QUEUE, [NewJob(f"job-{n}", b'{"n": 1}', TASKS[n % len(TASKS)]) for n in numbers])
    await storage.shift_clock(QUEUE, 5 + start // JOBS_AT_ONCE % 311)
    take = Take(f"worker{start // JOBS_AT_ONCE % 7}", JOBS_AT_ONCE, 600_000)
    leases = (await storage.claim(QUEUE, take)).leases
    for at in range(0, len(leases), SETTLED_AT_ONCE):
        await storage.shift_clock(QUEUE, 1000 + at)
        some = leases[at : at + SETTLED_AT_ONCE]
        ends = [FAILURE if number < 4 else Complete(b"1") for number in range(len(some))]
        done = [Settlement(lease.id, lease.token, end) for lease, end in zip(some, ends, strict=True)]
        await storage.settle(QUEUE, done)


def export(url: str, path: str, after: int, until: int) -> int:
    """What one would write by hand: a file with the columns of bronze. No manifest, no look at what is lost."""
    tables = []
    with Store(url) as store:
        while after < until:
            page = store.run(store.storage.read_entries(QUEUE, after=after, limit=min(PAGE, until - after)))
            found = columns(page.entries, queue=QUEUE, after=after, until=until)
            table = pa.table(found, schema=SCHEMA)
            for name in TIMES:
                table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(INSTANT))
            tables.append(table.append_column("epoch", pa.repeat(page.epoch, table.num_rows)))
            after = page.next
    whole = pa.concat_tables(tables)
    pq.write_table(whole, path, compression="zstd", compression_level=1)
    return int(whole.num_rows)
