"""Rows of a Parquet table as jobs: ``df.write`` beside a loader of two processes with the same calls of the engine."""

from __future__ import annotations

import time
from itertools import chain
from pathlib import Path
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.job import NewJob, Options
from penstock.spark import write_report
from penstock.spark.rows import row_id_maker
from penstock.spark.store import Store

from .spark_stage import CORES, Sample, Stage

__all__ = ["WritePart"]

QUEUE = "bench"
TASK = "noop"
BATCH = 1000
"""Jobs of one call: the default of ``batchSize``."""
FILES = 8
WARMING = 20_000


class WritePart:
    """A table of 4 columns, which make payloads of about 100 bytes."""

    def __init__(self, stage: Stage, *, rows: int, jobs: int) -> None:
        self.stage = stage
        self.tables = {rows: make_table(stage.folder, rows), WARMING: make_table(stage.folder, WARMING)}
        self.rows = rows

    def measure(self, system: str, *, warming: bool = False) -> dict[str, Sample]:
        self.stage.empty()
        rows = WARMING if warming else self.rows
        path = self.tables[rows]
        began = time.perf_counter()
        accepted = self.by_spark(path) if system == "spark" else self.by_hand(path)
        seconds = time.perf_counter() - began
        if accepted != rows:
            raise RuntimeError(f"{system}: {accepted} of {rows} rows are jobs")
        return {"write": {"count": rows, "seconds": seconds}}

    def by_spark(self, path: Path) -> int:
        url, write_id = self.stage.url, uuid4().hex
        options = {"url": url, "queue": QUEUE, "task": TASK, "keyColumns": "id", "writeId": write_id}
        frame = self.stage.spark.read.parquet(path.as_uri())
        frame.write.format("penstock").options(**options).mode("append").save()
        return write_report(url, write_id).accepted

    def by_hand(self, path: Path) -> int:
        files = sorted(map(str, path.iterdir()))
        work = [(self.stage.url, files[part::CORES]) for part in range(CORES)]
        return sum(self.stage.pool.starmap(load, work, chunksize=1))


def make_table(folder: Path, rows: int) -> Path:
    """A folder of Parquet files, as other programs leave them."""
    path = folder / f"rows-{rows}"
    path.mkdir()
    for part in range(FILES):
        numbers = range(rows * part // FILES, rows * (part + 1) // FILES)
        columns = {
            "id": pa.array(numbers, pa.int64()),
            "user": [f"user-{n % 5000:05}" for n in numbers],
            "text": [f"a text of some length, as people write it, number {n}" for n in numbers],
            "score": pa.array([n % 997 / 7 for n in numbers], pa.float64()),
        }
        pq.write_table(pa.table(columns), path / f"part-{part}.parquet")
    return path


def load(url: str, files: list[str]) -> int:
    """What one would write by hand: ids and payloads as ``df.write`` has them, so many jobs in a call."""
    id_of, encode = row_id_maker("penstock", TASK), msgspec.json.Encoder().encode
    options, write_id = Options(task=TASK), uuid4().hex
    queued = 0
    with Store(url) as store:
        for batch in chain.from_iterable(pq.ParquetFile(file).iter_batches(BATCH) for file in files):
            jobs = [
                NewJob(id_of((row["id"],)), encode(row), options, write_id=write_id)
                for row in batch.to_pylist()
            ]
            answers = store.run(store.storage.enqueue(QUEUE, jobs))
            queued += sum(answer.status == "queued" for answer in answers)
    return queued
