"""Reading an output as it is, whatever the session remembers of it.

Spark knows a folder by its name: where a user has cached a table of it, that stands for every other read of it, too,
and for what others have written since. The same goes for a table of the catalog and its list of files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import InvalidOption

_NOT_THERE: Final = ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA", "TABLE_OR_VIEW_NOT_FOUND")


_NO_JAR: Final = (
    "DATA_SOURCE_NOT_FOUND",
    "Failed to find data source",
    "No FileSystem for scheme",
    "ClassNotFoundException",
)


def fresh_path(spark: SparkSession, path: str, load: Callable[[str], DataFrame]) -> DataFrame | None:
    """What ``load`` reads at a path; ``None`` if there is nothing."""

    def read() -> DataFrame:
        spark.catalog.refreshByPath(path)
        return load(path)

    return _found(read, path)


def fresh_table(spark: SparkSession, name: str) -> DataFrame | None:
    """A table of the catalog; ``None`` if there is none."""

    def read() -> DataFrame:
        spark.catalog.refreshTable(name)
        return spark.table(name)

    return _found(read, name)


def _found(read: Callable[[], DataFrame], name: str) -> DataFrame | None:
    try:
        found = read()
        # By Spark Connect nothing is looked at until it is asked for.
        _ = found.schema
    except Exception as error:
        if isinstance(error, AnalysisException) and str(error.getCondition()).startswith(_NOT_THERE):
            return None
        _refuse_without_jar(error, name)
        raise
    return found


def _refuse_without_jar(error: Exception, name: str) -> None:
    """Raise ``InvalidOption`` if the session lacks a jar that the format or the file system of an output needs."""
    said = [line.strip() for line in str(error).splitlines() if any(mark in line for mark in _NO_JAR)]
    if said:
        raise InvalidOption(
            f"Spark cannot use {name}, because its session lacks a jar: {said[0]} Start the session with the jar "
            "(spark.jars.packages), or choose another format or another place."
        ) from error
