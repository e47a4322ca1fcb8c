"""The history of a million events: events to bronze against a plain exporter, then silver and gold. In one run.

``python bench/spark_history.py [events] [url]``. The exporter is two processes that read a half of the log each, make
Arrow tables of it and write them as Parquet: no manifest, no Spark. Both are measured warm, in turns, best of three.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.eventcolumns import columns
from penstock.core.job import NewJob, Options
from penstock.core.outcome import Complete
from penstock.spark import history, session
from penstock.spark.history.folder import open_history
from penstock.spark.history.gold import summarise
from penstock.spark.history.silver import fold
from penstock.spark.store import Store
from penstock.storage import open_storage
from penstock.storage.values import QueueSettings, Settlement, Take

QUEUE = "bench"
PAGE = 20_000
ROUNDS = 3


async def fill(url: str, events: int) -> int:
    """Jobs that are enqueued, claimed and completed: three events each."""
    storage = open_storage(url)
    await storage.open()
    await storage.configure(QUEUE, QueueSettings(events_count=None))
    options = [Options(task=f"task{n}") for n in range(5)]
    for start in range(0, events // 3, 1000):
        jobs = [NewJob(f"job-{n}", b'{"n": 1}', options[n % 5]) for n in range(start, start + 1000)]
        await storage.enqueue(QUEUE, jobs)
        leases = (await storage.claim(QUEUE, Take(f"worker{start % 7}", 1000, 60_000))).leases
        await storage.shift_clock(QUEUE, 200 + start % 977)
        await storage.settle(QUEUE, [Settlement(lease.id, lease.token, Complete(b"1")) for lease in leases])
    last = (await storage.read_entries(QUEUE, after=0, limit=1)).last
    await storage.close()
    return last


def export(url: str, path: str, after: int, until: int) -> None:
    """What one would write by hand."""
    with Store(url) as store:
        tables = []
        while after < until:
            page = store.run(store.storage.read_entries(QUEUE, after=after, limit=min(PAGE, until - after)))
            tables.append(pa.table(columns(page.entries, queue=QUEUE, after=after, until=until)))
            after = page.next
        pq.write_table(pa.concat_tables(tables), path, compression="zstd", compression_level=1)


def exported_s(pool: multiprocessing.pool.Pool, url: str, folder: Path, last: int) -> float:
    began = time.perf_counter()
    half = last // 2
    pool.starmap(export, [(url, f"{folder}/a.parquet", 0, half), (url, f"{folder}/b.parquet", half, last)])
    return time.perf_counter() - began


def main(events: int, url: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="history-bench-"))
    url = url or f"sqlite:///{folder}/jobs.db"
    last = asyncio.run(fill(url, events))
    spark = session("bench", cores=2)
    plain, bronze, silver, gold = [], [], [], []
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(time.sleep, [0.1] * 2)
        for turn in range(ROUNDS):
            plain.append(exported_s(pool, url, folder, last))
            out = folder / f"history{turn}"
            began = time.perf_counter()
            assert history.sync(url, out, spark=spark, upto="bronze").events == last
            bronze.append(time.perf_counter() - began)
            opened = open_history(out, create=False)
            began = time.perf_counter()
            fold(spark, opened, sync="bench")
            silver.append(time.perf_counter() - began)
            began = time.perf_counter()
            summarise(spark, opened, sync="bench")
            gold.append(time.perf_counter() - began)
    rows = {
        "plain exporter, two processes": plain,
        "history.sync to bronze": bronze,
        "silver": silver,
        "gold": gold,
    }
    for name, times in rows.items():
        rounds = ", ".join(f"{seconds:.2f}" for seconds in times)
        print(f"{name:32} {min(times):7.2f} s  {last / min(times):10,.0f} events/s  (rounds: {rounds})")
    print(f"{'bronze against plain':32} {min(plain) / min(bronze):7.2f} x")
    spark.stop()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000, sys.argv[2] if len(sys.argv) > 2 else "")
