"""The tables of a history in a catalog, as ``db.bronze``, ``db.silver``, ``db.gold`` and ``db.causes``.

The manifests stay the truth; what the catalog has says in a property which of them it shows, and is brought up to the
newest at the end of a sync, and at the beginning of the next one if that did not come to its end.

Without a format they are views, each of a folder with the files of one version: a reader sees one version or the next.
With the format of a table that can be changed in one step (Delta, Iceberg) they are tables by ``day``, of which the
days that have changed are replaced, as often as need be: to do it again changes nothing.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from penstock.errors import InvalidOption
from penstock.spark.history.folder import History
from penstock.spark.history.shown import SHOWN, Shown
from penstock.spark.history.versions import forget_versions, put_version
from penstock.spark.schemas import quoted

__all__ = ["Catalog"]

_OWNER: Final = "penstock.history"
_VERSION: Final = "penstock.version"
_MODE: Final = "spark.sql.sources.partitionOverwriteMode"


class Catalog:
    """A database (``db``, ``lake.queues``) that shows a history. Made if it is not there."""

    def __init__(self, spark: SparkSession, history: History, database: str, format: str | None) -> None:
        self._spark = spark
        self._history = history
        self._database = ".".join(quoted(part) for part in database.split("."))
        self._format = format

    def publish(self) -> None:
        """Bring the catalog up to the newest manifests. One at a time, on a machine.

        Raises:
            InvalidOption: a name is somebody else's, or the catalog cannot have what is asked for.
        """
        # Who may write to a database need not be one who may make it.
        if not self._is_there():
            self._run(f"CREATE DATABASE IF NOT EXISTS {self._database}")
        for shown in SHOWN:
            self._version(shown)
        with _alone(self._history.root):
            for shown in SHOWN:
                # Another sync may commit meanwhile.
                while (newest := shown.newest(self._history)) != (known := self._version(shown)):
                    if self._format is None:
                        self._put_view(shown, newest)
                    else:
                        self._put_table(shown, newest, known)
            forget_versions(self._history)

    def _is_there(self) -> bool:
        try:
            return self._spark.catalog.databaseExists(self._database)
        except PySparkException:
            return False

    def _version(self, shown: Shown) -> int:
        """The number of the manifest that the catalog shows; 0 if it has none of it yet."""
        name = self._name(shown)
        try:
            rows = self._spark.sql(f"SHOW TBLPROPERTIES {name}").collect()
        except AnalysisException as error:
            if "NOT_FOUND" in str(error.getCondition()):
                return 0
            raise
        found = {row["key"]: row["value"] for row in rows}
        kind = self._format or "view"
        if found.get(_OWNER) != f"{self._history.consumer} {kind}":
            raise InvalidOption(
                f"{name} is there already, and is no {kind} of this history. Drop it, or give another catalog."
            )
        return int(found.get(_VERSION, 0))

    def _put_view(self, shown: Shown, number: int) -> None:
        """In one step, with the property that says which version it is."""
        files = shown.files(self._history, number)
        folder = put_version(self._history, shown.name, number, files)
        columns = ", ".join(quoted(field.name) for field in shown.schema)
        source = (
            f"SELECT {columns} FROM parquet.{quoted(f'file:{folder}')}" if files else _empty(shown.schema)
        )
        self._run(
            f"CREATE OR REPLACE VIEW {self._name(shown)} TBLPROPERTIES ({self._owned('view')}, "
            f"'{_VERSION}' = '{number}') AS {source}"
        )

    def _put_table(self, shown: Shown, number: int, known: int) -> None:
        """First the days, then the property: killed in between, the same days are put again."""
        name = self._name(shown)
        columns = ", ".join(f"{quoted(field.name)} {field.dataType.simpleString()}" for field in shown.schema)
        self._run(
            f"CREATE TABLE IF NOT EXISTS {name} ({columns}, day DATE) USING {self._format} PARTITIONED BY (day) "
            f"TBLPROPERTIES ({self._owned(str(self._format))})"
        )
        rows = shown.changed_rows(self._spark, self._history, known, number)
        if rows is not None:
            with _dynamic(self._spark):
                _by_day(rows, shown).write.mode("overwrite").insertInto(name)
        self._run(f"ALTER TABLE {name} SET TBLPROPERTIES ('{_VERSION}' = '{number}')")

    def _name(self, shown: Shown) -> str:
        return f"{self._database}.{shown.name}"

    def _owned(self, kind: str) -> str:
        return f"'{_OWNER}' = '{self._history.consumer} {kind}'"

    def _run(self, statement: str) -> None:
        try:
            self._spark.sql(statement)
        except PySparkException as error:
            first = str(error).strip().partition("\n")[0]
            remedy = (
                " A catalog without views needs a format, such as iceberg." if self._format is None else ""
            )
            raise InvalidOption(f"the catalog has refused a table of the history: {first}{remedy}") from error


def _by_day(rows: DataFrame, shown: Shown) -> DataFrame:
    columns = [F.col(quoted(field.name)) for field in shown.schema]
    return rows.select(*columns, shown.day().alias("day"))


def _empty(schema: StructType) -> str:
    columns = [f"CAST(NULL AS {field.dataType.simpleString()}) AS {quoted(field.name)}" for field in schema]
    return f"SELECT {', '.join(columns)} WHERE false"


@contextmanager
def _dynamic(spark: SparkSession) -> Iterator[None]:
    """Only the days that are written are replaced."""
    before = spark.conf.get(_MODE)
    spark.conf.set(_MODE, "dynamic")
    try:
        yield
    finally:
        spark.conf.set(_MODE, str(before))


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    with (root / "_publishing").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
