"""Incremental updates of tables. Each file covers a span of time, and a sync rewrites only the files whose span has new
events. So the cost of a sync depends on the new events, not on the size of the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.spark.delta import DataFile, Table
from penstock.spark.history.folding import piles_of

Instants: TypeAlias = npt.NDArray[np.int64]
_PER_FILE: Final = 100_000
_PER_TASK: Final = 250_000
_BATCH: Final = 20_000


class Fold(ABC):
    """The derivation of one table from the events of bronze. Executors run it.

    ``rows`` is the schema of the rows to fold. It has the column ``ranged``, which the table's files are split by.
    ``extra`` are rows that do not come from events.
    """

    rows: pa.Schema
    ranged: str
    extra: pa.Table | None = None

    @abstractmethod
    def from_events(self, files: Sequence[DataFile]) -> pa.Table:
        """Return rows for the new events in these files of bronze."""

    @abstractmethod
    def from_known(self, table: pa.Table) -> pa.Table:
        """Return rows of the table in the form of rows to fold."""

    @abstractmethod
    def folded(self, rows: pa.Table) -> pa.Table:
        """Return the rows of the table for a span of time, in the order of its files."""


def fold_forward(
    spark: SparkSession,
    table: Table,
    known: Sequence[DataFile],
    *,
    fold: Fold,
    pending: Sequence[DataFile],
    instants: Instants,
    number: int,
    is_everything: bool = False,
) -> tuple[list[DataFile], list[DataFile]]:
    """Fold the new events of the ``pending`` files into the ``known`` files of a table, for commit ``number``. Return
    the new files, and the known ones that they replace. ``instants`` are the times of the new events; ``is_everything``
    replaces every file."""
    lows = np.array([file.low for file in known], np.int64)
    owners = range(len(lows)) if is_everything else np.unique(owners_of(lows, instants)).tolist()
    touched = [known[index] for index in owners] if len(lows) else []
    edges = _edges(lows, owners, instants)
    sources = [("new", pile) for pile in piles_of(pending)] + [("known", pile) for pile in piles_of(touched)]
    if fold.extra is not None:
        sources.append(("extra", []))
    if not sources:
        return [], []
    read = partial(_read, sources=sources, table=table, fold=fold, edges=edges)
    write = partial(_write, table=table, fold=fold, number=number)
    spanned = from_arrow_schema(fold.rows.append(pa.field("span", pa.int32())))
    rows = spark.range(0, len(sources), 1, len(sources)).mapInArrow(read, spanned)
    tasks = min(len(edges) + 1, 10_000)
    written = rows.repartition(tasks, "span").mapInArrow(write, "file binary").collect()
    return [msgspec.msgpack.decode(row.file, type=DataFile) for row in written], touched


def millis(column: Any) -> Instants:
    """Return instants as epoch milliseconds; 0 for null."""
    micros = pc.fill_null(pc.cast(pc.cast(column, pa.timestamp("us", "UTC")), pa.int64()), 0)
    return np.asarray(micros.to_numpy(), np.int64) // 1000


def owners_of(lows: Instants, instants: Instants) -> Instants:
    """Return the file for each instant. A file covers the time up to the next one; the first also all before."""
    return np.maximum(np.searchsorted(lows, instants, side="right") - 1, 0)


def _edges(lows: Instants, owners: Sequence[int], instants: Instants) -> Instants:
    """Return the bounds of tasks: the bounds of files, and further ones where a task would be too large."""
    bounds = [lows[index] for owner in owners for index in (owner, owner + 1) if 0 < index < len(lows)]
    splits = np.sort(instants)[_PER_TASK::_PER_TASK]
    return np.unique(np.concatenate([np.array(bounds, np.int64), splits]))


def _read(
    batches: Iterator[pa.RecordBatch],
    *,
    sources: Sequence[tuple[str, list[DataFile]]],
    table: Table,
    fold: Fold,
    edges: Instants,
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for index in batch.column(0).to_pylist():
            rows = _rows(table, fold, *sources[index])
            spans = np.searchsorted(edges, millis(rows[fold.ranged]), side="right")
            yield from rows.append_column("span", pa.array(spans, pa.int32())).to_batches(_BATCH)


def _rows(table: Table, fold: Fold, source: str, files: Sequence[DataFile]) -> pa.Table:
    if source == "new":
        return fold.from_events(files)
    if source == "known":
        return fold.from_known(pa.concat_tables(table.read(file) for file in files))
    return fold.extra


def _write(
    batches: Iterator[pa.RecordBatch], *, table: Table, fold: Fold, number: int
) -> Iterator[pa.RecordBatch]:
    read = list(batches)
    if not read:
        return
    rows = pa.Table.from_batches(read)
    # The session may have another time zone, or longer texts.
    for span in pc.unique(rows["span"]).to_pylist():
        own = rows.filter(pc.equal(rows["span"], span)).drop_columns(["span"]).cast(fold.rows)
        folded = fold.folded(own)
        for start, end in file_bounds(millis(folded[fold.ranged])):
            file = table.write(folded.slice(start, end - start), number)
            yield pa.RecordBatch.from_pydict({"file": [msgspec.msgpack.encode(file)]})


def file_bounds(instants: Instants, per_file: int = _PER_FILE) -> Iterator[tuple[int, int]]:
    """Yield the bounds of files: full ones first. Two files never share an instant."""
    start = 0
    while start < len(instants):
        end = min(start + per_file, len(instants))
        if end < len(instants):
            first = int(np.searchsorted(instants, instants[end], side="left"))
            end = first if first > start else int(np.searchsorted(instants, instants[end], side="right"))
        yield start, end
        start = end
