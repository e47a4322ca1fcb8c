"""Ranges of event logs written to Parquet files, on executors: what was read goes straight from Arrow into the file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from penstock.spark.durable import make_durable
from penstock.spark.eventreads import EventRange, read_range
from penstock.spark.history.manifest import DataFile, Range, now_ms
from penstock.spark.options import ReadOptions
from penstock.spark.schemas import EVENTS

__all__ = ["Share", "shares_of", "write_durably", "write_shares", "write_table"]

_LEAST: Final = 25_000
_MOST: Final = 250_000


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
    spark: SparkSession, shares: Sequence[Share], *, url: str, folder: Path, sync: str
) -> list[DataFile]:
    """Write a file for each share, as one job of Spark. Files hold what could be read, which may be less.

    A task that Spark repeats writes another file; only those that are returned count.
    """
    count = len(shares)
    if count == 0:
        return []
    task = partial(_write, shares=shares, url=url, folder=str(folder), sync=sync)
    rows = spark.range(0, count, 1, count).mapInArrow(task, "file binary").collect()
    files = [msgspec.msgpack.decode(row.file, type=DataFile) for row in rows]
    make_durable(folder)
    return sorted((file for file in files if file.rows), key=lambda file: file.path)


def _write(
    batches: Iterator[pa.RecordBatch], *, shares: Sequence[Share], url: str, folder: str, sync: str
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            table = _read(shares[number], url)
            file = write_table(table, Path(folder), f"{sync}-{number:05}")
            yield pa.RecordBatch.from_pydict({"file": [msgspec.msgpack.encode(file)]})


def _read(share: Share, url: str) -> pa.Table:
    options = ReadOptions(url=url, kind="events", fail_on_data_loss=False)
    batches: list[pa.RecordBatch] = []
    for part in share.ranges:
        wanted = EventRange(part.queue, part.epoch, part.first - 1, part.last)
        batches.extend(read_range(wanted, options, EVENTS))
    return pa.Table.from_batches(batches) if batches else pa.table({})


def write_table(table: pa.Table, folder: Path, name: str) -> DataFile:
    """A durable file of these events, or, if there are none, no file. The name is made unique."""
    if table.num_rows == 0:
        return DataFile(path="", rows=0, bytes=0, ranges=(), from_ms=0, to_ms=0, written_at_ms=0)
    path = folder / f"{name}-{uuid4().hex[:8]}.parquet"
    size = write_durably(table, path)
    at_ms = pc.cast(pc.divide(pc.cast(table["at"], pa.int64()), 1000), pa.int64())
    began_ms = pc.subtract(at_ms, table["run_ms"])
    types = pc.value_counts(table["type"])
    return DataFile(
        path=path.name,
        rows=table.num_rows,
        bytes=size,
        ranges=tuple(_ranges(table)),
        from_ms=pc.min(began_ms).as_py(),
        to_ms=pc.max(at_ms).as_py(),
        written_at_ms=now_ms(),
        days=tuple(_birth_days(table)),
        types={entry["values"]: entry["counts"] for entry in types.to_pylist()},
        has_groups=pc.any(pc.not_equal(table["group"], "")).as_py(),
    )


def write_durably(table: pa.Table, path: Path) -> int:
    """Write a Parquet file that is not there yet, and its folder if need be; how many bytes it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        pq.write_table(table, file, compression="zstd", compression_level=1)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _birth_days(table: pa.Table) -> list[str]:
    return sorted(
        str(day) for day in pc.unique(pc.cast(table["enqueued_at"], pa.date32())).drop_null().to_pylist()
    )


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
