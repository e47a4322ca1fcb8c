"""Types of a task's parameters and results, of table columns, and of Arrow data that Spark must convert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec.inspect as known
import pyarrow as pa
import pyarrow.types as kinds
import pyspark.sql.types as T
from msgspec.structs import FieldInfo
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from penstock.client.task import Task
from penstock.errors import InvalidInput
from penstock.spark.columntypes import OBJECTS, kind_of, spark_type

_MAX_PRECISION: Final = 38


def plain_type(type: pa.DataType) -> pa.DataType:
    """Return the nearest type that Spark supports, at every depth; the type itself if Spark supports it."""
    if isinstance(type, pa.BaseExtensionType):
        return plain_type(type.storage_type)
    if kinds.is_dictionary(type) or kinds.is_run_end_encoded(type):
        return plain_type(type.value_type)
    if kinds.is_map(type):
        return pa.map_(plain_type(type.key_type), plain_type(type.item_type))
    if _is_list(type):
        return pa.list_(plain_type(type.value_type))
    if kinds.is_struct(type):
        return pa.struct([field.with_type(plain_type(field.type)) for field in type])
    return _plain_number(type) or _plain_scalar(type)


def _is_list(type: pa.DataType) -> bool:
    return bool(
        kinds.is_list(type)
        or kinds.is_large_list(type)
        or kinds.is_fixed_size_list(type)
        or kinds.is_list_view(type)
        or kinds.is_large_list_view(type)
    )


_NUMBERS: Final = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
}


def _plain_number(type: pa.DataType) -> pa.DataType | None:
    if kinds.is_decimal(type):
        # Spark has no negative scale, so widen the precision instead.
        scale = max(type.scale, 0)
        return pa.decimal128(min(type.precision + max(-type.scale, 0), _MAX_PRECISION), scale)
    return _NUMBERS.get(type)


def _plain_scalar(type: pa.DataType) -> pa.DataType:
    if kinds.is_timestamp(type):
        return pa.timestamp("us", type.tz)
    if kinds.is_duration(type):
        return pa.duration("us")
    if kinds.is_time(type):
        return pa.time64("us")
    if kinds.is_date(type):
        return pa.date32()
    if kinds.is_large_string(type) or kinds.is_string_view(type):
        return pa.string()
    if kinds.is_large_binary(type) or kinds.is_binary_view(type) or kinds.is_fixed_size_binary(type):
        return pa.binary()
    return type


# Type hints of a task, compared with the types of a table.


class Fit(NamedTuple):
    """The columns of a payload; with ``whole``, as one object under that name."""

    columns: tuple[str, ...]
    whole: str = ""


def fit(task: Task[..., Any], schema: T.StructType, columns: Sequence[str] | None = None) -> Fit:
    """Return the columns that become arguments of the task: ``columns``, or those that are parameters. If the task
    has a single parameter, which takes an object and has the name of no column, it receives the whole row.

    Raises:
        InvalidInput: a parameter has no column, a column has no parameter, or their types do not match.
    """
    parameters = task.signature.fields
    whole = _takes_row(parameters, schema)
    if whole:
        return Fit(tuple(columns or schema.fieldNames()), whole)
    chosen = (
        tuple(name for name in schema.fieldNames() if name in parameters)
        if columns is None
        else tuple(columns)
    )
    for name, parameter in parameters.items():
        if parameter.required and name not in chosen:
            raise InvalidInput(
                f"task {task.name!r} needs {name!r}, but the table has no such column. Its columns are: "
                f"{', '.join(schema.fieldNames())}. Rename one (df.withColumnRenamed), or give the parameter a default."
            )
    for name in chosen:
        if name not in parameters:
            raise InvalidInput(
                f"column {name!r} is not a parameter of task {task.name!r}, which has: {', '.join(parameters)}. "
                "Remove it from payload."
            )
        _check_type(task, parameters[name], schema[name].dataType)
    return Fit(chosen)


def value_type(hint: Any) -> T.DataType | None:
    """Return the column type for results with this return hint; ``None`` if the hint does not determine it."""
    info = _info(hint)
    return None if info is None else _spark_type(info)


def _takes_row(parameters: Mapping[str, FieldInfo], schema: T.StructType) -> str:
    """Return the name of the parameter that takes the whole row, or ""."""
    if len(parameters) != 1:
        return ""
    (name, parameter), *_ = parameters.items()
    if name in schema.fieldNames():
        return ""
    info = _info(parameter.type)
    return name if info is None or isinstance(info, (known.AnyType, known.CustomType, *OBJECTS)) else ""


def _info(hint: Any) -> known.Type | None:
    try:
        return known.type_info(hint)
    except (TypeError, NameError):
        return None


def _check_type(task: Task[..., Any], parameter: FieldInfo, type: T.DataType) -> None:
    info = _info(parameter.type)
    if info is not None and not _fits(type, info):
        name, hint = parameter.encode_name, parameter.type
        raise InvalidInput(
            f"column {name!r} has type {type.simpleString()}, but task {task.name!r} takes {name}: "
            f"{getattr(hint, '__name__', hint)}. Cast the column (df.withColumn), or change the hint."
        )


def _fits(type: T.DataType, info: known.Type) -> bool:
    if isinstance(info, (known.AnyType, known.CustomType, known.RawType)):
        return True
    if isinstance(info, known.UnionType):
        return any(_fits(type, member) for member in info.types)
    if isinstance(info, known.Metadata):
        return _fits(type, info.type)
    kind = kind_of(type)
    return kind is None or not kind.hints or isinstance(info, kind.hints)


def _spark_type(info: known.Type) -> T.DataType | None:
    match info:
        case known.EnumType() | known.LiteralType():
            return _of_values(info)
        case known.ListType() | known.SetType() | known.FrozenSetType() | known.VarTupleType():
            return _array(info.item_type)
        case known.DictType():
            return _map(info)
        case known.StructType() | known.DataclassType() | known.TypedDictType():
            return _struct(info)
        case known.UnionType():
            return _optional(info)
        case known.Metadata():
            return _spark_type(info.type)
        case _:
            return spark_type(info)


def _of_values(info: known.EnumType | known.LiteralType) -> T.DataType | None:
    values = [member.value for member in info.cls] if isinstance(info, known.EnumType) else list(info.values)
    kinds = {type(value) for value in values}
    if kinds == {str}:
        return T.StringType()
    return T.LongType() if kinds == {int} else None


def _array(item: known.Type) -> T.DataType | None:
    element = _spark_type(item)
    return None if element is None else T.ArrayType(element)


def _map(info: known.DictType) -> T.DataType | None:
    key, value = _spark_type(info.key_type), _spark_type(info.value_type)
    kind = None if key is None else kind_of(key)
    if key is None or value is None or kind is None or not kind.is_map_key:
        return None
    return T.MapType(key, value)


def _struct(info: known.StructType | known.DataclassType | known.TypedDictType) -> T.DataType | None:
    if isinstance(info, known.StructType) and info.array_like:
        return None
    types = {field.encode_name: _spark_type(field.type) for field in info.fields}
    if not types or None in types.values():
        return None
    return T.StructType([T.StructField(name, type) for name, type in types.items() if type is not None])


def _optional(info: known.UnionType) -> T.DataType | None:
    members = [member for member in info.types if not isinstance(member, known.NoneType)]
    return _spark_type(members[0]) if len(members) == 1 else None


# Casts of columns to the types in the hints or in options.


def hinted_types(task: Task[..., Any], columns: list[str]) -> dict[str, T.DataType]:
    """Return the types of these columns according to the hints of the task's parameters or, if it takes whole rows, of
    the members of a row. Include only scalar types that text can be cast to."""
    parameters = {name: value_type(field.type) for name, field in task.signature.fields.items()}
    if len(parameters) == 1 and not parameters.keys() & set(columns):
        (row,) = parameters.values()
        parameters = {field.name: field.dataType for field in row} if isinstance(row, T.StructType) else {}
    # Text for bytes is Base64, which the task decodes.
    return {
        name: type
        for name, type in parameters.items()
        if name in columns and isinstance(type, T.AtomicType) and not isinstance(type, T.BinaryType)
    }


def cast(df: DataFrame, types: Mapping[str, T.DataType]) -> DataFrame:
    """Return the table with columns cast to these types. First read it once to check every value.

    Raises:
        InvalidInput: a column does not exist, or a value does not fit its type.
    """
    for name in types:
        if name not in df.columns:
            raise InvalidInput(f"the table has no column {name!r}. Its columns are: {', '.join(df.columns)}.")
    todo = {name: type for name, type in types.items() if df.schema[name].dataType != type}
    if not todo:
        return df
    made = {name: F.col(f"`{name}`").try_cast(type) for name, type in todo.items()}
    bad = {name: F.col(f"`{name}`").isNotNull() & value.isNull() for name, value in made.items()}
    checks = df.agg(
        *(F.count(F.when(wrong, 1)).alias(f"count {name}") for name, wrong in bad.items()),
        *(F.min(F.when(wrong, F.col(f"`{name}`"))).alias(f"least {name}") for name, wrong in bad.items()),
    ).first()
    assert checks is not None
    for name, type in todo.items():
        if count := checks[f"count {name}"]:
            raise InvalidInput(
                f"column {name!r} must be {type.simpleString()}, but {count} rows have other values, such as "
                f"{checks[f'least {name}']!r}. Fix them, or choose another type for the column. Nothing was enqueued."
            )
    return df.withColumns(made)
