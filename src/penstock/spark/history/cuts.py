"""What befalls jobs without an event of their own: lost events, a store that went back, an obliterated queue."""

from __future__ import annotations

from typing import Any

import msgspec
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from penstock.spark.history.events import place_number
from penstock.spark.history.folding import KEYS, OPEN_STATES
from penstock.spark.history.manifest import BronzeManifest, DerivedManifest

__all__ = ["Cut", "apply_cuts", "cuts_between", "obliterations"]


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Places ``first`` to ``last`` of a queue. A job that is open when they come is incomplete, or, if they have a time
    (``removed_at_us``), removed then. With ``undone`` it is the events there that make a job incomplete."""

    queue: str
    first: int
    last: int
    removed_at_us: int | None = None
    undone: bool = False


def cuts_between(bronze: BronzeManifest, silver: DerivedManifest) -> list[Cut]:
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


def obliterations(events: DataFrame) -> list[Cut]:
    """From the events that say so."""
    rows = (
        events.where(F.col("type") == "obliterated").select("queue", "place", F.unix_micros("at")).collect()
    )
    return [Cut(queue=queue, first=place, last=place, removed_at_us=at_us) for queue, place, at_us in rows]


def apply_cuts(rows: DataFrame, cuts: list[Cut]) -> DataFrame:
    """Mark the rows (of silver, or of single events) of the jobs that the cuts touch."""
    following = Window.partitionBy(*KEYS).orderBy("place")
    marked = rows.withColumn("_next", F.lead("place").over(following))
    is_open = F.col("state").isin(*OPEN_STATES)
    for cut in cuts:
        here = F.col("queue") == cut.queue
        if cut.undone:
            hit = here & F.col("place").between(cut.first, cut.last)
        else:
            ahead = F.col("_next").isNull() | (F.col("_next") > cut.last)
            hit = here & is_open & (F.col("place") < cut.first) & ahead
        marked = marked.withColumns(_consequence(cut, hit))
    return marked.drop("_next")


def _consequence(cut: Cut, hit: Column) -> dict[str, Any]:
    if cut.removed_at_us is None:
        return {"incomplete": F.col("incomplete") | hit}
    at = F.timestamp_micros(F.lit(cut.removed_at_us))
    return {name: F.when(hit, at).otherwise(F.col(name)) for name in ("removed_at", "last_seen_at")}
