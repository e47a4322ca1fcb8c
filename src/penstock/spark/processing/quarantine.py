"""The quarantine of a run: a table of the rows that failed or were rejected, to inspect and repair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import NullType, StructType

from penstock.errors import InvalidInput, InvalidOption
from penstock.spark.deltaoutput import DeltaOutput
from penstock.spark.driver_lease import output_identity
from penstock.spark.processing.intake import materialize
from penstock.spark.processing.ledger import PREFIX, Ledger
from penstock.spark.publishing import NameTaken, fresh_path, fresh_table, refuse_pattern, with_micros
from penstock.spark.schemas import quoted

_TABLE: Final = "table:"
_ATTEMPTS: Final = 5


class Quarantine:
    """The quarantine at a path or in a catalog table (``table:db.bad``), in the format of the output."""

    def __init__(self, spark: SparkSession, place: str | PurePath, format: str) -> None:
        self._spark = spark
        self._format = format
        self._is_path = not str(place).startswith(_TABLE)
        self._name = str(place).removeprefix(_TABLE)
        if self._is_path:
            refuse_pattern(self._name)
        self._delta: DeltaOutput | None = None
        if self._is_path and format.lower() == "delta":
            self._delta = DeltaOutput(spark, self._name, ranged=f"{PREFIX}finished_at", stats=())

    def check(self, ledger: Ledger) -> None:
        """Check that the run may replace the quarantine.

        Raises:
            InvalidOption: the quarantine is the output.
            InvalidInput: the quarantine holds something else.
        """
        if output_identity(self._name, is_path=self._is_path) == ledger.identity:
            raise InvalidOption(f"quarantine and output must differ, got {self._name} for both.")
        former = self._read()
        if former is not None and f"{PREFIX}state" not in former.columns:
            raise InvalidInput(
                f"{self._name} is not a quarantine: it has no column '{PREFIX}state'. The run would replace its "
                f"content. Its columns are: {', '.join(former.columns)}. Choose another quarantine."
            )

    def update(self, rows: DataFrame, results: DataFrame, key: Sequence[str], folder: str) -> None:
        """Write ``rows``, and keep the other rows that are still failed or rejected in ``results``. Keep temporary
        files in ``folder``."""
        rows = _without_void(rows)
        self._write(lambda: self._with_standing(rows, results, key, folder))

    def replace(self, rows: DataFrame) -> None:
        """Replace all rows with ``rows``."""
        self._write(lambda: _without_void(rows))

    def _with_standing(
        self, rows: DataFrame, results: DataFrame, key: Sequence[str], folder: str
    ) -> DataFrame:
        former = self._read(rows.schema)
        if former is None or not set(key) <= set(former.columns):
            return rows
        standing = results.where(F.col(f"{PREFIX}state").isin("failed", "rejected"))
        others = former.join(standing.select(*map(quoted, key)), list(key), "left_semi")
        others = others.join(rows.select(*map(quoted, key)), list(key), "left_anti")
        rows = rows.unionByName(others, allowMissingColumns=True)
        # Spark cannot read a table while it replaces it.
        return rows if self._delta is not None else materialize(rows, f"{folder}/quarantine")

    def _write(self, content: Callable[[], DataFrame]) -> None:
        if self._delta is not None:
            _replace(self._delta, content)
            return
        with with_micros(self._spark):
            writer = content().coalesce(1).write.mode("overwrite").format(self._format)
            if self._is_path:
                writer.save(self._name)
            else:
                writer.saveAsTable(self._name)

    def _read(self, schema: StructType | None = None) -> DataFrame | None:
        """Return the rows; ``None`` if the quarantine does not exist yet. Read JSON lines as ``schema``."""
        if self._delta is not None:
            columns = self._delta.schema()
            return None if columns is None else self._delta.read(columns)
        if not self._is_path:
            return fresh_table(self._spark, self._name)
        reader = self._spark.read.format(self._format)
        if schema is not None and self._format.lower() == "json":
            reader = reader.schema(schema)
        rows = fresh_path(self._spark, self._name, reader.load)
        # JSON lines without rows have no columns.
        return rows if rows is not None and rows.columns else None


def _replace(table: DeltaOutput, content: Callable[[], DataFrame]) -> None:
    """Replace the rows of a table. If another run commits meanwhile, start over from what it has written."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return table.replace(content())
        except NameTaken:
            continue
    return table.replace(content())


def _without_void(rows: DataFrame) -> DataFrame:
    """Return the rows without columns of type void, which no format can hold."""
    return rows.drop(*(field.name for field in rows.schema if isinstance(field.dataType, NullType)))
