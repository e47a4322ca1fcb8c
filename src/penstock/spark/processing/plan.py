"""The plan of a run: the rows of its input, compared with the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from penstock.errors import InvalidInput
from penstock.spark.processing.intake import Intake, IntakeRows, materialize
from penstock.spark.processing.ledger import PREFIX, Ledger, latest
from penstock.spark.processing.settled import COMPLETED, FAILED, entries_from, job_hash
from penstock.spark.processing.snapshot import SNAPSHOT

OnChange = Literal["rerun", "keep", "error"]
Verdict = Literal["new", "changed", "done", "failed"]
_EXAMPLES: Final = 3
# Up to this many keys, this process compares them without Spark, whose shuffle would take longer.
_MAX_COMPARED: Final = 200_000
_SETTLED: Final = {"completed": COMPLETED, "failed": FAILED}
_COMPARED: Final = StructType([*SNAPSHOT.fields, StructField("verdict", StringType())])


class ProcessPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a plan.

    Keys are ``new``, ``changed`` (known with another payload or task version), ``done`` or ``failed``. Rows are a
    ``duplicate`` of another one, or ``rejected`` because they cannot become jobs. ``todo`` counts the keys to enqueue.
    A dry run estimates their cost from the average of the finished rows in the ``output``, if there are any, or else
    from ``row_cost``. Without either, the cost is ``unknown``.
    """

    new: int = 0
    changed: int = 0
    done: int = 0
    failed: int = 0
    duplicate: int = 0
    rejected: int = 0
    todo: int = 0
    estimated_cost: float | None = None
    estimated_from: Literal["", "output", "row_cost", "unknown"] = ""

    def cost_text(self, cost_name: str) -> str:
        """Return the estimated cost, as the end of a sentence about the rows to run."""
        if self.estimated_cost is not None:
            return f", for about {self.estimated_cost:g} {cost_name}"
        if self.estimated_from == "unknown":
            return ", at an unknown cost: the output has no finished rows. Set row_cost"
        return ""


class Todo(msgspec.Struct, frozen=True):
    """Rows of a snapshot, with ``verdict``. ``ids`` has the fingerprints by job, if there are few rows."""

    rows: DataFrame
    ids: Mapping[str, str] | None = None

    def only(self, ids: Mapping[str, str]) -> Todo:
        """Return the rows of these jobs."""
        return Todo(self.rows.where(F.col("job_id").isin(list(ids))), ids)


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, the rows to enqueue, and their origin."""

    plan: ProcessPlan
    todo: Todo
    rows: DataFrame
    compared: Compared
    intake: Intake
    ledger: Ledger

    def remember(self, ended: Mapping[str, tuple[str, str]] | None) -> None:
        """Add the rows that are now settled to the index; ``ended`` is as for ``settled``. If the run is
        killed, the next one adds them from the ledger."""
        index = self.intake.index
        if index is None:
            return
        newer = index.files_now()
        entries, count = self.compared.settled(ended or {})
        if not newer and not count:
            return
        has_moved = (
            index.newer
            or self.plan.rejected
            or ended is None
            or self.compared.counts.keys() - {"new", "done"}
        )
        index.add(entries, count, changed=self.ledger.outcomes(newer) if newer and has_moved else None)


def planned(
    intake: Intake,
    ledger: Ledger,
    *,
    on_change: OnChange,
    retry_failed: bool,
    limit: int | None,
    folder: str,
) -> Planned:
    """Return the plan and the rows to enqueue. Keep temporary files in ``folder``.

    Raises:
        InvalidInput: keys are null, or equal keys have different payloads; or rows have changed and ``on_change`` is
            "error".
    """
    taken = intake.take(retry_failed=retry_failed)
    compared = _compare(taken, ledger, folder)
    if _has_divided_keys(intake, taken, compared):
        taken = intake.take_all()
        compared = _compare(taken, ledger, folder)
    counts = compared.counts
    changed = counts.get("changed", 0)
    if changed and on_change == "error":
        raise InvalidInput(
            f"{changed} keys have results for another payload or task version. Set on_change='rerun' to run them "
            "again, or 'keep' to keep the results. Nothing was enqueued."
        )
    verdicts = ["new", *(["changed"] if on_change == "rerun" else []), *(["failed"] if retry_failed else [])]
    todo = sum(counts.get(verdict, 0) for verdict in verdicts)
    if limit is not None:
        todo = min(todo, limit)
    plan = ProcessPlan(
        new=counts.get("new", 0),
        changed=changed,
        done=counts.get("done", 0) + taken.done,
        failed=counts.get("failed", 0) + taken.failed,
        duplicate=compared.duplicate + taken.duplicate,
        rejected=compared.rejected,
        todo=todo,
    )
    return Planned(
        plan=plan,
        todo=compared.chosen(verdicts, limit),
        rows=taken.rows,
        compared=compared,
        intake=intake,
        ledger=ledger,
    )


def _has_divided_keys(intake: Intake, taken: IntakeRows, compared: Compared) -> bool:
    """Return whether a key has both settled rows and other rows, which may have different payloads."""
    settled = taken.done + taken.failed
    if not settled or intake.entries is None or len(compared.counts.keys() - {"new"}) == 0:
        return False
    return taken.has_settled(intake.entries.join(F.broadcast(compared.known_jobs()), "job", "left_semi"))


def _compare(taken: IntakeRows, ledger: Ledger, folder: str) -> Compared:
    if taken.few is not None:
        return _SmallSnapshot(taken.rows, taken.few, ledger)
    return _LargeSnapshot(taken, ledger, folder)


class _SmallSnapshot:
    """The keys of a small snapshot, compared with the ledger without Spark. ``counts`` is their number by verdict."""

    def __init__(self, frame: DataFrame, rows: pa.Table, ledger: Ledger) -> None:
        self._frame = frame
        self._schema = rows.schema.append(pa.field("verdict", pa.string()))
        records = rows.to_pylist()
        usable = [row for row in records if row["refused"] is None]
        bad = [row["refused"] for row in records if row["bad_key"]]
        if bad:
            raise _bad_keys(len(bad), bad[0])
        self._rows = {row["job_id"]: row for row in usable}
        conflicting = {
            row["job_id"] for row in usable if row["fingerprint"] != self._rows[row["job_id"]]["fingerprint"]
        }
        if conflicting:
            count = sum(row["job_id"] in conflicting for row in usable)
            raise _conflicting_keys(
                len(conflicting),
                count,
                [self._rows[id]["key_json"] for id in sorted(conflicting)[:_EXAMPLES]],
            )
        self.rejected = len(records) - len(usable)
        self.duplicate = len(usable) - len(self._rows)
        known = ledger.newest_outcomes(list(self._rows))
        self._verdicts = {id: _verdict(row, known.get(id)) for id, row in self._rows.items()}
        self.counts: Mapping[str, int] = Counter(self._verdicts.values())
        self._ids: Mapping[str, str] = {}

    def chosen(self, verdicts: Sequence[str], limit: int | None) -> Todo:
        """Return the rows with these verdicts, up to ``limit``."""
        ids = sorted(id for id, verdict in self._verdicts.items() if verdict in verdicts)[:limit]
        self._ids = {id: self._rows[id]["fingerprint"] for id in ids}
        rows = [{**self._rows[id], "verdict": self._verdicts[id]} for id in ids]
        table = pa.Table.from_pylist(rows, schema=self._schema)
        return Todo(self._frame.sparkSession.createDataFrame(table, _COMPARED), self._ids)

    def known_jobs(self) -> DataFrame:
        """Return the hashes of the jobs that are in the ledger, as in the index."""
        ids = [id for id, verdict in self._verdicts.items() if verdict != "new"]
        jobs = self._frame.sparkSession.createDataFrame(pa.table({"job_id": pa.array(ids, pa.string())}))
        return jobs.select(job_hash(F.col("job_id")).alias("job"))

    def settled(self, ended: Mapping[str, tuple[str, str]]) -> tuple[DataFrame, int]:
        """Return the index entries for rows that are now settled, and their number. ``ended`` has the fingerprint and
        state by job of rows that the run has written; it is empty if there are too many."""
        entries = []
        for id, row in self._rows.items():
            state = {"done": "completed", "failed": "failed"}.get(self._verdicts[id], "")
            if id in self._ids:
                fingerprint, state = ended.get(id, ("", ""))
                state = state if fingerprint == row["fingerprint"] else ""
            if state in _SETTLED and row["first"] is not None:
                entries.append((row["first"], row["second"], id, _SETTLED[state]))
        return entries_from(self._frame.sparkSession, entries), len(entries)


class _LargeSnapshot:
    """The keys of a large snapshot, compared by Spark, which writes them to a file; see ``_SmallSnapshot``."""

    def __init__(self, taken: IntakeRows, ledger: Ledger, folder: str) -> None:
        self._ledger = ledger
        self._folder = folder
        self.duplicate = self.rejected = 0
        # The fingerprints by job, if all rows are new and valid.
        self._fresh: pa.Table | None = None
        if taken.count <= _MAX_COMPARED and ledger.has_index and ledger.files() == []:
            self._fresh = _plain_rows(taken.rows)
        if self._fresh is not None:
            self._rows = taken.rows.withColumn("verdict", F.lit("new"))
            self.counts: Mapping[str, int] = {"new": taken.count}
            return
        self.duplicate, self.rejected = _check_rows(taken.rows)
        self._rows = materialize(_with_verdicts(taken.rows, ledger), f"{folder}/compared")
        counted = self._rows.groupBy("verdict").count().collect()
        self.counts = {row["verdict"]: row["count"] for row in counted}

    def chosen(self, verdicts: Sequence[str], limit: int | None) -> Todo:
        rows = self._rows.where(F.col("verdict").isin(list(verdicts)))
        if limit is None or limit >= sum(self.counts.get(verdict, 0) for verdict in verdicts):
            return Todo(rows)
        return Todo(materialize(rows.orderBy("job_id").limit(limit), f"{self._folder}/todo"))

    def known_jobs(self) -> DataFrame:
        return self._rows.where("verdict != 'new'").select(job_hash(F.col("job_id")).alias("job"))

    def settled(self, ended: Mapping[str, tuple[str, str]]) -> tuple[DataFrame, int]:
        rows = self._rows.where("first IS NOT NULL")
        if self._have_completed(ended):
            state = F.lit(COMPLETED).cast("tinyint").alias("settled")
            entries = rows.select("first", "second", job_hash(F.col("job_id")).alias("job"), state)
            return entries, self.counts["new"]
        known = _newest_rows(self._ledger)
        if known is None:
            return entries_from(rows.sparkSession, []), 0
        is_same = F.col("was").isin(F.col("fingerprint"), F.col("former"))
        state = F.when(F.col("was_state") == "completed", COMPLETED).when(
            F.col("was_state") == "failed", FAILED
        )
        joined = rows.join(known, "job_id").where(is_same).withColumn("settled", state.cast("tinyint"))
        entries = materialize(
            joined.where("settled IS NOT NULL").select(
                "first", "second", job_hash(F.col("job_id")).alias("job"), "settled"
            ),
            f"{self._folder}/entries",
        )
        return entries, entries.count()

    def _have_completed(self, ended: Mapping[str, tuple[str, str]]) -> bool:
        """Return whether all rows were new and have completed in this run."""
        if self._fresh is None:
            return False
        rows = zip(*(column.to_pylist() for column in self._fresh.columns), strict=True)
        return all(ended.get(id) == (fingerprint, "completed") for id, fingerprint in rows)


Compared: TypeAlias = _SmallSnapshot | _LargeSnapshot


def _plain_rows(rows: DataFrame) -> pa.Table | None:
    """Return the jobs and fingerprints of rows; ``None`` if a row was refused or a key repeats."""
    is_refused = F.col("refused").isNotNull().alias("is_refused")
    table = rows.select("job_id", "fingerprint", is_refused).toArrow()
    ids = table.column("job_id")
    if pc.any(table.column("is_refused")).as_py() or pc.count_distinct(ids).as_py() != len(ids):
        return None
    return table.select(["job_id", "fingerprint"])


def _check_rows(rows: DataFrame) -> tuple[int, int]:
    """Return the numbers of duplicate and of rejected rows in a snapshot.

    Raises:
        InvalidInput: keys are null, or equal keys have different payloads.
    """
    totals = rows.agg(
        F.count(F.when(F.col("bad_key"), 1)).alias("bad"),
        F.count(F.when(F.col("refused").isNotNull(), 1)).alias("refused"),
        F.count(F.when(F.col("refused").isNull(), 1)).alias("usable"),
        F.first(F.when(F.col("bad_key"), F.col("refused")), ignorenulls=True).alias("example"),
    ).first()
    assert totals is not None
    if totals["bad"]:
        raise _bad_keys(totals["bad"], totals["example"])
    keys = rows.where("refused IS NULL").groupBy("job_id")
    kinds = keys.agg(
        (F.min("fingerprint") != F.max("fingerprint")).alias("conflicts"),
        F.first("key_json").alias("key"),
        F.count("*").alias("rows"),
    )
    total = kinds.agg(
        F.count("*").alias("keys"),
        F.count(F.when(F.col("conflicts"), 1)).alias("conflicting"),
        F.sum(F.when(F.col("conflicts"), F.col("rows"))).alias("conflicting_rows"),
    ).first()
    assert total is not None
    if total["conflicting"]:
        examples = [row["key"] for row in kinds.where("conflicts").limit(_EXAMPLES).collect()]
        raise _conflicting_keys(total["conflicting"], total["conflicting_rows"], examples)
    return totals["usable"] - total["keys"], totals["refused"]


def _bad_keys(count: int, example: str) -> InvalidInput:
    return InvalidInput(f"{count} rows have an invalid key, for example: {example} Nothing was enqueued.")


def _conflicting_keys(count: int, rows: int, examples: Sequence[str]) -> InvalidInput:
    return InvalidInput(
        f"{count} keys have rows with different payloads ({rows} rows), such as {', '.join(examples)}. Choose a key "
        "that identifies a row, or drop the duplicates. Nothing was enqueued."
    )


def _verdict(row: Mapping[str, Any], was: Any) -> Verdict:
    # A cancelled or rejected row has no outcome, so it counts as new.
    if was is None or was["state"] in ("cancelled", "rejected"):
        return "new"
    if was["fingerprint"] not in (row["fingerprint"], row["former"]):
        return "changed"
    return "done" if was["state"] == "completed" else "failed"


def _with_verdicts(rows: DataFrame, ledger: Ledger) -> DataFrame:
    """Return one row per key of a snapshot, with ``verdict`` as ``_verdict`` computes it."""
    unique = rows.where("refused IS NULL").dropDuplicates(["job_id"])
    was = _newest_rows(ledger)
    if was is None:
        return unique.withColumn("verdict", F.lit("new"))
    is_same = F.col("was").eqNullSafe(F.col("fingerprint")) | F.col("was").eqNullSafe(F.col("former"))
    verdict = (
        F.when(F.col("was").isNull() | F.col("was_state").isin("cancelled", "rejected"), "new")
        .when(~is_same, "changed")
        .when(F.col("was_state") == "completed", "done")
        .otherwise("failed")
    )
    return unique.join(was, "job_id", "left").withColumn("verdict", verdict).drop("was", "was_state")


def _newest_rows(ledger: Ledger) -> DataFrame | None:
    """Return the newest row of each job: its fingerprint as ``was``, its state as ``was_state``."""
    known = ledger.outcomes()
    if known is None:
        return None
    newest = latest(known)
    return newest.select("job_id", F.col("fingerprint").alias("was"), F.col("state").alias("was_state"))


def with_estimate(plan: ProcessPlan, ledger: Ledger, cost_name: str, row_cost: float | None) -> ProcessPlan:
    """Return the plan with an estimate of how much of ``cost_name`` its rows will use."""
    average = _average_cost(ledger, cost_name)
    if average is not None:
        return replace(plan, estimated_cost=average * plan.todo, estimated_from="output")
    if row_cost is not None:
        return replace(plan, estimated_cost=row_cost * plan.todo, estimated_from="row_cost")
    return replace(plan, estimated_from="unknown")


def _average_cost(ledger: Ledger, cost_name: str) -> float | None:
    known = ledger.read()
    if known is None:
        return None
    # Failed rows have a cost as well.
    ended = known.where(F.col(f"{PREFIX}state").isin("completed", "failed"))
    used = F.coalesce(F.col(f"{PREFIX}usage").getItem(cost_name), F.lit(0.0))
    row: Any = ended.agg(F.avg(used)).first()
    return None if row is None or row[0] is None else float(row[0])
