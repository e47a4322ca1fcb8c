"""The tables of a history: Delta tables in one folder, on a disk or in an object store.

Each commit records a state: its position in the logs, and the losses found.

Tables are updated incrementally from the new events of bronze. Each file covers a span of time, and a sync rewrites
only the files whose span has new events. So the cost of a sync depends on the new events, not on the size of the table.

A place is the position of an event in the order of its queue, across epochs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidOption
from penstock.spark.cells import arrow_schema
from penstock.spark.delta import DataFile, Folder, Snapshot, Table, open_folder
from penstock.spark.publishing import refuse_pattern
from penstock.spark.schemas import EVENTS

# The measures of gold that count events, and the event types that each of them counts.
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
GOLD_KEYS: Final = {"grain": _TEXT, "dimension": _TEXT, "queue": _TEXT, "name": _TEXT, "at": _TIME}
_HISTOGRAM: Final = pa.list_(pa.struct({"bucket": pa.int32(), "times": _LONG}))
GOLD: Final = pa.schema(
    {
        **GOLD_KEYS,
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
        **{name: GOLD_KEYS.get(name, _TEXT) for name in ("grain", "queue", "task", "error_type", "at")},
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
    """A restore of the store to an earlier state. Both epochs agree up to ``common``. The later events of ``before``,
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


Instants: TypeAlias = npt.NDArray[np.int64]


def millis(column: Any) -> Instants:
    """Return instants as epoch milliseconds; 0 for null."""
    micros = pc.fill_null(pc.cast(pc.cast(column, pa.timestamp("us", "UTC")), pa.int64()), 0)
    return np.asarray(micros.to_numpy(), np.int64) // 1000


def aggregated(rows: pa.Table, keys: Iterable[str], how: Mapping[str, str]) -> pa.Table:
    """Return one row for each value of the keys, with the other columns aggregated under their own names."""
    grouped = rows.group_by([*keys], use_threads=False).aggregate([*how.items()])
    return grouped.rename_columns({f"{name}_{way}": name for name, way in how.items()})


def where(condition: Any, values: Any) -> Any:
    """Return the values for which the condition holds; null for the others."""
    return pc.if_else(condition, values, pa.scalar(None, values.type))


def usd_micros(events: pa.Table, is_used: Any) -> pa.Array:
    """Return the US dollars that usage events report, in millionths."""
    if not pc.any(is_used).as_py():
        return pa.nulls(events.num_rows, _LONG)
    texts = where(is_used, events["data"]).to_pylist()
    return pa.array([msgspec.json.decode(text).get("usd") if text else None for text in texts], _LONG)


# All places of an epoch come before those of the next one.
_PER_EPOCH: Final = 1 << 48


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
