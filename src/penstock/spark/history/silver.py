"""Silver: one row per job and life, folded forward from what bronze has and silver has not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from penstock.spark.history.bronze import parallelism
from penstock.spark.history.cuts import cuts_between, obliterations
from penstock.spark.history.derived import DayFile, put_days, read_table, version_folder
from penstock.spark.history.events import listed_events, pending_files, placing_after
from penstock.spark.history.folder import History
from penstock.spark.history.folding import KEYS, SILVER
from penstock.spark.history.foldtasks import FoldedFiles, fold_files, fold_jobs, piles_of
from penstock.spark.history.manifest import BronzeManifest, DataFile, DerivedManifest

__all__ = ["fold", "silver_rows"]

TABLE = "jobs"
# A task has all of its rows in memory.
_PER_TASK = 250_000


def silver_rows(
    spark: SparkSession, history: History, silver: DerivedManifest, days: Iterable[str] | None = None
) -> DataFrame:
    """The rows of a version; of the jobs that were enqueued on some days only, if they are given."""
    return read_table(
        spark, history, "silver", silver.of(TABLE, None if days is None else list(days)), SILVER
    )


def fold(spark: SparkSession, history: History, *, sync: str) -> DerivedManifest:
    """Commit a version with all of bronze in it, and return it. If nothing is new, that is the one there is.

    Raises:
        Conflict: another sync was first. Nothing was committed.
    """
    bronze, silver = history.bronze.newest(), history.silver.newest()
    if silver.places == bronze.places and silver.losses == len(bronze.losses):
        return silver
    files = pending_files(bronze, silver.places)
    cuts = cuts_between(bronze, silver)
    if any("obliterated" in file.types for file in files):
        cuts += obliterations(listed_events(spark, history, bronze, files))
    # A cut may touch any job there is.
    days = {day for file in files for day in file.days} | (silver.days.keys() if cuts else set())
    folder = version_folder(history, "silver", silver, sync)
    task = partial(fold_jobs, cuts=cuts, folder=str(folder / TABLE))
    rows = _rows(spark, history, bronze, silver, files=files, days=days, combine=not cuts)
    found = rows.mapInArrow(task, "day string, path string").collect()
    written = [DayFile(day, TABLE, f"{folder.name}/{TABLE}/{path}") for day, path in found]
    return put_days(history, "silver", base=silver, bronze=bronze, sync=sync, touched=days, files=written)


def _rows(
    spark: SparkSession,
    history: History,
    bronze: BronzeManifest,
    silver: DerivedManifest,
    *,
    files: list[DataFile],
    days: set[str],
    combine: bool,
) -> DataFrame:
    """What silver knows of these days and the events of these files, all rows of a job in one task."""
    known = silver.of(TABLE, sorted(days))
    rows = read_table(spark, history, "silver", known, SILVER)
    if files:
        folded = FoldedFiles(
            folder=str(history.root / "bronze"),
            piles=piles_of(files),
            placing=placing_after(bronze, silver.places),
            combine=combine,
        )
        count = len(folded.piles)
        found = spark.range(0, count, 1, count).mapInArrow(partial(fold_files, files=folded), SILVER)
        rows = rows.unionByName(found) if known else found
    total = sum(file.rows for file in files) + _count(history, known)
    return rows.repartition(max(parallelism(spark), -(-total // _PER_TASK)), *KEYS)


def _count(history: History, paths: Sequence[str]) -> int:
    """How many rows these files of silver have."""
    folder = history.root / "silver"
    return sum(pq.read_metadata(folder / path).num_rows for path in paths)
