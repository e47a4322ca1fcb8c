"""``writeStream.format("penstock")``: every row of every micro-batch a job, once, however often a batch is repeated."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from penstock.spark.sink import Target, Written, finish, give_up, write_partition

__all__ = ["StreamWriter"]


class StreamWriter(DataSourceStreamArrowWriter):
    """Made anew for every batch, and again to commit it: the save is named by query and batch, which Spark repeats."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """As ``PenstockWriter.write``, under the name of the batch that is under way."""
        context = TaskContext.get()
        assert context is not None, "executors have one"
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        return write_partition(iterator, self._target.named(f"{query}-{batch}"))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        target = self._named(messages)
        if target is not None:
            finish(target, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        target = self._named(messages)
        if target is not None:
            give_up(target)

    def _named(self, messages: list[WriterCommitMessage | None]) -> Target | None:
        """The target under the name that the tasks wrote under; ``None`` if there was nothing to write."""
        for message in messages:
            if isinstance(message, Written):
                return self._target.named(message.write_id)
        return None
