"""The events of bronze as Spark sees them: those of listed files, each with its place in the order of its queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.spark.history.folder import History
from penstock.spark.history.manifest import BronzeManifest, DataFile, Place, Range
from penstock.spark.schemas import EVENTS

__all__ = ["after_places", "day_of", "listed_events", "pending_files", "place_number"]

# Sequences of an epoch come before all those of the next one.
_PER_EPOCH: Final = 1 << 48


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


def after_places(
    events: DataFrame, bronze: BronzeManifest, files: Sequence[DataFile], places: Mapping[str, Place]
) -> DataFrame:
    """Those of the events of these files that come after the places. Costs nothing if all of them do."""
    kept = events
    for queue in sorted({part.queue for file in files for part in file.ranges} & places.keys()):
        done = place_number(bronze, queue, places[queue].epoch, places[queue].seq)
        starts = [
            place_number(bronze, queue, part.epoch, part.first)
            for file in files
            for part in file.ranges
            if part.queue == queue
        ]
        if min(starts) <= done:
            kept = kept.where((F.col("queue") != queue) | (F.col("place") > done))
    return kept


def _is_folded(bronze: BronzeManifest, part: Range, places: Mapping[str, Place]) -> bool:
    queue, epoch, last = part.queue, part.epoch, part.last
    place = places.get(queue)
    if place is None:
        return False
    return place_number(bronze, queue, epoch, last) <= place_number(bronze, queue, place.epoch, place.seq)


def day_of(column: Column) -> Column:
    """The day of an instant in UTC, whatever the zone of the session."""
    return F.date_from_unix_date(F.floor(F.unix_millis(column) / 86_400_000).cast("int"))
