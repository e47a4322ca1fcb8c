"""The tables of a history as DataFrames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.spark.delta import DataFile, Table
from penstock.spark.history.folder import open_history

__all__ = ["Tables", "tables"]


class Tables(NamedTuple):
    """``bronze``: events. ``silver``: jobs. ``gold``: measures by period and name. ``causes``: failures by class."""

    bronze: DataFrame
    silver: DataFrame
    gold: DataFrame
    causes: DataFrame


def tables(
    spark: SparkSession, path: str | Path, *, storage_options: Mapping[str, str] | None = None
) -> Tables:
    """Return the newest version of each table. They stay readable for a week after a sync has replaced them.

    Raises:
        InvalidOption: the folder holds no history.
    """
    history = open_history(path, storage_options, create=False)
    return Tables(
        *(_frame(spark, table) for table in (history.bronze, history.silver, history.gold, history.causes))
    )


def _frame(spark: SparkSession, table: Table) -> DataFrame:
    schema, files = from_arrow_schema(table.schema), table.load().files
    if not files:
        return spark.createDataFrame([], schema)
    if table.folder.is_local:
        return spark.read.schema(schema).parquet(*(f"{table.folder.root}/{file.path}" for file in files))
    # Spark reads an object store only with a jar; delta-rs needs none.
    read = partial(_read, table=table, files=files)
    return spark.range(0, len(files), 1, len(files)).mapInArrow(read, schema)


def _read(
    batches: Iterator[pa.RecordBatch], *, table: Table, files: Sequence[DataFile]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for index in batch.column(0).to_pylist():
            yield from table.read(files[index]).to_batches(20_000)
