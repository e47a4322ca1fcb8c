"""Tasks on Spark's executors, and what they return to the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")
S = TypeVar("S")
Batches: TypeAlias = Iterator[pa.RecordBatch]
Mapper: TypeAlias = Callable[[Batches], Batches]


def collected(rows: DataFrame, task: Callable[[Batches], Iterable[T]], kind: type[T]) -> list[T]:
    """Run a task on each partition of the rows, and return the values of type ``kind`` that the tasks yield."""

    def run(batches: Batches) -> Batches:
        for value in task(batches):
            yield pa.RecordBatch.from_pydict({"value": [msgspec.msgpack.encode(value)]})

    made = rows.mapInArrow(run, "value binary").collect()
    return [msgspec.msgpack.decode(row["value"], type=kind) for row in made]


def counted(rows: DataFrame, task: Callable[[Batches], Counter[str]]) -> Counter[str]:
    """Run a task on each partition of the rows, and return the sum of its counts."""
    total: Counter[str] = Counter()
    for counts in collected(rows, lambda batches: [dict(task(batches))], dict[str, int]):
        total.update(counts)
    return total


def parallelism(spark: SparkSession) -> int:
    """Return the number of tasks that the session runs at a time."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # Spark Connect has no context
        return int(spark.conf.get("spark.sql.shuffle.partitions", "8") or 8)


def numbered(spark: SparkSession, items: Sequence[object]) -> DataFrame:
    """Return the indexes of items, one per partition."""
    return spark.range(0, len(items), 1, max(len(items), 1))


def each(items: Sequence[S], task: Callable[[S], Iterable[T]]) -> Callable[[Batches], Iterator[T]]:
    """Return a task on the rows of ``numbered`` that runs ``task`` on each item."""

    def run(batches: Batches) -> Iterator[T]:
        for batch in batches:
            for index in batch.column(0).to_pylist():
                yield from task(items[index])

    return run


def chunks(batches: Batches, size: int) -> Batches:
    """Yield the batches in slices of at most ``size`` rows."""
    for batch in batches:
        for start in range(0, batch.num_rows, size):
            yield batch.slice(start, size)
