"""Expectations: what a result must be like for its row to count as completed."""

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
from penstock.spark.processing.plan import Plan
from penstock.spark.schemas import quoted

Expectation: TypeAlias = Callable[[Any], object]
Expectations: TypeAlias = Expectation | str | Mapping[str, Expectation | str]
"""A predicate on results, or its name as ``module:function``; or several of them, by name."""

FAILURE_TYPE: Final = "ExpectationFailed"
_SHOWN: Final = 300


def open_expectations(expect: Expectations, task: Task[..., Any]) -> Expected:
    """Return the expectations on results of a task.

    Raises:
        InvalidOption: something that cannot be called, or a function that cannot be found.
    """
    given = expect if isinstance(expect, Mapping) else {"": expect}
    found = {}
    for name, predicate in given.items():
        chosen = find_function(predicate) if isinstance(predicate, str) else predicate
        if not callable(chosen):
            raise InvalidOption(
                f"expect must be a function of the result, its name as 'module:function', or a dict of them by name, "
                f"got {shown(repr(expect))}."
            )
        found[name or getattr(chosen, "__name__", repr(chosen))] = chosen
    return Expected(found, task)


class Expected:
    """Predicates by name, on the results of one task."""

    def __init__(self, predicates: Mapping[str, Expectation], task: Task[..., Any]) -> None:
        self._predicates = predicates
        self._decode = task.source.decode_result

    def judged(self, job: Job) -> Job:
        """Return the job; as a failed one if it has completed with a result that is not as expected."""
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
                # Each gets its own: one that changes the value does not change what the next one sees.
                if not predicate(self._decode(result)):
                    return f"the result is not as expected by {name}: {text}"
            except Exception as error:
                return f"the expectation {name} raised {type(error).__name__}: {error}. The result: {text}"
        return ""


# The result of ``process``: counts of rows, their cost, and the tables to look at.


# The columns that ``joined`` adds to the input, besides the value: those of the output that people ask
# about.
_RESULT_SHOWN: Final = (
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
    """The input and the output of a run. ``again`` runs the task on rows of the input that have failed."""

    rows: DataFrame
    key: tuple[str, ...]
    group: str
    ledger: Callable[[], Ledger]
    again: Callable[[DataFrame], Processed]

    def results(self) -> DataFrame:
        """Return the newest row of each key of the output."""
        ledger = self.ledger()
        found = ledger.read()
        return ledger.empty() if found is None else latest(found)

    def joined(self) -> DataFrame:
        results = self.results()
        value = [f"{PREFIX}{VALUE}"] if f"{PREFIX}{VALUE}" in results.columns else []
        columns = [*self.key, *value, *(f"{PREFIX}{name}" for name in _RESULT_SHOWN)]
        # Columns of an earlier run, if its joined table is the input of this one.
        return self.without_ours().join(results.select(*map(quoted, columns)), list(self.key), "left")

    def without_result(self) -> DataFrame:
        """Return the rows of ``joined`` that failed or were rejected."""
        return self.joined().where(F.col(f"{PREFIX}state").isin("failed", "rejected"))

    def without_ours(self) -> DataFrame:
        """Return the input without columns that an earlier run has added to it."""
        ours = {f"{PREFIX}{name}" for name in (*COLUMNS.fieldNames(), VALUE)} - set(self.key)
        return self.rows.select(*(quoted(name) for name in self.rows.columns if name not in ours))

    def costs(self, by: tuple[str, ...], run_id: str | None) -> DataFrame:
        """Return what was spent by day and by columns of the input, in one run or in all."""
        ledger = self.ledger()
        found = ledger.read()
        paid = ledger.empty() if found is None else found
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
    """The result of a run: counts of what this run did, and tables of what holds now.

    ``reused`` rows have a result that the store had before the run: nothing was run or paid for them. ``rejected`` rows
    cannot be jobs. ``cost`` is what this run has used of ``cost_name``. ``stopped`` says why the run ended before its
    rows did: ``max_cost``, ``cancelled`` or nothing.

    The tables are Spark DataFrames. They are made when they are asked for, from the input, which is read again, and
    from the output as it is then.
    """

    run_id: str
    task: str
    output: str
    plan: Plan
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
        """The newest row of each key of the output, of all its runs."""
        return self.tables.results()

    @property
    def joined(self) -> DataFrame:
        """The input, each row with its result columns, which are null for rows without a result."""
        return self.tables.joined()

    @property
    def completed_rows(self) -> DataFrame:
        """The rows of ``joined`` that have a result."""
        return self._rows("completed")

    @property
    def failed_rows(self) -> DataFrame:
        """The rows of ``joined`` that failed, in this run or before."""
        return self._rows("failed")

    @property
    def rejected_rows(self) -> DataFrame:
        """The rows of ``joined`` that cannot be jobs."""
        return self._rows("rejected")

    def _rows(self, state: str) -> DataFrame:
        return self.tables.joined().where(F.col(f"{PREFIX}state") == state)

    def retry_failed(self) -> Processed:
        """Run the rows again that failed, and nothing else. The options are those of this run."""
        failed = self.failed_rows.select(*map(quoted, self.tables.without_ours().columns))
        return self.tables.again(failed)

    def cost_by(self, *columns: str, all_runs: bool = False) -> DataFrame:
        """Return the cost by day and by ``columns`` of the input: the group column, unless given.

        The cost is that of this run; with ``all_runs``, that of all runs on the output. Every run of a row counts, also
        one whose result was replaced since.
        """
        by = columns or ((self.tables.group,) if self.tables.group else ())
        return self.tables.costs(by, None if all_runs else self.run_id)

    def summary(self) -> dict[str, Any]:
        """Return the counts, for JSON."""
        names = [name for name in self.__struct_fields__ if name != "tables"]
        return {name: msgspec.to_builtins(getattr(self, name)) for name in names}

    def __str__(self) -> str:
        lines = [
            f"{self.task}: {self._counts()}, in {self.seconds:.1f} s",
            f"plan: {_plan_text(self.plan)}",
            f"output: {self.output}",
        ]
        if self.stopped:
            lines.append(f"stopped by {self.stopped}; call process again to go on")
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
            "plan": _plan_text(self.plan),
            "output": self.output,
        }
        if self.stopped:
            counts["stopped by"] = f"{self.stopped}; call process again to go on"
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(str(count))}</td></tr>" for name, count in counts.items()
        )
        return f"<table><thead><tr><th colspan='2'>{escape(self.task)}</th></tr></thead><tbody>{rows}</tbody></table>"


def _plan_text(plan: Plan) -> str:
    counts = {
        "new": plan.new,
        "changed": plan.changed,
        "done before": plan.done,
        "failed before": plan.failed,
        "duplicate": plan.duplicate,
        "rejected": plan.rejected,
    }
    found = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    cost = "" if plan.estimated_cost is None else f", for about {plan.estimated_cost:g}"
    return f"{found or 'no rows'}; {plan.todo:,} to do{cost}"
