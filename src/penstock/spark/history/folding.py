"""Jobs from events: each new event becomes a partial row of silver, and rows of the same job are merged.

Rows of silver have the same form. So the result of merging new rows into them equals that of folding all events at
once. This uses Arrow. Spark would sort the rows, because its hash aggregation does not support text values.

A place is the position of an event in the order of its queue, across epochs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BooleanType, DoubleType, LongType, StringType, StructType, TimestampType

from penstock.core.lifecycle import OPEN
from penstock.spark.cells import arrow_schema
from penstock.spark.delta import DataFile, Table
from penstock.spark.history.state import BronzeState, Place

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


# Rows of silver.


KEYS: Final = ("queue", "id", "incarnation")
REMOVED: Final = "removed"
OPEN_STATES: Final = sorted(OPEN)

_TEXT, _LONG, _TIME = StringType(), LongType(), TimestampType()
_COLUMNS: Final = {
    "queue": _TEXT,
    "id": _TEXT,
    "incarnation": _LONG,
    "task": _TEXT,
    "version": _TEXT,
    "group": _TEXT,
    "run_id": _TEXT,
    "priority": _LONG,
    "cost": DoubleType(),
    "state": _TEXT,
    "enqueued_at": _TIME,
    "first_claimed_at": _TIME,
    "last_claimed_at": _TIME,
    "finished_at": _TIME,
    "removed_at": _TIME,
    "runs": _LONG,
    "failures": _LONG,
    "stalls": _LONG,
    "retries": _LONG,
    "wait_ms": _LONG,
    "last_wait_ms": _LONG,
    "run_ms": _LONG,
    "last_run_ms": _LONG,
    "error_type": _TEXT,
    "error": _TEXT,
    "worker": _TEXT,
    "payload_size": _LONG,
    "result_size": _LONG,
    "usd_micros": _LONG,
    "first_type": _TEXT,
    "first_seen_at": _TIME,
    "last_seen_at": _TIME,
    "first_place": _LONG,
    "place": _LONG,
    "incomplete": BooleanType(),
}
SILVER: Final = StructType()
for _name, _type in _COLUMNS.items():
    SILVER.add(_name, _type)

ARROW: Final = arrow_schema(SILVER)

_ENDS: Final = ("completed", "failed", "cancelled", "expired")
_FAILURES: Final = ("retrying", "failed", "expired")
# Columns that take the newest known value. An empty text is unknown.
_TEXTS: Final = ("task", "version", "group", "run_id", "state", "worker", "error_type", "error")
_NEWEST: Final = ("priority", "cost", "last_wait_ms", "last_run_ms", "payload_size", "result_size")
_SUMS: Final = ("runs", "failures", "stalls", "retries", "wait_ms", "run_ms", "usd_micros")
_HOW: Final = {
    **dict.fromkeys((*_TEXTS, *_NEWEST), "last"),
    **dict.fromkeys(_SUMS, "sum"),
    **dict.fromkeys(("enqueued_at", "last_claimed_at", "finished_at", "removed_at", "last_seen_at"), "max"),
    **dict.fromkeys(("first_claimed_at", "first_seen_at"), "min"),
    "first_type": "first",
    "first_place": "min",
    "place": "max",
    "incomplete": "any",
}


def partial_rows(events: pa.Table) -> pa.Table:
    """Return each event of a job as a partial row of silver, with its ``place``."""
    events = events.filter(pc.not_equal(events["id"], ""))
    at, kind = events["at"], events["type"].combine_chunks().dictionary_encode()

    def of(*types: str) -> pa.Array:
        """Return which events are of one of the types."""
        return pc.take(pc.is_in(kind.dictionary, pa.array(types, pa.string())), kind.indices)

    enqueued, claimed = of("enqueued"), of("claimed")
    values: dict[str, Any] = {
        "priority": _where(enqueued, events["priority"]),
        "cost": _where(enqueued, events["cost"]),
        "first_claimed_at": _where(claimed, at),
        "last_claimed_at": _where(claimed, at),
        "finished_at": _where(of(*_ENDS), at),
        "removed_at": _where(of(REMOVED), at),
        "runs": claimed,
        "failures": of(*_FAILURES),
        "stalls": of("stalled"),
        "retries": of("retrying", "retried"),
        "last_wait_ms": _where(claimed, events["wait_ms"]),
        "last_run_ms": _where(pc.greater(events["run_ms"], 0), events["run_ms"]),
        "payload_size": _where(enqueued, events["size"]),
        "result_size": _where(of("completed"), events["size"]),
        "usd_micros": _usd(events, of("used")),
        "first_type": events["type"],
        "first_place": events["place"],
        "first_seen_at": at,
        "last_seen_at": at,
        "incomplete": pa.repeat(False, len(events)),
    }
    return _silver({name: events[name] for name in ARROW.names if name not in values} | values)


def _silver(columns: Mapping[str, Any]) -> pa.Table:
    return pa.table([pc.cast(columns[field.name], field.type) for field in ARROW], schema=ARROW)


def _where(condition: Any, values: Any) -> Any:
    return pc.if_else(condition, values, pa.scalar(None, values.type))


def _usd(events: pa.Table, is_used: pa.Array) -> pa.Array:
    """Return the US dollars, in millionths, of usage events."""
    texts = _where(is_used, events["data"]).to_pylist() if pc.any(is_used).as_py() else [None] * len(events)
    return pa.array(
        [int(msgspec.json.decode(text).get("usd", 0)) if text else 0 for text in texts], pa.int64()
    )


def merged(rows: pa.Table) -> pa.Table:
    """Return one row per job, from rows of silver and of events in any order. The result can be merged again."""
    rows = rows.sort_by("place")
    failed = pc.not_equal(rows["error_type"], "")
    known = {name: _where(pc.not_equal(rows[name], ""), rows[name]) for name in _TEXTS}
    known["error"] = _where(failed, rows["error"])
    table = pa.table([known.get(name, rows[name]) for name in ARROW.names], names=ARROW.names)
    grouped = table.group_by([*KEYS], use_threads=False).aggregate([*_HOW.items()])
    columns = {name: grouped[f"{name}_{how}"] for name, how in _HOW.items()}
    columns |= {name: pc.fill_null(columns[name], "") for name in _TEXTS}
    columns |= {name: pc.fill_null(columns[name], 0) for name in _SUMS}
    return _silver(columns | {name: grouped[name] for name in KEYS})


def jobs_of(rows: pa.Table) -> pa.Table:
    """Return the final rows of silver: ``merged`` with derived columns. A job that was removed while open finished
    then; an open job has no finish time."""
    jobs = merged(rows)
    is_open = pc.is_in(jobs["state"], pa.array(OPEN_STATES))
    was_open = pc.and_(pc.is_valid(jobs["removed_at"]), is_open)
    state = pc.if_else(was_open, REMOVED, jobs["state"])
    ended = _where(pc.invert(pc.is_in(state, pa.array(OPEN_STATES))), jobs["finished_at"])
    columns = {name: jobs[name] for name in ARROW.names} | {
        "state": state,
        "finished_at": pc.if_else(pc.equal(state, REMOVED), jobs["removed_at"], ended),
        "incomplete": pc.or_(jobs["incomplete"], pc.not_equal(jobs["first_type"], "enqueued")),
    }
    return _silver(columns)
