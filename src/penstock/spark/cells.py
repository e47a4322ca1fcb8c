"""Conversion of column values: between Arrow and payloads or results, and from stored jobs to Arrow batches.

``columntypes`` lists the types. Nothing here needs a Spark session.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import cache
from typing import Any, Final, TypeAlias, TypedDict, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DataType, StringType, StructType, TimestampType, VariantType, VariantVal

from penstock.errors import InvalidOption

Column: TypeAlias = Callable[[Sequence[Any], DataType, pa.DataType], pa.Array]
"""A function from values to an Arrow array of a Spark type and an Arrow type."""

# pyspark 4.2 takes the time zone as an argument; earlier releases always use UTC.
_TAKES_TIME_ZONE: Final = "timezone" in inspect.signature(to_arrow_schema).parameters

_raw = msgspec.json.Decoder(msgspec.Raw).decode
_unpack = msgspec.msgpack.Decoder().decode


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema of a Spark schema, with timestamps in UTC."""
    return to_arrow_schema(schema, timezone="UTC") if _TAKES_TIME_ZONE else to_arrow_schema(schema)


class Builder:
    """Builds batches of one schema. ``known`` maps each available column to the function that builds it.

    Raises:
        InvalidOption: the schema has an unknown column.
    """

    def __init__(self, schema: StructType, known: Mapping[str, Column], *, where: str) -> None:
        for name in schema.fieldNames():
            if name not in known:
                raise InvalidOption(f"{where} has no column {name!r}. Its columns are: {', '.join(known)}.")
        self._schema = schema
        self._known = known
        self.names = tuple(schema.fieldNames())

    def batch(self, columns: Mapping[str, Sequence[Any]]) -> pa.RecordBatch:
        """Return a batch of these columns, which have the same length. Columns that the schema lacks are dropped."""
        arrow = arrow_schema(self._schema)
        arrays = [
            self._known[field.name](columns[field.name], field.dataType, arrow.field(field.name).type)
            for field in self._schema.fields
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=arrow)


def plain(values: Sequence[Any], type: DataType, arrow: pa.DataType) -> pa.Array:
    """Return values unchanged."""
    return pa.array(values, type=arrow)


def instants(values: Sequence[int], type: DataType, arrow: pa.DataType) -> pa.Array:
    """Return epoch milliseconds (0 means never) as timestamps, or as numbers if the schema says so."""
    numbers = pa.array(values, type=pa.int64())
    known = pa.compute.if_else(pa.compute.equal(numbers, 0), pa.scalar(None, pa.int64()), numbers)
    if not isinstance(type, TimestampType):
        return known.cast(arrow)
    return pa.compute.multiply(known, 1000).cast(arrow)


def value_column(values: Sequence[bytes | None], type: DataType, arrow: pa.DataType) -> pa.Array:
    """Return payloads or results as JSON text, as variants, or parsed to the type in the user's schema."""
    if pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow):
        return pa.array(values, type=arrow)
    texts = [None if value is None else json_text(value) for value in values]
    if isinstance(type, StringType):
        return pa.array(texts, type=arrow)
    if isinstance(type, VariantType):
        return pa.array([_variant(text) for text in texts], type=arrow)
    return _parsed(texts, arrow)


def json_text(value: bytes) -> str | None:
    """Return a JSON or MessagePack payload as JSON text; ``None`` for other bytes."""
    try:
        return str(_raw(value), "utf-8") if value else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        return msgspec.json.encode(_unpack(value)).decode()
    except (msgspec.MsgspecError, TypeError, ValueError):
        return None


def _variant(text: str | None) -> dict[str, bytes] | None:
    if text is None:
        return None
    made = VariantVal.parseJson(text)
    return {"value": made.value, "metadata": made.metadata}


_LINE: Final = '{{"value":{}}}'


def _parsed(texts: Sequence[str | None], arrow: pa.DataType) -> pa.Array:
    lines = "\n".join(_LINE.format("null" if text is None else text) for text in texts)
    options = pa_json.ParseOptions(
        explicit_schema=pa.schema([pa.field("value", arrow)]),
        newlines_in_values=True,
        unexpected_field_behavior="ignore",
    )
    if not lines:
        return pa.array([], type=arrow)
    try:
        table = pa_json.read_json(pa.BufferReader(lines.encode()), parse_options=options)
    except pa.ArrowInvalid as error:
        raise InvalidOption(
            f"a payload or result does not fit the type {arrow} of the schema: {error}. Compare the two, or read it as "
            "string."
        ) from None
    return table.column("value").combine_chunks()


_encode = msgspec.json.Encoder().encode
_FAILURES: Final = (ValueError, ArithmeticError, TypeError, pa.ArrowException)
_ROUNDING: Final = Context(prec=100, rounding=ROUND_HALF_UP)

_Convert: TypeAlias = Callable[[Any], Any]
# ``Any`` permits a dynamic call, which type checkers would reject.
_typed_dict: Final[Any] = TypedDict


class Unreadable:
    """A value that Python cannot represent, such as a date in the year 10000. No payload can hold it."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __repr__(self) -> str:
        return "?"


# From Arrow to Python.


def column_values(column: pa.Array) -> list[Any]:
    """Return the values of a column as Python values: maps as dicts, variants as their content, instants in UTC. A
    value that Python cannot represent becomes ``Unreadable``."""
    kind = column.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    try:
        # For the most common types, this is several times faster than to_pylist.
        if pa.types.is_string(kind) or (is_number and column.null_count == 0):
            return cast("list[Any]", column.to_numpy(zero_copy_only=False).tolist())
        return _converted(column)
    except _FAILURES:
        return [_one_value(column, number) for number in range(len(column))]


def _converted(column: pa.Array) -> list[Any]:
    kind = _in_utc(column.type)
    if kind != column.type:
        column = column.cast(kind)
    # Set the option only for maps, because it slows down every nested value.
    how = {"maps_as_pydicts": "strict"} if _has_map(kind) else {}
    values = cast("list[Any]", column.to_pylist(**how))
    convert = _variant_converter(kind)
    return values if convert is None else [None if value is None else convert(value) for value in values]


def _one_value(column: pa.Array, number: int) -> Any:
    try:
        return _converted(column.slice(number, 1))[0]
    except _FAILURES as error:
        return Unreadable(f"holds a value that Python cannot represent ({error})")


def _in_utc(kind: pa.DataType) -> pa.DataType:
    """Return the type with UTC as the time zone of all timestamps."""
    if pa.types.is_timestamp(kind):
        return kind if kind.tz is None else pa.timestamp(kind.unit, "UTC")
    if pa.types.is_struct(kind):
        return pa.struct([_field_in_utc(field) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_field_in_utc(kind.value_field))
    if pa.types.is_map(kind):
        return pa.map_(_field_in_utc(kind.key_field), _field_in_utc(kind.item_field), kind.keys_sorted)
    return kind


def _has_map(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return True
    if pa.types.is_list(kind):
        return _has_map(kind.value_type)
    return pa.types.is_struct(kind) and any(_has_map(field.type) for field in kind)


def _field_in_utc(field: pa.Field) -> pa.Field:
    return field.with_type(_in_utc(field.type))


def _is_variant(kind: pa.DataType) -> bool:
    """Return whether the type is a variant, which Spark marks on one of its two members."""
    if not pa.types.is_struct(kind) or kind.num_fields != 2:
        return False
    return any((field.metadata or {}).get(b"variant") == b"true" for field in kind)


def _variant_converter(kind: pa.DataType) -> _Convert | None:
    """Return a function that replaces the variants within a value, or ``None`` if the type has none."""
    if _is_variant(kind):
        return lambda value: _with_numbers(VariantVal(value["value"], value["metadata"]).toPython())
    return _within(kind, _variant_converter)


def _with_numbers(value: Any) -> Any:
    """Return the content of a variant with decimals as JSON numbers. Spark reads every number with a point as a
    decimal, so ``2.5`` must not become text, and ``2.0`` not a whole number."""
    if isinstance(value, Decimal):
        text = plain_decimal(value)
        is_whole = "." not in text and value.as_tuple().exponent != 0
        return msgspec.Raw(f"{text}.0" if is_whole else text)
    if isinstance(value, dict):
        return {key: _with_numbers(member) for key, member in value.items()}
    return [_with_numbers(member) for member in value] if isinstance(value, list) else value


def _within(kind: pa.DataType, converter_of: Callable[[pa.DataType], _Convert | None]) -> _Convert | None:
    """Return a function that converts the members of a value, or ``None`` if no member needs it."""
    if pa.types.is_list(kind):
        item = converter_of(kind.value_type)
        return None if item is None else lambda value: [_apply(item, member) for member in value]
    if pa.types.is_map(kind):
        item = converter_of(kind.item_type)
        return (
            None
            if item is None
            else lambda value: {key: _apply(item, member) for key, member in value.items()}
        )
    if pa.types.is_struct(kind):
        converters = {field.name: converter_of(field.type) for field in kind}
        if any(converters.values()):
            return lambda value: {name: _apply(converters[name], member) for name, member in value.items()}
    return None


def _apply(convert: _Convert | None, value: Any) -> Any:
    return value if convert is None or value is None else convert(value)


# Numbers that JSON cannot represent.


def not_finite(name: str, column: pa.Array, values: Sequence[Any]) -> dict[int, str]:
    """Return an error message for each row that has NaN or infinity at any depth, by row number. msgspec would write
    these as null. ``values`` are the Python values of the column."""
    if not _may_hold_nan(column):
        return {}
    errors: dict[int, str] = {}
    for number, value in enumerate(values):
        for path, bad in _bad_numbers(value):
            errors[number] = (
                f"column {name + path!r} is {bad}, which JSON cannot represent. Replace it, for example with null."
            )
            break
    return errors


def _may_hold_nan(column: pa.Array) -> bool:
    """Return whether the column may hold NaN or infinity. The check includes the members of null values, so true may
    be a false alarm."""
    kind = column.type
    if pa.types.is_floating(kind):
        return pc.all(pc.is_finite(column)).as_py() is False
    if _is_variant(kind):
        return True
    if pa.types.is_list(kind):
        return _may_hold_nan(column.values)
    if pa.types.is_map(kind):
        return _may_hold_nan(column.keys) or _may_hold_nan(column.items)
    return pa.types.is_struct(kind) and any(
        _may_hold_nan(column.field(number)) for number in range(kind.num_fields)
    )


def _bad_numbers(value: Any) -> Iterator[tuple[str, float]]:
    """Yield each number that is not finite, with its path."""
    if isinstance(value, float):
        if not math.isfinite(value):
            yield "", value
    elif isinstance(value, dict):
        for key, member in value.items():
            yield from ((f"[{key}]", bad) for _, bad in _bad_numbers(key))
            yield from ((f".{key}{path}", bad) for path, bad in _bad_numbers(member))
    elif isinstance(value, list):
        for number, member in enumerate(value):
            yield from ((f"[{number}]{path}", bad) for path, bad in _bad_numbers(member))


# The canonical form of rows, which fingerprints are computed from.


def canonical_maker(names: Sequence[str], types: Sequence[pa.DataType]) -> Callable[[Sequence[Any]], bytes]:
    """Return a function from the values of a row to its canonical form: a JSON object as the task receives it, sorted
    by name at every level. It omits null columns, null members of structs, and trailing zeros of decimals.

    So the canonical form does not change with the order of columns, the width of a number, or a new column that is
    null.
    """
    columns = [(name, _canonical_converter(kind)) for name, kind in zip(names, types, strict=True)]
    encode = msgspec.json.Encoder(order="sorted").encode

    def canonical(values: Sequence[Any]) -> bytes:
        return encode(
            {
                name: value if convert is None else convert(value)
                for (name, convert), value in zip(columns, values, strict=True)
                if value is not None
            }
        )

    return canonical


def _canonical_converter(kind: pa.DataType) -> _Convert | None:
    if pa.types.is_decimal(kind):
        return plain_decimal
    if _is_variant(kind):
        return None
    if pa.types.is_struct(kind):
        converters = {field.name: _canonical_converter(field.type) for field in kind}
        return lambda value: {
            name: _apply(converters[name], member) for name, member in value.items() if member is not None
        }
    if pa.types.is_map(kind):
        item, is_text = _canonical_converter(kind.item_type), pa.types.is_string(kind.key_type)
        return lambda value: {
            key if is_text else _key_text(key): _apply(item, member) for key, member in value.items()
        }
    return _within(kind, _canonical_converter)


def _key_text(key: Any) -> str:
    if isinstance(key, Decimal):
        return plain_decimal(key)
    return _encode(key).decode().strip('"')


def plain_decimal(value: Decimal) -> str:
    """Return a decimal as text without exponent and trailing zeros. ``Decimal.normalize`` would round to 28 digits."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


# From results to Arrow.


def result_array(texts: Sequence[str | None], kind: pa.DataType) -> pa.Array:
    """Return results, which are JSON texts, as a column. Decimals are rounded to the scale of the column. Results that
    do not fit the type become null."""
    values = [None if text is None else _decoded(text, kind) for text in texts]
    try:
        return pa.array(values, type=kind)
    except _FAILURES:
        return pa.concat_arrays([pa.array([], type=kind), *(_fitting(value, kind) for value in values)])


def is_too_large(text: str, kind: pa.DataType) -> bool:
    """Return whether a result has the right type, but a value that a column of that type cannot hold."""
    value = _decoded(text, kind)
    return value is not None and _fitting(value, kind).null_count > 0


def _decoded(text: str, kind: pa.DataType) -> Any:
    try:
        return _decoder(kind)(text)
    except (msgspec.DecodeError, ValueError):
        return None


@cache
def _decoder(kind: pa.DataType) -> Callable[[str], Any]:
    return msgspec.json.Decoder(_python_type(kind) | None).decode


def _fitting(value: Any, kind: pa.DataType) -> pa.Array:
    """Return an array with the value, or with null if the value does not fit."""
    try:
        return pa.array([value], type=kind)
    except _FAILURES:
        pass
    try:
        return pa.array([_rounded(value, kind)], type=kind)
    except _FAILURES:
        return pa.nulls(1, type=kind)


def _rounded(value: Any, kind: pa.DataType) -> Any:
    """Return the value with decimals rounded to the scale of the type, as Spark casts them."""
    if value is None:
        return None
    if pa.types.is_decimal(kind):
        return value.quantize(Decimal(1).scaleb(-kind.scale), context=_ROUNDING)
    if pa.types.is_list(kind):
        return [_rounded(member, kind.value_type) for member in value]
    if pa.types.is_map(kind):
        return {key: _rounded(member, kind.item_type) for key, member in value.items()}
    if pa.types.is_struct(kind):
        return {field.name: _rounded(value.get(field.name), field.type) for field in kind}
    return value


def _python_type(kind: pa.DataType) -> Any:
    """Return the Python type for decoding results of this Arrow type."""
    if pa.types.is_list(kind):
        return list.__class_getitem__(_python_type(kind.value_type) | None)
    if pa.types.is_map(kind):
        return dict.__class_getitem__((_python_type(kind.key_type), _python_type(kind.item_type) | None))
    if pa.types.is_struct(kind):
        # msgspec finds a non-ASCII name only after the same string object has been encoded.
        named = [(field.name, field.type) for field in kind]
        _encode([name for name, _ in named])
        return _typed_dict("Result", {name: _python_type(type) | None for name, type in named}, total=False)
    return next(python for is_kind, python in _SCALARS if is_kind(kind))


_SCALARS: Final[tuple[tuple[Callable[[pa.DataType], bool], type], ...]] = (
    (pa.types.is_boolean, bool),
    (pa.types.is_integer, int),
    (pa.types.is_floating, float),
    (pa.types.is_decimal, Decimal),
    (pa.types.is_string, str),
    (pa.types.is_binary, bytes),
    (pa.types.is_date, date),
    (pa.types.is_timestamp, datetime),
)
