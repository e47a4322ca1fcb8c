"""What befalls jobs without an event of their own: lost events, a store that went back, an obliterated queue."""

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
    pending_files,
    place_number,
    placing_between,
    strips,
)
from penstock.spark.history.ranged import Fold, fold_forward, millis
from penstock.spark.history.state import BronzeState, FoldState, state_of


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


# Silver: one row per job and life, folded forward from what bronze has and silver has not.


_TOLD: Final = ("queue", "epoch", "seq", "at", "type", "enqueued_at")


class _Jobs(Fold):
    rows = ARROW
    ranged = "enqueued_at"

    def __init__(self, bronze: Table, placing: Placing, cuts: Sequence[Cut]) -> None:
        self._bronze = bronze
        self._placing = placing
        self._cuts = list(cuts)

    def from_events(self, files: Sequence[DataFile]) -> pa.Table:
        rows = strips(new_events(self._bronze, files, self._placing))
        # A cut falls between two events of a job.
        return rows if self._cuts else merged(rows)

    def from_known(self, table: pa.Table) -> pa.Table:
        return table

    def folded(self, rows: pa.Table) -> pa.Table:
        jobs = jobs_of(apply_cuts(rows, self._cuts) if self._cuts else rows)
        return jobs.sort_by([(name, "ascending") for name in ("enqueued_at", "queue", "id", "incarnation")])


def fold(spark: SparkSession, history: History) -> None:
    """Commit a version of silver with all of bronze in it, unless nothing is new.

    Raises:
        Conflict: another sync was first. Nothing was committed.
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
    told = new_events(history.bronze, pending, placing, _TOLD)
    cuts = [*cuts_between(bronze, known), *obliterations(told)]
    files, replaced = fold_forward(
        spark,
        history.silver,
        # A table that cannot say how far it goes is made again.
        base.files if known.bronze else [],
        fold=_Jobs(history.bronze, placing, cuts),
        pending=pending,
        instants=millis(told["enqueued_at"].drop_null()),
        number=base.number + 1,
        # A cut may touch any job there is.
        is_everything=bool(cuts),
    )
    history.silver.commit(
        base,
        add=files,
        remove=replaced if known.bronze else base.files,
        state=msgspec.json.encode(reached).decode(),
    )
