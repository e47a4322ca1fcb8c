"""The id of a row's job: a hash of namespace, task and the values of its key columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from hashlib import blake2b
from typing import Any, Final

import msgspec

from penstock.spark.cells import plain_decimal
from penstock.spark.errors import BadKey

__all__ = ["row_id_maker"]

_DIGEST: Final = 16
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_CANONICAL: Final = frozenset({str, int, bool, bytes})
_encode = msgspec.msgpack.Encoder().encode


def row_id_maker(namespace: str, task: str) -> Callable[[tuple[Any, ...]], str]:
    """A function from the values of a key to the id of its job, 32 hexadecimal digits.

    Equal values of equal kind have equal ids, whatever they are stored as: an int and a long, a float and a double, a
    timestamp in any time zone, decimals of any scale. Values of different kinds differ: ``1``, ``"1"``, ``1.0``.

    Raises (the function): ``BadKey``.
    """
    start = blake2b(_encode((namespace, task)), digest_size=_DIGEST)

    def id_of(key: tuple[Any, ...]) -> str:
        digest = start.copy()
        is_canonical = _CANONICAL.issuperset(map(type, key))
        digest.update(_encode(key if is_canonical else [_canonical(value) for value in key]))
        return digest.hexdigest()

    return id_of


def _canonical(value: Any) -> Any:
    """A value that MessagePack encodes in one way only. Kinds it does not know are marked by a list with their name."""
    kind = type(value)
    if kind in _CANONICAL:
        return value
    if kind is float:
        return _canonical_float(value)
    if value is None:
        raise BadKey("the key is null. Drop such rows, or choose key columns that are always there.")
    if isinstance(value, datetime):
        # Without a time zone it is a wall clock's time, which is no instant.
        if value.tzinfo is None:
            return ["local", (value.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND]
        return ["instant", (value - _EPOCH) // _MICROSECOND]
    if isinstance(value, date):
        return ["date", value.toordinal()]
    if isinstance(value, Decimal):
        return ["decimal", plain_decimal(value)]
    if isinstance(value, list):
        return ["array", *map(_canonical, value)]
    if isinstance(value, dict):
        return ["struct", *([name, _canonical(member)] for name, member in value.items())]
    raise BadKey(
        f"a key of type {kind.__name__} has no canonical form. Use text, numbers, dates, timestamps or bytes."
    )


def _canonical_float(value: float) -> float:
    if not math.isfinite(value):
        raise BadKey(f"the key is {value}, which identifies nothing. Drop such rows, or choose another key.")
    return value or 0.0  # there is one zero
