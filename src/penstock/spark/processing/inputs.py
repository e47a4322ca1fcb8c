"""The input of ``process``: tables of Spark, pandas, Polars, Arrow and Delta, and ``since=``, which reads only new
rows.

``since=`` keeps a mark in the output: the highest value of a column, or the version of a Delta table. It only saves
work. The ledger knows which rows are done, so a mark that is lost or too low costs nothing but time.
"""

from __future__ import annotations

from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.types as kinds
import pyspark.sql.types as T
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.core.text import get_logger
from penstock.errors import InvalidInput, InvalidOption
from penstock.spark.cells import arrow_schema
from penstock.spark.delta import Folder, open_folder
from penstock.spark.local import session
from penstock.spark.processing.ledger import Ledger
from penstock.spark.processing.types import plain_type
from penstock.spark.publishing import local_path, write_text
from penstock.spark.schemas import quoted
from penstock.spark.tasks import Batches, Mapper, parallelism

logger = get_logger("penstock.spark")

# Reader features that do not affect the content of data files.
_HARMLESS: Final = frozenset({"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck", "typeWidening"})


def delta_dataframe(table: DeltaTable, spark: SparkSession, *, since: int | None = None) -> DataFrame:
    """Return the rows of the table's version; with ``since``, only those in files that version ``since`` did not have.

    A file that was compacted or rewritten since then counts as new, with all its rows. The executors read the files.

    Raises:
        InvalidInput: the table uses deletion vectors or column mapping.
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
    count = min(fresh.num_rows, parallelism(spark))
    return (
        spark.createDataFrame(fresh)
        .repartition(count)
        .mapInArrow(_reader(folder, tuple(names), arrow_schema(schema)), schema)
    )


def _refuse_features(table: DeltaTable) -> None:
    features = set(table.protocol().reader_features or ()) - _HARMLESS
    mapping = table.metadata().configuration.get("delta.columnMapping.mode", "none")
    if mapping != "none":
        features.add("columnMapping")
    if features:
        raise InvalidInput(
            f"{table.table_uri} uses {', '.join(sorted(features))}, which cannot be read without Delta's jar. Read it "
            "in a session that has the jar, and pass the DataFrame."
        )


def _paths_at(table: DeltaTable, version: int) -> set[str]:
    if version > table.version():
        raise InvalidInput(
            f"since={version} is later than version {table.version()} of {table.table_uri}. Reload the table, or "
            "use an earlier version."
        )
    try:
        former = DeltaTable(table.table_uri, version=version, storage_options=table._storage_options)
    except DeltaError as error:
        logger.warning(
            "version %s of %s can no longer be read, so the run reads the whole table: %s",
            version,
            table.table_uri,
            error,
        )
        return set()
    return set(pa.table(former.get_add_actions(flatten=True)).column("path").to_pylist())


def _reader(folder: Folder, names: tuple[str, ...], schema: pa.Schema) -> Mapper:
    def read(batches: Batches) -> Batches:
        for batch in batches:
            for number, path in enumerate(batch.column("path").to_pylist()):
                values = {name: batch.column(f"p{n}")[number] for n, name in enumerate(names)}
                # The log has the path in URL encoding.
                table = folder.read(unquote(path))
                columns = [_column(table, field, values) for field in schema]
                yield from pa.table(columns, schema=schema).to_batches(max_chunksize=10_000)

    return read


def _column(table: pa.Table, field: pa.Field, values: dict[str, Any]) -> pa.ChunkedArray:
    if field.name in values:
        value = values[field.name].as_py()
        return pa.chunked_array([pa.array([value] * table.num_rows).cast(field.type)], field.type)
    if field.name not in table.column_names:
        # The file predates the column.
        return pa.chunked_array([pa.nulls(table.num_rows, field.type)], field.type)
    return table.column(field.name).cast(field.type)


# ``since=``: only rows that are new since the last complete run.


_FILE: Final = "_since.json"
_PROPERTY: Final = "penstock.since"
VERSION: Final = "version"


class Mark(msgspec.Struct, frozen=True):
    """The point up to which an input was followed: a value of a column, or a version of a Delta table."""

    by: str
    kind: str
    value: str


class Followed(msgspec.Struct, frozen=True, kw_only=True):
    """The rows to process, and the mark to set once all of them are done."""

    rows: DataFrame
    mark: Mark | None


def follow(df: DataFrame, by: str, ledger: Ledger, *, is_whole: bool) -> Followed:
    """Return the rows whose value in the column ``by`` is at or above the mark. With ``is_whole``, return all rows.

    Raises:
        InvalidInput: the column does not exist, or its type has no order.
    """
    if by not in df.columns:
        raise InvalidInput(
            f"since={by!r} is not a column of the table. Its columns are: {', '.join(df.columns)}. Choose a "
            "column whose values grow, such as the time of the last change."
        )
    kind = df.schema[by].dataType
    if not isinstance(kind, (T.NumericType, T.StringType, T.DateType, T.TimestampType, T.TimestampNTZType)):
        raise InvalidInput(
            f"since={by!r} has type {kind.simpleString()}. Use a column of numbers, text, dates or timestamps."
        )
    mark = read_mark(df.sparkSession, ledger)
    column = F.col(quoted(by))
    if isinstance(kind, (T.FloatType, T.DoubleType)):
        # Leave out infinity and NaN, because no later value would be above such a mark.
        column = F.when(F.abs(column) < float("inf"), column)
    if mark is not None and (mark.by, mark.kind) == (by, kind.simpleString()) and not is_whole:
        # Rows without a value, or with infinity or NaN, may always be new.
        df = df.where(column.isNull() | (column >= _literal(mark.value, kind)))
    # Rows that arrive after this point are for the next run.
    row = df.agg(F.max(column).alias("high")).select(_text(F.col("high"), kind)).first()
    high = None if row is None else row[0]
    if high is None:
        return Followed(rows=df, mark=mark)
    rows = df.where(column.isNull() | (column <= _literal(high, kind)))
    return Followed(rows=rows, mark=Mark(by, kind.simpleString(), high))


def follow_version(
    table: DeltaTable, spark: SparkSession, since: int | str, ledger: Ledger, *, is_whole: bool
) -> Followed:
    """Return the rows in the files that a Delta table has gained since a version, or since the one in the mark."""
    name = str(table.metadata().id)
    mark = read_mark(spark, ledger)
    former: int | None = since if isinstance(since, int) else None
    if former is None and mark is not None and (mark.by, mark.kind) == (VERSION, name):
        former = int(mark.value)
    rows = delta_dataframe(table, spark, since=None if is_whole else former)
    return Followed(rows=rows, mark=Mark(VERSION, name, str(table.version())))


def _text(column: Column, kind: T.DataType) -> Column:
    """Return a value as text, independent of the time zone."""
    return (F.unix_micros(column) if isinstance(kind, T.TimestampType) else column).cast("string")


def _literal(text: str, kind: T.DataType) -> Column:
    if isinstance(kind, T.TimestampType):
        return F.timestamp_micros(F.lit(int(text)))
    return F.lit(text).cast(kind)


def read_mark(spark: SparkSession, ledger: Ledger) -> Mark | None:
    """Return the mark that the last complete run left in the output, or ``None``."""
    try:
        return msgspec.json.decode(_stored(spark, ledger), type=Mark)
    except (msgspec.DecodeError, OSError):
        return None


def write_mark(spark: SparkSession, ledger: Ledger, mark: Mark) -> None:
    """Write the mark into the output."""
    text = msgspec.json.encode(mark).decode()
    if not ledger.is_path:
        escaped = text.replace("\\", "\\\\").replace("'", "\\'")
        spark.sql(f"ALTER TABLE {ledger.output} SET TBLPROPERTIES ('{_PROPERTY}' = '{escaped}')")
        return
    if ledger.remote is not None:
        ledger.remote.write_text(text, _FILE)
        return
    path = f"{ledger.output.rstrip('/')}/{_FILE}"
    here = local_path(path)
    if here is not None and here.parent.is_dir():
        write_text(spark, path, text)
        return
    spark.createDataFrame([(text,)], "value string").coalesce(1).write.mode("overwrite").text(path)


def _stored(spark: SparkSession, ledger: Ledger) -> str:
    try:
        if not ledger.is_path:
            properties = (
                spark.sql(f"SHOW TBLPROPERTIES {ledger.output}").where(F.col("key") == _PROPERTY).collect()
            )
            return str(properties[0]["value"]) if properties else ""
        if ledger.remote is not None:
            return ledger.remote.read_text(_FILE)
        path = f"{ledger.output.rstrip('/')}/{_FILE}"
        here = local_path(path)
        if here is not None and here.parent.is_dir():
            return here.read_text()
        rows = spark.read.text(path).collect()
        return str(rows[0][0]) if rows else ""
    except AnalysisException:
        return ""


# Conversion of tables that are not Spark's.


class SupportsArrow(Protocol):
    """A table that can export Arrow batches, such as one of pandas, Polars, pyarrow or DuckDB."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


class _Lazy(Protocol):
    """A query that returns a table, such as a Polars ``LazyFrame``."""

    def collect(self) -> Any: ...


TableLike: TypeAlias = DataFrame | SupportsArrow | _Lazy | DeltaTable


def as_dataframe(table: TableLike, spark: SparkSession | None = None) -> DataFrame:
    """Return the table as a DataFrame in ``spark``, in the active session, or in a new local one.

    Types that Spark lacks become the nearest type that holds every value: categories and views become text, unsigned
    integers become wider ones. NaN in pandas means null. A named pandas index becomes columns; an unnamed one is
    dropped.

    Raises:
        InvalidInput: the value is not a table, or Spark has no type for a column.
        InvalidOption: the table belongs to another session.
    """
    if isinstance(table, DataFrame):
        # Spark Connect sessions compare by identity as well.
        if spark is not None and table.sparkSession is not spark:
            raise InvalidOption(
                "the table belongs to another Spark session than the one passed as spark. Leave spark out to use the "
                "session of the table."
            )
        return table
    if isinstance(table, DeltaTable):
        return delta_dataframe(table, spark or session())
    arrow = _arrow_table(table)
    columns = [_plain_column(field, arrow.column(number)) for number, field in enumerate(arrow.schema)]
    plain = pa.table(columns, names=arrow.column_names)
    # Without a schema, Spark would add the session's zone to timestamps that have none.
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
        # Polars may panic, with an exception class that cannot be imported.
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
        message = ", ".join(str(part) for part in error.args)
        raise InvalidInput(
            f"the pandas table cannot be converted to Arrow: {message}. Each column needs values of one type and a "
            "unique name."
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
            f"column {field.name!r} has the Arrow type {field.type}, for which Spark has no type. Cast or drop the "
            "column."
        ) from error
    except pa.ArrowException as error:
        raise InvalidInput(
            f"column {field.name!r} has the Arrow type {field.type}, which does not fit Spark's {type}: {error}. Times "
            "have microseconds, decimals up to 38 digits. Round the values, or cast the column."
        ) from error
