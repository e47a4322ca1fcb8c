"""Silver: one row per incarnation of a job, folded forward from the new events of bronze.

Each new event becomes a partial row of silver, and rows of the same job are merged. Rows of silver have the same form,
so merging new rows into them has the same result as folding all events at once. The merge uses Arrow: Spark would sort
the rows, because its hash aggregation does not support text values.

Loss marks cover changes to jobs without events of their own: lost events, a restored store, an obliterated queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from penstock.core.lifecycle import OPEN
from penstock.spark.delta import Table
from penstock.spark.history.folding import Fold, fold_forward, next_slice
from penstock.spark.history.tables import (
    SILVER,
    BronzeState,
    FoldState,
    History,
    Placing,
    aggregated,
    millis,
    place_number,
    usd_micros,
    where,
)

KEYS: Final = ("queue", "id", "incarnation")
REMOVED: Final = "removed"
OPEN_STATES: Final = sorted(OPEN)

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
        """Return whether each event has one of the types."""
        return pc.take(pc.is_in(kind.dictionary, pa.array(types, pa.string())), kind.indices)

    enqueued, claimed = of("enqueued"), of("claimed")
    values: dict[str, Any] = {
        "priority": where(enqueued, events["priority"]),
        "cost": where(enqueued, events["cost"]),
        "first_claimed_at": where(claimed, at),
        "last_claimed_at": where(claimed, at),
        "finished_at": where(of(*_ENDS), at),
        "removed_at": where(of(REMOVED), at),
        "runs": claimed,
        "failures": of(*_FAILURES),
        "stalls": of("stalled"),
        "retries": of("retrying", "retried"),
        "last_wait_ms": where(claimed, events["wait_ms"]),
        "last_run_ms": where(pc.greater(events["run_ms"], 0), events["run_ms"]),
        "payload_size": where(enqueued, events["size"]),
        "result_size": where(of("completed"), events["size"]),
        "usd_micros": usd_micros(events, of("used")),
        "first_type": events["type"],
        "first_place": events["place"],
        "first_seen_at": at,
        "last_seen_at": at,
        "incomplete": pa.repeat(False, len(events)),
    }
    return _silver({name: events[name] for name in SILVER.names if name not in values} | values)


def _silver(columns: Mapping[str, Any]) -> pa.Table:
    return pa.table([pc.cast(columns[field.name], field.type) for field in SILVER], schema=SILVER)


def merged(rows: pa.Table) -> pa.Table:
    """Return one row per job, from rows of silver and of events in any order. The result can be merged again."""
    rows = rows.sort_by("place")
    failed = pc.not_equal(rows["error_type"], "")
    known = {name: where(pc.not_equal(rows[name], ""), rows[name]) for name in _TEXTS}
    known["error"] = where(failed, rows["error"])
    table = pa.table([known.get(name, rows[name]) for name in SILVER.names], names=SILVER.names)
    jobs = aggregated(table, KEYS, _HOW)
    filled = {name: pc.fill_null(jobs[name], "") for name in _TEXTS}
    filled |= {name: pc.fill_null(jobs[name], 0) for name in _SUMS}
    return _silver({name: filled.get(name, jobs[name]) for name in SILVER.names})


def jobs_of(rows: pa.Table) -> pa.Table:
    """Return the final rows of silver: ``merged`` with derived columns. A job that was removed while open counts
    as finished at that time; an open job has no finish time."""
    jobs = merged(rows)
    is_open = pc.is_in(jobs["state"], pa.array(OPEN_STATES))
    was_open = pc.and_(pc.is_valid(jobs["removed_at"]), is_open)
    state = pc.if_else(was_open, REMOVED, jobs["state"])
    ended = where(pc.invert(pc.is_in(state, pa.array(OPEN_STATES))), jobs["finished_at"])
    columns = {name: jobs[name] for name in SILVER.names} | {
        "state": state,
        "finished_at": pc.if_else(pc.equal(state, REMOVED), jobs["removed_at"], ended),
        "incomplete": pc.or_(jobs["incomplete"], pc.not_equal(jobs["first_type"], "enqueued")),
    }
    return _silver(columns)


# Loss marks.


class LossMark(msgspec.Struct, frozen=True, kw_only=True):
    """A range of places in a queue, from ``first`` to ``last``, that affects jobs. Jobs that are open at the range
    become incomplete or, with ``removed_at_us``, are removed at that time. With ``undone``, jobs that have events in
    the range become incomplete instead. The mark applies in the slice that contains the place ``found``."""

    queue: str
    first: int
    last: int
    found: int
    removed_at_us: int | None = None
    undone: bool = False


def marks_between(bronze: BronzeState, silver: FoldState) -> list[LossMark]:
    """Return marks for the losses and epoch changes that silver has not seen."""
    lost = [
        LossMark(
            queue=loss.queue,
            first=place_number(bronze, loss.queue, loss.epoch, loss.first),
            last=place_number(bronze, loss.queue, loss.epoch, loss.last),
            found=place_number(bronze, loss.queue, loss.epoch, loss.last),
        )
        for loss in bronze.losses[silver.losses :]
    ]
    undone = [
        LossMark(
            queue=change.queue,
            first=place_number(bronze, change.queue, change.before, change.common + 1),
            last=place_number(bronze, change.queue, change.before, change.read),
            found=place_number(bronze, change.queue, change.after, change.common),
            undone=True,
        )
        for change in bronze.changes[silver.changes :]
    ]
    return [*lost, *undone]


def obliterations(events: pa.Table) -> list[LossMark]:
    """Return the marks of the obliterations among the events."""
    obliterated = events.filter(pc.equal(events["type"], "obliterated"))
    at_us = pc.cast(pc.cast(obliterated["at"], pa.timestamp("us", "UTC")), pa.int64())
    return [
        LossMark(queue=queue, first=place, last=place, found=place, removed_at_us=at)
        for queue, place, at in zip(
            obliterated["queue"].to_pylist(), obliterated["place"].to_pylist(), at_us.to_pylist(), strict=True
        )
    ]


def apply_marks(rows: pa.Table, marks: list[LossMark]) -> pa.Table:
    """Apply the marks to rows of silver or of single events. ``rows`` must have all rows of an affected job."""
    rows = rows.sort_by([(name, "ascending") for name in (*KEYS, "place")])
    following = _following(rows)
    is_open = pc.is_in(rows["state"], pa.array(OPEN_STATES))
    for mark in marks:
        hit = pc.equal(rows["queue"], mark.queue)
        if mark.undone:
            hit = pc.and_(hit, pc.greater_equal(rows["place"], mark.first))
            hit = pc.and_(hit, pc.less_equal(rows["place"], mark.last))
        else:
            ahead = pc.fill_null(pc.greater(following, mark.last), True)
            hit = pc.and_(pc.and_(hit, is_open), pc.and_(pc.less(rows["place"], mark.first), ahead))
        for name, column in _consequence(rows, mark, hit).items():
            rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), column)
    return rows


def _following(rows: pa.Table) -> pa.Array:
    """Return the place of the next row of the same job, or null. ``rows`` must be sorted."""
    if not rows.num_rows:
        return pa.array([], pa.int64())
    place = rows["place"].combine_chunks()
    same = pa.repeat(True, rows.num_rows - 1)
    for name in KEYS:
        column = rows[name].combine_chunks()
        same = pc.and_(same, pc.equal(column[:-1], column[1:]))
    none = pa.scalar(None, pa.int64())
    return pa.concat_arrays([pc.if_else(same, place[1:], none), pa.array([None], pa.int64())])


def _consequence(rows: pa.Table, mark: LossMark, hit: Any) -> dict[str, Any]:
    if mark.removed_at_us is None:
        return {"incomplete": pc.or_(rows["incomplete"], hit)}
    names = ("removed_at", "last_seen_at")
    return {
        name: pc.if_else(hit, pa.scalar(mark.removed_at_us, rows[name].type), rows[name]) for name in names
    }


# The fold.


_EVENT_COLUMNS: Final = ("queue", "epoch", "seq", "at", "type", "enqueued_at")


class _Jobs(Fold):
    rows = SILVER
    ranged = "enqueued_at"

    def __init__(self, bronze: Table, placing: Placing, marks: Sequence[LossMark]) -> None:
        super().__init__(bronze, placing)
        self._marks = list(marks)

    def from_events(self, events: pa.Table) -> pa.Table:
        rows = partial_rows(events)
        # A mark may fall between two events of a job.
        return rows if self._marks else merged(rows)

    def folded(self, rows: pa.Table) -> pa.Table:
        jobs = jobs_of(apply_marks(rows, self._marks) if self._marks else rows)
        return jobs.sort_by([(name, "ascending") for name in ("enqueued_at", "queue", "id", "incarnation")])


def fold(spark: SparkSession, history: History) -> bool:
    """Fold the next slice of bronze into silver, in one commit. Return whether there are more.

    Raises:
        Conflict: another sync committed first. Nothing was committed.
    """
    part = next_slice(history, history.silver)
    if part is None:
        return False
    events = part.events(history, _EVENT_COLUMNS)
    marks = [
        mark for mark in marks_between(part.bronze, part.known) if part.placing.passes(mark.queue, mark.found)
    ]
    marks += obliterations(events)
    return fold_forward(
        spark,
        history.silver,
        part,
        fold=_Jobs(history.bronze, part.placing, marks),
        instants=millis(events["enqueued_at"].drop_null()),
        # A mark may affect any job.
        is_everything=bool(marks),
    )
