"""``since=``: only the rows that a table gained since the last run that did all it found.

What was seen is kept in the output: the highest value of a column, or the version of a Delta table. It only saves work.
Which rows are done is known by the ledger, so a mark that is lost or too low costs time and nothing else.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec
from deltalake import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    DataType,
    DateType,
    NumericType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from penstock.errors import InvalidInput
from penstock.spark.publishing import local_path
from penstock.spark.schemas import quoted
from penstock.spark.tables.deltainput import delta_dataframe
from penstock.spark.tables.ledger import Ledger

__all__ = ["Followed", "Mark", "follow", "follow_version", "write_mark"]

_FILE: Final = "_since.json"
_PROPERTY: Final = "penstock.since"
VERSION: Final = "version"


class Mark(msgspec.Struct, frozen=True):
    """The point up to which an input was followed: a value of a column, or a version of a Delta table."""

    by: str
    kind: str
    value: str


class Followed(msgspec.Struct, frozen=True, kw_only=True):
    """The rows to look at, and the mark to set once all of them are done."""

    rows: DataFrame
    mark: Mark | None


def follow(df: DataFrame, by: str, ledger: Ledger, *, is_whole: bool) -> Followed:
    """Return the rows whose value in the column ``by`` is not below the mark; all of them with ``is_whole``.

    Raises:
        InvalidInput: no such column, or one whose values have no order that can be noted down.
    """
    if by not in df.columns:
        raise InvalidInput(
            f"since={by!r} is not a column of the table. It has: {', '.join(df.columns)}. Give a column whose values "
            "grow, such as the time of the last change."
        )
    kind = df.schema[by].dataType
    if not isinstance(kind, (NumericType, StringType, DateType, TimestampType, TimestampNTZType)):
        raise InvalidInput(
            f"since={by!r} has type {kind.simpleString()}. Use a column of numbers, text, dates or timestamps."
        )
    mark = read_mark(df.sparkSession, ledger)
    column = F.col(quoted(by))
    if mark is not None and (mark.by, mark.kind) == (by, kind.simpleString()) and not is_whole:
        # Rows without a value may be new each time.
        df = df.where(column.isNull() | (column >= _literal(mark.value, kind)))
    # Rows that come after this moment are for the next run.
    row = df.agg(F.max(column).alias("high")).select(_text(F.col("high"), kind)).first()
    high = None if row is None else row[0]
    if high is None:
        return Followed(rows=df, mark=mark)
    rows = df.where(column.isNull() | (column <= _literal(high, kind)))
    return Followed(rows=rows, mark=Mark(by, kind.simpleString(), high))


def follow_version(
    table: DeltaTable, spark: SparkSession, since: int | str, ledger: Ledger, *, is_whole: bool
) -> Followed:
    """Return the rows in the files that a Delta table gained: since a version, or since the one that was noted down."""
    name = str(table.metadata().id)
    mark = read_mark(spark, ledger)
    former: int | None = since if isinstance(since, int) else None
    if former is None and mark is not None and (mark.by, mark.kind) == (VERSION, name):
        former = int(mark.value)
    rows = delta_dataframe(table, spark, since=None if is_whole else former)
    return Followed(rows=rows, mark=Mark(VERSION, name, str(table.version())))


def _text(column: Column, kind: DataType) -> Column:
    """Make a text of a value, in any time zone the same."""
    return (F.unix_micros(column) if isinstance(kind, TimestampType) else column).cast("string")


def _literal(text: str, kind: DataType) -> Column:
    if isinstance(kind, TimestampType):
        return F.timestamp_micros(F.lit(int(text)))
    return F.lit(text).cast(kind)


def read_mark(spark: SparkSession, ledger: Ledger) -> Mark | None:
    """Return the mark that the last complete run left in the output, or ``None``."""
    try:
        return msgspec.json.decode(_stored(spark, ledger), type=Mark)
    except (msgspec.DecodeError, OSError):
        return None


def write_mark(spark: SparkSession, ledger: Ledger, mark: Mark) -> None:
    """Note down in the output how far the input was followed."""
    text = msgspec.json.encode(mark).decode()
    if not ledger.is_path:
        escaped = text.replace("\\", "\\\\").replace("'", "\\'")
        spark.sql(f"ALTER TABLE {ledger.output} SET TBLPROPERTIES ('{_PROPERTY}' = '{escaped}')")
        return
    path = f"{ledger.output.rstrip('/')}/{_FILE}"
    here = local_path(path)
    if here is not None and here.parent.is_dir():
        draft = here.with_name(f"{_FILE}.{os.getpid()}")
        draft.write_text(text)
        draft.replace(here)
        return
    spark.createDataFrame([(text,)], "value string").coalesce(1).write.mode("overwrite").text(path)


def _stored(spark: SparkSession, ledger: Ledger) -> str:
    from pyspark.errors import AnalysisException

    try:
        if not ledger.is_path:
            found = (
                spark.sql(f"SHOW TBLPROPERTIES {ledger.output}").where(F.col("key") == _PROPERTY).collect()
            )
            return str(found[0]["value"]) if found else ""
        path = f"{ledger.output.rstrip('/')}/{_FILE}"
        here = local_path(path)
        if here is not None and here.parent.is_dir():
            return here.read_text()
        rows = spark.read.text(path).collect()
        return str(rows[0][0]) if rows else ""
    except AnalysisException:
        return ""
