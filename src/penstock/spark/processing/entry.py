"""``penstock.spark.process``: the public function, and its loop over the micro-batches of a stream.

Each micro-batch is a run into the same ledger. Spark delivers it in another thread, which hands it to the thread that
called ``process`` and waits. So Ctrl-C and errors behave as they do without a stream. An unfinished batch comes
again, and the ledger knows which of its rows are done.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import PurePath
from queue import Empty, SimpleQueue
from typing import Any, Final, Literal

import msgspec
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from penstock.client.imports import find
from penstock.client.task import Task
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidInput, InvalidOption
from penstock.spark.local import session
from penstock.spark.processing.inputs import TableLike, as_dataframe
from penstock.spark.processing.plan import OnChange
from penstock.spark.processing.progress import ProgressStyle
from penstock.spark.processing.request import Request
from penstock.spark.processing.result import Expectations, Processed, open_expectations
from penstock.spark.processing.running import Limits
from penstock.spark.processing.workers import RunWorkers, refuse_in_local_worker
from penstock.spark.schemas import quoted

_CHECKPOINT: Final = "_checkpoint"
_POLL_S: Final = 0.2
_SUMS: Final = ("completed", "failed", "rejected", "reused", "cost", "seconds")


class _Batch:
    """A micro-batch that waits for its run."""

    def __init__(self, rows: DataFrame) -> None:
        self.rows = rows
        self.is_done = False
        self._ended = threading.Event()

    def end(self, *, is_done: bool) -> None:
        self.is_done = is_done
        self._ended.set()

    def wait(self) -> None:
        """Wait for the run. Raise an error if it did not finish, so that Spark does not commit the batch."""
        self._ended.wait()
        if not self.is_done:
            raise RuntimeError("the batch did not finish; the next run processes it again")


def run_stream(
    request: Request, stream: DataFrame, *, checkpoint: str | PurePath | None, every: Duration | None
) -> Processed:
    """Run the request on each available batch, or with ``every`` on each new batch until the query is stopped.

    Raises:
        InvalidOption: an option that does not apply to streams.
        InvalidInput: the stream failed.
    """
    _check(request, stream)
    place = str(checkpoint) if checkpoint is not None else _default_checkpoint(request)
    request = msgspec.structs.replace(request, is_part=True)
    batches: SimpleQueue[_Batch] = SimpleQueue()

    def hand_over(rows: DataFrame, _: int) -> None:
        batch = _Batch(rows)
        batches.put(batch)
        batch.wait()

    writer = stream.writeStream.foreachBatch(hand_over).option("checkpointLocation", place)
    writer = (
        writer.trigger(availableNow=True)
        if every is None
        else writer.trigger(processingTime=f"{milliseconds(every, what='every')} milliseconds")
    )
    query = writer.start()
    try:
        with request.open_workers(stream.sparkSession) as workers:
            done = _follow(request, query, batches, workers)
    finally:
        query.stop()
    if (error := query.exception()) is not None and not (done and done.stopped):
        raise InvalidInput(f"the stream failed: {error}") from error
    return _stream_result(request, stream, done)


def _check(request: Request, stream: DataFrame) -> None:
    if not hasattr(stream.sparkSession, "_jvm"):
        raise InvalidOption(
            "Spark Connect runs the batches of a stream on the server, not in this process. Call process there, or use "
            "since=."
        )
    if request.dry_run or request.limit is not None or request.since is not None:
        raise InvalidOption("dry_run, limit and since do not apply to streams. Remove them, or pass a table.")


def _default_checkpoint(request: Request) -> str:
    output = str(request.output)
    if output.startswith("table:"):
        raise InvalidOption(
            f"the output {output!r} is a table, which has no folder for a checkpoint. Set checkpoint='...'."
        )
    if "://" in output and not output.startswith("file:") and request.format.lower() == "delta":
        raise InvalidOption(
            f"the output {output!r} is in an object store, to which Spark may have no access. Set checkpoint= to a "
            "folder that Spark can use."
        )
    return f"{output.rstrip('/')}/{_CHECKPOINT}"


def _follow(
    request: Request, query: Any, batches: SimpleQueue[_Batch], workers: RunWorkers
) -> Processed | None:
    """Run batches as they arrive, until the query ends or a run is stopped. Return the sum of the runs."""
    total: Processed | None = None
    while total is None or not total.stopped:
        try:
            batch = batches.get(timeout=_POLL_S)
        except Empty:
            if not query.isActive:
                break
            continue
        is_done = False
        try:
            done = request.carry_out(batch.rows, workers)
            is_done = not done.stopped
        finally:
            batch.end(is_done=is_done)
        total = done if total is None else _sum(total, done)
    return total


def _sum(total: Processed, done: Processed) -> Processed:
    sums = {name: getattr(total, name) + getattr(done, name) for name in _SUMS}
    counts = {
        name: getattr(total.plan, name) + getattr(done.plan, name)
        for name in done.plan.__struct_fields__
        if not name.startswith("estimated_")
    }
    return msgspec.structs.replace(done, plan=msgspec.structs.replace(done.plan, **counts), **sums)


def _stream_result(request: Request, stream: DataFrame, done: Processed | None) -> Processed:
    """Return the result of all batches. Its tables cover the whole output, because a stream cannot be read again."""
    if done is None:
        # No batch arrived. Run an empty one for the tables.
        empty = stream.sparkSession.createDataFrame([], stream.schema)
        return request.carry_out(empty)
    keys = done.results.select(*map(quoted, request.key))
    tables = msgspec.structs.replace(done.tables, rows=keys, group="", again=_refuse_again)
    return msgspec.structs.replace(done, tables=tables)


def _refuse_again(_: DataFrame) -> Processed:
    raise InvalidInput(
        "a stream cannot be read again, so its failed rows cannot be retried from here. Call process with "
        "retry_failed=True on a table that has those rows."
    )


def process(
    table: TableLike,
    task: Task[..., Any] | str,
    *,
    key: str | Sequence[str],
    output: str | PurePath,
    spark: SparkSession | None = None,
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
    since: str | int | None = None,
    checkpoint: str | PurePath | None = None,
    every: Duration | None = None,
    max_cost: float | None = None,
    cost_name: str = "usd",
    row_cost: float | None = None,
    max_failures: int | None = None,
    max_failure_rate: float | None = None,
    expect: Expectations | None = None,
    quarantine: str | PurePath | None = None,
    workers: int = 0,
    fleet: Literal["spark"] | None = None,
    fleet_size: int | None = None,
    concurrency: int = 100,
    progress: ProgressStyle = "auto",
    format: str = "parquet",
    scratch: str | None = None,
) -> Processed:
    """Run ``task`` on every row of ``table`` and write the results to ``output``.

    ``table`` is a Spark, pandas, Polars or Arrow table. A table that is not Spark's is converted through Arrow, for
    ``spark``, the active session, or a new local one (``penstock.spark.session()``).

    The ``key`` columns identify a row. The arguments are the columns that are parameters of the task, or the
    ``payload`` columns. ``priority``, ``delay``, ``group`` and ``cost`` name columns that hold those options of a job.
    Rows that the output has with the same arguments and task version are not run again. ``on_change`` decides about
    changed rows, ``retry_failed`` about failed ones. If the output lacks a row, but the store still has a result for
    the same arguments and version, the run reuses that result, unless ``reuse_results=False``.

    ``output`` is a path or a catalog table (``table:db.scores``). It is an append-only ledger; ``latest`` returns the
    current row of each key. ``format`` is ``parquet``, ``json`` (lines), or any other format of the session that keeps
    types, so not ``csv``.

    A streaming ``table`` (``spark.readStream``) is processed in batches: the available ones, or with ``every="1m"``
    new ones until the query is stopped. Spark keeps its offsets in ``checkpoint`` (default: inside the output).
    ``since`` names a column with growing values: a run reads only rows at or above the highest value of earlier runs.
    For a ``deltalake.DeltaTable`` it may be ``"version"``, to read only files added since the last run, or the number
    of the version to start from.

    Ctrl-C cancels the jobs that have not started, waits for the running ones, writes their results and raises
    ``KeyboardInterrupt``. A second Ctrl-C leaves them to the next run.

    ``max_cost`` limits how much of ``cost_name`` the jobs may use (``context.use(usd=...)``). Jobs that are running
    when it is reached may exceed it. ``max_failures`` is the number of rows that may fail, ``max_failure_rate`` the
    share of rows (such as 0.05), which applies from 20 rows on. ``limit`` is the maximum number of rows to run.
    ``dry_run`` only returns the plan. It estimates the cost from the finished rows in the output, or from ``row_cost``,
    the cost that you expect of a row.

    ``expect`` is a predicate on results, or several by name. A row whose result it rejects fails with
    ``ExpectationFailed``; ``retry_failed`` runs it again. ``quarantine`` is a separate table for failed and rejected
    rows, with all their columns. Each run replaces it. A run that reads only new rows keeps the other rows.

    Any worker on the task's queue runs the jobs. ``workers`` starts that many local worker processes.
    ``fleet="spark"`` uses ``fleet_size`` task slots of Spark (default: all but the one that the run needs).

    The run keeps temporary files in a folder inside ``scratch``, which executors can read and write. By default, it
    keeps them in an output that is a path, or else, on one machine, in a temporary folder.

    Raises:
        InvalidInput: keys are missing, null or not unique, the table does not fit the task, or the output holds
            something else. Nothing was enqueued.
        OutputBusy: another run is writing to the output.
        TooManyFailures: see ``max_failures`` and ``max_failure_rate``. Finished rows are in the output.
        StorageError: the store does not answer.
    """
    refuse_in_local_worker()
    chosen = _checked_task(task)
    placement = {"priority": priority, "delay": delay, "group": group, "cost": cost}
    request = Request(
        task=chosen,
        key=(key,) if isinstance(key, str) else tuple(key),
        output=output,
        payload=payload,
        placement={name: column for name, column in placement.items() if column},
        on_change=on_change,
        retry_failed=retry_failed,
        reuse_results=reuse_results,
        limit=limit,
        dry_run=dry_run,
        limits=Limits(
            max_cost=max_cost,
            max_failures=max_failures,
            max_failure_rate=max_failure_rate,
            cost_name=cost_name,
        ),
        expected=None if expect is None else open_expectations(expect, chosen),
        quarantine=quarantine,
        since=since,
        row_cost=row_cost,
        progress=progress,
        format=format,
        scratch=scratch,
        workers={"workers": workers, "fleet": fleet, "fleet_size": fleet_size, "concurrency": concurrency},
    )
    return _carry_out(request, table, spark, checkpoint=checkpoint, every=every)


def _carry_out(
    request: Request,
    table: TableLike,
    spark: SparkSession | None,
    *,
    checkpoint: str | PurePath | None,
    every: Duration | None,
) -> Processed:
    since = request.since
    if isinstance(table, DeltaTable) and (since == "version" or isinstance(since, int)):
        return request.carry_out_on_delta(table, spark or session())
    df = as_dataframe(table, spark)
    if isinstance(since, int):
        raise InvalidOption(
            f"since={since} is the version of a Delta table, but the table is not one. Pass a deltalake.DeltaTable, or "
            "the name of a column."
        )
    if df.isStreaming:
        return run_stream(request, df, checkpoint=checkpoint, every=every)
    if every is not None or checkpoint is not None:
        raise InvalidOption(
            "every and checkpoint apply only to streams, and the table is not one. Remove them."
        )
    return request.carry_out(df)


def _checked_task(task: object) -> Task[..., Any]:
    chosen = find(task, Task) if isinstance(task, str) else task
    if not isinstance(chosen, Task):
        name = getattr(task, "__qualname__", repr(task))
        raise InvalidInput(
            f"task must be a task of an app, or its name as 'module:task', got {name}. Decorate the function with "
            "@app.task(queue=...)."
        )
    return chosen
