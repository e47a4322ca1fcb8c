"""A call of ``process``: its options and the steps that carry it out on a table. ``running`` has the run itself."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, get_args

import msgspec
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from penstock.client.task import Task
from penstock.core.names import uuid7
from penstock.core.text import get_logger
from penstock.errors import InvalidInput, InvalidOption, OutputLost, TooManyFailures
from penstock.spark.columntypes import check_columns
from penstock.spark.driver_lease import OutputLease, output_name
from penstock.spark.processing.collector import Collector
from penstock.spark.processing.enqueue import Batch
from penstock.spark.processing.inputs import Followed, delta_dataframe, follow, follow_version, write_mark
from penstock.spark.processing.intake import Intake
from penstock.spark.processing.ledger import Ledger
from penstock.spark.processing.plan import OnChange, Planned, ProcessPlan, planned, with_estimate
from penstock.spark.processing.progress import ProgressStyle, Tally, open_progress
from penstock.spark.processing.quarantine import Quarantine
from penstock.spark.processing.result import Expected, Processed, RunTables
from penstock.spark.processing.running import Limits, Run
from penstock.spark.processing.types import fit, value_type
from penstock.spark.processing.workers import RunWorkers
from penstock.spark.publishing import STAGING, NameTaken, fresh_path, remove_folder
from penstock.spark.rows import Layout
from penstock.spark.schemas import namespace_of
from penstock.spark.store import Store, shared_url

logger = get_logger("penstock.spark")


class Scratch:
    """The temporary folder of a run, which executors can read and readers of the output ignore. It lasts for a ``with``
    block.

    Only runs on this output use its parent. The parent is inside ``scratch`` if that is set, else inside an output that
    is a path. Otherwise it is a temporary folder, if Spark runs on this machine.

    Raises:
        InvalidOption: Spark cannot use the folder, or ``scratch`` is required.
    """

    def __init__(self, spark: SparkSession, ledger: Ledger, run_id: str, scratch: str | None) -> None:
        self._spark = spark
        self._root = _default(spark, ledger) if scratch is None else _own_folder(scratch, ledger)
        if scratch is not None:
            # If Spark cannot use the folder, fail here and not in the middle of the run.
            fresh_path(spark, self._root, spark.read.parquet)
        self.path = f"{self._root}/{run_id}"

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        remove_folder(self._spark, self.path)

    def clear(self) -> None:
        """Remove the files of killed runs. Only the holder of the output may call it."""
        remove_folder(self._spark, self._root)


def _own_folder(scratch: str, ledger: Ledger) -> str:
    """Return the folder of this output in ``scratch``, which may serve many outputs."""
    return f"{scratch.rstrip('/')}/penstock-{output_name(ledger.identity)}"


def _default(spark: SparkSession, ledger: Ledger) -> str:
    if ledger.is_path and ledger.remote is None:
        return f"{ledger.output.rstrip('/')}/{STAGING}"
    master = spark.conf.get("spark.master", "")
    if master is None or not master.startswith("local"):
        raise InvalidOption(
            f"the run needs a folder that all executors can read and write, and the output {ledger.output!r} is "
            "not one. Set scratch='s3://...' or similar."
        )
    return tempfile.mkdtemp(prefix="penstock-")


# The request.


def ledger_of(
    df: DataFrame, task: Task[..., Any], *, key: Sequence[str], output: str | PurePath, format: str
) -> Ledger:
    """Return the ledger for a run of ``task`` on ``df``, which has the ``key`` columns."""
    return Ledger(
        df.sparkSession,
        output,
        key=StructType([df.schema[name] for name in key]),
        value=value_type(task.signature.result_type),
        format=format,
    )


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a call of ``process``. ``placement`` maps options of a job to columns."""

    task: Any
    key: tuple[str, ...]
    output: str | PurePath
    payload: Sequence[str] | None
    placement: dict[str, str]
    on_change: OnChange
    retry_failed: bool
    reuse_results: bool
    limit: int | None
    dry_run: bool
    limits: Limits
    progress: ProgressStyle
    format: str
    scratch: str | None
    workers: dict[str, Any]
    expected: Expected | None = None
    quarantine: str | PurePath | None = None
    since: str | int | None = None
    row_cost: float | None = None
    # The tables are parts of a larger input, like the batches of a stream.
    is_part: bool = False

    def __post_init__(self) -> None:
        if self.on_change not in get_args(OnChange):
            raise InvalidOption(f"on_change must be rerun, keep or error, got {self.on_change!r}.")
        if self.limit is not None and self.limit < 1:
            raise InvalidOption(f"limit must be >= 1, or None for all rows, got {self.limit}.")
        if self.row_cost is not None and self.row_cost < 0:
            raise InvalidOption(f"row_cost must be >= 0, got {self.row_cost}.")

    @property
    def follows(self) -> bool:
        """Return whether a run reads only a part of its input, such as the new rows."""
        return self.is_part or self.since is not None

    def carry_out(self, df: DataFrame, workers: RunWorkers | None = None) -> Processed:
        """Run the task on the rows of a table, or only plan it for a dry run. Start workers unless they are passed."""
        if not isinstance(self.since, str):
            return self._carry_out(df, workers)
        followed = follow(df, self.since, self._ledger(df), is_whole=self.retry_failed)
        return self._followed(followed, workers)

    def carry_out_on_delta(self, table: DeltaTable, spark: SparkSession) -> Processed:
        """Run the task on the rows that a Delta table gained since a version."""
        assert self.since is not None
        ledger = self._ledger(delta_dataframe(table, spark))
        return self._followed(
            follow_version(table, spark, self.since, ledger, is_whole=self.retry_failed), None
        )

    def _followed(self, followed: Followed, workers: RunWorkers | None) -> Processed:
        done = self._carry_out(followed.rows, workers)
        # If jobs were cancelled, the next run must find their rows again.
        is_whole = done.completed + done.failed + done.reused >= done.plan.todo
        is_complete = is_whole and not (self.dry_run or done.stopped or self.limit is not None)
        if followed.mark is not None and is_complete and not isinstance(self.since, int):
            write_mark(followed.rows.sparkSession, self._ledger(followed.rows), followed.mark)
        return done

    def _carry_out(self, df: DataFrame, workers: RunWorkers | None) -> Processed:
        layout = self._layout(df)
        ledger = self._ledger(df)
        ledger.check()
        if self.quarantine is not None:
            Quarantine(df.sparkSession, self.quarantine, self.format).check(ledger)
        workers = workers or self.open_workers(df.sparkSession)
        call = _Call(request=self, url=shared_url(self.task.app), run_id=uuid7(), layout=layout, df=df)
        with Scratch(df.sparkSession, ledger, call.run_id, self.scratch) as scratch:
            return call.only_plan(ledger, scratch) if self.dry_run else call.run(ledger, scratch, workers)

    def open_workers(self, spark: SparkSession) -> RunWorkers:
        """Return the workers that the run starts."""
        return RunWorkers(spark, self.task, **self.workers)

    def tables(self, df: DataFrame) -> RunTables:
        again = msgspec.structs.replace(
            self, retry_failed=True, limit=None, on_change="keep", dry_run=False, since=None, is_part=True
        )
        return RunTables(
            rows=df,
            key=self.key,
            group=self.placement.get("group", ""),
            ledger=lambda: self._checked_ledger(df),
            again=again.carry_out,
        )

    def _ledger(self, df: DataFrame) -> Ledger:
        return ledger_of(df, self.task, key=self.key, output=self.output, format=self.format)

    def _checked_ledger(self, df: DataFrame) -> Ledger:
        ledger = self._ledger(df)
        ledger.check()
        return ledger

    def _layout(self, df: DataFrame) -> Layout:
        schema, placed = df.schema, self.placement
        if not self.key:
            raise InvalidInput("key is empty. Name the columns that identify a row.")
        for name in (*self.key, *(self.payload or ()), *placed.values()):
            if name not in schema.fieldNames():
                raise InvalidInput(
                    f"the table has no column {name!r}. Its columns are: {', '.join(schema.fieldNames())}."
                )
        fitting = fit(self.task, schema, self.payload)
        ignore_case = df.sparkSession.conf.get("spark.sql.caseSensitive", "false") != "true"
        check_columns(schema, (*fitting.columns, *placed.values()), key=self.key, ignore_case=ignore_case)
        return Layout(
            namespace=namespace_of(shared_url(self.task.app)),
            task=self.task.name,
            key=self.key,
            payload=fitting.columns,
            whole=fitting.whole,
            placement=placed,
            options=self.task.defaults,
            fields={name: value for name, value in self.task.fields.items() if name != "dedup"},
            # The key already determines which rows share a job.
            rules=self.task.rules and self.task.rules.without("dedup", "unique"),
            max_payload=self.task.app.max_payload,
        )


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request on one table."""

    request: Request
    url: str
    run_id: str
    layout: Layout
    df: DataFrame

    def only_plan(self, ledger: Ledger, scratch: Scratch) -> Processed:
        with Store(self.url):
            plan = self._planned(ledger, scratch).plan
        cost_name = self.request.limits.cost_name
        return self._processed(ledger, with_estimate(plan, ledger, cost_name, self.request.row_cost))

    def run(self, ledger: Ledger, scratch: Scratch, workers: RunWorkers) -> Processed:
        began_at = time.monotonic()
        request = self.request
        with Store(self.url) as store, OutputLease(self.url, ledger.identity, self.run_id) as lease:
            scratch.clear()
            ledger.recover()
            batch = self._batch(ledger, lease)
            collector = self._collector(store, ledger, lease, batch)
            collector.collect_left()
            work = self._planned(ledger, scratch)
            plan = work.plan
            if plan.rejected:
                collector.reject(work.rows)
            collector.tally = tally = Tally(plan.todo)
            progress = open_progress(request.progress, request.task.name)
            run = Run(
                store=store,
                ledger=ledger,
                lease=lease,
                batch=batch,
                limits=request.limits,
                progress=progress,
                collector=collector,
                workers=workers,
            )
            try:
                if plan.todo:
                    with workers:
                        run.run(work.todo, plan.todo)
            except TooManyFailures:
                self._quarantine(scratch)
                raise
            finally:
                progress.close(tally)
            self._finish(ledger, collector, work, scratch)
        seconds = time.monotonic() - began_at
        return self._processed(ledger, plan, tally=tally, seconds=seconds, stopped=run.stopped)

    def _finish(self, ledger: Ledger, collector: Collector, work: Planned, scratch: Scratch) -> None:
        if not collector.last_commit and ledger.read() is None:
            ledger.begin()
        work.remember(collector.ended)
        self._quarantine(scratch)
        _compact(ledger, work)

    def _collector(self, store: Store, ledger: Ledger, lease: OutputLease, batch: Batch) -> Collector:
        expected, cost_name = self.request.expected, self.request.limits.cost_name
        if expected is None:
            return Collector(store, ledger, lease, batch, cost_name=cost_name)
        return Collector(store, ledger, lease, batch, cost_name=cost_name, judge=expected.judged)

    def _quarantine(self, scratch: Scratch) -> None:
        request, tables = self.request, self.request.tables(self.df)
        if request.quarantine is None:
            return
        quarantine = Quarantine(self.df.sparkSession, request.quarantine, request.format)
        if request.follows:
            quarantine.update(tables.failed_or_rejected(), tables.results(), request.key, scratch.path)
        else:
            quarantine.replace(tables.failed_or_rejected())

    def _processed(
        self, ledger: Ledger, plan: ProcessPlan, *, tally: Tally | None = None, **fields: Any
    ) -> Processed:
        counts: Mapping[str, Any] = {}
        if tally is not None:
            counts = {name: getattr(tally, name) for name in ("completed", "failed", "reused", "cost")}
        return Processed(
            run_id=self.run_id,
            task=self.request.task.name,
            output=ledger.output,
            plan=plan,
            rejected=plan.rejected,
            cost_name=self.request.limits.cost_name,
            tables=self.request.tables(self.df),
            **counts,
            **fields,
        )

    def _planned(self, ledger: Ledger, scratch: Scratch) -> Planned:
        return planned(
            Intake(self.df, self.layout, ledger, scratch.path, expects_few=self.request.follows),
            ledger,
            on_change=self.request.on_change,
            retry_failed=self.request.retry_failed,
            limit=self.request.limit,
            folder=scratch.path,
        )

    def _batch(self, ledger: Ledger, lease: OutputLease) -> Batch:
        name = f"output-{output_name(ledger.identity)}"
        return Batch(
            url=self.url,
            queue=self.request.task.queue,
            options=self.request.task.defaults,
            run_id=self.run_id,
            consumer=name,
            flow=name,
            reuse=self.request.reuse_results,
            began_at_ms=lease.began_at_ms,
        )


def _compact(ledger: Ledger, work: Planned) -> None:
    """Merge small files of the output. If that fails, the next run tries again."""
    try:
        moved = ledger.compact()
    except (NameTaken, OutputLost):
        return
    except (DeltaError, OSError) as error:
        logger.warning("the small files of %s were not merged: %s", ledger.output, error)
        return
    if moved is not None and (index := work.intake.index) is not None:
        index.note_moved(moved)
