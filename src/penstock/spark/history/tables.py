"""The tables of a history: Delta tables in one folder, on a disk or in an object store.

Each commit records a state: its position in the logs, and the losses found.

Tables are updated incrementally from the new events of bronze. Each file covers a span of time, and a sync rewrites
only the files whose span has new events. So the cost of a sync depends on the new events, not on the size of the table.

A place is the position of an event in the order of its queue, across epochs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.errors import InvalidOption
from penstock.spark.cells import arrow_schema
from penstock.spark.delta import DataFile, Folder, Snapshot, Table, open_folder
from penstock.spark.publishing import refuse_pattern
from penstock.spark.schemas import EVENTS
from penstock.spark.tasks import Batches, collected, each, numbered

# The measures of gold that count events, and the types of these.
COUNTED: Final = {
    "enqueued": ("enqueued",),
    "claimed": ("claimed",),
    "completed": ("completed",),
    "failed": ("failed", "expired"),
    "cancelled": ("cancelled",),
    "retried": ("retrying",),
    "stalled": ("stalled",),
    "snoozed": ("snoozed", "suspended"),
    "limited": ("limited",),
}
PERCENTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
TIMED: Final = ("wait", "run")

_TEXT, _LONG, _DOUBLE, _TIME = pa.string(), pa.int64(), pa.float64(), pa.timestamp("us", "UTC")
BRONZE: Final = arrow_schema(EVENTS)
SILVER: Final = pa.schema(
    {
        "queue": _TEXT,
        "id": _TEXT,
        "incarnation": _LONG,
        **dict.fromkeys(("task", "version", "group", "run_id"), _TEXT),
        "priority": _LONG,
        "cost": _DOUBLE,
        "state": _TEXT,
        **dict.fromkeys(("enqueued_at", "first_claimed_at", "last_claimed_at"), _TIME),
        **dict.fromkeys(("finished_at", "removed_at"), _TIME),
        **dict.fromkeys(("runs", "failures", "stalls", "retries"), _LONG),
        **dict.fromkeys(("wait_ms", "last_wait_ms", "run_ms", "last_run_ms"), _LONG),
        **dict.fromkeys(("error_type", "error", "worker"), _TEXT),
        **dict.fromkeys(("payload_size", "result_size", "usd_micros"), _LONG),
        "first_type": _TEXT,
        **dict.fromkeys(("first_seen_at", "last_seen_at"), _TIME),
        **dict.fromkeys(("first_place", "place"), _LONG),
        "incomplete": pa.bool_(),
    }
)
KEYS: Final = {"grain": _TEXT, "dimension": _TEXT, "queue": _TEXT, "name": _TEXT, "at": _TIME}
_HISTOGRAM: Final = pa.list_(pa.struct({"bucket": pa.int32(), "times": _LONG}))
GOLD: Final = pa.schema(
    {
        **KEYS,
        **dict.fromkeys(COUNTED, _LONG),
        **{f"{what}_{end}": _DOUBLE for what in TIMED for end in (*PERCENTILES, "max")},
        **dict.fromkeys(("run_ms", "busy_ms"), _LONG),
        **dict.fromkeys(("utilisation", "cost", "usd"), _DOUBLE),
        **dict.fromkeys(("backlog", "backlog_max"), _LONG),
        **{f"{what}_histogram": _HISTOGRAM for what in TIMED},
    }
)
CAUSES: Final = pa.schema(
    {
        **{name: KEYS.get(name, _TEXT) for name in ("grain", "queue", "task", "error_type", "at")},
        **dict.fromkeys(("failed", "retried"), _LONG),
        "example": _TEXT,
    }
)

STEPS: Final = pa.schema(
    {
        **dict.fromkeys(("queue", "id"), _TEXT),
        "incarnation": _LONG,
        **dict.fromkeys(("name", "key", "task", "status"), _TEXT),
        **dict.fromkeys(("run", "attempt"), _LONG),
        **dict.fromkeys(("enqueued_at", "started_at", "recorded_at"), _TIME),
        **dict.fromkeys(("run_ms", "last_run_ms", "result_size"), _LONG),
        **dict.fromkeys(("error_type", "error", "worker"), _TEXT),
        "unused": pa.bool_(),
        "place": _LONG,
    }
)

_BEFORE_DELTA: Final = "_history.json"


class History:
    """The tables of a history. ``consumer`` is the name of the consumer that holds back the trimming of logs."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.bronze = Table(
            folder.inside("bronze"),
            BRONZE,
            ranged="at",
            stats=("queue", "epoch", "seq", "type", "enqueued_at"),
        )
        self.silver = Table(
            folder.inside("silver"), SILVER, ranged="enqueued_at", stats=("queue", "state", "last_seen_at")
        )
        self.gold = Table(folder.inside("gold"), GOLD, ranged="at", stats=("grain", "dimension", "queue"))
        self.causes = Table(folder.inside("causes"), CAUSES, ranged="at", stats=("grain", "queue"))
        self.steps = Table(folder.inside("steps"), STEPS, ranged="enqueued_at", stats=("queue", "status"))
        self.all = (self.bronze, self.silver, self.gold, self.causes, self.steps)

    @property
    def consumer(self) -> str:
        table = self.bronze.load().table
        assert table is not None
        return f"history-{str(table.metadata().id).replace('-', '')[:12]}"


def open_history(path: str | Path, options: Mapping[str, str] | None = None, *, create: bool) -> History:
    """Return the history at a path, or at a URL of an object store.

    Raises:
        InvalidOption: the folder is not a history, or the object store is not safe for several writers.
    """
    folder = open_folder(path, options)
    refuse_pattern(folder.root)
    history = History(folder)
    names = set(folder.names())
    if _BEFORE_DELTA in names:
        raise InvalidOption(
            f"{folder.root} was written by an earlier version of Penstock, before history was kept in Delta tables. "
            "Sync into a new folder. It starts with the events that the store still has."
        )
    if (names and "bronze" not in names) or (not names and not create):
        raise InvalidOption(
            f"{folder.root} is not a history: it has no table bronze. Use a folder that history.sync has written, or "
            "an empty folder to start one."
        )
    if create:
        for table in history.all:
            table.create()
    elif history.bronze.load().table is None:
        raise InvalidOption(
            f"{folder.root}/bronze is not a Delta table. Use a folder that history.sync has written."
        )
    return history


# The states of commits.


class Range(msgspec.Struct, frozen=True, kw_only=True, rename={"first": "from", "last": "to"}):
    """Events ``first`` to ``last`` of a queue, inclusive."""

    queue: str
    epoch: str
    first: int
    last: int


class Loss(msgspec.Struct, frozen=True, kw_only=True, rename={"first": "from", "last": "to"}):
    """Events that were trimmed before they could be read."""

    queue: str
    epoch: str
    first: int
    last: int
    found_at_ms: int


class EpochChange(msgspec.Struct, frozen=True, kw_only=True):
    """The store was restored to an earlier state. Both epochs agree up to ``common``. The later events of ``before``,
    up to ``read``, happened, but the store no longer has them."""

    queue: str
    before: str
    after: str
    common: int
    read: int
    found_at_ms: int


class Place(msgspec.Struct, frozen=True):
    """The last event of a queue in a table."""

    epoch: str
    seq: int


class BronzeState(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of each queue in bronze. ``epochs`` has the epochs of each queue in order."""

    places: dict[str, Place] = {}
    epochs: dict[str, tuple[str, ...]] = {}
    losses: tuple[Loss, ...] = ()
    changes: tuple[EpochChange, ...] = ()


class FoldState(msgspec.Struct, frozen=True, kw_only=True):
    """The part of bronze that a derived table includes: commits up to ``bronze``, events up to ``places``, and the
    numbers of ``losses`` and ``changes``. Gold also has the number of ``open`` jobs by queue."""

    bronze: int = 0
    places: dict[str, Place] = {}
    losses: int = 0
    changes: int = 0
    open: dict[str, int] = {}


def fold_state(snapshot: Snapshot) -> FoldState:
    """Return the state of the last commit; an empty one for a new table, or if the log no longer has it."""
    return FoldState() if snapshot.state is None else msgspec.json.decode(snapshot.state, type=FoldState)


# All places of an epoch come before those of the next one.
_PER_EPOCH: Final = 1 << 48
_PILE: Final = 250_000
# So many events are folded at a time, because the driver holds some of their columns.
_PER_SLICE: Final = 1_000_000


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

    def passes(self, queue: str, place: int) -> bool:
        """Return whether a place is covered."""
        return self.done.get(queue, 0) < place <= self.upto.get(queue, 0)

    def may_cover(self, file: DataFile) -> bool:
        """Return whether a file of bronze may hold a covered event."""
        if len(file.bounds) < 3:
            return True
        (first, last), epochs, (low, high) = (file.bounds[name] for name in ("queue", "epoch", "seq"))
        for queue in self.upto:
            if first <= queue <= last:
                known = self.epochs[queue]
                start = (
                    known.index(epochs[0]) * _PER_EPOCH
                    if epochs[0] == epochs[1] and epochs[0] in known
                    else None
                )
                if start is None or (
                    start + high > self.done.get(queue, 0) and start + low <= self.upto[queue]
                ):
                    return True
        return False


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


def pending_files(files: Sequence[DataFile], number: int, placing: Placing) -> list[DataFile]:
    """Return the files that may hold covered events of commits after that number."""
    return [file for file in files if file.number > number and placing.may_cover(file)]


def next_state(bronze: BronzeState, known: FoldState, upto: FoldState) -> FoldState:
    """Return the state after the next slice of events: ``upto``, or one on the way if too many are left."""
    room, places = _PER_SLICE, dict(known.places)
    for queue, end in sorted(upto.places.items()):
        start = _start(bronze, queue, end.epoch, known.places.get(queue))
        stop = min(end.seq, start + room)
        if room > 0 or stop == end.seq:
            places[queue] = Place(end.epoch, stop)
            room -= stop - start
    return upto if places == upto.places else msgspec.structs.replace(known, places=places)


def _start(bronze: BronzeState, queue: str, epoch: str, place: Place | None) -> int:
    """Return the number before the next event of an epoch in bronze. What earlier epochs still have is little."""
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
    """Return the covered events of these files with their ``place``, and all columns or some."""
    empty = bronze.schema.empty_table()
    none = placing.placed(empty if columns is None else empty.select(list(columns)))
    return pa.concat_tables([none, *(placing.placed(bronze.read(file, columns)) for file in files)])


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
    is_known = fold_state(base) != FoldState()
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
