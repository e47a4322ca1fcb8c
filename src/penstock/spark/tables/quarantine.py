"""A table of its own for the rows that failed or were rejected, so that somebody can look at them and mend them."""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import NullType

from penstock.errors import InvalidInput, InvalidOption
from penstock.spark.freshreads import fresh_path, fresh_table
from penstock.spark.publishing import refuse_pattern, with_micros
from penstock.spark.tables.ledger import PREFIX, Ledger
from penstock.spark.tables.outputlease import output_identity

__all__ = ["check_quarantine", "write_quarantine"]

_TABLE: Final = "table:"
_DELTA: Final = "delta"


def check_quarantine(spark: SparkSession, quarantine: str | PurePath, ledger: Ledger, format: str) -> None:
    """Check that the quarantine may be written anew.

    Raises:
        InvalidInput: it is the output, or holds something else.
    """
    name, is_path = _place(quarantine)
    if output_identity(name, is_path=is_path) == ledger.identity:
        raise InvalidOption(f"quarantine is the same place as output: {name}. Give it one of its own.")
    found = _read(spark, name, is_path=is_path, format=format)
    if found is not None and f"{PREFIX}state" not in found:
        raise InvalidInput(
            f"{name} is not a quarantine: it has no column '{PREFIX}state'. The run would replace what it holds. Its "
            f"columns are: {', '.join(found)}. Give another place."
        )


def write_quarantine(rows: DataFrame, quarantine: str | PurePath, format: str) -> None:
    """Replace the rows of the quarantine by these."""
    name, is_path = _place(quarantine)
    # No format can hold a column without a type.
    void = [field.name for field in rows.schema if isinstance(field.dataType, NullType)]
    rows = rows.drop(*void)
    if is_path and format.lower() == _DELTA:
        from deltalake import write_deltalake

        write_deltalake(name, rows.toArrow(), mode="overwrite", schema_mode="overwrite")
        return
    with with_micros(rows.sparkSession):
        writer = rows.coalesce(1).write.mode("overwrite").format(format)
        if is_path:
            writer.save(name)
        else:
            writer.saveAsTable(name)


def _read(spark: SparkSession, name: str, *, is_path: bool, format: str) -> list[str] | None:
    if is_path and format.lower() == _DELTA:
        from deltalake import DeltaTable

        return DeltaTable(name).schema().to_arrow().names if DeltaTable.is_deltatable(name) else None
    found = fresh_path(spark, name, spark.read.format(format).load) if is_path else fresh_table(spark, name)
    # JSON lines without rows have no columns.
    return None if found is None or not found.columns else found.columns


def _place(quarantine: str | PurePath) -> tuple[str, bool]:
    name = str(quarantine)
    if name.startswith(_TABLE):
        return name.removeprefix(_TABLE), False
    refuse_pattern(name)
    return name, True
