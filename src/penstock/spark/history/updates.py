"""Incremental updates of tables from the new events of bronze.

Each file covers a span of time, and a sync rewrites only the files whose span has new events. So the cost of a sync
depends on the new events, not on the size of the table.

A place is the position of an event in the order of its queue, across epochs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.spark.delta import DataFile, Snapshot, Table
from penstock.spark.history.tables import BronzeState, FoldState, Place, fold_state
from penstock.spark.tasks import Batches, collected, each, numbered

# All places of an epoch come before those of the next one.
_PER_EPOCH: Final = 1 << 48
_PILE: Final = 250_000


class Placing(msgspec.Struct, frozen=True):
    """Assigns places to the events after ``done`` and up to ``upto``, and drops all others."""

    epochs: dict[str, tuple[str, ...]]
    done: dict[str, int]
    upto: dict[str, int]

    def placed(self, events: pa.Table) -> pa.Table:
        """Return the covered events with their ``place``."""
        place = events["seq"]
        for queue, epochs in self.epochs.items():
            for number, epoch in enumerate(epochs[1:], 1):
                is_then = pc.and_(pc.equal(events["queue"], queue), pc.equal(events["epoch"], epoch))
                place = pc.if_else(is_then, pc.add(events["seq"], number * _PER_EPOCH), place)
        return events.append_column("place", place).filter(self.covers(events["queue"], place))

    def covers(self, queues: Any, places: Any) -> Any:
        """Return whether each place is covered, given its queue."""
        after, upto = (
            pc.fill_null(
                pc.take(pa.array(bounds.values(), pa.int64()), pc.index_in(queues, _names(bounds))), 0
            )
            for bounds in (self.done, self.upto)
        )
        return pc.and_(pc.greater(places, after), pc.less_equal(places, upto))


def _names(bounds: Mapping[str, int]) -> pa.Array:
    return pa.array(bounds, pa.string())


def place_number(bronze: BronzeState, queue: str, epoch: str, seq: int) -> int:
    """Return the place of an event in its queue, across epochs."""
    return bronze.epochs[queue].index(epoch) * _PER_EPOCH + seq


def placing_between(bronze: BronzeState, done: Mapping[str, Place], upto: Mapping[str, Place]) -> Placing:
    """Return a placing for the events between two states."""
    numbers = [
        {queue: place_number(bronze, queue, place.epoch, place.seq) for queue, place in places.items()}
        for places in (done, upto)
    ]
    return Placing(bronze.epochs, *numbers)


def pending_files(files: Sequence[DataFile], number: int) -> list[DataFile]:
    """Return the files that may hold events of commits after that number."""
    return [file for file in files if file.number > number]


def new_events(
    bronze: Table, files: Sequence[DataFile], placing: Placing, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return the covered events of these files with their ``place``, and all columns or some."""
    empty = bronze.schema.empty_table()
    tables = [bronze.read(file, columns) for file in files]
    return placing.placed(
        pa.concat_tables(tables or [empty if columns is None else empty.select(list(columns))])
    )


def piles_of(files: Sequence[DataFile]) -> list[list[DataFile]]:
    """Group files for tasks, so that each group is worth a task and fits into its memory."""
    piles: list[list[DataFile]] = []
    room = 0
    for file in files:
        if file.rows > room or not piles:
            piles.append([])
            room = _PILE
        piles[-1].append(file)
        room -= file.rows
    return piles


# Folds of new events into the files of a table.


Instants: TypeAlias = npt.NDArray[np.int64]
_PER_FILE: Final = 100_000
_PER_TASK: Final = 250_000
_BATCH: Final = 20_000


class Fold(ABC):
    """The derivation of one table from the events of bronze that a placing covers. Executors run it.

    ``rows`` is the schema of the rows to fold. It has the column ``ranged``, which the table's files are split by.
    ``extra`` are rows that do not come from events.
    """

    rows: pa.Schema
    ranged: str

    def __init__(self, bronze: Table, placing: Placing, *, extra: pa.Table | None = None) -> None:
        self.bronze = bronze
        self.placing = placing
        self.extra = extra

    @abstractmethod
    def from_events(self, events: pa.Table) -> pa.Table:
        """Return rows for new events."""

    def from_known(self, table: pa.Table) -> pa.Table:
        """Return rows of the table in the form of rows to fold."""
        return table

    @abstractmethod
    def folded(self, rows: pa.Table) -> pa.Table:
        """Return the rows of the table for a span of time, in the order of its files."""


def fold_forward(
    spark: SparkSession,
    table: Table,
    base: Snapshot,
    *,
    fold: Fold,
    pending: Sequence[DataFile],
    instants: Instants,
    reached: FoldState,
    is_everything: bool = False,
) -> None:
    """Fold the new events of the ``pending`` files into a table, in one commit with the state ``reached``. ``instants``
    are the times of the new events; ``is_everything`` replaces every file.

    Raises:
        Conflict: another sync committed first. Nothing was committed.
    """
    # A table whose state is unknown is rebuilt.
    is_known = fold_state(base).bronze > 0
    known = base.files if is_known else []
    lows = np.array([file.low for file in known], np.int64)
    owners = range(len(lows)) if is_everything else np.unique(owners_of(lows, instants)).tolist()
    touched = [known[index] for index in owners] if len(lows) else []
    edges = _edges(lows, owners, instants)
    sources = [("new", pile) for pile in piles_of(pending)] + [("known", pile) for pile in piles_of(touched)]
    if fold.extra is not None:
        sources.append(("extra", []))
    made: list[DataFile] = []
    if sources:
        spanned = from_arrow_schema(fold.rows.append(pa.field("span", pa.int32())))
        rows = numbered(spark, sources).mapInArrow(each(sources, partial(_read, table, fold, edges)), spanned)
        tasks = min(len(edges) + 1, 10_000)
        write = partial(_write, table=table, fold=fold, number=base.number + 1)
        made = collected(rows.repartition(tasks, "span"), write, DataFile)
    removed = touched if is_known else base.files
    table.commit(base, add=made, remove=removed, state=msgspec.json.encode(reached).decode())


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


def _read(table: Table, fold: Fold, edges: Instants, source: tuple[str, list[DataFile]]) -> Batches:
    rows = _rows(table, fold, *source)
    spans = np.searchsorted(edges, millis(rows[fold.ranged]), side="right")
    yield from rows.append_column("span", pa.array(spans, pa.int32())).to_batches(_BATCH)


def _rows(table: Table, fold: Fold, source: str, files: Sequence[DataFile]) -> pa.Table:
    if source == "new":
        return fold.from_events(new_events(fold.bronze, files, fold.placing))
    if source == "known":
        return fold.from_known(pa.concat_tables(table.read(file) for file in files))
    return fold.extra


def _write(batches: Batches, *, table: Table, fold: Fold, number: int) -> Iterator[DataFile]:
    read = list(batches)
    if not read:
        return
    rows = pa.Table.from_batches(read)
    # The session may have another time zone, or longer texts.
    for span in pc.unique(rows["span"]).to_pylist():
        own = rows.filter(pc.equal(rows["span"], span)).drop_columns(["span"]).cast(fold.rows)
        folded = fold.folded(own)
        for start, end in file_bounds(millis(folded[fold.ranged])):
            yield table.write(folded.slice(start, end - start), number)


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
