"""What a run has to do: the snapshot of its input against what the ledger knows."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from penstock.errors import InvalidInput
from penstock.spark.tables.ledger import PREFIX, Ledger, latest, ours

__all__ = ["OnChange", "Plan", "Verdict", "check_rows", "judged", "planned"]

OnChange = Literal["rerun", "keep", "error"]
Verdict = Literal["new", "changed", "done", "failed"]
_EXAMPLES: Final = 3


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How many keys are ``new``, ``changed`` (known with another payload or task version), ``done`` or ``failed``;
    how many rows are a ``duplicate`` of another, or ``rejected`` because they cannot be jobs. ``todo`` are the keys
    that a run would put in, and ``estimated_cost`` is what they would cost at the average of the done ones."""

    new: int = 0
    changed: int = 0
    done: int = 0
    failed: int = 0
    duplicate: int = 0
    rejected: int = 0
    todo: int = 0
    estimated_cost: float | None = None


def check_rows(rows: DataFrame) -> tuple[int, int]:
    """The numbers of duplicate and of rejected rows in a snapshot.

    Raises:
        InvalidInput: null keys, or equal keys with different payloads.
    """
    found = rows.agg(
        F.count(F.when(F.col("bad_key"), 1)).alias("bad"),
        F.count(F.when(F.col("refused").isNotNull(), 1)).alias("refused"),
        F.count(F.when(F.col("refused").isNull(), 1)).alias("usable"),
        F.first(F.when(F.col("bad_key"), F.col("refused")), ignorenulls=True).alias("example"),
    ).first()
    assert found is not None
    if found["bad"]:
        raise InvalidInput(
            f"{found['bad']} rows have no usable key, such as {found['example']} Nothing was enqueued."
        )
    keys = rows.where("refused IS NULL").groupBy("job_id")
    kinds = keys.agg(
        F.countDistinct("fingerprint").alias("kinds"),
        F.first("key_json").alias("key"),
        F.count("*").alias("rows"),
    )
    total = kinds.agg(
        F.count("*").alias("keys"),
        F.count(F.when(F.col("kinds") > 1, 1)).alias("torn"),
        F.sum(F.when(F.col("kinds") > 1, F.col("rows"))).alias("torn_rows"),
    ).first()
    assert total is not None
    if total["torn"]:
        shown = [row["key"] for row in kinds.where("kinds > 1").limit(_EXAMPLES).collect()]
        raise InvalidInput(
            f"{total['torn']} keys have rows with different payloads ({total['torn_rows']} rows), such as "
            f"{', '.join(shown)}. Choose a key that names a row, or drop what differs. Nothing was enqueued."
        )
    return found["usable"] - total["keys"], found["refused"]


def judged(rows: DataFrame, ledger: Ledger) -> DataFrame:
    """One row per key of a snapshot, with ``verdict``: what the ledger says of it."""
    unique = rows.where("refused IS NULL").dropDuplicates(["job_id"])
    known = ledger.read()
    if known is None:
        return unique.withColumn("verdict", F.lit("new"))
    newest = latest(known)
    was = newest.select(ours("job_id"), ours("fingerprint").alias("was"), ours("state").alias("was_state"))
    # What was cancelled or rejected has no outcome: it is to be done, like what nobody has seen.
    verdict = (
        F.when(F.col("was").isNull() | F.col("was_state").isin("cancelled", "rejected"), "new")
        .when(
            ~F.col("was").eqNullSafe(F.col("fingerprint")) & ~F.col("was").eqNullSafe(F.col("former")),
            "changed",
        )
        .when(F.col("was_state") == "completed", "done")
        .otherwise("failed")
    )
    return unique.join(was, "job_id", "left").withColumn("verdict", verdict).drop("was", "was_state")


def planned(
    rows: DataFrame, ledger: Ledger, *, on_change: OnChange, retry_failed: bool, limit: int | None
) -> tuple[Plan, DataFrame]:
    """The plan, and the rows that are to be put in.

    Raises:
        InvalidInput: as ``check_rows``; and changed rows, if they are to be an error.
    """
    duplicate, rejected = check_rows(rows)
    verdicts = judged(rows, ledger)
    counts: dict[str, int] = {
        row["verdict"]: row["count"] for row in verdicts.groupBy("verdict").count().collect()
    }
    changed = counts.get("changed", 0)
    if changed and on_change == "error":
        raise InvalidInput(
            f"{changed} keys were done before with another payload or task version. Choose on_change='rerun' to do "
            "them again, 'keep' to keep what is there. Nothing was enqueued."
        )
    wanted = ["new", *(["changed"] if on_change == "rerun" else []), *(["failed"] if retry_failed else [])]
    todo = sum(counts.get(verdict, 0) for verdict in wanted)
    chosen = verdicts.where(F.col("verdict").isin(wanted))
    if limit is not None and limit < todo:
        chosen, todo = chosen.orderBy("job_id").limit(limit), limit
    plan = Plan(
        new=counts.get("new", 0),
        changed=changed,
        done=counts.get("done", 0),
        failed=counts.get("failed", 0),
        duplicate=duplicate,
        rejected=rejected,
        todo=todo,
        estimated_cost=_estimate(ledger, todo),
    )
    return plan, chosen


def _estimate(ledger: Ledger, todo: int) -> float | None:
    known = ledger.read()
    if known is None:
        return None
    row: Any = known.where(F.col(f"{PREFIX}state") == "completed").agg(F.avg(f"{PREFIX}cost")).first()
    return None if row is None or row[0] is None else float(row[0]) * todo
