"""What a catalog shows of a history: for each table its files, and what has changed between two versions of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from penstock.spark.history.derived import read_table
from penstock.spark.history.events import day_of, listed_events, pending_files
from penstock.spark.history.folder import History
from penstock.spark.history.folding import SILVER
from penstock.spark.history.gold import CAUSES, GOLD
from penstock.spark.history.manifest import BronzeManifest, DerivedManifest, Manifests
from penstock.spark.schemas import EVENTS

__all__ = ["SHOWN", "Shown"]

M = TypeVar("M", BronzeManifest, DerivedManifest)
_DAY_MS: Final = 86_400_000


class Shown(ABC):
    """A table by ``name`` with ``schema``, and the column whose ``day`` it is kept by."""

    def __init__(self, name: str, schema: StructType, *, dated: str) -> None:
        self.name = name
        self.schema = schema
        self._dated = dated

    def day(self) -> Column:
        """In UTC."""
        return day_of(F.col(self._dated))

    @abstractmethod
    def newest(self, history: History) -> int:
        """The number of the newest manifest."""

    @abstractmethod
    def files(self, history: History, number: int) -> list[Path]:
        """Those of a version."""

    @abstractmethod
    def changed_rows(self, spark: SparkSession, history: History, before: int, now: int) -> DataFrame | None:
        """The rows of all days that differ between two versions; ``None`` if none does. If the earlier one is no longer
        known, those of all days."""


class _Events(Shown):
    def newest(self, history: History) -> int:
        return history.bronze.newest().number

    def files(self, history: History, number: int) -> list[Path]:
        paths = [file.path for file in history.bronze.at(number).files]
        return [Path(path) for path in history.files("bronze", paths)]

    def changed_rows(self, spark: SparkSession, history: History, before: int, now: int) -> DataFrame | None:
        bronze = history.bronze.at(now)
        known = _known(history.bronze, before) or BronzeManifest()
        fresh = pending_files(bronze, known.places)
        if not fresh:
            return None
        start = min(file.from_ms for file in fresh) // _DAY_MS * _DAY_MS
        files = [file for file in bronze.files if file.to_ms >= start]
        events = listed_events(spark, history, bronze, files).drop("place")
        return events.where(F.unix_millis("at") >= start)


class _Derived(Shown):
    def __init__(self, name: str, schema: StructType, *, dated: str, layer: str, table: str) -> None:
        super().__init__(name, schema, dated=dated)
        self._layer = layer
        self._table = table

    def _manifests(self, history: History) -> Manifests[DerivedManifest]:
        return history.silver if self._layer == "silver" else history.gold

    def newest(self, history: History) -> int:
        return self._manifests(history).newest().number

    def files(self, history: History, number: int) -> list[Path]:
        paths = self._manifests(history).at(number).of(self._table)
        return [Path(path) for path in history.files(self._layer, paths)]

    def changed_rows(self, spark: SparkSession, history: History, before: int, now: int) -> DataFrame | None:
        manifest = self._manifests(history).at(now)
        known = _known(self._manifests(history), before) or DerivedManifest()
        days = [
            day for day in manifest.days if manifest.of(self._table, [day]) != known.of(self._table, [day])
        ]
        if not days:
            return None
        return read_table(spark, history, self._layer, manifest.of(self._table, days), self.schema)


def _known(manifests: Manifests[M], number: int) -> M | None:
    try:
        return manifests.at(number)
    except FileNotFoundError:
        return None


SHOWN: Final[Sequence[Shown]] = (
    _Events("bronze", EVENTS, dated="at"),
    _Derived("silver", SILVER, dated="enqueued_at", layer="silver", table="jobs"),
    _Derived("gold", GOLD, dated="at", layer="gold", table="metrics"),
    _Derived("causes", CAUSES, dated="at", layer="gold", table="causes"),
)
