"""Tables that are folded forward. Each file owns a span of time, and only files that something new falls into are
written again, so that a sync costs what is new and not what is there."""

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
    """How rows of one table come from events of bronze. Executors run it.

    ``rows`` is the schema of what is folded, which has the column that the table is ``ranged`` by. ``extra`` are rows
    that do not come from events.
    """

    rows: pa.Schema
    ranged: str
    extra: pa.Table | None = None

    @abstractmethod
    def from_events(self, files: Sequence[DataFile]) -> pa.Table:
        """Return rows for the new events in these files of bronze."""

    @abstractmethod
    def from_known(self, table: pa.Table) -> pa.Table:
        """Return rows of the table as rows to be folded."""

    @abstractmethod
    def folded(self, rows: pa.Table) -> pa.Table:
        """Return the rows of the table, from all rows of a span of time, in the order that files have."""


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
    """Write what the ``known`` files and the new events of the ``pending`` ones make, for the commit with that number.
    Return the new files, and the known ones that they replace. ``instants`` are all times that the new events fall on;
    ``is_everything`` replaces every file."""
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
    found = rows.repartition(tasks, "span").mapInArrow(write, "file binary").collect()
    return [msgspec.msgpack.decode(row.file, type=DataFile) for row in found], touched


def millis(column: Any) -> Instants:
    """Return instants as epoch milliseconds; 0 for those that are not known."""
    micros = pc.fill_null(pc.cast(pc.cast(column, pa.timestamp("us", "UTC")), pa.int64()), 0)
    return np.asarray(micros.to_numpy(), np.int64) // 1000


def owners_of(lows: Instants, instants: Instants) -> Instants:
    """A file owns what falls between its first instant and that of the next file; the first one all before, too."""
    return np.maximum(np.searchsorted(lows, instants, side="right") - 1, 0)


def _edges(lows: Instants, owners: Sequence[int], instants: Instants) -> Instants:
    """Return where tasks end: at the bounds of files, and wherever a task would have too much to do."""
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
    found = list(batches)
    if not found:
        return
    rows = pa.Table.from_batches(found)
    # The session may have another time zone, or longer texts.
    for span in pc.unique(rows["span"]).to_pylist():
        own = rows.filter(pc.equal(rows["span"], span)).drop_columns(["span"]).cast(fold.rows)
        folded = fold.folded(own)
        for start, end in cuts_of(millis(folded[fold.ranged])):
            file = table.write(folded.slice(start, end - start), number)
            yield pa.RecordBatch.from_pydict({"file": [msgspec.msgpack.encode(file)]})


def cuts_of(instants: Instants, per_file: int = _PER_FILE) -> Iterator[tuple[int, int]]:
    """Yield where files start and end: full ones first, and never two with the same instant."""
    start = 0
    while start < len(instants):
        end = min(start + per_file, len(instants))
        if end < len(instants):
            first = int(np.searchsorted(instants, instants[end], side="left"))
            end = first if first > start else int(np.searchsorted(instants, instants[end], side="right"))
        yield start, end
        start = end
