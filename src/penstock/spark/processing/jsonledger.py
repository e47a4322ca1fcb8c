"""A ledger in JSON lines. JSON has no types, so the reader supplies them."""

from __future__ import annotations

from typing import Final

import pyspark.sql.types as T
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from penstock.errors import InvalidInput
from penstock.spark.publishing import fresh_path

# Keep columns that are null everywhere. By default, Spark cuts times to milliseconds, and old time zones
# to minutes.
JSON_OPTIONS: Final = {
    "ignoreNullFields": "false",
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
_TORN: Final = "_corrupt_record"
_WHOLE: Final = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
_BROKEN: Final = (T.FloatType, T.DoubleType, T.DecimalType)


def check_json(
    spark: SparkSession, path: str, schema: T.StructType, *, key: T.StructType, optional: str
) -> None:
    """Check that existing rows match the schema, as far as JSON can tell. The column ``optional`` may be missing.

    Raises:
        InvalidInput: the rows have other columns, keys of another type, or values that do not fit.
    """
    inferred = fresh_path(spark, path, spark.read.json)
    # A dry run leaves an empty folder, a run without rows an empty file.
    if inferred is None or not inferred.columns:
        return
    columns = inferred.schema
    # Spark does not infer a column whose objects are all empty.
    plain = [*key.fieldNames(), *(field.name for field in schema if isinstance(field.dataType, T.AtomicType))]
    missing = [name for name in plain if name not in columns.fieldNames() and name != optional]
    if missing:
        raise InvalidInput(
            f"{path} does not hold results of process with this key: it has no column {missing[0]!r}. Its columns "
            f"are: {', '.join(columns.fieldNames())}. Choose another output."
        )
    for field in key:
        was = columns[field.name].dataType
        if _kind(was) != _kind(field.dataType):
            raise InvalidInput(
                f"{path} has the key {field.name!r} as {was.simpleString()}, but the table has it as "
                f"{field.dataType.simpleString()}. Cast the column, or choose another output."
            )
    typed = spark.read.schema(T.StructType([*schema.fields]).add(_TORN, T.StringType())).json(path)
    # Spark cannot select this column alone.
    torn = typed.select(_TORN, schema.fieldNames()[-1]).where(F.col(_TORN).isNotNull()).first()
    if torn is not None:
        raise InvalidInput(
            f"{path} has rows that do not fit the task's hints, such as {torn[0]:.200} Choose another output, or "
            "restore the former hint."
        )


def _kind(type: T.DataType) -> str:
    """Return the JSON type of values of this type."""
    if isinstance(type, _WHOLE):
        return "whole number"
    if isinstance(type, _BROKEN):
        return "number"
    if isinstance(type, T.BooleanType):
        return "truth"
    return type.typeName() if type.typeName() in ("struct", "array", "map") else "text"
