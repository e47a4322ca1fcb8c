"""The output of ``process``: an append-only ledger of the outcome of each row.

Every row is one outcome of one job. The newest row of a key is the current one (``latest``). The key columns have the
user's names; all others begin with ``penstock_``, except in an output that an earlier version created.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import PurePath
from typing import Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyspark.sql.types as T
from pyspark.sql import Column, DataFrame, DataFrameReader, Row, SparkSession
from pyspark.sql import functions as F

from penstock.errors import InvalidInput, InvalidOption
from penstock.spark.cells import arrow_schema, is_too_large, result_array
from penstock.spark.compaction import Moved
from penstock.spark.delta import Folder
from penstock.spark.deltaoutput import DeltaOutput, is_delta_table
from penstock.spark.driver_lease import output_identity
from penstock.spark.processing.jsonledger import JSON_OPTIONS, check_json
from penstock.spark.publishing import (
    append_files,
    append_table,
    commit_name,
    compact_files,
    finish_compaction,
    fresh_path,
    fresh_table,
    last_commit,
    list_folder,
    refuse_pattern,
)

_TEXT, _LONG, _INT, _TIME = T.StringType(), T.LongType(), T.IntegerType(), T.TimestampType()

_COLUMNS: Final[dict[str, T.DataType]] = {
    **dict.fromkeys(("state", "result", "error_type", "error"), _TEXT),
    **dict.fromkeys(("runs", "failures"), _INT),
    "cost": T.DoubleType(),
    "usage": T.MapType(_TEXT, T.DoubleType()),
    "run_ms": _LONG,
    **dict.fromkeys(("enqueued_at", "finished_at"), _TIME),
    **dict.fromkeys(("task", "task_version", "run_id", "job_id"), _TEXT),
    "incarnation": _LONG,
    "fingerprint": _TEXT,
    "commit": _LONG,
}
COLUMNS: Final = T.StructType([T.StructField(name, type) for name, type in _COLUMNS.items()])
PREFIX: Final = "penstock_"
OUTCOME: Final = ("job_id", "fingerprint", "state", "finished_at", "commit")
VALUE: Final = "value"
_TABLE: Final = "table:"
_KEY: Final = "key_json"
_SHOWN: Final = 300
_UNTYPED: Final = ("csv", "text", "xml")


class Ledger:
    """The ledger at a path or in a catalog table (``table:db.scores``). ``key`` has the types of the key columns,
    ``value`` the column type of results, if the task's hints determine it."""

    def __init__(
        self,
        spark: SparkSession,
        output: str | PurePath,
        *,
        key: T.StructType,
        value: T.DataType | None,
        format: str,
    ) -> None:
        self._spark = spark
        self.is_path = not str(output).startswith(_TABLE)
        self.output = str(output).removeprefix(_TABLE)
        if self.is_path:
            refuse_pattern(self.output)
        self.identity = output_identity(self.output, is_path=self.is_path)
        self._key = key
        self._value = value
        self._format = format
        # The prefix of our columns. Empty in an output that an earlier version created.
        self._prefix = PREFIX
        if format.lower() in _UNTYPED:
            raise InvalidOption(
                f"format={format!r} cannot hold the output: it keeps neither types nor nested columns, which the next "
                f"run needs. Use parquet, delta or json, and write a copy of the latest rows as {format}."
            )
        self._is_json = self.is_path and format.lower() == "json"
        self._delta: DeltaOutput | None = None
        if self.is_path and format.lower() == "delta":
            self._delta = DeltaOutput(
                spark, self.output, ranged=self._name("finished_at"), stats=[self._name("commit")]
            )
        self._is_inferred = False
        # Called before files are published. Raises if this run no longer holds the output.
        self.check_held: Callable[[], None] = lambda: None
        taken = sorted(set(map(self._name, (*COLUMNS.fieldNames(), VALUE))) & set(key.fieldNames()))
        if taken:
            raise InvalidInput(
                f"the key column {taken[0]!r} has the same name as a column of the output. Rename it "
                f"(df.withColumnRenamed({taken[0]!r}, ...))."
            )

    def _name(self, column: str) -> str:
        return f"{self._prefix}{column}"

    @property
    def _schema(self) -> T.StructType:
        ours = [T.StructField(self._name(name), type) for name, type in self._columns()]
        return T.StructType([*self._key.fields, *ours])

    def read(self) -> DataFrame | None:
        """Return all rows, with our columns under ``PREFIX``; ``None`` before the first run."""
        rows = self._read()
        if rows is None or self._prefix:
            return rows
        return rows.withColumnsRenamed({name: f"{PREFIX}{name}" for name in (*COLUMNS.fieldNames(), VALUE)})

    def empty(self) -> DataFrame:
        """Return an empty table with the columns of ``read``."""
        return self._spark.createDataFrame([], self._schema)

    def _read(self) -> DataFrame | None:
        if self._delta is not None:
            schema = self._delta.schema()
            return None if schema is None else self._delta.read(schema)
        rows = (
            fresh_path(self._spark, self.output, self._load)
            if self.is_path
            else fresh_table(self._spark, self.output)
        )
        if rows is not None:
            self._note_names(rows.columns)
        return rows

    def _note_names(self, columns: Sequence[str]) -> None:
        has_former = set(COLUMNS.fieldNames()) <= set(columns) - set(self._key.fieldNames())
        self._prefix = "" if has_former else PREFIX

    def _load(self, path: str) -> DataFrame:
        if self._is_json:
            if not self._is_inferred:
                self._note_names(self._spark.read.json(path).columns)
                self._is_inferred = True
            return _distinct(self._spark.read).schema(self._schema).json(path)
        return _distinct(self._spark.read).format(self._format).option("mergeSchema", "true").load(path)

    @property
    def has_index(self) -> bool:
        """Return whether the output can have an index, because its file names are never reused."""
        if self._delta is not None:
            return self._delta.is_local
        return self.is_path and self._format.lower() == "parquet"

    @property
    def remote(self) -> Folder | None:
        """Return the folder of an output in an object store that Spark may need a jar for; else ``None``."""
        return None if self._delta is None or self._delta.is_local else self._delta.folder

    def files(self) -> list[str] | None:
        """Return the names of the files; ``None`` if this process cannot list them."""
        if self._delta is not None:
            return self._delta.files()
        return list_folder(self._spark, self.output)

    def outcomes(self, files: Sequence[str] | None = None) -> DataFrame | None:
        """Return the columns ``OUTCOME`` of all rows, or of those in ``files``, without prefix. Spark neither reads the
        other columns nor looks for them in every file."""
        if not self.has_index and self._delta is None:
            rows = self.read()
            return None if rows is None else rows.select(*map(unprefixed, OUTCOME))
        names = {self._name(name): name for name in OUTCOME}
        schema = T.StructType([T.StructField(name, COLUMNS[plain].dataType) for name, plain in names.items()])
        if self._delta is not None:
            rows = None if self._delta.schema() is None else self._delta.read(schema, files)
        else:
            root = self.output.rstrip("/")
            paths = [self.output] if files is None else [f"{root}/{name}" for name in files]
            rows = fresh_path(
                self._spark, self.output, lambda _: self._spark.read.schema(schema).parquet(*paths)
            )
        return None if rows is None else rows.withColumnsRenamed(names)

    def newest_outcomes(self, ids: Sequence[str]) -> dict[str, Row]:
        """Return the newest outcome of each of a few jobs."""
        known = self.outcomes()
        rows = [] if known is None or not ids else known.where(F.col("job_id").isin(list(ids))).collect()
        newest: dict[str, Row] = {}
        for row in rows:
            was = newest.get(row["job_id"])
            if was is None or (was["commit"], was["finished_at"]) < (row["commit"], row["finished_at"]):
                newest[row["job_id"]] = row
        return newest

    def check(self) -> None:
        """Check that a run can continue the existing output.

        Raises:
            InvalidInput: the output holds something else, rows with another key, or results of another type.
        """
        if self.is_path and self._delta is None and is_delta_table(self.output):
            raise InvalidInput(
                f"{self.output} is a Delta table. Set format='delta', or choose another output."
            )
        rows = self._read()
        if rows is None:
            return
        value = self._name(VALUE)
        if self._is_json:
            check_json(self._spark, self.output, self._schema, key=self._key, optional=value)
            return
        missing = [name for name in map(self._name, COLUMNS.fieldNames()) if name not in rows.columns]
        if missing:
            raise InvalidInput(
                f"{self.output} does not hold results of process: it has no column {missing[0]!r}. Its columns are: "
                f"{', '.join(rows.columns)}. Choose another output."
            )
        _check_key(self.output, self._key, rows)
        if self._value is not None and value in rows.columns:
            was = rows.schema[value].dataType
            self._value = _former_type(was, self._value)
            _check_value(self.output, was, self._value, value)
        if self._delta is not None:
            _check_delta_columns(self.output, rows, self._schema)

    def has_former_fingerprints(self) -> bool:
        """Return whether rows may have fingerprints of an earlier version. Call ``check`` first."""
        return not self._prefix

    def append(self, rows: pa.Table, *, commit: int) -> None:
        """Append rows as one file, atomically. ``rows`` have ``COLUMNS`` and the key as JSON. ``commit`` is the number
        of the commit, one more than ``last_commit``.

        Raises:
            NameTaken: another run has made this commit. Nothing was written.
        """
        if self._value is not None:
            # A row that failed its expectation keeps the result only as text.
            is_done = pc.equal(rows.column("state"), "completed")
            texts = pc.if_else(is_done, rows.column("result"), None).to_pylist()
            rows = rows.append_column(VALUE, result_array(texts, _arrow_type(self._value)))
        self._append(self._spark.createDataFrame(rows), commit)

    def complaint(self, result: str) -> str:
        """Return why the value column cannot hold a result of its type; "" if it can."""
        if self._value is None or not is_too_large(result, _arrow_type(self._value)):
            return ""
        column = f"{self._name(VALUE)} ({self._value.simpleString()})"
        return f"the result does not fit the column {column}: {result:.{_SHOWN}}"

    def finish_times(self, ids: Sequence[str]) -> set[tuple[str, int]]:
        """Return the id and finish time (ms) of each ledger row of these jobs."""
        known = self.outcomes()
        if known is None:
            return set()
        jobs = self._spark.createDataFrame(pa.table({"job_id": ids}))
        times = known.select("job_id", F.unix_millis("finished_at").alias("ms"))
        return {(row["job_id"], row["ms"]) for row in times.join(jobs, "job_id", "left_semi").collect()}

    def _append(self, made: DataFrame, commit: int) -> None:
        key = F.from_json(F.col(_KEY), self._key).alias("key")
        columns = [F.col(name).cast(type).alias(self._name(name)) for name, type in self._columns()]
        names = [self._name(name) for name, _ in self._columns()]
        table = made.select(key, *columns).select("key.*", *names)
        table = table.coalesce(1)
        if self._delta is not None:
            self._delta.append(table, number=commit)
        elif self.is_path:
            append_files(
                table,
                self.output,
                format=self._format,
                name=commit_name(commit),
                options=JSON_OPTIONS if self._is_json else {},
                check=self.check_held,
            )
        else:
            append_table(table, self.output, format=self._format)

    def append_rejected(self, rows: DataFrame, *, task: str, version: str, run_id: str, commit: int) -> bool:
        """Append the rejected rows of a snapshot, except those whose newest row has the same error. Return whether
        there were any. Raise as ``append`` does."""
        known = self.read()
        if known is not None:
            rejected = latest(known).where(F.col(f"{PREFIX}state") == "rejected")
            known_errors = rejected.select(unprefixed("job_id"), F.col(f"{PREFIX}error").alias("refused"))
            rows = rows.join(known_errors, ["job_id", "refused"], "left_anti")
        if rows.isEmpty():
            return False
        now = F.current_timestamp()
        values = {
            "state": F.lit("rejected"),
            "error_type": F.lit("BadRow"),
            "error": F.col("refused"),
            "enqueued_at": now,
            "finished_at": now,
            "task": F.lit(task),
            "task_version": F.lit(version),
            "run_id": F.lit(run_id),
            "job_id": F.col("job_id"),
            "fingerprint": F.lit(""),
            "commit": F.lit(commit),
        }
        columns = [values.get(name, F.lit(None)).cast(type).alias(name) for name, type in self._columns()]
        self._append(rows.select(_KEY, *columns), commit)
        return True

    def last_commit(self) -> int:
        """Return the number of the newest commit; 0 if there is none."""
        if self._delta is not None:
            return self._delta.load().number
        names = list_folder(self._spark, self.output) if self.is_path else None
        if names is not None and all(
            last_commit([name]) or name.startswith(commit_name(0)) for name in names
        ):
            return last_commit(names)
        known = self.outcomes()
        row = None if known is None else known.agg(F.max("commit")).first()
        return 0 if row is None or row[0] is None else int(row[0])

    def recover(self) -> None:
        """Finish or undo the compaction of a killed run. Only the holder of the output may call it."""
        if self._delta is None and self.has_index:
            finish_compaction(self.output)

    def compact(self) -> Moved | None:
        """Merge small files if there are many. Return the changes, or ``None``. Only the holder of the output may call
        it.

        Raises:
            NameTaken: another run is writing to the output. Nothing has changed.
        """
        if self._delta is not None:
            return self._delta.compact()
        if not self.has_index:
            return None
        return compact_files(self._spark, self.output, check=self.check_held)

    def begin(self) -> None:
        """Create an empty output that can be read. Only JSON lines cannot store the columns of an empty output."""
        if self._delta is not None:
            self._delta.create(self._schema)
            return
        keys = [F.lit("{}").alias(_KEY)]
        nulls = [F.lit(None).cast(type).alias(name) for name, type in self._columns()]
        self._append(self._spark.range(1).select(*keys, *nulls).limit(0), 0)

    def _columns(self) -> list[tuple[str, T.DataType]]:
        """Return our columns and their types, without prefix."""
        value = [] if self._value is None else [(VALUE, self._value)]
        return [*((field.name, field.dataType) for field in COLUMNS), *value]


@cache
def _arrow_type(type: T.DataType) -> pa.DataType:
    return arrow_schema(T.StructType([T.StructField(VALUE, type)])).field(VALUE).type


def _distinct(reader: DataFrameReader) -> DataFrameReader:
    """Return a reader whose reads differ from all others. Otherwise Spark treats two reads of a folder as one."""
    return reader.option("penstockRead", uuid4().hex)


def latest(rows: DataFrame) -> DataFrame:
    """Return the newest row of each key."""
    prefix = PREFIX if f"{PREFIX}job_id" in rows.columns else ""
    newest = F.max_by(F.struct("*"), F.struct(f"{prefix}commit", f"{prefix}finished_at")).alias("row")
    return rows.groupBy(f"{prefix}job_id").agg(newest).select("row.*")


def unprefixed(name: str) -> Column:
    """Return one of our columns without its prefix."""
    return F.col(f"{PREFIX}{name}").alias(name)


def _check_key(output: str, key: T.StructType, rows: DataFrame) -> None:
    for field in key:
        if field.name not in rows.columns:
            raise InvalidInput(
                f"{output} has results for another key: it has no column {field.name!r}. Use the key that it was "
                "created with, or choose another output."
            )
        was = rows.schema[field.name].dataType
        # A file does not say that members of arrays and structs are never null, so compare the type names.
        if was.simpleString() != field.dataType.simpleString():
            raise InvalidInput(
                f"{output} has the key {field.name!r} as {was.simpleString()}, but the table has it as "
                f"{field.dataType.simpleString()}. Cast the column, or choose another output."
            )


def _check_delta_columns(output: str, rows: DataFrame, schema: T.StructType) -> None:
    """Compare the columns of a Delta table, which are fixed, with those of the new rows."""
    for field in schema:
        was = rows.schema[field.name].dataType if field.name in rows.columns else None
        if was is None or was.simpleString() != field.dataType.simpleString():
            before = "does not have it" if was is None else f"has it as {was.simpleString()}"
            raise InvalidInput(
                f"the task's results now need the column {field.name!r} as {field.dataType.simpleString()}, but the "
                f"Delta table {output} {before}. Choose another output, or restore the former hint."
            )


def _former_type(was: T.DataType, now: T.DataType) -> T.DataType:
    """Return the result type, with text for bytes where the output has text. Earlier versions wrote bytes as text."""
    match was, now:
        case T.StringType(), T.BinaryType():
            return was
        case T.ArrayType(), T.ArrayType():
            return T.ArrayType(_former_type(was.elementType, now.elementType))
        case T.MapType(), T.MapType():
            return T.MapType(now.keyType, _former_type(was.valueType, now.valueType))
        case T.StructType(), T.StructType():
            former = {field.name: field.dataType for field in was}
            return T.StructType(
                [T.StructField(f.name, _former_type(former.get(f.name, f.dataType), f.dataType)) for f in now]
            )
        case _:
            return now


def _check_value(output: str, was: T.DataType, now: T.DataType, path: str) -> None:
    """Allow new members, but no changes of type."""
    if isinstance(was, T.StructType) and isinstance(now, T.StructType):
        for field in was:
            if field.name in now.fieldNames():
                _check_value(output, field.dataType, now[field.name].dataType, f"{path}.{field.name}")
        return
    if was != now:
        raise InvalidInput(
            f"{output} has {path} as {was.simpleString()}, but the task's hints now say {now.simpleString()}. Only "
            "members can be added: choose another output, or restore the former hint."
        )
