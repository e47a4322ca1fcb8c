"""Silver: one row per incarnation of a job, folded forward from the new events of bronze.

Loss marks cover changes to jobs without events of their own: lost events, a restored store, an obliterated queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from penstock.spark.delta import DataFile, Table
from penstock.spark.history.bronze import bronze_state
from penstock.spark.history.folder import History
from penstock.spark.history.folding import (
    ARROW,
    KEYS,
    OPEN_STATES,
    Placing,
    jobs_of,
    merged,
    new_events,
    partial_rows,
    pending_files,
    place_number,
    placing_between,
)
from penstock.spark.history.ranged import Fold, fold_forward, millis
from penstock.spark.history.state import BronzeState, FoldState, state_of


class LossMark(msgspec.Struct, frozen=True, kw_only=True):
    """A range of places in a queue, ``first`` to ``last``, that affects jobs. Jobs that are open at the range become
    incomplete or, with ``removed_at_us``, removed at that time. With ``undone``, jobs with events in it become
    incomplete."""

    queue: str
    first: int
    last: int
    removed_at_us: int | None = None
    undone: bool = False


def marks_between(bronze: BronzeState, silver: FoldState) -> list[LossMark]:
    """Return marks for the losses and epoch changes that silver has not seen."""
    lost = [
        LossMark(
            queue=loss.queue,
            first=place_number(bronze, loss.queue, loss.epoch, loss.first),
            last=place_number(bronze, loss.queue, loss.epoch, loss.last),
        )
        for loss in bronze.losses[silver.losses :]
    ]
    undone = [
        LossMark(
            queue=change.queue,
            first=place_number(bronze, change.queue, change.before, change.common + 1),
            last=place_number(bronze, change.queue, change.before, change.read),
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
        LossMark(queue=queue, first=place, last=place, removed_at_us=at)
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
    """Return the place of the next row of the same job, or null. The rows are sorted."""
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


_COLUMNS: Final = ("queue", "epoch", "seq", "at", "type", "enqueued_at")


class _Jobs(Fold):
    rows = ARROW
    ranged = "enqueued_at"

    def __init__(self, bronze: Table, placing: Placing, marks: Sequence[LossMark]) -> None:
        self._bronze = bronze
        self._placing = placing
        self._marks = list(marks)

    def from_events(self, files: Sequence[DataFile]) -> pa.Table:
        rows = partial_rows(new_events(self._bronze, files, self._placing))
        # A mark may fall between two events of a job.
        return rows if self._marks else merged(rows)

    def from_known(self, table: pa.Table) -> pa.Table:
        return table

    def folded(self, rows: pa.Table) -> pa.Table:
        jobs = jobs_of(apply_marks(rows, self._marks) if self._marks else rows)
        return jobs.sort_by([(name, "ascending") for name in ("enqueued_at", "queue", "id", "incarnation")])


def fold(spark: SparkSession, history: History) -> None:
    """Bring silver up to date with bronze, in one commit.

    Raises:
        Conflict: another sync committed first. Nothing was committed.
    """
    events, base = history.bronze.load(), history.silver.load()
    bronze, known = bronze_state(history, events), state_of(base, FoldState) or FoldState()
    reached = FoldState(
        bronze=events.number, places=bronze.places, losses=len(bronze.losses), changes=len(bronze.changes)
    )
    if known == reached:
        return
    pending = pending_files(events.files, known.bronze)
    placing = placing_between(bronze, known.places, bronze.places)
    new = new_events(history.bronze, pending, placing, _COLUMNS)
    marks = [*marks_between(bronze, known), *obliterations(new)]
    files, replaced = fold_forward(
        spark,
        history.silver,
        # A table whose state is unknown is rebuilt.
        base.files if known.bronze else [],
        fold=_Jobs(history.bronze, placing, marks),
        pending=pending,
        instants=millis(new["enqueued_at"].drop_null()),
        number=base.number + 1,
        # A mark may affect any job.
        is_everything=bool(marks),
    )
    history.silver.commit(
        base,
        add=files,
        remove=replaced if known.bronze else base.files,
        state=msgspec.json.encode(reached).decode(),
    )
