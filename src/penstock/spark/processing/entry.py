"""A stream as the input of ``process``: each micro-batch is a run into the same ledger.

Spark calls for each batch in a thread of its own. That thread hands the batch over to the one that called ``process``
and waits, so that Ctrl-C and errors are where they are without a stream. A batch that was not done is not committed:
Spark brings it again, and the ledger knows which of its rows are done.
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
from penstock.spark.processing.workers import Staff, refuse_in_crew
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
        """Wait for the run. Raise an error if Spark is not to commit the batch."""
        self._ended.wait()
        if not self.is_done:
            raise RuntimeError("the batch was not done; the next run gets it again")


def run_stream(
    request: Request, stream: DataFrame, *, checkpoint: str | PurePath | None, every: Duration | None
) -> Processed:
    """Run the request on each batch: those that are there now, or with ``every`` until the query is stopped.

    Raises:
        InvalidOption: an option that a stream cannot have.
        InvalidInput: the stream has failed.
    """
    _check(request, stream)
    place = str(checkpoint) if checkpoint is not None else _default_checkpoint(request)
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
        with request.staff(stream.sparkSession) as staff:
            done = _follow(request, query, batches, staff)
    finally:
        query.stop()
    if (error := query.exception()) is not None and not (done and done.stopped):
        raise InvalidInput(f"the stream has failed: {error}") from error
    return _told(request, stream, done)


def _check(request: Request, stream: DataFrame) -> None:
    if not hasattr(stream.sparkSession, "_jvm"):
        raise InvalidOption(
            "a stream of Spark Connect runs its batches on the server, away from this process. Call process there, or "
            "use since=."
        )
    if request.dry_run or request.limit is not None or request.since is not None:
        raise InvalidOption("dry_run, limit and since are not for streams. Give a table, or leave them out.")


def _default_checkpoint(request: Request) -> str:
    output = str(request.output)
    if output.startswith("table:"):
        raise InvalidOption(
            f"the output {output!r} is a table, so the stream has no place for its checkpoint. Give checkpoint='...'."
        )
    return f"{output.rstrip('/')}/{_CHECKPOINT}"


def _follow(request: Request, query: Any, batches: SimpleQueue[_Batch], staff: Staff) -> Processed | None:
    """Run batches as they come, until the query ends or a run is stopped; return the sum of the runs."""
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
            done = request.carry_out(batch.rows, staff)
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
        if name != "estimated_cost"
    }
    return msgspec.structs.replace(done, plan=msgspec.structs.replace(done.plan, **counts), **sums)


def _told(request: Request, stream: DataFrame, done: Processed | None) -> Processed:
    """Return the result of all batches. Its tables are about the whole output: a stream cannot be read again."""
    if done is None:
        # No batch has come; an empty one says what there is.
        empty = stream.sparkSession.createDataFrame([], stream.schema)
        return request.carry_out(empty)
    keys = done.results.select(*map(quoted, request.key))
    tables = msgspec.structs.replace(done.tables, rows=keys, group="", again=_refuse_again)
    return msgspec.structs.replace(done, tables=tables)


def _refuse_again(_: DataFrame) -> Processed:
    raise InvalidInput(
        "a stream cannot be read again, so its failed rows cannot be retried from here. Call process on a table that "
        "has them, with retry_failed=True."
    )


# ``process``: what a user calls. See ``request`` for how it is carried out.


_ON_CHANGE: Final = ("rerun", "keep", "error")


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
    """Run ``task`` on every row of ``table``; the results are rows of ``output``.

    ``table`` is a table of Spark, pandas, Polars or Arrow. One that is not Spark's goes through Arrow to ``spark``, or
    else to the session that is active, or to a new local one (``penstock.spark.session()``).

    A row is named by its ``key`` columns. Its columns that are parameters of the task (or ``payload``) are the
    arguments; ``priority``, ``delay``, ``group`` and ``cost`` are columns with those options of its job. Rows that
    are in the output with the same arguments and task version are not run again; ``on_change`` says what happens to
    those that have changed, ``retry_failed`` to those that failed. A row that the output does not have, but for which
    the store still keeps a result of the same arguments and version, takes that result; with ``reuse_results=False`` it
    is run. ``output`` is a path, or a table of the catalog
    (``table:db.scores``): an append-only ledger, of which ``latest`` gives what holds. Its ``format`` is ``parquet``,
    ``json`` (lines), or another that the session has and that keeps types: not ``csv``.

    A ``table`` that is a stream (``spark.readStream``) is processed batch by batch: all that is there now, or with
    ``every="1m"`` what comes, until it is stopped. Spark's offsets are kept in ``checkpoint``, inside the output unless
    given. ``since`` is a column whose values grow: a run looks only at rows from the highest value on that earlier runs
    have seen. For a ``deltalake.DeltaTable`` it may be ``"version"``: only files that the table gained since then; or
    the number of a version to start from.

    Ctrl-C stops it: jobs that have not begun are taken back, those under way are let finish and written down, and then
    ``KeyboardInterrupt`` is raised. The second Ctrl-C leaves them to the next run.

    ``max_cost`` bounds what the jobs of this run may use of ``cost_name`` (``context.use(usd=...)``), up to what is
    under way when it is reached. ``max_failures`` is the number of rows that may fail, ``max_failure_rate`` their share
    (0.05), which is judged from 20 rows on. ``limit`` does only so many rows. ``dry_run`` only says what there is to
    do, and estimates its cost.

    ``expect`` is a function of a result, or several by name. A row whose result it does not accept has failed with
    ``ExpectationFailed``; ``retry_failed`` runs it again. ``quarantine`` is a table of its own for the rows that
    failed or were rejected, with all their columns; each run writes it anew.

    Jobs are done by whatever workers there are on the task's queue, by
    ``workers`` processes started for it here, and with ``fleet="spark"`` by ``fleet_size`` of Spark's task slots: all
    but one, which the run needs for itself, unless given.

    What the run writes for itself is in the output, if that is a path, and else in a folder of its own in ``scratch``,
    which executors must be able to read and write; on one machine that is a temporary one, unless given.

    Raises:
        InvalidInput: keys that are missing, null or not unique, a table that does not fit the task, an output that
            holds something else. Nothing was enqueued.
        OutputBusy: another run is writing to the output.
        TooManyFailures: see ``max_failures`` and ``max_failure_rate``; what was done is in the output.
        StorageError: the store does not answer.
    """
    refuse_in_crew()
    chosen = _checked_task(task)
    placement = {"priority": priority, "delay": delay, "group": group, "cost": cost}
    if on_change not in _ON_CHANGE:
        raise InvalidOption(f"on_change={on_change!r} is not known. Give rerun, keep or error.")
    if limit is not None and limit < 1:
        raise InvalidOption(f"limit={limit}: give at least 1, or None for all rows.")
    if max_failure_rate is not None and not 0 <= max_failure_rate < 1:
        raise InvalidOption(f"max_failure_rate must be a share from 0 to below 1, got {max_failure_rate}.")
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
        progress=progress,
        format=format,
        scratch=scratch,
        staffing={
            "workers": workers,
            "fleet": fleet,
            "fleet_size": fleet_size,
            "concurrency": concurrency,
        },
    )
    if isinstance(table, DeltaTable) and (since == "version" or isinstance(since, int)):
        return request.carry_out_on_delta(table, spark or session())
    df = as_dataframe(table, spark)
    if isinstance(since, int):
        raise InvalidOption(
            f"since={since} is a version of a Delta table, and the table is none. Give a deltalake.DeltaTable, or the "
            "name of a column."
        )
    if df.isStreaming:
        return run_stream(request, df, checkpoint=checkpoint, every=every)
    if every is not None or checkpoint is not None:
        raise InvalidOption("every and checkpoint are for streams, and the table is not one. Leave them out.")
    return request.carry_out(df)


def _checked_task(task: object) -> Task[..., Any]:
    chosen = find(task, Task) if isinstance(task, str) else task
    if not isinstance(chosen, Task):
        name = getattr(task, "__qualname__", repr(task))
        raise InvalidInput(
            f"task must be a task of an app, or its name as 'module:task', got {name}, which is not one. Decorate the "
            "function with @app.task(queue=...)."
        )
    return chosen
