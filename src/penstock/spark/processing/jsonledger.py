"""A ledger in JSON lines. They say nothing of types: these are given when they are read."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    AtomicType,
    BooleanType,
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
)

from penstock.errors import InvalidInput
from penstock.spark.uncached_read import fresh_path

# A column that is null everywhere must be there all the same.
WRITTEN_WITH: Final = {"ignoreNullFields": "false"}
_TORN: Final = "_corrupt_record"
_WHOLE: Final = (ByteType, ShortType, IntegerType, LongType)
_BROKEN: Final = (FloatType, DoubleType, DecimalType)


def read_json(spark: SparkSession, path: str, schema: StructType) -> DataFrame:
    """The rows at ``path``, typed. Raises ``AnalysisException`` if there is nothing."""
    return spark.read.schema(schema).json(path)


def check_json(spark: SparkSession, path: str, schema: StructType, *, key: StructType, optional: str) -> None:
    """Check that the rows there, if any, are of this schema, as far as JSON can tell. The column ``optional`` may be
    missing.

    Raises:
        InvalidInput: they have other columns, keys of another type, or values that do not fit.
    """
    inferred = fresh_path(spark, path, spark.read.json)
    # A dry run, or one that came to no commit, leaves a folder without rows.
    if inferred is None:
        return
    found = inferred.schema
    # Of an object that is empty everywhere Spark says nothing.
    plain = [*key.fieldNames(), *(field.name for field in schema if isinstance(field.dataType, AtomicType))]
    missing = [name for name in plain if name not in found.fieldNames() and name != optional]
    if missing:
        raise InvalidInput(
            f"{path} holds something else than results of process by this key: it has no column {missing[0]!r}. Its "
            f"columns are: {', '.join(found.fieldNames())}. Give another output."
        )
    for field in key:
        was = found[field.name].dataType
        if _kind(was) != _kind(field.dataType):
            raise InvalidInput(
                f"{path} has the key {field.name!r} as {was.simpleString()}, and the table as "
                f"{field.dataType.simpleString()}. Cast the column, or give another output."
            )
    typed = read_json(spark, path, StructType([*schema.fields]).add(_TORN, StringType()))
    # Spark refuses to look at this column alone.
    torn = typed.select(_TORN, schema.fieldNames()[-1]).where(F.col(_TORN).isNotNull()).first()
    if torn is not None:
        raise InvalidInput(
            f"{path} has rows that do not fit the task's hints, such as {torn[0]:.200} Give another output, or the "
            "task its former hint."
        )


def _kind(type: DataType) -> str:
    """What a value of this type is in JSON."""
    if isinstance(type, _WHOLE):
        return "whole number"
    if isinstance(type, _BROKEN):
        return "number"
    if isinstance(type, BooleanType):
        return "truth"
    return type.typeName() if type.typeName() in ("struct", "array", "map") else "text"
