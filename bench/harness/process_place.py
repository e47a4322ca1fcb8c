"""An input table, and an output of `process` in which every row of it is settled."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

import penstock.spark as ps
from penstock.spark.processing.collector import ROWS
from penstock.spark.processing.request import ledger_of
from penstock.spark.processing.snapshot import snapshot
from penstock.spark.rows import Layout
from penstock.spark.schemas import namespace_of
from penstock.spark.store import shared_url

from . import process_app

__all__ = ["Place"]

PAYLOAD = ("k", "name", "text", "x")
AT_ONCE = 50_000
"""Rows that a long run writes in one commit."""
ENDED_AT_US = 1_700_000_000_000_000


class Place:
    """A table of `rows` rows and an output that has their results, for a store at `url`."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, *, rows: int) -> None:
        self.spark, self.url = spark, url
        self.table, self.output = folder / "table", folder / "output"
        self.count = self.increments = 0
        if rows:
            self.add(rows)
            self._settle()
            self.increments = 0

    @property
    def task(self) -> Any:
        os.environ[process_app.URL] = self.url
        return importlib.reload(process_app).measure

    def rows(self) -> DataFrame:
        return self.spark.read.parquet(str(self.table))

    def add(self, rows: int) -> None:
        """Add new rows to the table, in two files."""
        text = F.concat_ws("-", *(F.sha2((F.col("id") + n).cast("string"), 256) for n in range(2)))
        made = self.spark.range(self.count, self.count + rows, 1, 2)
        columns = [F.col("id"), F.concat(F.lit("row "), "id"), text, F.col("id") / 7]
        named = made.select(*(column.alias(name) for column, name in zip(columns, PAYLOAD, strict=True)))
        named.write.mode("append").parquet(str(self.table))
        self.count += rows
        self.increments += 1

    def files(self) -> int:
        """Return how many files the output has."""
        return len(list(self.output.glob("*.parquet")))

    def bare(self) -> int:
        """Read both tables, hash each row, and return how many rows the output does not have."""
        # Observed, because Spark would otherwise move the join below the hash and hash only the rows that are left.
        seen = Observation()
        hashed = self.rows().select("k", F.sha2(F.concat_ws("\x1f", *PAYLOAD), 256).alias("hash"))
        known = self.spark.read.parquet(str(self.output)).select("k")
        rows = hashed.observe(seen, F.min("hash").alias("least")).join(known, "k", "left_anti")
        return rows.count()

    def process(self, **options: Any) -> ps.Processed:
        given = {"key": "k", "output": self.output, "workers": 1, "progress": "none", **options}
        return ps.process(self.rows(), self.task, **given)

    def _settle(self) -> None:
        """Write the output as long runs would: fast, and without the store."""
        task = self.task
        layout = Layout(
            namespace=namespace_of(shared_url(task.app)),
            task=task.name,
            key=("k",),
            payload=PAYLOAD,
            options=task.defaults,
        )
        ledger = ledger_of(self.rows(), task, key=("k",), output=self.output, format="parquet")
        # Through a file: the rows are read once, and taken one part after another.
        taken = snapshot(self.rows(), layout).select("job_id", "fingerprint", "key_json").toArrow()
        for number, start in enumerate(range(0, taken.num_rows, AT_ONCE), 1):
            ledger.append(_ends(taken.slice(start, AT_ONCE), task, number), commit=number)


def _ends(rows: pa.Table, task: Any, commit: int) -> pa.Table:
    same = {
        "state": "completed",
        "result": "129",
        "runs": 1,
        "failures": 0,
        "run_ms": 1,
        "enqueued_at": ENDED_AT_US,
        "finished_at": ENDED_AT_US,
        "task": task.name,
        "task_version": task.defaults.version,
        "run_id": "settled",
        "incarnation": 1,
        "commit": commit,
    }
    columns = [
        rows[field.name]
        if field.name in rows.column_names
        else pa.repeat(pa.scalar(same.get(field.name), field.type), rows.num_rows)
        for field in ROWS
    ]
    return pa.table(columns, schema=ROWS)
