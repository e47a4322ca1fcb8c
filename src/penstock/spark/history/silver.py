"""Silver: one row per job and life, folded forward from what bronze has and silver has not."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.spark.history.cuts import apply_cuts, cuts_between, obliterations
from penstock.spark.history.derived import put_days, read_table
from penstock.spark.history.events import after_places, day_of, listed_events, pending_files
from penstock.spark.history.folder import History
from penstock.spark.history.folding import SILVER, merged, strips
from penstock.spark.history.manifest import BronzeManifest, DataFile, DerivedManifest

__all__ = ["fold", "silver_rows"]

TABLE = "jobs"


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
    rows, days = _rows(spark, history, bronze, silver, files)
    return put_days(
        history,
        "silver",
        base=silver,
        bronze=bronze,
        sync=sync,
        touched=days,
        tables={TABLE: merged(rows).withColumn("day", day_of(F.col("enqueued_at")))},
    )


def _rows(
    spark: SparkSession,
    history: History,
    bronze: BronzeManifest,
    silver: DerivedManifest,
    files: list[DataFile],
) -> tuple[DataFrame, set[str]]:
    """What is to be merged, and the days it is about."""
    events = after_places(listed_events(spark, history, bronze, files), bronze, files, silver.places)
    cuts = cuts_between(bronze, silver)
    if any("obliterated" in file.types for file in files):
        cuts += obliterations(events)
    days = {day for file in files for day in file.days}
    if cuts:
        days |= silver.days.keys()
    known = silver_rows(spark, history, silver, days & silver.days.keys())
    rows = reduce(DataFrame.unionByName, [known, strips(events)])
    return (apply_cuts(rows, cuts) if cuts else rows), days
