"""Gold: what happened per minute, hour and day, in all and by queue, task, group and worker.

By the time of the event, in UTC. The first day that something new reaches, and all days after it, are computed anew.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, LongType, StringType, StructType, TimestampType

from penstock.spark.history.derived import put_days, read_table, version_folder, write_days
from penstock.spark.history.events import listed_events, pending_files
from penstock.spark.history.folder import History
from penstock.spark.history.manifest import BronzeManifest, DataFile, DerivedManifest
from penstock.spark.history.measures import (
    COUNTED,
    GRAINS,
    busy_minutes,
    counted,
    failed_minutes,
    net_by_minute,
    percentiles,
    with_groups,
)
from penstock.spark.history.silver import silver_rows

__all__ = ["CAUSES", "GOLD", "gold_rows", "summarise"]

_DAY_MS: Final = GRAINS["day"]
_TEXT, _LONG, _DOUBLE, _TIME = StringType(), LongType(), DoubleType(), TimestampType()
_TIMINGS: Final = [f"{what}_{end}" for what in ("wait", "run") for end in ("p50", "p95", "p99", "max")]

GOLD: Final = StructType()
for _name in ("grain", "dimension", "queue", "name"):
    GOLD.add(_name, _TEXT)
GOLD.add("at", _TIME)
for _name in COUNTED:
    GOLD.add(_name, _LONG)
for _name in _TIMINGS:
    GOLD.add(_name, _DOUBLE)
for _name in ("run_ms", "busy_ms"):
    GOLD.add(_name, _LONG)
for _name in ("utilisation", "cost", "usd"):
    GOLD.add(_name, _DOUBLE)
for _name in ("backlog", "backlog_max"):
    GOLD.add(_name, _LONG)

CAUSES: Final = StructType()
for _name in ("grain", "queue", "task", "error_type"):
    CAUSES.add(_name, _TEXT)
CAUSES.add("at", _TIME)
for _name in ("failed", "retried"):
    CAUSES.add(_name, _LONG)
CAUSES.add("example", _TEXT)

_SCHEMAS: Final = {"metrics": GOLD, "causes": CAUSES}


def gold_rows(spark: SparkSession, history: History, gold: DerivedManifest, table: str) -> DataFrame:
    """A table of a version: ``metrics`` or ``causes``."""
    return read_table(spark, history, "gold", gold.of(table), _SCHEMAS[table])


def summarise(spark: SparkSession, history: History, *, sync: str) -> DerivedManifest:
    """Commit a version with all of silver's bronze in it, and return it. If nothing is new, that is the one there is.

    Raises:
        Conflict: another sync was first, or silver is behind bronze. Nothing was committed.
    """
    bronze, silver, gold = history.bronze.newest(), history.silver.newest(), history.gold.newest()
    fresh = pending_files(bronze, gold.places)
    if not fresh:
        return gold
    start_ms = min(file.from_ms for file in fresh) // _DAY_MS * _DAY_MS
    touched = {day for day in gold.days if day >= _day_name(start_ms)}
    files = [file for file in bronze.files if file.to_ms >= start_ms]
    events = listed_events(spark, history, bronze, files)
    jobs = silver_rows(spark, history, silver)
    if any(file.has_groups for file in files):
        events = with_groups(events, jobs)
    counts = counted(events).where(F.col("minute") >= start_ms).persist()
    try:
        backlog = _backlog(
            spark, history, gold, net_by_minute(counts, _untold(bronze, files, jobs)), start_ms
        )
        busy = busy_minutes(events).where(F.col("minute") >= start_ms)
        failures = failed_minutes(events).where(F.col("minute") >= start_ms)
        tables = {"metrics": _metrics([counts, busy, backlog]), "causes": _causes(failures)}
        by_day = {name: _by_day(frame, _SCHEMAS[name]) for name, frame in tables.items()}
        written = write_days(version_folder(history, "gold", gold, sync), by_day)
        return put_days(history, "gold", base=gold, bronze=bronze, sync=sync, touched=touched, files=written)
    finally:
        counts.unpersist()


def _day_name(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).date().isoformat()


def _untold(bronze: BronzeManifest, files: list[DataFile], jobs: DataFrame) -> DataFrame | None:
    """Silver, if there is something that only it can tell."""
    removing = any({"removed", "obliterated"} & file.types.keys() for file in files)
    return jobs if removing or bronze.losses else None


def _by_day(frame: DataFrame, schema: StructType) -> DataFrame:
    columns = [F.col(field.name).cast(field.dataType) for field in schema.fields]
    day = F.date_from_unix_date(F.floor(F.unix_millis("at") / _DAY_MS).cast("int"))
    # Gold is small: one file for a day and table.
    return frame.select(*columns).withColumn("day", day).repartition("day")


def _metrics(parts: list[DataFrame]) -> DataFrame:
    """Rows by minute and name, each with some of the measures, summed up by period."""
    rows = reduce(lambda some, more: some.unionByName(more, allowMissingColumns=True), parts)
    backlog = F.when(F.col("dimension") == "queue", F.col("backlog"))
    sums: dict[str, Column] = {
        name: F.sum(F.when(F.col("type").isin(*types), F.col("times")).otherwise(F.lit(0)))
        for name, types in COUNTED.items()
    }
    sums |= {
        "_wait": percentiles("wait_ms"),
        "_run": percentiles("run_ms"),
        "wait_max": F.max("wait_ms"),
        "run_max": F.max("run_ms"),
        "run_ms": F.sum(F.col("run_ms") * F.col("times")),
        "busy_ms": F.sum("busy_ms"),
        "cost": F.sum("cost"),
        "usd": F.sum("usd_micros") / 1e6,
        "backlog": F.max_by("backlog", F.when(backlog.isNotNull(), F.col("minute"))),
        "backlog_max": F.max(backlog),
    }
    names = ("grain", "dimension", "queue", "name", "period")
    found = _by_period(_by_name(rows)).groupBy(*names).agg(*(sum.alias(name) for name, sum in sums.items()))
    ends = {
        f"{what}_{end}": F.col(f"_{what}")[number]
        for what in ("wait", "run")
        for number, end in enumerate(("p50", "p95", "p99"))
    }
    lengths = F.create_map(*(F.lit(part) for item in GRAINS.items() for part in item))
    derived = {"utilisation": F.col("busy_ms") / lengths[F.col("grain")], "at": F.timestamp_millis("period")}
    return found.withColumns({**ends, **derived})


def _by_name(rows: DataFrame) -> DataFrame:
    """Each row once for every name it goes by, and once for the store as a whole."""
    named = [_named(name, F.col("queue"), F.col(name)) for name in ("queue", "task", "group", "worker")]
    names = F.array(_named("store", F.lit(""), F.lit("")), *named)
    others = [name for name in rows.columns if name not in ("queue", "task", "group", "worker")]
    spread = rows.withColumn("_name", F.explode(names)).select(*others, "_name.*")
    return spread.where((F.col("name") != "") | (F.col("dimension") == "store"))


def _named(dimension: str, queue: Column, name: Column) -> Column:
    return F.struct(F.lit(dimension).alias("dimension"), queue.alias("queue"), name.alias("name"))


def _by_period(rows: DataFrame) -> DataFrame:
    """Each row once for every period it is in."""
    periods = F.array(
        *(
            F.struct(
                F.lit(grain).alias("grain"), (F.col("minute") - F.col("minute") % length).alias("period")
            )
            for grain, length in GRAINS.items()
        )
    )
    return rows.withColumn("_period", F.explode(periods)).select(*rows.columns, "_period.*")


def _causes(failures: DataFrame) -> DataFrame:
    is_retry, times = F.col("type") == "retrying", F.col("times")
    found = _by_period(failures).groupBy("grain", "period", "queue", "task", "error_type")
    return found.agg(
        F.sum(F.when(~is_retry, times).otherwise(0)).alias("failed"),
        F.sum(F.when(is_retry, times).otherwise(0)).alias("retried"),
        F.max("error").alias("example"),
    ).withColumn("at", F.timestamp_millis("period"))


def _backlog(
    spark: SparkSession, history: History, gold: DerivedManifest, net: DataFrame, start_ms: int
) -> DataFrame:
    """Open jobs of each queue at the end of every minute in which that changed."""
    before = gold_rows(spark, history, gold, "metrics").where(
        (F.col("grain") == "day") & (F.col("dimension") == "queue") & (F.unix_millis("at") < start_ms)
    )
    carried = before.groupBy("queue").agg(
        F.max_by("backlog", F.when(F.col("backlog").isNotNull(), F.col("at"))).alias("net")
    )
    late = net.where(F.col("minute") >= start_ms)
    steps = late.unionByName(carried.withColumn("minute", F.lit(start_ms - 1).cast("long")))
    so_far = Window.partitionBy("queue").orderBy("minute")
    running = steps.withColumn("backlog", F.sum("net").over(so_far)).where(F.col("minute") >= start_ms)
    return running.select("queue", "minute", "backlog")
