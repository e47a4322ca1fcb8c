"""Hashes of rows that Spark computes itself. Rows with equal hashes have the same key and the same fingerprint.

The converse does not hold: a map in another order, or an integer that has become a long, gives another hash.
"""

from __future__ import annotations

from typing import Final

import msgspec
import pyspark.sql.types as T
from pyspark.sql import Column
from pyspark.sql import functions as F

from penstock.spark.rows import Layout
from penstock.spark.schemas import quoted
from penstock.spark.tables.snapshot import FINGERPRINTS

__all__ = ["job_hash", "row_hashes"]

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
    """Return two hashes of 64 bits for each row of a table; ``None`` if it has a column that Spark cannot hash."""
    names = (*layout.key, *sorted(layout.payload))
    types = [schema[name].dataType.json() for name in names]
    version = layout.options.version
    said = (FINGERPRINTS, layout.namespace, layout.task, layout.whole, version, len(layout.key), names, types)
    identity = msgspec.json.encode(said).decode()
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
    """Return columns that Spark can hash and that differ whenever two values do. Spark passes over nulls, takes
    -0.0 for 0.0 and does not see where an array ends, so these are columns of their own.

    Raises:
        TypeError: Spark cannot hash the type.
    """
    match type:
        case T.StringType():
            # Not as text: some collations take different texts for equal.
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
