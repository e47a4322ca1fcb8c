"""A table of archived jobs, at a path or in the catalog."""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from penstock.errors import InvalidInput
from penstock.spark.deltaoutput import DeltaOutput, is_delta_table
from penstock.spark.freeing import COLUMNS
from penstock.spark.freshreads import fresh_path, fresh_table
from penstock.spark.publishing import (
    STAGING,
    append_files,
    append_table,
    commit_name,
    last_commit,
    list_folder,
    refuse_pattern,
    remove_folder,
)

__all__ = ["ArchiveTable"]

_TABLE: Final = "table:"


class ArchiveTable:
    """Rows with ``COLUMNS``, at a path or in a table of the catalog (``table:db.archive``)."""

    def __init__(self, spark: SparkSession, output: str | PurePath, *, format: str) -> None:
        self._spark = spark
        self._format = format
        self.is_path = not str(output).startswith(_TABLE)
        self.output = str(output).removeprefix(_TABLE)
        self._commits = 0
        if self.is_path:
            refuse_pattern(self.output)
        self._delta: DeltaOutput | None = None
        if self.is_path and format.lower() == "delta":
            self._delta = DeltaOutput(spark, self.output, ranged="finished_at", stats=("queue", "state"))

    @property
    def is_beyond_spark(self) -> bool:
        """Tell whether it is in an object store that Spark may have no jar for."""
        return self._delta is not None and not self._delta.is_local

    def read(self) -> DataFrame | None:
        """All rows; ``None`` if there is no table yet."""
        if self._delta is not None:
            schema = self._delta.schema()
            return None if schema is None else self._delta.read(schema)
        if not self.is_path:
            return fresh_table(self._spark, self.output)
        return fresh_path(self._spark, self.output, self._spark.read.format(self._format).load)

    def check(self) -> None:
        """Raises ``InvalidInput`` if there is something else."""
        if self.is_path and self._delta is None and is_delta_table(self.output):
            raise InvalidInput(f"{self.output} is a Delta table. Give format='delta', or another output.")
        found = self.read()
        missing = (
            [] if found is None else [name for name in COLUMNS.fieldNames() if name not in found.columns]
        )
        if found is not None and missing:
            raise InvalidInput(
                f"{self.output} holds something else than archived jobs: it has no column {missing[0]!r}. Its columns "
                f"are: {', '.join(found.columns)}. Give another output."
            )

    def take_over(self) -> None:
        """For whoever has just become the holder of the output: what calls before had not put in place is removed, and
        commits are counted on from those that are there."""
        if self._delta is not None:
            self._commits = self._delta.load().number
            return
        if not self.is_path:
            return
        remove_folder(self._spark, f"{self.output.rstrip('/')}/{STAGING}")
        self._commits = last_commit(list_folder(self._spark, self.output) or ())

    def append(self, rows: DataFrame) -> None:
        """Each file of it appears as a whole, or not at all.

        Raises:
            NameTaken: another holder has made this commit, which is the one after those that were there when the output
                was taken over. Nothing was put in place.
        """
        if self._delta is not None:
            self._delta.append(rows, number=self._commits + 1)
            self._commits += 1
        elif self.is_path:
            name = commit_name(self._commits + 1)
            append_files(rows, self.output, format=self._format, name=name)
            self._commits += 1
        else:
            append_table(rows, self.output, format=self._format)
