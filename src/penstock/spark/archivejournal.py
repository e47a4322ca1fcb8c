"""Copies of jobs on their way from the store into a table of archived jobs."""

from __future__ import annotations

from functools import reduce
from hashlib import blake2b
from typing import Final
from urllib.parse import urlsplit

from pyspark.sql import DataFrame, SparkSession

from penstock.core.ids import uuid7
from penstock.errors import InvalidOption
from penstock.spark.archivetable import ArchiveTable
from penstock.spark.freeing import COLUMNS
from penstock.spark.options import namespace_of
from penstock.spark.publishing import list_folder, remove_folder

__all__ = ["Journal", "journal_path"]

# Spark passes over names that begin with an underscore.
_FOLDER: Final = "_penstock_archive"
_SHARED: Final = "shared"


class Journal:
    """The copies of one call, in a folder of its own at ``path``: a call that was away for so long that another has
    taken its place writes over nobody's. Made when the output is held; what is there then was left by calls before.

    By Spark Connect, where folders are not to be seen from here, all calls share one.
    """

    def __init__(self, spark: SparkSession, path: str) -> None:
        names = list_folder(spark, path)
        self._spark = spark
        self._left = [f"{path}/{name}" for name in ([_SHARED] if names is None else names)]
        self.folder = f"{path}/{_SHARED if names is None else uuid7()}"

    def write(self, rows: DataFrame) -> None:
        rows.write.mode("overwrite").parquet(self.folder)

    def read(self) -> DataFrame:
        return self._spark.read.schema(COLUMNS).parquet(self.folder)

    def clear(self) -> None:
        self._remove(self.folder)

    def read_left(self) -> DataFrame | None:
        """What calls before this one have left; ``None`` if there is nothing. Two of them may have copied one job."""
        tables = (ArchiveTable(self._spark, folder, format="parquet").read() for folder in self._left)
        found = [table for table in tables if table is not None]
        return reduce(DataFrame.unionByName, found) if found else None

    def clear_left(self) -> None:
        for folder in self._left:
            self._remove(folder)

    def _remove(self, folder: str) -> None:
        if folder.endswith(f"/{_SHARED}"):
            self._spark.createDataFrame([], COLUMNS).write.mode("overwrite").parquet(folder)
        else:
            remove_folder(self._spark, folder)


def journal_path(table: ArchiveTable, url: str, queue: str, scratch: str | None) -> str:
    """Where the journals of a store's queue are: the same at every call, whatever password the URL has.

    Raises:
        InvalidOption: the output is a table, and ``scratch`` was not given.
    """
    if scratch is None and (not table.is_path or table.is_beyond_spark):
        raise InvalidOption(
            "the journal of an archive needs a folder that lasts and that Spark can write to, and the output "
            f"{table.output!r} is not one. Give scratch='s3://...' or the like, the same at every call."
        )
    parts = urlsplit(url)
    named = "\n".join(
        (parts.hostname or "", str(parts.port), parts.path, namespace_of(url), queue, table.output)
    )
    name = blake2b(named.encode(), digest_size=8).hexdigest()
    root = scratch or f"{table.output.rstrip('/')}/{_FOLDER}"
    return f"{root.rstrip('/')}/{name}"
