"""The result of ``process``: counts, cost and tables. Also the expectations that results must meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any, Final, TypeAlias

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from penstock.client.imports import find_function
from penstock.client.task import Task
from penstock.core.job import Job
from penstock.core.lifecycle import State
from penstock.core.outcome import Failure
from penstock.core.text import shown
from penstock.errors import InvalidOption
from penstock.spark.cells import json_text
from penstock.spark.processing.ledger import COLUMNS, PREFIX, VALUE, Ledger, latest
from penstock.spark.processing.plan import ProcessPlan
from penstock.spark.schemas import quoted

Expectation: TypeAlias = Callable[[Any], object]
Expectations: TypeAlias = Expectation | str | Mapping[str, Expectation | str]
"""A predicate on results, its name as ``module:function``, or a mapping of several."""

FAILURE_TYPE: Final = "ExpectationFailed"
_SHOWN: Final = 300


def open_expectations(expect: Expectations, task: Task[..., Any]) -> Expected:
    """Return the expectations on the results of a task.

    Raises:
        InvalidOption: an expectation is not callable, or not found.
    """
    by_name = expect if isinstance(expect, Mapping) else {"": expect}
    predicates = {}
    for name, predicate in by_name.items():
        chosen = find_function(predicate) if isinstance(predicate, str) else predicate
        if not callable(chosen):
            raise InvalidOption(
                f"expect must be a function of the result, its name as 'module:function', or a dict of these, "
                f"got {shown(repr(expect))}."
            )
        predicates[name or getattr(chosen, "__name__", repr(chosen))] = chosen
    return Expected(predicates, task)


class Expected:
    """Predicates by name, on the results of one task."""

    def __init__(self, predicates: Mapping[str, Expectation], task: Task[..., Any]) -> None:
        self._predicates = predicates
        self._decode = task.source.decode_result

    def judged(self, job: Job) -> Job:
        """Return the job, marked as failed if its result does not meet the expectations."""
        if job.state is not State.COMPLETED:
            return job
        why = self._complaint(job.result or b"null")
        if not why:
            return job
        return msgspec.structs.replace(job, state=State.FAILED, failure=Failure(FAILURE_TYPE, why))

    def _complaint(self, result: bytes) -> str:
        text = f"{json_text(result)!s:.{_SHOWN}}"
        for name, predicate in self._predicates.items():
            try:
                # Each predicate gets a fresh value, in case one modifies it.
                if not predicate(self._decode(result)):
                    return f"the result does not meet the expectation {name}: {text}"
            except Exception as error:
                return f"the expectation {name} raised {type(error).__name__}: {error}. The result: {text}"
        return ""


# Columns of the output that ``joined`` adds to the input, besides the value.
_JOINED_COLUMNS: Final = (
    "state",
    "result",
    "error_type",
    "error",
    "runs",
    "cost",
    "run_ms",
    "finished_at",
    "run_id",
)


class RunTables(msgspec.Struct, frozen=True, kw_only=True):
    """The input and output of a run. ``again`` runs the task on failed rows of the input."""

    rows: DataFrame
    key: tuple[str, ...]
    group: str
    ledger: Callable[[], Ledger]
    again: Callable[[DataFrame], Processed]

    def results(self) -> DataFrame:
        """Return the newest row of each key in the output."""
        ledger = self.ledger()
        rows = ledger.read()
        return ledger.empty() if rows is None else latest(rows)

    def joined(self) -> DataFrame:
        """Return the input with the result columns."""
        results = self.results()
        value = [f"{PREFIX}{VALUE}"] if f"{PREFIX}{VALUE}" in results.columns else []
        columns = [*self.key, *value, *(f"{PREFIX}{name}" for name in _JOINED_COLUMNS)]
        # The input may be the joined table of an earlier run, with its result columns.
        return self.without_result_columns().join(
            results.select(*map(quoted, columns)), list(self.key), "left"
        )

    def failed_or_rejected(self) -> DataFrame:
        """Return the rows of ``joined`` that failed or were rejected."""
        return self.joined().where(F.col(f"{PREFIX}state").isin("failed", "rejected"))

    def failed_input(self) -> DataFrame:
        """Return the rows of the input that have failed so far. Later changes to the output do not affect them."""
        failed = self.joined().where(F.col(f"{PREFIX}state") == "failed").select(*map(quoted, self.key))
        keys = failed.sparkSession.createDataFrame(failed.toArrow(), failed.schema)
        return self.without_result_columns().join(keys, list(self.key), "left_semi")

    def without_result_columns(self) -> DataFrame:
        """Return the input without columns that an earlier run has added to it."""
        ours = {f"{PREFIX}{name}" for name in (*COLUMNS.fieldNames(), VALUE)} - set(self.key)
        return self.rows.select(*(quoted(name) for name in self.rows.columns if name not in ours))

    def costs(self, by: tuple[str, ...], run_id: str | None) -> DataFrame:
        """Return the cost by day and by columns of the input, of one run or of all."""
        ledger = self.ledger()
        rows = ledger.read()
        paid = ledger.empty() if rows is None else rows
        if run_id is not None:
            paid = paid.where(F.col(f"{PREFIX}run_id") == run_id)
        missing = [name for name in by if name not in self.key]
        if missing:
            named = self.rows.select(*map(quoted, (*self.key, *missing))).dropDuplicates(list(self.key))
            paid = paid.join(named, list(self.key), "left")
        state = F.col(f"{PREFIX}state")
        return (
            paid.where(state.isin("completed", "failed"))
            .groupBy(*map(quoted, by), F.to_date(f"{PREFIX}finished_at").alias("day"))
            .agg(
                F.count(F.when(state == "completed", 1)).alias("completed"),
                F.count(F.when(state == "failed", 1)).alias("failed"),
                F.coalesce(F.sum(f"{PREFIX}cost"), F.lit(0.0)).alias("cost"),
                F.coalesce(F.sum(f"{PREFIX}run_ms") / 1000, F.lit(0.0)).alias("run_seconds"),
            )
            .orderBy(*map(quoted, by), "day")
        )


class Processed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run: its counts, and tables of the current state.

    ``reused`` rows got a result that the store had before the run, at no cost. ``rejected`` rows cannot become jobs.
    ``cost`` is how much of ``cost_name`` this run used. ``stopped`` is why the run stopped early: ``max_cost``,
    ``cancelled`` or "".

    The tables are Spark DataFrames. Each access reads the input again, and the output as it is then.
    """

    run_id: str
    task: str
    output: str
    plan: ProcessPlan
    completed: int = 0
    failed: int = 0
    rejected: int = 0
    reused: int = 0
    cost: float = 0.0
    cost_name: str = "usd"
    seconds: float = 0.0
    stopped: str = ""
    tables: RunTables

    @property
    def results(self) -> DataFrame:
        """Return the newest row of each key in the output, of all runs."""
        return self.tables.results()

    @property
    def joined(self) -> DataFrame:
        """Return the input with the result columns, which are null for rows without a result."""
        return self.tables.joined()

    @property
    def completed_rows(self) -> DataFrame:
        """Return the rows of ``joined`` that have a result."""
        return self._rows("completed")

    @property
    def failed_rows(self) -> DataFrame:
        """Return the rows of ``joined`` that failed, in this run or an earlier one."""
        return self._rows("failed")

    @property
    def rejected_rows(self) -> DataFrame:
        """Return the rows of ``joined`` that cannot become jobs."""
        return self._rows("rejected")

    def _rows(self, state: str) -> DataFrame:
        return self.tables.joined().where(F.col(f"{PREFIX}state") == state)

    def retry_failed(self) -> Processed:
        """Run only the failed rows again, with the options of this run."""
        return self.tables.again(self.tables.failed_input())

    def cost_by(self, *columns: str, all_runs: bool = False) -> DataFrame:
        """Return the cost of this run by day and by ``columns`` of the input (default: the group column).

        With ``all_runs``, return the cost of all runs on the output. Every run of a row counts, even if its result was
        replaced later.
        """
        by = columns or ((self.tables.group,) if self.tables.group else ())
        return self.tables.costs(by, None if all_runs else self.run_id)

    def summary(self) -> dict[str, Any]:
        """Return the counts as JSON-compatible values."""
        names = [name for name in self.__struct_fields__ if name != "tables"]
        return {name: msgspec.to_builtins(getattr(self, name)) for name in names}

    def __str__(self) -> str:
        lines = [
            f"{self.task}: {self._counts()}, in {self.seconds:.1f} s",
            f"plan: {_plan_text(self.plan, self.cost_name)}",
            f"output: {self.output}",
        ]
        if self.stopped:
            lines.append(f"stopped by {self.stopped}; call process again to continue")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _counts(self) -> str:
        optional = {"rejected": self.rejected, "reused": self.reused}
        extra = "".join(f", {count:,} {name}" for name, count in optional.items() if count)
        cost = f", {self.cost:g} {self.cost_name}" if self.cost else ""
        return f"{self.completed:,} completed, {self.failed:,} failed{extra}{cost}"

    def _repr_html_(self) -> str:
        counts: dict[str, object] = {
            "completed": f"{self.completed:,}",
            "failed": f"{self.failed:,}",
            "rejected": f"{self.rejected:,}",
            "reused": f"{self.reused:,}",
            "cost": f"{self.cost:g} {self.cost_name}",
            "time": f"{self.seconds:.1f} s",
            "plan": _plan_text(self.plan, self.cost_name),
            "output": self.output,
        }
        if self.stopped:
            counts["stopped by"] = f"{self.stopped}; call process again to continue"
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(str(count))}</td></tr>" for name, count in counts.items()
        )
        return f"<table><thead><tr><th colspan='2'>{escape(self.task)}</th></tr></thead><tbody>{rows}</tbody></table>"


def _plan_text(plan: ProcessPlan, cost_name: str) -> str:
    counts = {
        "new": plan.new,
        "changed": plan.changed,
        "done before": plan.done,
        "failed before": plan.failed,
        "duplicate": plan.duplicate,
        "rejected": plan.rejected,
    }
    parts = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    return f"{parts or 'no rows'}; {plan.todo:,} to do{plan.cost_text(cost_name)}"
