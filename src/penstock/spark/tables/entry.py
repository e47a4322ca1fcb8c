"""``process``: what a user calls. See ``running`` for how it goes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final, Literal

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from penstock.core.ids import uuid7
from penstock.errors import InvalidInput, InvalidOption
from penstock.importing import find
from penstock.spark.columntypes import check_columns
from penstock.spark.options import namespace_of
from penstock.spark.rows import Layout
from penstock.spark.store import Store, shared_url
from penstock.spark.tables.crew import refuse_in_crew
from penstock.spark.tables.enqueueing import Batch
from penstock.spark.tables.gathering import Gathering
from penstock.spark.tables.hints import fit, value_type
from penstock.spark.tables.ledger import Ledger
from penstock.spark.tables.outputlease import OutputLease, output_name
from penstock.spark.tables.plan import OnChange, Plan, planned
from penstock.spark.tables.progress import ProgressStyle, Tally, open_progress
from penstock.spark.tables.running import Limits, Run
from penstock.spark.tables.scratch import Scratch
from penstock.spark.tables.snapshot import snapshot
from penstock.spark.tables.staff import Staff
from penstock.task import Task

__all__ = ["Processed", "ledger_of", "process"]

_ON_CHANGE: Final = ("rerun", "keep", "error")


class Processed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run. ``reused`` rows have a result that the store had before the run: nothing was run or paid for
    them. ``stopped`` says why it ended before its rows did: ``max_cost``, ``cancelled`` or none."""

    run_id: str
    output: str
    plan: Plan
    completed: int = 0
    failed: int = 0
    reused: int = 0
    cost: float = 0.0
    seconds: float = 0.0
    stopped: str = ""


def process(
    df: DataFrame,
    task: Task[..., Any] | str,
    *,
    key: str | Sequence[str],
    output: str | PurePath,
    payload: Sequence[str] | None = None,
    priority: str = "",
    delay: str = "",
    group: str = "",
    cost: str = "",
    on_change: OnChange = "rerun",
    retry_failed: bool = False,
    reuse_results: bool = True,
    limit: int | None = None,
    dry_run: bool = False,
    max_cost: float | None = None,
    cost_name: str = "usd",
    max_failures: int | None = None,
    workers: int = 0,
    fleet: Literal["spark"] | None = None,
    fleet_size: int | None = None,
    concurrency: int = 100,
    progress: ProgressStyle = "auto",
    format: str = "parquet",
    scratch: str | None = None,
) -> Processed:
    """Run ``task`` on every row of ``df``; the results are rows of ``output``.

    A row is named by its ``key`` columns. Its columns that are parameters of the task (or ``payload``) are the
    arguments; ``priority``, ``delay``, ``group`` and ``cost`` are columns with those options of its job. Rows that
    are in the output with the same arguments and task version are not run again; ``on_change`` says what happens to
    those that have changed, ``retry_failed`` to those that failed. A row that the output does not have, but for which
    the store still keeps a result of the same arguments and version, takes that result; with ``reuse_results=False`` it
    is run. ``output`` is a path, or a table of the catalog
    (``table:db.scores``): an append-only ledger, of which ``latest`` gives what holds. Its ``format`` is ``parquet``,
    ``json`` (lines), or another that the session has and that keeps types: not ``csv``.

    Ctrl-C stops it: jobs that have not begun are taken back, those under way are let finish and written down, and then
    ``KeyboardInterrupt`` is raised. The second Ctrl-C leaves them to the next run.

    ``max_cost`` bounds what the jobs of this run may use of ``cost_name`` (``context.use(usd=...)``), up to what is
    under way when it is reached; ``max_failures`` how many rows may fail. ``limit`` does only so many rows.
    ``dry_run`` only says what there is to do. Jobs are done by whatever workers there are on the task's queue, by
    ``workers`` processes started for it here, and with ``fleet="spark"`` by ``fleet_size`` of Spark's task slots: all
    but one, which the run needs for itself, unless given.

    What the run writes for itself is in the output, if that is a path, and else in a folder of its own in ``scratch``,
    which executors must be able to read and write; on one machine that is a temporary one, unless given.

    Raises:
        InvalidInput: keys that are missing, null or not unique, a table that does not fit the task, an output that
            holds something else. Nothing was enqueued.
        OutputBusy: another run is writing to the output.
        TooManyFailures: see ``max_failures``; what was done is in the output.
        StorageError: the store does not answer.
    """
    refuse_in_crew()
    _check_table(df)
    chosen = _checked_task(task)
    names = (key,) if isinstance(key, str) else tuple(key)
    placement = {"priority": priority, "delay": delay, "group": group, "cost": cost}
    if on_change not in _ON_CHANGE:
        raise InvalidOption(f"on_change={on_change!r} is not known. Give rerun, keep or error.")
    if limit is not None and limit < 1:
        raise InvalidOption(f"limit={limit}: give at least 1, or None for all rows.")
    url = shared_url(chosen.app)
    layout = _layout(
        df.schema,
        chosen,
        url=url,
        key=names,
        payload=payload,
        placement=placement,
        ignore_case=df.sparkSession.conf.get("spark.sql.caseSensitive", "false") != "true",
    )
    ledger = ledger_of(df, chosen, key=names, output=output, format=format)
    ledger.check()
    call = _Call(
        url=url,
        run_id=uuid7(),
        task=chosen,
        layout=layout,
        limits=Limits(max_cost=max_cost, max_failures=max_failures, cost_name=cost_name),
        on_change=on_change,
        retry_failed=retry_failed,
        reuse_results=reuse_results,
        limit=limit,
        progress=progress,
    )
    staff = Staff(
        df.sparkSession,
        chosen,
        workers=workers,
        fleet=fleet,
        fleet_size=fleet_size,
        concurrency=concurrency,
    )
    with Scratch(df.sparkSession, ledger, call.run_id, scratch) as place:
        return call.only_plan(df, ledger, place) if dry_run else call.run(df, ledger, place, staff)


def _check_table(df: object) -> None:
    if not isinstance(df, DataFrame):
        kind = f"{type(df).__module__.partition('.')[0]}.{type(df).__qualname__}"
        raise InvalidInput(
            f"the table must be a Spark DataFrame, got {kind}. Convert it first: spark.createDataFrame(table)."
        )
    if df.isStreaming:
        raise InvalidInput(
            "the table is a stream, which has no end. Call process for each batch: "
            "stream.writeStream.foreachBatch(lambda rows, _: process(rows, ...)).start()."
        )


def _checked_task(task: object) -> Task[..., Any]:
    chosen = find(task, Task) if isinstance(task, str) else task
    if not isinstance(chosen, Task):
        name = getattr(task, "__qualname__", repr(task))
        raise InvalidInput(
            f"task must be a task of an app, or its name as 'module:task', got {name}, which is not one. Decorate the "
            "function with @app.task(queue=...)."
        )
    return chosen


def ledger_of(
    df: DataFrame, task: Task[..., Any], *, key: Sequence[str], output: str | PurePath, format: str
) -> Ledger:
    """The ledger that a run of ``task`` on ``df`` writes to. ``df`` has the ``key`` columns."""
    return Ledger(
        df.sparkSession,
        output,
        key=StructType([df.schema[name] for name in key]),
        value=value_type(task.signature.result_type),
        format=format,
    )


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    """What a call of ``process`` asks for."""

    url: str
    run_id: str
    task: Any
    layout: Layout
    limits: Limits
    on_change: OnChange
    retry_failed: bool
    reuse_results: bool
    limit: int | None
    progress: ProgressStyle

    def only_plan(self, df: DataFrame, ledger: Ledger, place: Scratch) -> Processed:
        with Store(self.url):
            plan, _ = self._plan(self._taken(df, ledger, place), ledger)
        return Processed(run_id=self.run_id, output=ledger.output, plan=plan)

    def run(self, df: DataFrame, ledger: Ledger, place: Scratch, staff: Staff) -> Processed:
        began_at = time.monotonic()
        with Store(self.url) as store, OutputLease(self.url, ledger.identity, self.run_id) as lease:
            place.clear()
            batch = self._batch(ledger, lease)
            gathering = Gathering(store, ledger, lease, batch, cost_name=self.limits.cost_name)
            gathering.take_left()
            rows = self._taken(df, ledger, place)
            plan, chosen = self._plan(rows, ledger)
            gathering.reject(rows)
            gathering.tally = tally = Tally(plan.todo)
            progress = open_progress(self.progress, self.task.name)
            run = Run(
                store,
                ledger,
                lease,
                batch,
                limits=self.limits,
                progress=progress,
                gathering=gathering,
                check_workers=staff.check,
            )
            try:
                if plan.todo:
                    with staff:
                        run.run(_written(chosen, f"{place.path}/todo"), plan.todo)
            finally:
                progress.close(tally)
            if not gathering.last_commit and ledger.read() is None:
                ledger.begin()
        return Processed(
            run_id=self.run_id,
            output=ledger.output,
            plan=plan,
            completed=tally.completed,
            failed=tally.failed,
            reused=tally.reused,
            cost=tally.cost,
            seconds=time.monotonic() - began_at,
            stopped=run.stopped,
        )

    def _taken(self, df: DataFrame, ledger: Ledger, place: Scratch) -> DataFrame:
        rows = snapshot(df, self.layout, with_former=ledger.has_former_fingerprints())
        return _written(rows, f"{place.path}/input")

    def _plan(self, rows: DataFrame, ledger: Ledger) -> tuple[Plan, DataFrame]:
        return planned(
            rows, ledger, on_change=self.on_change, retry_failed=self.retry_failed, limit=self.limit
        )

    def _batch(self, ledger: Ledger, lease: OutputLease) -> Batch:
        name = f"output-{output_name(ledger.identity)}"
        return Batch(
            url=self.url,
            queue=self.task.queue,
            options=self.task.defaults,
            run_id=self.run_id,
            consumer=name,
            flow=name,
            again=f"-{self.run_id}" if self.retry_failed else "",
            reuse=self.reuse_results,
            began_at_ms=lease.began_at_ms,
        )


def _written(rows: DataFrame, path: str) -> DataFrame:
    """The same rows, from a file: whatever they come from, they stay what they are."""
    rows.write.mode("overwrite").parquet(path)
    return rows.sparkSession.read.schema(rows.schema).parquet(path)


def _layout(
    schema: StructType,
    task: Task[..., Any],
    *,
    url: str,
    key: tuple[str, ...],
    payload: Sequence[str] | None,
    placement: Mapping[str, str],
    ignore_case: bool,
) -> Layout:
    if not key:
        raise InvalidInput("key is empty. Name the columns whose values name a row.")
    placed = {name: column for name, column in placement.items() if column}
    for name in (*key, *(payload or ()), *placed.values()):
        if name not in schema.fieldNames():
            raise InvalidInput(f"the table has no column {name!r}. It has: {', '.join(schema.fieldNames())}.")
    fitting = fit(task, schema, payload)
    check_columns(schema, (*fitting.columns, *placed.values()), key=key, ignore_case=ignore_case)
    return Layout(
        namespace=namespace_of(url),
        task=task.name,
        key=key,
        payload=fitting.columns,
        whole=fitting.whole,
        placement=placed,
        options=task.defaults,
        max_payload=task.app.max_payload,
    )
