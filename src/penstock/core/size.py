"""Sizes: what users write (``"1MiB"``, ``4096``), and the bytes that are counted.

A number is bytes; a text is an amount with a unit. ``kB``, ``MB``, ``GB`` are powers of 1000, ``KiB``, ``MiB``,
``GiB`` of 1024.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final, TypeAlias

from penstock.core.display import shown
from penstock.errors import InvalidOption

__all__ = ["Size", "byte_count", "describe_size"]

Size: TypeAlias = int | str

_UNITS: Final = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
}
_TEXT: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([A-Za-z]{1,3})")


def byte_count(value: Size, *, what: str = "size") -> int:
    """``value`` in bytes, at least 1. Raises ``InvalidOption`` for what is no size; the message names ``what``."""
    count = 0
    if isinstance(value, int) and not isinstance(value, bool):
        count = value
    elif isinstance(value, str):
        found = _TEXT.fullmatch(value.strip())
        if found is not None:
            count = int(Fraction(found[1]) * _UNITS.get(found[2].lower(), 0))
    if count < 1:
        raise InvalidOption(
            f'{what}={shown(value)} is not a usable size. Give a number of bytes, or a text such as "64KiB" or "1MiB".'
        )
    return count


def describe_size(count: int) -> str:
    """``count`` for people: ``"1.0 MiB"``, ``"812 bytes"``."""
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
