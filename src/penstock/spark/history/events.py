"""The events of bronze: those of listed files, each with its place in the order of its queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.spark.history.folder import History
from penstock.spark.history.manifest import BronzeManifest, DataFile, Place, Range
from penstock.spark.schemas import EVENTS

__all__ = ["Placing", "day_of", "listed_events", "pending_files", "place_number", "placing_after"]

# Sequences of an epoch come before all those of the next one.
_PER_EPOCH: Final = 1 << 48


class Placing(msgspec.Struct, frozen=True):
    """What is needed to tell the places of events, and which of them are ``done``: up to that place of a queue."""

    epochs: dict[str, tuple[str, ...]]
    done: dict[str, int]

    def placed(self, events: pa.Table) -> pa.Table:
        """The events that are not done, with their ``place``."""
        place, is_new = events["seq"], None
        for queue, epochs in self.epochs.items():
            is_here = pc.equal(events["queue"], queue)
            for number, epoch in enumerate(epochs[1:], 1):
                is_then = pc.and_(is_here, pc.equal(events["epoch"], epoch))
                place = pc.if_else(is_then, pc.add(events["seq"], number * _PER_EPOCH), place)
            if queue in self.done:
                ahead = pc.or_(pc.invert(is_here), pc.greater(place, self.done[queue]))
                is_new = ahead if is_new is None else pc.and_(is_new, ahead)
        table = events.append_column("place", place)
        return table if is_new is None else table.filter(is_new)


def place_number(bronze: BronzeManifest, queue: str, epoch: str, seq: int) -> int:
    """A place among all events of a queue, whatever their epochs."""
    return bronze.epochs[queue].index(epoch) * _PER_EPOCH + seq


def listed_events(
    spark: SparkSession, history: History, bronze: BronzeManifest, files: Iterable[DataFile]
) -> DataFrame:
    """The events of these files, with their ``place``."""
    paths = history.files("bronze", [file.path for file in files])
    found = spark.read.schema(EVENTS).parquet(*paths) if paths else spark.createDataFrame([], EVENTS)
    return found.withColumn("place", _ordinal(bronze) * F.lit(_PER_EPOCH) + F.col("seq"))


def _ordinal(bronze: BronzeManifest) -> Column:
    ordinal = F.lit(0).cast("long")
    for queue, epochs in bronze.epochs.items():
        for number, epoch in enumerate(epochs):
            if number:
                here = (F.col("queue") == queue) & (F.col("epoch") == epoch)
                ordinal = F.when(here, F.lit(number).cast("long")).otherwise(ordinal)
    return ordinal


def pending_files(bronze: BronzeManifest, places: Mapping[str, Place]) -> list[DataFile]:
    """The files with events after these places."""
    return [
        file for file in bronze.files if not all(_is_folded(bronze, part, places) for part in file.ranges)
    ]


def placing_after(bronze: BronzeManifest, places: Mapping[str, Place]) -> Placing:
    """Of the events after these places."""
    done = {queue: place_number(bronze, queue, place.epoch, place.seq) for queue, place in places.items()}
    return Placing(bronze.epochs, done)


def _is_folded(bronze: BronzeManifest, part: Range, places: Mapping[str, Place]) -> bool:
    queue, epoch, last = part.queue, part.epoch, part.last
    place = places.get(queue)
    if place is None:
        return False
    return place_number(bronze, queue, epoch, last) <= place_number(bronze, queue, place.epoch, place.seq)


def day_of(column: Column) -> Column:
    """The day of an instant in UTC, whatever the zone of the session."""
    return F.date_from_unix_date(F.floor(F.unix_millis(column) / 86_400_000).cast("int"))
