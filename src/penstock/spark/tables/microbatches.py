"""A stream as the input of ``process``: each micro-batch is a run into the same ledger.

Spark calls for each batch in a thread of its own. That thread hands the batch over to the one that called ``process``
and waits, so that Ctrl-C and errors are where they are without a stream. A batch that was not done is not committed:
Spark brings it again, and the ledger knows which of its rows are done.
"""

from __future__ import annotations

import threading
from pathlib import PurePath
from queue import Empty, SimpleQueue
from typing import Any, Final

import msgspec
from pyspark.sql import DataFrame

from penstock.core.duration import Duration, milliseconds
from penstock.errors import InvalidInput, InvalidOption
from penstock.spark.schemas import quoted
from penstock.spark.tables.request import Request
from penstock.spark.tables.result import Processed
from penstock.spark.tables.staff import Staff

__all__ = ["run_stream"]

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
