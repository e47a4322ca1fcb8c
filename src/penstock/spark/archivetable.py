"""A table of archived jobs, at a path or in the catalog, and the journal beside it."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import PurePath
from typing import Final
from urllib.parse import urlsplit

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from penstock.core.ids import uuid7
from penstock.errors import InvalidInput, InvalidOption
from penstock.spark.freeing import COLUMNS
from penstock.spark.options import namespace_of
from penstock.spark.publishing import STAGING, append_files, append_table, remove_folder

__all__ = ["ArchiveTable", "journal_path"]

_NOT_THERE: Final = ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA", "TABLE_OR_VIEW_NOT_FOUND")
_TABLE: Final = "table:"
# Spark passes over names that begin with an underscore.
_FOLDER: Final = "_penstock_archive"


class ArchiveTable:
    """Rows with ``COLUMNS``, at a path or in a table of the catalog (``table:db.archive``)."""

    def __init__(self, spark: SparkSession, output: str | PurePath, *, format: str) -> None:
        self._spark = spark
        self._format = format
        self.is_path = not str(output).startswith(_TABLE)
        self.output = str(output).removeprefix(_TABLE)

    def read(self) -> DataFrame | None:
        """All rows; ``None`` if there is no table yet."""
        try:
            if self.is_path:
                found = self._spark.read.format(self._format).load(self.output)
            else:
                found = self._spark.table(self.output)
            # By Spark Connect nothing is looked at until it is asked for.
            _ = found.schema
        except AnalysisException as error:
            if str(error.getCondition()).startswith(_NOT_THERE):
                return None
            raise
        return found

    def check(self) -> None:
        """Raises ``InvalidInput`` if there is something else."""
        found = self.read()
        missing = (
            [] if found is None else [name for name in COLUMNS.fieldNames() if name not in found.columns]
        )
        if found is not None and missing:
            raise InvalidInput(
                f"{self.output} holds something else than archived jobs: it has no column {missing[0]!r}. Its columns "
                f"are: {', '.join(found.columns)}. Give another output."
            )

    def append(self, rows: DataFrame) -> None:
        """Each file of it appears as a whole, or not at all."""
        if self.is_path:
            append_files(rows, self.output, format=self._format, name=f"penstock-{uuid7()}")
        else:
            append_table(rows, self.output, format=self._format)

    def clear_staging(self) -> None:
        """Remove what calls that were killed had not put in place. For the holder of the output only."""
        if self.is_path:
            remove_folder(self._spark, f"{self.output.rstrip('/')}/{STAGING}")

    def overwrite(self, rows: DataFrame) -> None:
        """For a path. ``rows`` may be empty, and may not come from here."""
        rows.write.mode("overwrite").format(self._format).save(self.output)


def journal_path(table: ArchiveTable, url: str, queue: str, scratch: str | None) -> str:
    """Where the journal of a store's queue is: the same at every call, whatever password the URL has.

    Raises:
        InvalidOption: the output is a table, and ``scratch`` was not given.
    """
    if scratch is None and not table.is_path:
        raise InvalidOption(
            f"the journal of an archive needs a place that lasts, and the output {table.output!r} is a table. Give "
            "scratch='s3://...' or the like, the same at every call."
        )
    parts = urlsplit(url)
    named = "\n".join(
        (parts.hostname or "", str(parts.port), parts.path, namespace_of(url), queue, table.output)
    )
    name = blake2b(named.encode(), digest_size=8).hexdigest()
    root = scratch or f"{table.output.rstrip('/')}/{_FOLDER}"
    return f"{root.rstrip('/')}/{name}"
