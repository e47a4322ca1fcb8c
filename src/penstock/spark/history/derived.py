"""Versions of silver and gold: the days that were touched are written anew, all others are taken over as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from msgspec.structs import replace
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from penstock.spark.durable import make_durable
from penstock.spark.history.folder import History
from penstock.spark.history.manifest import BronzeManifest, DerivedManifest, now_ms

__all__ = ["DayFile", "put_days", "read_table", "version_folder", "write_days"]

_REMEMBERED_MS: Final = 2 * 3_600_000


def read_table(
    spark: SparkSession, history: History, table: str, paths: list[str], schema: StructType
) -> DataFrame:
    """Listed files as a DataFrame; of none, an empty one."""
    if not paths:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(*history.files(table, paths))


class DayFile(NamedTuple):
    """A file that was written: of which day and table, and where in the folder."""

    day: str
    table: str
    path: str


def version_folder(history: History, table: str, base: DerivedManifest, sync: str) -> Path:
    """Where the files of the version after ``base`` go: one sync may write several versions."""
    return history.root / table / f"{sync}-{base.number + 1:010}"


def write_days(folder: Path, tables: Mapping[str, DataFrame]) -> list[DayFile]:
    """Write tables into the folder of a version, by their column ``day``."""
    files: list[DayFile] = []
    for name, frame in tables.items():
        target = folder / name
        # Spark takes a path as it is: escaped as a URL is, it would be that of another folder.
        frame.write.mode("overwrite").option("partitionOverwriteMode", "static").partitionBy("day").parquet(
            f"file:{target}"
        )
        for path in sorted(target.rglob("*.parquet")):
            make_durable(path)
            day = path.parent.name.removeprefix("day=")
            files.append(DayFile(day, name, str(path.relative_to(folder.parent))))
    return files


def put_days(
    history: History,
    table: str,
    *,
    base: DerivedManifest,
    bronze: BronzeManifest,
    sync: str,
    touched: Iterable[str],
    files: Iterable[DayFile],
) -> DerivedManifest:
    """Commit the version that has these files for the touched days.

    Raises:
        Conflict: another sync was first. Nothing was committed.
    """
    days = dict(base.days)
    outgoing = {path for day in touched for paths in days.pop(day, {}).values() for path in paths}
    for day, name, path in files:
        of_day = days.setdefault(day, {})
        days[day] = {**of_day, name: (*of_day.get(name, ()), path)}
    now = now_ms()
    recent = {path: at_ms for path, at_ms in base.replaced.items() if at_ms > now - _REMEMBERED_MS}
    manifest = replace(
        base,
        number=base.number + 1,
        sync=sync,
        written_at_ms=now,
        bronze=bronze.number,
        places=bronze.places,
        losses=len(bronze.losses),
        changes=len(bronze.changes),
        days=days,
        replaced={**recent, **dict.fromkeys(sorted(outgoing), now)},
    )
    commit(history, table, manifest)
    return manifest


def commit(history: History, table: str, manifest: DerivedManifest) -> None:
    """Raises ``Conflict``."""
    (history.silver if table == "silver" else history.gold).commit(manifest)
