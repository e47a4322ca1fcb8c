"""Column types: which of them a job can hold, which task parameters accept them, and the types of result columns.

``KINDS`` is the only list. The checks of tables, the checks of task hints and the types of result columns derive from
it. ``cells`` converts the values. docs/spark.md shows the list to users.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec.inspect as known
import pyspark.sql.types as T

from penstock.errors import InvalidInput

_Hints = tuple[type[known.Type], ...]


class ColumnKind(NamedTuple):
    """A kind of column. ``hints`` are the parameter types that accept it; empty means all. ``result`` is the column
    type for results with one of the hints in ``results``."""

    name: str
    types: tuple[type[T.DataType], ...]
    hints: _Hints = ()
    result: T.DataType | None = None
    results: _Hints = ()
    is_key: bool = False
    is_map_key: bool = False


_BYTES: Final = (known.BytesType, known.ByteArrayType, known.MemoryViewType)
_ARRAYS: Final = (
    known.ListType,
    known.SetType,
    known.FrozenSetType,
    known.VarTupleType,
    known.TupleType,
    known.NamedTupleType,
    known.CollectionType,
)
OBJECTS: Final = (known.DictType, known.StructType, known.DataclassType, known.TypedDictType)
_FROM_TEXT: Final = (
    known.StrType,
    known.EnumType,
    known.LiteralType,
    known.UUIDType,
    known.DateTimeType,
    known.DateType,
    known.TimeType,
    known.TimeDeltaType,
    known.DecimalType,
    *_BYTES,
)
# Durations and times of day become text, because neither Delta Lake nor older Spark releases can store them.
_TEXT_RESULTS: Final = (known.StrType, known.UUIDType, known.TimeType, known.TimeDeltaType)

_INTEGERS: Final = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
_FOR_INTEGERS: Final = (known.IntType, known.FloatType, known.DecimalType, known.EnumType, known.LiteralType)
_TEXTS: Final = (T.StringType, T.VarcharType, T.CharType)
# Requires pyspark 4.1.
_TIMES: Final = (T.TimeType,) if hasattr(T, "TimeType") else ()


def _scalar(
    name: str, types: tuple[type[T.DataType], ...], hints: _Hints, result: T.DataType, results: _Hints = ()
) -> ColumnKind:
    """Return a kind whose values can be keys of rows and of maps. ``results`` defaults to the first hint."""
    return ColumnKind(name, types, hints, result, results or hints[:1], is_key=True, is_map_key=True)


KINDS: Final = (
    ColumnKind("void", (T.NullType,)),
    ColumnKind(
        "boolean",
        (T.BooleanType,),
        (known.BoolType, known.LiteralType),
        T.BooleanType(),
        (known.BoolType,),
        is_key=True,
    ),
    _scalar("tinyint, smallint, int, bigint", _INTEGERS, _FOR_INTEGERS, T.LongType()),
    _scalar(
        "float, double", (T.FloatType, T.DoubleType), (known.FloatType, known.DecimalType), T.DoubleType()
    ),
    _scalar("decimal", (T.DecimalType,), (known.DecimalType, known.StrType), T.DecimalType(38, 18)),
    _scalar("string, char, varchar", _TEXTS, _FROM_TEXT, T.StringType(), _TEXT_RESULTS),
    _scalar("date", (T.DateType,), (known.DateType, known.StrType), T.DateType()),
    _scalar(
        "timestamp, timestamp_ntz",
        (T.TimestampType, T.TimestampNTZType),
        (known.DateTimeType, known.StrType),
        T.TimestampType(),
    ),
    ColumnKind("time", _TIMES, (known.TimeType, known.StrType), is_map_key=True),
    ColumnKind(
        "interval day to second",
        (T.DayTimeIntervalType,),
        (known.TimeDeltaType, known.StrType),
        is_map_key=True,
    ),
    _scalar("binary", (T.BinaryType,), (*_BYTES, known.StrType), T.BinaryType(), _BYTES),
    ColumnKind("array", (T.ArrayType,), _ARRAYS, is_key=True),
    ColumnKind("struct", (T.StructType,), OBJECTS, is_key=True),
    ColumnKind("map", (T.MapType,), OBJECTS),
    ColumnKind("variant", (T.VariantType,)),
)

_BY_TYPE: Final = {type: kind for kind in KINDS for type in kind.types}
_BY_HINT: Final = {hint: kind.result for kind in KINDS for hint in kind.results}


def kind_of(type: T.DataType) -> ColumnKind | None:
    """Return the kind of a type, or ``None`` if a job cannot hold its values."""
    return _BY_TYPE.get(type.__class__)


def spark_type(hint: known.Type) -> T.DataType | None:
    """Return the column type for results with a scalar hint, or ``None``."""
    return _BY_HINT.get(hint.__class__)


def check_columns(
    schema: T.StructType, columns: Sequence[str], *, key: Sequence[str] = (), ignore_case: bool = False
) -> None:
    """Check that a job can hold the values of these columns, and that ``key`` columns can identify a row.
    Set ``ignore_case`` if Spark does not distinguish ``a`` and ``A``.

    Raises:
        InvalidInput: a column, or a part of one, has an unsupported type or a duplicate name.
    """
    for name in dict.fromkeys((*key, *columns)):
        _check_name(schema, name, ignore_case=ignore_case)
        type = schema[name].dataType
        for path, part, remedy in _unsupported(name, type):
            raise InvalidInput(f"column {path!r} has type {part.simpleString()}, {remedy}")
        if name in key:
            _check_key(name, type)


def _check_name(schema: T.StructType, name: str, *, ignore_case: bool) -> None:
    names = schema.fieldNames()
    same = [other for other in names if other == name or (ignore_case and other.lower() == name.lower())]
    if len(same) > 1:
        raise InvalidInput(
            f"the table has {len(same)} columns named {', '.join(map(repr, same))}, which Spark cannot tell apart. "
            "Rename one of them, or drop it."
        )


_NO_VALUE: Final = (
    "which a job cannot hold, because JSON cannot represent it. Cast it to another type, such as string, or leave "
    "the column out."
)
_NO_MAP_KEY: Final = (
    "which cannot be a key in JSON. Use a map whose keys are text, numbers, dates or timestamps."
)
_SAME_NAMES: Final = "with two members of the same name. Rename one of them."


def _unsupported(path: str, type: T.DataType) -> Iterator[tuple[str, T.DataType, str]]:
    """Yield the path, type and remedy of each part of a type that a job cannot hold."""
    if kind_of(type) is None:
        yield path, type, _NO_VALUE
    elif isinstance(type, T.ArrayType):
        yield from _unsupported(f"{path}[]", type.elementType)
    elif isinstance(type, T.StructType):
        if len(set(type.fieldNames())) < len(type):
            yield path, type, _SAME_NAMES
        for field in type:
            yield from _unsupported(f"{path}.{field.name}", field.dataType)
    elif isinstance(type, T.MapType):
        kind = kind_of(type.keyType)
        if kind is None or not kind.is_map_key:
            yield f"{path} (keys)", type.keyType, _NO_MAP_KEY
        yield from _unsupported(f"{path}{{}}", type.valueType)


def _check_key(path: str, type: T.DataType) -> None:
    kind = kind_of(type)
    if kind is None or not kind.is_key:
        raise InvalidInput(
            f"key column {path!r} has type {type.simpleString()}, which cannot identify a row. Use text, numbers, "
            "dates, timestamps or bytes."
        )
    members: list[Any] = []
    if isinstance(type, T.ArrayType):
        members = [(f"{path}[]", type.elementType)]
    elif isinstance(type, T.StructType):
        members = [(f"{path}.{field.name}", field.dataType) for field in type]
    for member in members:
        _check_key(*member)
