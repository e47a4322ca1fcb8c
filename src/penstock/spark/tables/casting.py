"""Types for columns that have none, or others than are wanted: those that the task's hints say, or that were given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import AtomicType, BinaryType, DataType, StructType

from penstock.errors import InvalidInput
from penstock.spark.tables.hints import value_type
from penstock.task import Task

__all__ = ["cast", "hinted_types"]


def hinted_types(task: Task[..., Any], columns: list[str]) -> dict[str, DataType]:
    """The types that the task's hints say of these columns: of its parameters, or, if it takes the row as a whole, of
    the members of that. Only plain ones, that a text can be made into."""
    parameters = {name: value_type(field.type) for name, field in task.signature.fields.items()}
    if len(parameters) == 1 and not parameters.keys() & set(columns):
        (row,) = parameters.values()
        parameters = {field.name: field.dataType for field in row} if isinstance(row, StructType) else {}
    # Text for bytes is Base64, which the task decodes.
    return {
        name: type
        for name, type in parameters.items()
        if name in columns and isinstance(type, AtomicType) and not isinstance(type, BinaryType)
    }


def cast(df: DataFrame, types: Mapping[str, DataType]) -> DataFrame:
    """The table with these columns as these types. Reads it once, to see that every value can be.

    Raises:
        InvalidInput: a column that is not there, or a value that cannot be of its type.
    """
    for name in types:
        if name not in df.columns:
            raise InvalidInput(f"the table has no column {name!r}. It has: {', '.join(df.columns)}.")
    todo = {name: type for name, type in types.items() if df.schema[name].dataType != type}
    if not todo:
        return df
    made = {name: F.col(f"`{name}`").try_cast(type) for name, type in todo.items()}
    bad = {name: F.col(f"`{name}`").isNotNull() & value.isNull() for name, value in made.items()}
    found = df.agg(
        *(F.count(F.when(wrong, 1)).alias(f"count {name}") for name, wrong in bad.items()),
        *(F.min(F.when(wrong, F.col(f"`{name}`"))).alias(f"least {name}") for name, wrong in bad.items()),
    ).first()
    assert found is not None
    for name, type in todo.items():
        if count := found[f"count {name}"]:
            raise InvalidInput(
                f"column {name!r} is to be {type.simpleString()}, and {count} rows have something else there, such as "
                f"{found[f'least {name}']!r}. Mend them, or give the column another type. Nothing was enqueued."
            )
    return df.withColumns(made)
