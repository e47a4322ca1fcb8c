"""Columns of plain values as the Arrow batches that Spark asks for, to the letter of its schema."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.json as pa_json
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DataType, StringType, StructType, TimestampType, VariantType, VariantVal

from penstock.errors import InvalidOption

__all__ = ["Builder", "Column", "arrow_schema", "instants", "json_text", "plain", "value_column"]

Column: TypeAlias = Callable[[Sequence[Any], DataType, pa.DataType], pa.Array]
"""Makes an Arrow array of the given types from plain values."""

# From pyspark 4.2 the zone is asked for, and left out where none is given; before, it was always UTC.
_ASKS_FOR_ZONE: Final = "timezone" in inspect.signature(to_arrow_schema).parameters

_raw = msgspec.json.Decoder(msgspec.Raw).decode
_unpack = msgspec.msgpack.Decoder().decode


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema that Spark has for this one, with timestamps in UTC."""
    return to_arrow_schema(schema, timezone="UTC") if _ASKS_FOR_ZONE else to_arrow_schema(schema)


class Builder:
    """Makes batches of one schema. ``known`` are the columns there are, and how each is made.

    Raises:
        InvalidOption: the schema has a column that is not known.
    """

    def __init__(self, schema: StructType, known: Mapping[str, Column], *, where: str) -> None:
        for name in schema.fieldNames():
            if name not in known:
                raise InvalidOption(f"{where} has no column {name!r}. It has: {', '.join(known)}.")
        self._schema = schema
        self._known = known
        self.names = tuple(schema.fieldNames())

    def batch(self, columns: Mapping[str, Sequence[Any]]) -> pa.RecordBatch:
        """A batch of these columns, all of the same length; those that the schema does not have are left out."""
        arrow = arrow_schema(self._schema)
        arrays = [
            self._known[field.name](columns[field.name], field.dataType, arrow.field(field.name).type)
            for field in self._schema.fields
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=arrow)


def plain(values: Sequence[Any], type: DataType, arrow: pa.DataType) -> pa.Array:
    """Values as they are."""
    return pa.array(values, type=arrow)


def instants(values: Sequence[int], type: DataType, arrow: pa.DataType) -> pa.Array:
    """Epoch milliseconds, of which 0 means never, as timestamps; as numbers, if those are asked for."""
    numbers = pa.array(values, type=pa.int64())
    known = pa.compute.if_else(pa.compute.equal(numbers, 0), pa.scalar(None, pa.int64()), numbers)
    if not isinstance(type, TimestampType):
        return known.cast(arrow)
    return pa.compute.multiply(known, 1000).cast(arrow)


def value_column(values: Sequence[bytes | None], type: DataType, arrow: pa.DataType) -> pa.Array:
    """Payloads or results: as JSON text, as variants, or parsed to the type that the user's schema says."""
    if pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow):
        return pa.array(values, type=arrow)
    texts = [None if value is None else json_text(value) for value in values]
    if isinstance(type, StringType):
        return pa.array(texts, type=arrow)
    if isinstance(type, VariantType):
        return pa.array([_variant(text) for text in texts], type=arrow)
    return _parsed(texts, arrow)


def json_text(value: bytes) -> str | None:
    """A payload as JSON text. MessagePack is turned into it; other bytes are none."""
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
