"""Reading an output as it is, whatever the session remembers of it.

Spark knows a folder by its name: where a user has cached a table of it, that stands for every other read of it, too,
and for what others have written since. The same goes for a table of the catalog and its list of files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

__all__ = ["fresh_path", "fresh_table"]

_NOT_THERE: Final = ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA", "TABLE_OR_VIEW_NOT_FOUND")


def fresh_path(spark: SparkSession, path: str, load: Callable[[str], DataFrame]) -> DataFrame | None:
    """What ``load`` reads at a path; ``None`` if there is nothing."""
    spark.catalog.refreshByPath(path)
    return _found(lambda: load(path))


def fresh_table(spark: SparkSession, name: str) -> DataFrame | None:
    """A table of the catalog; ``None`` if there is none."""

    def read() -> DataFrame:
        spark.catalog.refreshTable(name)
        return spark.table(name)

    return _found(read)


def _found(read: Callable[[], DataFrame]) -> DataFrame | None:
    try:
        found = read()
        # By Spark Connect nothing is looked at until it is asked for.
        _ = found.schema
    except AnalysisException as error:
        if str(error.getCondition()).startswith(_NOT_THERE):
            return None
        raise
    return found
