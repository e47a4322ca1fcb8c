"""A Delta table as the input of ``process``, read by the executors: all of it, or the files that it gained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.core.display import get_logger
from penstock.errors import InvalidInput
from penstock.spark.arrow import arrow_schema
from penstock.spark.delta import Folder, open_folder
from penstock.spark.tables.arrowtypes import plain_type

__all__ = ["delta_dataframe"]

logger = get_logger("penstock.spark")

_Mapper: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

# Of readers. They say nothing about what the data files hold.
_HARMLESS: Final = frozenset({"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck", "typeWidening"})


def delta_dataframe(table: DeltaTable, spark: SparkSession, *, since: int | None = None) -> DataFrame:
    """Return the rows of the table's version; with ``since``, those in files that it has and version ``since`` had not.

    A file that was compacted or rewritten since then counts as gained, with all its rows.

    Raises:
        InvalidInput: the table needs a reader that knows deletion vectors or column mapping.
    """
    _refuse_features(table)
    added = pa.table(table.get_add_actions(flatten=False))
    names = table.metadata().partition_columns
    parts = [added.column("partition").combine_chunks().field(name) for name in names]
    files = pa.table([added.column("path"), *parts], names=["path", *(f"p{n}" for n in range(len(parts)))])
    former = set() if since is None else _paths_at(table, since)
    fresh = files.filter(
        pa.array([path not in former for path in files.column("path").to_pylist()], pa.bool_())
    )
    arrow = pa.schema(table.schema().to_arrow())
    schema = from_arrow_schema(pa.schema([(field.name, plain_type(field.type)) for field in arrow]))
    if not fresh.num_rows:
        return spark.createDataFrame([], schema)
    folder = open_folder(table.table_uri, table._storage_options)
    count = min(fresh.num_rows, max(spark.sparkContext.defaultParallelism, 1)) if _has_context(spark) else 1
    return (
        spark.createDataFrame(fresh)
        .repartition(count)
        .mapInArrow(_reader(folder, tuple(names), arrow_schema(schema)), schema)
    )


def _has_context(spark: SparkSession) -> bool:
    """Return whether the session is in this process, not behind Spark Connect."""
    return hasattr(spark, "_jsc")


def _refuse_features(table: DeltaTable) -> None:
    features = set(table.protocol().reader_features or ()) - _HARMLESS
    mapping = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mapping != "none":
        features.add("columnMapping")
    if features:
        raise InvalidInput(
            f"{table.table_uri} uses {', '.join(sorted(features))}, which cannot be read without Delta's jar. Read it "
            "by a session that has the jar, and give the DataFrame."
        )


def _paths_at(table: DeltaTable, version: int) -> set[str]:
    if version > table.version():
        raise InvalidInput(
            f"since={version} is later than the version of {table.table_uri}, {table.version()}. Load the table anew, "
            "or give an earlier version."
        )
    try:
        former = DeltaTable(table.table_uri, version=version, storage_options=table._storage_options)
    except DeltaError as error:
        logger.warning(
            "version %s of %s cannot be read any more, so the run reads the whole table: %s",
            version,
            table.table_uri,
            error,
        )
        return set()
    return set(pa.table(former.get_add_actions(flatten=True)).column("path").to_pylist())


def _reader(folder: Folder, names: tuple[str, ...], schema: pa.Schema) -> _Mapper:
    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number, path in enumerate(batch.column("path").to_pylist()):
                values = {name: batch.column(f"p{n}")[number] for n, name in enumerate(names)}
                # The log has it as a URL.
                table = folder.read(unquote(path))
                columns = [_column(table, field, values) for field in schema]
                yield from pa.table(columns, schema=schema).to_batches(max_chunksize=10_000)

    return read


def _column(table: pa.Table, field: pa.Field, values: dict[str, Any]) -> pa.ChunkedArray:
    if field.name in values:
        value = values[field.name].as_py()
        return pa.chunked_array([pa.array([value] * table.num_rows).cast(field.type)], field.type)
    if field.name not in table.column_names:
        # The file is older than the column.
        return pa.chunked_array([pa.nulls(table.num_rows, field.type)], field.type)
    return table.column(field.name).cast(field.type)
