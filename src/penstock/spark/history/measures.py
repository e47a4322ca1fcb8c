"""What gold measures: rows of events, made ready to be counted by any period and any of their names."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from penstock.spark.history.folding import KEYS, REMOVED

__all__ = [
    "COUNTED",
    "GRAINS",
    "OUT",
    "busy_minutes",
    "counted",
    "failed_minutes",
    "minute_of",
    "net_by_minute",
    "percentiles",
    "with_groups",
]

GRAINS: Final = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
COUNTED: Final = {
    "enqueued": ("enqueued",),
    "claimed": ("claimed",),
    "completed": ("completed",),
    "failed": ("failed", "expired"),
    "cancelled": ("cancelled",),
    "retried": ("retrying",),
    "stalled": ("stalled",),
    "snoozed": ("snoozed", "suspended"),
    "limited": ("limited",),
}
OUT: Final = ("completed", "failed", "expired", "cancelled")
_ENDS: Final = 0.5, 0.95, 0.99


def minute_of(column: Column) -> Column:
    """The minute an instant is in, as milliseconds since the epoch."""
    return (F.floor(F.unix_millis(column) / GRAINS["minute"]) * GRAINS["minute"]).cast("long")


def with_groups(events: DataFrame, silver: DataFrame) -> DataFrame:
    """Most events do not say their job's group: silver does."""
    known = silver.where(F.col("group") != "").select(*KEYS, F.col("group").alias("_group"))
    joined = events.join(known, [*KEYS], "left")
    return joined.withColumn("group", F.coalesce("_group", "group")).drop("_group")


def counted(events: DataFrame) -> DataFrame:
    """Events of jobs by minute and name, with how many are alike: what all periods are summed up from."""
    kind = F.col("type")
    # A run that took no measurable time is a run.
    values = {
        "minute": minute_of(F.col("at")),
        "wait_ms": F.when(kind == "claimed", F.col("wait_ms")),
        "run_ms": F.when(kind.isin("completed", "failed", "retrying"), F.col("run_ms")),
        "usd_micros": F.when(kind == "used", F.get_json_object("data", "$.usd").cast("long")),
        "cost": F.when(kind == "claimed", F.col("cost")),
    }
    named = events.where(F.col("id") != "").withColumns(values)
    alike = ("minute", "queue", "task", "group", "worker", "type", "wait_ms", "run_ms")
    return named.groupBy(*alike).agg(
        F.count(F.lit(1)).alias("times"),
        F.sum("usd_micros").alias("usd_micros"),
        F.sum("cost").alias("cost"),
    )


def failed_minutes(events: DataFrame) -> DataFrame:
    """Failures by minute and cause, with how many are alike and what one of them said."""
    # Apart from the counts: Spark sorts what it takes the largest text of, and failures are few.
    failures = events.where((F.col("error_type") != "") & F.col("type").isin("failed", "retrying", "expired"))
    found = failures.where(F.col("id") != "").withColumn("minute", minute_of(F.col("at")))
    return found.groupBy("minute", "queue", "task", "type", "error_type").agg(
        F.count(F.lit(1)).alias("times"), F.max("error").alias("error")
    )


def busy_minutes(events: DataFrame) -> DataFrame:
    """Every run, cut into the minutes that it took part of, with how long in each."""
    end = F.unix_millis("at")
    began = end - F.col("run_ms")
    minute = GRAINS["minute"]
    first = (F.floor(began / minute) * minute).cast("long")
    last = (F.floor(end / minute) * minute).cast("long")
    runs = events.where((F.col("run_ms") > 0) & (F.col("worker") != "")).select(
        "queue",
        "task",
        "group",
        "worker",
        began.alias("began"),
        end.alias("ended"),
        F.explode(F.sequence(first, last, F.lit(minute).cast("long"))).alias("minute"),
    )
    within = F.least("ended", F.col("minute") + minute) - F.greatest("began", "minute")
    return runs.groupBy("minute", "queue", "task", "group", "worker").agg(F.sum(within).alias("busy_ms"))


def net_by_minute(counts: DataFrame, silver: DataFrame | None) -> DataFrame:
    """By how many jobs the backlog of a queue grew in each minute.

    Silver, if given, tells of what has no event: jobs that were removed while open, and jobs whose enqueueing was lost.
    """
    kind, times = F.col("type"), F.col("times")
    step = F.when(kind.isin("enqueued", "retried"), times).when(kind.isin(*OUT), -times)
    steps = counts.where(step.isNotNull()).select("queue", "minute", step.alias("step"))
    if silver is not None:
        gone = silver.where(F.col("state") == REMOVED).select(
            "queue", minute_of(F.col("finished_at")).alias("minute"), F.lit(-1).cast("long").alias("step")
        )
        found = silver.where(~F.col("first_type").isin("enqueued", "retried")).select(
            "queue", minute_of(F.col("first_seen_at")).alias("minute"), F.lit(1).cast("long").alias("step")
        )
        steps = steps.unionByName(gone).unionByName(found)
    return steps.groupBy("queue", "minute").agg(F.sum("step").alias("net"))


def percentiles(column: str) -> Column:
    """Exact ones, of values that stand for so many ``times`` each."""
    weight = F.when(F.col(column).isNotNull(), F.col("times")).otherwise(F.lit(0)).cast("long")
    return F.percentile(F.col(column), F.array(*map(F.lit, _ENDS)), weight)
