"""Reads of an output that bypass the session's cache.

Spark identifies a folder by its name. If a user has cached a table of it, every other read returns the cached rows, and
not what others have written since. The same applies to catalog tables and their lists of files.
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
    """Return what ``load`` reads at a path; ``None`` if there is nothing."""

    def read() -> DataFrame:
        spark.catalog.refreshByPath(path)
        return load(path)

    return _read_or_none(read, path)


def fresh_table(spark: SparkSession, name: str) -> DataFrame | None:
    """Return a table of the catalog; ``None`` if it does not exist."""

    def read() -> DataFrame:
        spark.catalog.refreshTable(name)
        return spark.table(name)

    return _read_or_none(read, name)


def _read_or_none(read: Callable[[], DataFrame], name: str) -> DataFrame | None:
    try:
        table = read()
        # Spark Connect is lazy: ask for the schema to raise errors here.
        _ = table.schema
    except Exception as error:
        if isinstance(error, AnalysisException) and str(error.getCondition()).startswith(_NOT_THERE):
            return None
        _refuse_without_jar(error, name)
        raise
    return table


def _refuse_without_jar(error: Exception, name: str) -> None:
    """Raise ``InvalidOption`` if the session lacks a jar that the format or the file system of an output needs."""
    lines = [line.strip() for line in str(error).splitlines() if any(mark in line for mark in _NO_JAR)]
    if lines:
        raise InvalidOption(
            f"Spark cannot use {name}, because its session lacks a jar: {lines[0]} Start the session with the jar "
            "(spark.jars.packages), or choose another format or location."
        ) from error
