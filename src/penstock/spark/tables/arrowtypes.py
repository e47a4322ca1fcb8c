"""Types of Arrow that Spark lacks, and those that it has for their values."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.types as kinds

__all__ = ["plain_type"]

_MAX_PRECISION: Final = 38


def plain_type(type: pa.DataType) -> pa.DataType:
    """Return the type that Spark has for values of this one, at every depth; the type itself if it needs no other."""
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
        # Spark has no negative scale; the digits before the point need their room then.
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
