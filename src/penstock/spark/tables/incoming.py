"""Tables that ``process`` takes: those of Spark, and those of pandas, Polars and Arrow, which are converted."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.types as kinds
from deltalake import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.errors import InvalidInput, InvalidOption
from penstock.spark.local import session
from penstock.spark.tables.arrowtypes import plain_type
from penstock.spark.tables.deltainput import delta_dataframe

__all__ = ["TableLike", "as_dataframe"]


class SupportsArrow(Protocol):
    """A table that can be read as a stream of Arrow batches: of pandas, Polars, pyarrow, DuckDB and others."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


class _Lazy(Protocol):
    """A query that makes such a table: a Polars ``LazyFrame``."""

    def collect(self) -> Any: ...


TableLike: TypeAlias = DataFrame | SupportsArrow | _Lazy | DeltaTable


def as_dataframe(table: TableLike, spark: SparkSession | None = None) -> DataFrame:
    """Return the table as one of Spark: of ``spark``, or else of the session that is active, or of a new local one.

    Types that Spark lacks become the nearest that holds every value: categories and views become text, unsigned
    integers wider ones. As everywhere in pandas, its NaN means null. A named index of pandas becomes columns; one
    without a name is left out.

    Raises:
        InvalidInput: not a table, or a column that Spark cannot hold.
        InvalidOption: the table belongs to another session.
    """
    if isinstance(table, DataFrame):
        # By Spark Connect, sessions compare by identity as well.
        if spark is not None and table.sparkSession is not spark:
            raise InvalidOption(
                "the table belongs to another Spark session than the one given as spark. Leave spark out: the run uses "
                "the session of its table."
            )
        return table
    if isinstance(table, DeltaTable):
        return delta_dataframe(table, spark or session())
    arrow = _arrow_table(table)
    columns = [_plain_column(field, arrow.column(number)) for number, field in enumerate(arrow.schema)]
    plain = pa.table(columns, names=arrow.column_names)
    # Without a schema, Spark would take a timestamp without a zone for one of the session's zone.
    schema = from_arrow_schema(plain.schema, prefer_timestamp_ntz=True)
    return (spark or session()).createDataFrame(plain, schema)


def _arrow_table(table: Any) -> pa.Table:
    module = type(table).__module__.partition(".")[0]
    if module == "pandas" and type(table).__name__ == "DataFrame":
        return _from_pandas(table)
    if module == "polars" and type(table).__name__ == "LazyFrame":
        table = table.collect()
    if isinstance(table, pa.RecordBatch):
        return pa.Table.from_batches([table])
    if not hasattr(table, "__arrow_c_stream__") or module == "pandas" or type(table).__name__ == "Series":
        remedy = " Convert it first: series.to_frame()." if type(table).__name__ == "Series" else ""
        raise InvalidInput(
            f"the table must be a Spark, pandas, Polars or Arrow table, got {_kind(table)}.{remedy}"
        )
    try:
        return pa.RecordBatchReader.from_stream(table).read_all()
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InvalidInput(f"{_kind(table)} cannot be converted to Arrow: {error}") from error
    except Exception as error:
        # Polars panics, and its class of exception is not one to import.
        raise InvalidInput(f"{_kind(table)} cannot be converted to Arrow: {error}") from error


def _kind(table: object) -> str:
    module = type(table).__module__.partition(".")[0]
    name = type(table).__qualname__
    return name if module == "builtins" else f"{module}.{name}"


def _from_pandas(table: Any) -> pa.Table:
    levels = [name for name in table.index.names if name is not None]
    try:
        if levels:
            unnamed = [number for number, name in enumerate(table.index.names) if name is None]
            table = table.reset_index(level=levels) if unnamed else table.reset_index()
        return pa.Table.from_pandas(table, preserve_index=False).replace_schema_metadata(None)
    except (pa.ArrowException, TypeError, ValueError) as error:
        said = ", ".join(str(part) for part in error.args)
        raise InvalidInput(
            f"the pandas table cannot be converted to Arrow: {said}. Give each column values of one type, and each "
            "column a name of its own."
        ) from error


def _plain_column(field: pa.Field, column: pa.ChunkedArray) -> pa.ChunkedArray:
    type = plain_type(field.type)
    try:
        if kinds.is_dictionary(field.type):
            column = pa.chunked_array(
                [chunk.dictionary_decode() for chunk in column.chunks], type=field.type.value_type
            )
        from_arrow_schema(pa.schema([(field.name, type)]))
        return column.cast(type)
    except PySparkException as error:
        raise InvalidInput(
            f"column {field.name!r} has the Arrow type {field.type}, and Spark has no type for it. Cast the column, or "
            "leave it out."
        ) from error
    except pa.ArrowException as error:
        raise InvalidInput(
            f"column {field.name!r} has the Arrow type {field.type}, and Spark would hold it as {type}: {error}. Times "
            "are kept to microseconds, decimals to 38 digits. Round the values, or cast the column."
        ) from error
