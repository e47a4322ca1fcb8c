"""Folds of the events of bronze into the files of another table, a slice of events at a time.

Each file covers a span of time, and a fold rewrites only the files whose span has new events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.spark.delta import DataFile, Snapshot, Table
from penstock.spark.history.bronze import bronze_state
from penstock.spark.history.tables import (
    BronzeState,
    FoldState,
    History,
    Instants,
    Place,
    Placing,
    fold_state,
    millis,
    placing_between,
)
from penstock.spark.tasks import Batches, collected, each, numbered

# The maximum number of events per fold. The driver holds some of their columns in memory.
_PER_SLICE: Final = 1_000_000


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """The next events to fold into the version ``base`` of a table: those in the files ``pending`` that ``placing``
    covers. They take the table from the state ``known`` to the state ``reached``."""

    bronze: BronzeState
    base: Snapshot
    known: FoldState
    reached: FoldState
    placing: Placing
    pending: list[DataFile]
    is_last: bool

    def events(self, history: History, columns: Sequence[str]) -> pa.Table:
        """Return some columns of the events, with their ``place``."""
        return new_events(history.bronze, self.pending, self.placing, columns)


def next_slice(history: History, table: Table, upto: FoldState | None = None) -> Slice | None:
    """Return the next slice of events for a table, or ``None`` if the table has reached ``upto`` (default: the end of
    bronze)."""
    events, base = history.bronze.load(), table.load()
    bronze, known = bronze_state(history, events), fold_state(base)
    if upto is None:
        losses, changes = len(bronze.losses), len(bronze.changes)
        upto = FoldState(bronze=events.number, places=bronze.places, losses=losses, changes=changes)
    upto = replace(upto, open=known.open)
    # A table that is being rebuilt may be behind a table that derives from it.
    if known == upto or known.bronze > upto.bronze:
        return None
    reached = _next_state(bronze, known, upto)
    placing = placing_between(bronze, known.places, reached.places)
    # Each file carries the number of the commit that wrote it.
    pending = [file for file in events.files if file.number > known.bronze and placing.may_cover(file)]
    return Slice(
        bronze=bronze,
        base=base,
        known=known,
        reached=reached,
        placing=placing,
        pending=pending,
        is_last=reached == upto,
    )


def _next_state(bronze: BronzeState, known: FoldState, upto: FoldState) -> FoldState:
    """Return the state after the next slice of events: ``upto``, or one on the way if too many are left."""
    room, places = _PER_SLICE, dict(known.places)
    for queue, end in sorted(upto.places.items()):
        start = _start(bronze, queue, end.epoch, known.places.get(queue))
        stop = min(end.seq, start + room)
        if room > 0 or stop == end.seq:
            places[queue] = Place(end.epoch, stop)
            room -= stop - start
    return upto if places == upto.places else replace(known, places=places)


def _start(bronze: BronzeState, queue: str, epoch: str, place: Place | None) -> int:
    """Return the sequence number before the next event of an epoch in bronze. Ignore the few events that earlier
    epochs still have."""
    start = place.seq if place is not None and place.epoch == epoch else 0
    for change in bronze.changes:
        if (change.queue, change.after) == (queue, epoch):
            start = max(start, change.common)
    for loss in bronze.losses:
        if (loss.queue, loss.epoch) == (queue, epoch) and loss.first <= start + 1:
            start = max(start, loss.last)
    return start


def new_events(
    bronze: Table, files: Sequence[DataFile], placing: Placing, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return the covered events of these files with their ``place``. ``columns`` selects some columns."""
    empty = bronze.schema.empty_table()
    none = placing.placed(empty if columns is None else empty.select(list(columns)))
    return pa.concat_tables([none, *(placing.placed(bronze.read(file, columns)) for file in files)])


# The fold of a slice.


_PILE: Final = 250_000
_PER_FILE: Final = 100_000
_PER_TASK: Final = 250_000
_BATCH: Final = 20_000


class Fold(ABC):
    """The derivation of one table from the events of bronze that a placing covers. Executors run it.

    ``rows`` is the schema of the rows to fold. The files of the table are split by its column ``ranged``. ``extra``
    holds rows that do not come from events.
    """

    rows: pa.Schema
    ranged: str

    def __init__(self, bronze: Table, placing: Placing, *, extra: pa.Table | None = None) -> None:
        self.bronze = bronze
        self.placing = placing
        self.extra = extra

    @abstractmethod
    def from_events(self, events: pa.Table) -> pa.Table:
        """Return the rows to fold for new events."""

    def from_known(self, table: pa.Table) -> pa.Table:
        """Return the rows to fold for existing rows of the table."""
        return table

    @abstractmethod
    def folded(self, rows: pa.Table) -> pa.Table:
        """Return the rows of the table for a span of time, in the order of its files."""


def fold_forward(
    spark: SparkSession,
    table: Table,
    part: Slice,
    *,
    fold: Fold,
    instants: Instants,
    open: Mapping[str, int] | None = None,
    is_everything: bool = False,
) -> bool:
    """Fold a slice of events into a table, in one commit, and return whether there are more. ``instants`` are the times
    of the events, and ``open`` is part of the new state. ``is_everything`` replaces every file.

    Raises:
        Conflict: another sync committed first. Nothing was committed.
    """
    base, reached = part.base, part.reached if open is None else replace(part.reached, open=dict(open))
    # Rebuild a table whose state is unknown.
    is_known = part.known != FoldState()
    known = base.files if is_known else []
    lows = np.array([file.low for file in known], np.int64)
    owners = range(len(lows)) if is_everything else np.unique(owners_of(lows, instants)).tolist()
    touched = [known[index] for index in owners] if len(lows) else []
    edges = _edges(lows, owners, instants)
    sources = [("new", pile) for pile in _piles_of(part.pending if len(instants) else [])]
    sources += [("known", pile) for pile in _piles_of(touched)]
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
    return not part.is_last


def owners_of(lows: Instants, instants: Instants) -> Instants:
    """Return the index of the file for each instant. A file covers the time up to the start of the next file. The
    first file also covers all earlier times."""
    return np.maximum(np.searchsorted(lows, instants, side="right") - 1, 0)


def _edges(lows: Instants, owners: Sequence[int], instants: Instants) -> Instants:
    """Return the bounds of tasks: those of the files, and further ones where a task would be too large."""
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
    # Cast, because the session may use another time zone or another type of text.
    for span in pc.unique(rows["span"]).to_pylist():
        own = rows.filter(pc.equal(rows["span"], span)).drop_columns(["span"]).cast(fold.rows)
        folded = fold.folded(own)
        for start, end in file_bounds(millis(folded[fold.ranged])):
            yield table.write(folded.slice(start, end - start), number)


def file_bounds(instants: Instants, per_file: int = _PER_FILE) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each file, full files first. Two files never share an instant."""
    start = 0
    while start < len(instants):
        end = min(start + per_file, len(instants))
        if end < len(instants):
            first = int(np.searchsorted(instants, instants[end], side="left"))
            end = first if first > start else int(np.searchsorted(instants, instants[end], side="right"))
        yield start, end
        start = end


def _piles_of(files: Sequence[DataFile]) -> list[list[DataFile]]:
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
