"""An index of settled rows, beside an output at a path. It holds only hashes.

A run skips rows that are in the index, without Python and without the ledger. The index is a cache: rows that are not
in it are looked up in the ledger. It belongs to the files it was made from. A read leaves out jobs that also occur in
newer files; if one of the index's files is gone, the index is invalid.

Spark computes the hashes. Rows with equal hashes have the same key and fingerprint. The converse does not hold: a map
in another order, or a long in place of an integer, has another hash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyspark.sql.types as T
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.spark.compaction import Moved
from penstock.spark.processing.snapshot import FINGERPRINTS
from penstock.spark.publishing import list_folder, read_text, remove_folder, write_text
from penstock.spark.rows import Layout
from penstock.spark.schemas import quoted

_PLAIN: Final = (
    T.BooleanType,
    T.ByteType,
    T.ShortType,
    T.IntegerType,
    T.LongType,
    T.DecimalType,
    T.BinaryType,
    T.DateType,
    T.TimestampType,
    T.TimestampNTZType,
    T.DayTimeIntervalType,
)
_SALTS: Final = ("first", "second")
_DIGITS: Final = 16


def row_hashes(schema: T.StructType, layout: Layout) -> tuple[Column, Column] | None:
    """Return two 64-bit hashes for each row of a table; ``None`` if Spark cannot hash one of its columns."""
    names = (*layout.key, *sorted(layout.payload))
    types = [schema[name].dataType.json() for name in names]
    task = (layout.namespace, layout.task, layout.whole, layout.options.version)
    columns = (len(layout.key), names, types)
    identity = msgspec.json.encode((FINGERPRINTS, *task, *columns)).decode()
    try:
        parts = [part for name in names for part in _parts(F.col(quoted(name)), schema[name].dataType)]
    except TypeError:
        return None
    first, second = (F.xxhash64(F.lit(f"{salt} {identity}"), *parts) for salt in _SALTS)
    return first, second


def job_hash(job_id: Column) -> Column:
    """Return the first 64 bits of a row's job id, which is a hash itself."""
    return F.conv(F.substring(job_id, 1, _DIGITS), 16, -10).cast("long")


def _parts(value: Column, type: T.DataType) -> list[Column]:
    """Return columns that Spark can hash, and that differ whenever two values do. Spark's hash ignores nulls, the sign
    of zero and the end of an array, so these become separate columns.

    Raises:
        TypeError: Spark cannot hash the type.
    """
    match type:
        case T.StringType():
            # As binary, because some collations treat different texts as equal.
            return [value.isNull(), value.cast("binary")]
        case T.FloatType() | T.DoubleType():
            return [value.isNull(), value, F.when(value == 0, value.cast("string"))]
        case T.StructType():
            members = [_parts(value.getField(field.name), field.dataType) for field in type]
            return [value.isNull(), *(part for member in members for part in member)]
        case T.ArrayType():
            inner = type.elementType
            items = F.transform(value, lambda item: F.struct(*_parts(item, inner)))
            return [value.isNull(), F.size(value), items]
        case T.MapType():
            fields = [T.StructField("key", type.keyType), T.StructField("value", type.valueType)]
            return _parts(F.map_entries(value), T.ArrayType(T.StructType(fields)))
        case T.NullType():
            return [value.isNull()]
        case _ if isinstance(type, _PLAIN):
            return [value.isNull(), value]
        case _:
            raise TypeError(type.simpleString())


# The index.


# Spark ignores names that begin with an underscore.
_FOLDER: Final = "_penstock_index"
_CONTENTS: Final = "contents.json"
_SCHEME: Final = 1
# An index with this many parts is merged into one part. A small index always is.
_MAX_PARTS: Final = 16
_SMALL: Final = 20_000
COMPLETED: Final = 1
FAILED: Final = 2

_LONG: Final = T.LongType()
SETTLED: Final = T.StructType(
    [
        T.StructField("first", _LONG),
        T.StructField("second", _LONG),
        T.StructField("job", _LONG),
        T.StructField("settled", T.ByteType()),
        # Positions are dense and begin at 0, for bitmaps.
        T.StructField("position", _LONG),
    ]
)
_ARROW: Final = pa.schema(
    [("first", pa.int64()), ("second", pa.int64()), ("job", pa.int64()), ("settled", pa.int8())]
)


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the index: ``parts`` with up to ``keys`` rows, made from ``files`` of the ledger."""

    scheme: int = _SCHEME
    files: list[str] = []
    parts: list[str] = []
    keys: int = 0


class SettledIndex:
    """The current index of one output. ``files`` returns the files of the ledger; ``newer`` are those that the index
    does not cover."""

    def __init__(self, spark: SparkSession, output: str, files: Callable[[], list[str] | None]) -> None:
        self._spark = spark
        self._files = files
        self._folder = f"{output.rstrip('/')}/{_FOLDER}"
        self.contents = Contents()
        self.newer: list[str] = []
        names = files()
        self.is_possible = names is not None
        if names:
            contents = _read(spark, f"{self._folder}/{_CONTENTS}")
            if contents is not None and set(contents.files) <= set(names):
                self.contents = contents
            self.newer = sorted(set(names) - set(self.contents.files))

    def files_now(self) -> list[str]:
        """Return the current files of the ledger that the index does not cover."""
        return sorted(set(self._files() or ()) - set(self.contents.files))

    def read(self, changed: DataFrame | None = None) -> DataFrame | None:
        """Return the entries as ``SETTLED``, without the jobs in ``changed``; ``None`` if there are none."""
        if not self.contents.keys:
            return None
        paths = [f"{self._folder}/{part}" for part in self.contents.parts]
        entries = self._spark.read.schema(SETTLED).parquet(*paths)
        if changed is None:
            return entries
        jobs = changed.select(job_hash(F.col("job_id")).alias("job"))
        return entries.join(jobs, "job", "left_anti").select(*SETTLED.fieldNames())

    def add(self, entries: DataFrame, count: int, *, changed: DataFrame | None) -> None:
        """Add ``entries``, and drop former entries of the jobs in ``changed``. The index then covers the current files
        of the ledger.

        Parts never change, and the list of parts is written last, so a kill leaves the index as it was.
        """
        before = self.contents
        part = uuid4().hex
        is_rewritten = changed is not None or len(before.parts) >= _MAX_PARTS or before.keys < _SMALL
        former = self.read(changed) if is_rewritten else None
        rows = entries if former is None else former.drop("position").unionByName(entries)
        if count or former is not None:
            start = 0 if is_rewritten else before.keys
            # One partition, so that the positions are dense.
            numbered = rows.coalesce(1).withColumn("position", F.monotonically_increasing_id() + start)
            numbered.write.parquet(f"{self._folder}/{part}")
        else:
            part = ""
        self._commit(part, keys=before.keys + count, is_rewritten=is_rewritten)

    def note_moved(self, moved: Moved) -> None:
        """Update the file names after a compaction. If the run is killed before, the next one rebuilds the index."""
        before = self.contents
        if not set(moved.gone) <= set(before.files):
            return
        files = sorted((set(before.files) - set(moved.gone)) | set(moved.made))
        self.contents = msgspec.structs.replace(before, files=files)
        self._write()

    def _write(self) -> None:
        text = msgspec.json.encode(self.contents).decode()
        write_text(self._spark, f"{self._folder}/{_CONTENTS}", text)

    def _commit(self, part: str, *, keys: int, is_rewritten: bool) -> None:
        before = self.contents
        parts = [*([] if is_rewritten else before.parts), *([part] if part else [])]
        self.contents = Contents(files=self._files() or [], parts=parts, keys=keys if parts else 0)
        self.newer = []
        self._write()
        # A concurrent dry run may still read the former parts.
        needed = {*before.parts, *parts, _CONTENTS}
        for name in set(list_folder(self._spark, self._folder) or ()) - needed:
            remove_folder(self._spark, f"{self._folder}/{name}")


def entries_from(spark: SparkSession, rows: Sequence[tuple[int, int, str, int]]) -> DataFrame:
    """Return entries for ``SettledIndex.add``. ``rows`` have two hashes, a job id, and ``COMPLETED`` or ``FAILED``."""
    columns = {
        "first": [row[0] for row in rows],
        "second": [row[1] for row in rows],
        "job": [_signed(row[2]) for row in rows],
        "settled": [row[3] for row in rows],
    }
    return spark.createDataFrame(pa.table(columns, schema=_ARROW))


def _signed(job_id: str) -> int:
    """Return the hash of a job id, as ``job_hash`` computes it."""
    number = int(job_id[:16], 16)
    return number - (1 << 64) if number >= 1 << 63 else number


def _read(spark: SparkSession, path: str) -> Contents | None:
    text = read_text(spark, path)
    if text is None:
        return None
    try:
        contents = msgspec.json.decode(text, type=Contents)
    except msgspec.MsgspecError:
        return None
    return contents if contents.scheme == _SCHEME else None
