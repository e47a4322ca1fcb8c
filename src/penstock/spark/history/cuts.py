"""What befalls jobs without an event of their own: lost events, a store that went back, an obliterated queue."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.history.events import place_number
from penstock.spark.history.folding import KEYS, OPEN_STATES
from penstock.spark.history.state import BronzeState, FoldState

__all__ = ["Cut", "apply_cuts", "cuts_between", "obliterations"]


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Places ``first`` to ``last`` of a queue. A job that is open when they come is incomplete, or, if they have a time
    (``removed_at_us``), removed then. With ``undone`` it is the events there that make a job incomplete."""

    queue: str
    first: int
    last: int
    removed_at_us: int | None = None
    undone: bool = False


def cuts_between(bronze: BronzeState, silver: FoldState) -> list[Cut]:
    """Losses and changes of epoch that silver has not seen."""
    lost = [
        Cut(
            queue=loss.queue,
            first=place_number(bronze, loss.queue, loss.epoch, loss.first),
            last=place_number(bronze, loss.queue, loss.epoch, loss.last),
        )
        for loss in bronze.losses[silver.losses :]
    ]
    undone = [
        Cut(
            queue=change.queue,
            first=place_number(bronze, change.queue, change.before, change.common + 1),
            last=place_number(bronze, change.queue, change.before, change.read),
            undone=True,
        )
        for change in bronze.changes[silver.changes :]
    ]
    return [*lost, *undone]


def obliterations(events: pa.Table) -> list[Cut]:
    """Return the cuts of events that say so."""
    found = events.filter(pc.equal(events["type"], "obliterated"))
    at_us = pc.cast(pc.cast(found["at"], pa.timestamp("us", "UTC")), pa.int64())
    return [
        Cut(queue=queue, first=place, last=place, removed_at_us=at)
        for queue, place, at in zip(
            found["queue"].to_pylist(), found["place"].to_pylist(), at_us.to_pylist(), strict=True
        )
    ]


def apply_cuts(rows: pa.Table, cuts: list[Cut]) -> pa.Table:
    """Mark the rows (of silver, or of single events) of the jobs that the cuts touch, all of whose rows are there."""
    rows = rows.sort_by([(name, "ascending") for name in (*KEYS, "place")])
    following = _following(rows)
    is_open = pc.is_in(rows["state"], pa.array(OPEN_STATES))
    for cut in cuts:
        hit = pc.equal(rows["queue"], cut.queue)
        if cut.undone:
            hit = pc.and_(hit, pc.greater_equal(rows["place"], cut.first))
            hit = pc.and_(hit, pc.less_equal(rows["place"], cut.last))
        else:
            ahead = pc.fill_null(pc.greater(following, cut.last), True)
            hit = pc.and_(pc.and_(hit, is_open), pc.and_(pc.less(rows["place"], cut.first), ahead))
        for name, column in _consequence(rows, cut, hit).items():
            rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), column)
    return rows


def _following(rows: pa.Table) -> pa.Array:
    """The place of the next row of the same job, if there is one, from rows in order."""
    if not rows.num_rows:
        return pa.array([], pa.int64())
    place = rows["place"].combine_chunks()
    same = pa.repeat(True, rows.num_rows - 1)
    for name in KEYS:
        column = rows[name].combine_chunks()
        same = pc.and_(same, pc.equal(column[:-1], column[1:]))
    none = pa.scalar(None, pa.int64())
    return pa.concat_arrays([pc.if_else(same, place[1:], none), pa.array([None], pa.int64())])


def _consequence(rows: pa.Table, cut: Cut, hit: Any) -> dict[str, Any]:
    if cut.removed_at_us is None:
        return {"incomplete": pc.or_(rows["incomplete"], hit)}
    names = ("removed_at", "last_seen_at")
    return {
        name: pc.if_else(hit, pa.scalar(cut.removed_at_us, rows[name].type), rows[name]) for name in names
    }
