"""Ranges of event logs written to Parquet files, on executors: what was read goes straight from Arrow into the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from penstock.spark.delta import DataFile, Table
from penstock.spark.eventreads import EventRange, read_range
from penstock.spark.history.state import Range
from penstock.spark.options import ReadOptions
from penstock.spark.schemas import EVENTS

__all__ = ["Share", "WrittenFile", "shares_of", "write_shares"]

_LEAST: Final = 25_000
_MOST: Final = 250_000


class WrittenFile(msgspec.Struct, frozen=True):
    """A file of bronze, and the events that it holds."""

    file: DataFile
    ranges: tuple[Range, ...]


class Share(msgspec.Struct, frozen=True):
    """What one task writes into one file."""

    ranges: tuple[Range, ...]


def shares_of(ranges: Sequence[Range], parallelism: int) -> list[Share]:
    """Ranges cut and put together, so that every task has about as many events, and no file is needlessly small."""
    total = sum(_length(part) for part in ranges)
    target = min(max(-(-total // parallelism), _LEAST), _MOST)
    shares: list[Share] = []
    filling: list[Range] = []
    for part in (piece for whole in ranges for piece in _pieces(whole, target)):
        if filling and sum(map(_length, filling)) + _length(part) > target:
            shares.append(Share(tuple(filling)))
            filling = []
        filling.append(part)
    return [*shares, Share(tuple(filling))] if filling else shares


def _length(part: Range) -> int:
    return part.last - part.first + 1


def _pieces(part: Range, target: int) -> Iterator[Range]:
    count = -(-_length(part) // target)
    edges = [part.first + _length(part) * number // count for number in range(count + 1)]
    for first, end in pairwise(edges):
        yield msgspec.structs.replace(part, first=first, last=end - 1)


def write_shares(
    spark: SparkSession, shares: Sequence[Share], *, url: str, bronze: Table, number: int
) -> list[WrittenFile]:
    """Write a file for each share, as one job of Spark. Files hold what could be read, which may be less.

    A task that Spark repeats writes another file; only those that are returned count.
    """
    count = len(shares)
    if count == 0:
        return []
    task = partial(_write, shares=shares, url=url, bronze=bronze, number=number)
    rows = spark.range(0, count, 1, count).mapInArrow(task, "file binary").collect()
    return [msgspec.msgpack.decode(row.file, type=WrittenFile) for row in rows]


def _write(
    batches: Iterator[pa.RecordBatch], *, shares: Sequence[Share], url: str, bronze: Table, number: int
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for index in batch.column(0).to_pylist():
            events = _read(shares[index], url)
            if events.num_rows:
                written = WrittenFile(bronze.write(events, number), tuple(_ranges(events)))
                yield pa.RecordBatch.from_pydict({"file": [msgspec.msgpack.encode(written)]})


def _read(share: Share, url: str) -> pa.Table:
    options = ReadOptions(url=url, kind="events", fail_on_data_loss=False)
    batches: list[pa.RecordBatch] = []
    for part in share.ranges:
        wanted = EventRange(part.queue, part.epoch, part.first - 1, part.last)
        batches.extend(read_range(wanted, options, EVENTS))
    return pa.Table.from_batches(batches) if batches else pa.table({})


def _ranges(table: pa.Table) -> Iterator[Range]:
    """The unbroken ranges that the table holds, in its order."""
    seqs = table["seq"].combine_chunks()
    steps = pc.pairwise_diff(seqs)
    broken = pc.not_equal(steps, 1).fill_null(True)
    for name in ("queue", "epoch"):
        column = table[name].combine_chunks()
        changed = pc.not_equal(column[1:], column[:-1])
        broken = pc.or_(broken, pa.concat_arrays([pa.array([True]), changed]))
    starts = pc.indices_nonzero(broken).to_pylist()
    for start, end in zip(starts, [*starts[1:], table.num_rows], strict=True):
        yield Range(
            queue=table["queue"][start].as_py(),
            epoch=table["epoch"][start].as_py(),
            first=seqs[start].as_py(),
            last=seqs[end - 1].as_py(),
        )
