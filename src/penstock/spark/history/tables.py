"""The tables of a history: four Delta tables in one folder, on a disk or in an object store.

Each commit records a state: its position in the logs, and the losses found.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa

from penstock.errors import InvalidOption
from penstock.spark.cells import arrow_schema
from penstock.spark.delta import Folder, Snapshot, Table, open_folder
from penstock.spark.publishing import refuse_pattern
from penstock.spark.schemas import EVENTS

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
        for table in (history.bronze, history.silver, history.gold, history.causes):
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
