"""A task's type hints and the types of a table: whether the one fits the other, and what a result's column is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec.inspect as known
from msgspec.structs import FieldInfo
from pyspark.sql.types import ArrayType, DataType, LongType, MapType, StringType, StructField, StructType

from penstock.errors import InvalidInput
from penstock.spark.columntypes import OBJECTS, kind_of, spark_type
from penstock.task import Task

__all__ = ["Fit", "fit", "value_type"]


class Fit(NamedTuple):
    """The columns that make a payload; with ``whole``, as an object under that name."""

    columns: tuple[str, ...]
    whole: str = ""


def fit(task: Task[..., Any], schema: StructType, columns: Sequence[str] | None = None) -> Fit:
    """How rows become arguments of the task: ``columns``, or else those that are parameters of it; or, if it has one
    parameter that takes an object and no column is called that, the row as a whole.

    Raises:
        InvalidInput: a parameter without a column, a column without a parameter, or types that cannot meet.
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
                f"task {task.name!r} needs {name!r}, and there is no such column. The columns are: "
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


def value_type(hint: Any) -> DataType | None:
    """The type of the column for results of a task with this return hint; ``None`` if it does not say."""
    info = _info(hint)
    return None if info is None else _spark_type(info)


def _takes_row(parameters: Mapping[str, FieldInfo], schema: StructType) -> str:
    """The name of the one parameter that the whole row goes to, or nothing."""
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


def _check_type(task: Task[..., Any], parameter: FieldInfo, type: DataType) -> None:
    info = _info(parameter.type)
    if info is not None and not _fits(type, info):
        name, hint = parameter.encode_name, parameter.type
        raise InvalidInput(
            f"column {name!r} is of type {type.simpleString()}, and task {task.name!r} takes {name}: "
            f"{getattr(hint, '__name__', hint)}. Cast the column (df.withColumn), or change the hint."
        )


def _fits(type: DataType, info: known.Type) -> bool:
    if isinstance(info, (known.AnyType, known.CustomType, known.RawType)):
        return True
    if isinstance(info, known.UnionType):
        return any(_fits(type, member) for member in info.types)
    if isinstance(info, known.Metadata):
        return _fits(type, info.type)
    kind = kind_of(type)
    return kind is None or not kind.hints or isinstance(info, kind.hints)


def _spark_type(info: known.Type) -> DataType | None:
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


def _of_values(info: known.EnumType | known.LiteralType) -> DataType | None:
    values = [member.value for member in info.cls] if isinstance(info, known.EnumType) else list(info.values)
    kinds = {type(value) for value in values}
    if kinds == {str}:
        return StringType()
    return LongType() if kinds == {int} else None


def _array(item: known.Type) -> DataType | None:
    element = _spark_type(item)
    return None if element is None else ArrayType(element)


def _map(info: known.DictType) -> DataType | None:
    key, value = _spark_type(info.key_type), _spark_type(info.value_type)
    kind = None if key is None else kind_of(key)
    if key is None or value is None or kind is None or not kind.is_map_key:
        return None
    return MapType(key, value)


def _struct(info: known.StructType | known.DataclassType | known.TypedDictType) -> DataType | None:
    if isinstance(info, known.StructType) and info.array_like:
        return None
    types = {field.encode_name: _spark_type(field.type) for field in info.fields}
    if not types or None in types.values():
        return None
    return StructType([StructField(name, type) for name, type in types.items() if type is not None])


def _optional(info: known.UnionType) -> DataType | None:
    members = [member for member in info.types if not isinstance(member, known.NoneType)]
    return _spark_type(members[0]) if len(members) == 1 else None
