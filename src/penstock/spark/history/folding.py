"""How events become jobs: a row per event in the shape of a job, and rows of the same job made one.

The rows that silver has already are of the same shape, so that what is new is folded into them and the outcome is the
same as that of folding everything at once.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    DoubleType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from penstock.core.lifecycle import OPEN

__all__ = ["KEYS", "OPEN_STATES", "REMOVED", "SILVER", "merged", "strips"]

KEYS: Final = ("queue", "id", "incarnation")
REMOVED: Final = "removed"
OPEN_STATES: Final = sorted(OPEN)

_TEXT, _LONG, _TIME = StringType(), LongType(), TimestampType()
_COLUMNS: Final = {
    "queue": _TEXT,
    "id": _TEXT,
    "incarnation": _LONG,
    "task": _TEXT,
    "version": _TEXT,
    "group": _TEXT,
    "run_id": _TEXT,
    "priority": _LONG,
    "cost": DoubleType(),
    "state": _TEXT,
    "enqueued_at": _TIME,
    "first_claimed_at": _TIME,
    "last_claimed_at": _TIME,
    "finished_at": _TIME,
    "removed_at": _TIME,
    "runs": _LONG,
    "failures": _LONG,
    "stalls": _LONG,
    "retries": _LONG,
    "wait_ms": _LONG,
    "last_wait_ms": _LONG,
    "run_ms": _LONG,
    "last_run_ms": _LONG,
    "error_type": _TEXT,
    "error": _TEXT,
    "worker": _TEXT,
    "payload_size": _LONG,
    "result_size": _LONG,
    "usd_micros": _LONG,
    "first_type": _TEXT,
    "first_seen_at": _TIME,
    "last_seen_at": _TIME,
    "place": _LONG,
    "incomplete": BooleanType(),
}
SILVER: Final = StructType()
for _name, _type in _COLUMNS.items():
    SILVER.add(_name, _type)

# The same in all events of a job that have them, and cheaper than the newest.
_CONSTANT_TEXTS: Final = ("task", "version", "group", "run_id")
_NEWEST_TEXTS: Final = ("state", "worker")
_NEWEST_KNOWN: Final = ("priority", "cost", "last_wait_ms", "last_run_ms", "payload_size", "result_size")
_SUMS: Final = ("runs", "failures", "stalls", "retries", "wait_ms", "run_ms", "usd_micros")


def strips(events: DataFrame) -> DataFrame:
    """Events of jobs, each as a row of silver that knows of nothing else."""
    kind = F.col("type")
    values: dict[str, Column] = {
        "priority": F.when(kind == "enqueued", F.col("priority")),
        "cost": F.when(kind == "enqueued", F.col("cost")),
        "first_claimed_at": F.when(kind == "claimed", F.col("at")),
        "last_claimed_at": F.when(kind == "claimed", F.col("at")),
        "finished_at": F.when(kind.isin("completed", "failed", "cancelled", "expired"), F.col("at")),
        "removed_at": F.when(kind == REMOVED, F.col("at")),
        "runs": _counts(kind == "claimed"),
        "failures": _counts(kind.isin("retrying", "failed", "expired")),
        "stalls": _counts(kind == "stalled"),
        "retries": _counts(kind.isin("retrying", "retried")),
        "last_wait_ms": F.when(kind == "claimed", F.col("wait_ms")),
        "last_run_ms": F.when(F.col("run_ms") > 0, F.col("run_ms")),
        "payload_size": F.when(kind == "enqueued", F.col("size")),
        "result_size": F.when(kind == "completed", F.col("size")),
        "usd_micros": F.when(kind == "used", F.get_json_object("data", "$.usd").cast("long")).otherwise(
            _zero()
        ),
        "first_type": kind,
        "first_seen_at": F.col("at"),
        "last_seen_at": F.col("at"),
        "incomplete": F.lit(False),
    }
    columns = [values.get(name, F.col(name)).cast(type).alias(name) for name, type in _COLUMNS.items()]
    return events.where(F.col("id") != "").select(*columns)


def _zero() -> Column:
    return F.lit(0).cast("long")


def _counts(condition: Column) -> Column:
    return F.when(condition, F.lit(1)).otherwise(F.lit(0))


def merged(rows: DataFrame) -> DataFrame:
    """One row per job, from rows of silver and of events in any order."""
    place = F.col("place")
    values: dict[str, Column] = {
        "enqueued_at": F.max("enqueued_at"),
        "first_claimed_at": F.min("first_claimed_at"),
        "last_claimed_at": F.max("last_claimed_at"),
        "finished_at": F.max("finished_at"),
        "removed_at": F.max("removed_at"),
        "error_type": F.coalesce(F.max_by("error_type", F.when(F.col("error_type") != "", place)), F.lit("")),
        "error": F.coalesce(F.max_by("error", F.when(F.col("error_type") != "", place)), F.lit("")),
        "first_type": F.min_by("first_type", "place"),
        "first_seen_at": F.min("first_seen_at"),
        "last_seen_at": F.max("last_seen_at"),
        "place": F.max("place"),
        "incomplete": F.bool_or("incomplete"),
    }
    for name in _CONSTANT_TEXTS:
        values[name] = F.max(name)
    for name in _NEWEST_TEXTS:
        values[name] = F.coalesce(F.max_by(name, F.when(F.col(name) != "", place)), F.lit(""))
    for name in _NEWEST_KNOWN:
        values[name] = F.max_by(name, F.when(F.col(name).isNotNull(), place))
    for name in _SUMS:
        values[name] = F.sum(F.coalesce(F.col(name), _zero()))
    grouped = rows.groupBy(*KEYS).agg(*(column.alias(name) for name, column in values.items()))
    return _settled(grouped).select(*_COLUMNS)


def _settled(jobs: DataFrame) -> DataFrame:
    """What follows from the rest: a job that was removed while it was open ended there; one that is open has no end."""
    was_open = F.col("removed_at").isNotNull() & F.col("state").isin(*OPEN_STATES)
    state = F.when(was_open, F.lit(REMOVED)).otherwise(F.col("state"))
    ended = F.when(state == REMOVED, F.col("removed_at")).when(
        ~state.isin(*OPEN_STATES), F.col("finished_at")
    )
    incomplete = F.col("incomplete") | (F.col("first_type") != "enqueued")
    return jobs.withColumns({"state": state, "finished_at": ended, "incomplete": incomplete})
