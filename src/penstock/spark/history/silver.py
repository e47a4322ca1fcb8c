"""Silver: one row per job and life, folded forward from what bronze has and silver has not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession

from penstock.spark.delta import DataFile, Table
from penstock.spark.history.bronze import bronze_state
from penstock.spark.history.cuts import Cut, apply_cuts, cuts_between, obliterations
from penstock.spark.history.events import Placing, new_events, pending_files, placing_between
from penstock.spark.history.folder import History
from penstock.spark.history.folding import ARROW, jobs_of, merged, strips
from penstock.spark.history.ranged import Fold, fold_forward, millis
from penstock.spark.history.state import FoldState, state_of

__all__ = ["fold"]

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
