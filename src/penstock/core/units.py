"""Durations and sizes: what users write (``"1h30m"``, ``90``, ``timedelta``, ``"1MiB"``), as milliseconds and bytes.

The text of a duration is one or more amounts with a unit, largest unit first, each unit at most once: ``"250ms"``,
``"30s"``, ``"1.5h"``, ``"1h30m"``, ``"5min"``, ``"2 days"``, ``"1w"``. A number means seconds. Text without a unit
is refused, because the unit would be a guess.

A size is a number of bytes, or an amount with a unit. ``kB``, ``MB``, ``GB`` are powers of 1000; ``KiB``, ``MiB``,
``GiB`` are powers of 1024.
"""

from __future__ import annotations

import math
import re
from datetime import timedelta
from fractions import Fraction
from typing import Final, TypeAlias

from penstock.core.text import shown
from penstock.errors import InvalidOption

Duration: TypeAlias = timedelta | str | int | float

_UNITS_MS: Final = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}

# Ten thousand weeks (about 190 years). A longer duration is a mistake in the unit. Sums of a few of these
# are exact in a float, the number type of Lua.
MAX_MS: Final = 10_000 * _UNITS_MS["w"]

_SPELLINGS: Final = {
    "w": "w(?:eeks?)?",
    "d": "d(?:ays?)?",
    "h": "h(?:rs?|ours?)?",
    "m": "m(?:ins?|inutes?)?",
    "s": "s(?:ecs?|econds?)?",
    "ms": "ms|msecs?|milliseconds?",
}
# [0-9] rather than \d, which matches the digits of every script.
_TEXT: Final = re.compile(
    r"\s*".join(rf"(?:([0-9]+(?:\.[0-9]+)?) ?(?:{_SPELLINGS[unit]}))?" for unit in _UNITS_MS)
)
_LONGEST_TEXT: Final = 100
_ACCEPTED: Final = (
    'a timedelta, a number of seconds, or a text such as "250ms", "30s", "5min", "1h30m", "2d", "1w"'
)


def milliseconds(value: Duration, *, what: str = "delay") -> int:
    """Return ``value`` in whole milliseconds, rounded to the nearest. Only zero becomes zero.

    Raises:
        InvalidOption: not a duration, negative, not finite, or longer than ``MAX_MS``; the message names ``what``.
    """
    exact = _exact(value, what)
    if exact < 0:
        raise _refused(value, what, "it is negative")
    if exact > MAX_MS:
        raise _refused(value, what, f"it is longer than the longest allowed, {describe(MAX_MS)}")
    return max(round(exact), 1) if exact else 0


def describe(ms: int) -> str:
    """Return the shortest text that ``milliseconds`` accepts: ``5_400_000`` is ``"1h30m"``, ``0`` is ``"0s"``.

    It never uses weeks, because people count days. A negative duration, which only displays may show, has a leading
    minus.
    """
    parts = ["-"] if ms < 0 else []
    rest = abs(ms)
    for unit, size in _UNITS_MS.items():
        count, remainder = divmod(rest, size)
        if count and unit != "w":
            parts.append(f"{count}{unit}")
            rest = remainder
    return "".join(parts) or "0s"


def _exact(value: Duration, what: str) -> Fraction | float | int:
    """Return the milliseconds before rounding and before the limits are checked. Refuse NaN and infinity."""
    # bool is a subclass of int, but delay=True is a mistake.
    if isinstance(value, bool):
        raise _refused(value, what, "it is a bool")
    if isinstance(value, int):
        return value * 1000
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _refused(value, what, "it is not a finite number")
        return value * 1000
    if isinstance(value, timedelta):
        return Fraction(value // timedelta(microseconds=1), 1000)
    if isinstance(value, str):
        return _parse(value, what)
    raise _refused(value, what, f"it is of type {type(value).__name__}")


def _parse(text: str, what: str) -> Fraction:
    stripped = text.strip()
    # Check the length first: an attacker could keep a server busy with int() of a million digits.
    match = _TEXT.fullmatch(stripped) if 0 < len(stripped) <= _LONGEST_TEXT else None
    if match is None:
        raise _refused(text, what, "it cannot be read")
    amounts = zip(match.groups(), _UNITS_MS.values(), strict=True)
    return sum((Fraction(amount) * size for amount, size in amounts if amount), Fraction(0))


def _refused(value: object, what: str, cause: str) -> InvalidOption:
    return InvalidOption(f"{what}={shown(value)} is not a valid duration: {cause}. Give {_ACCEPTED}.")


# Sizes

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
_SIZE_TEXT: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([A-Za-z]{1,3})")


def byte_count(value: Size, *, what: str = "size") -> int:
    """Return ``value`` in bytes, at least 1. Raise ``InvalidOption`` if it is not a size; the message names
    ``what``."""
    count = 0
    if isinstance(value, int) and not isinstance(value, bool):
        count = value
    elif isinstance(value, str):
        match = _SIZE_TEXT.fullmatch(value.strip())
        if match is not None:
            count = int(Fraction(match[1]) * _UNITS.get(match[2].lower(), 0))
    if count < 1:
        raise InvalidOption(
            f'{what} must be a number of bytes, or text such as "64KiB" or "1MiB", got {shown(value)}.'
        )
    return count


def describe_size(count: int) -> str:
    """Return ``count`` for display: ``"1.0 MiB"``, ``"812 bytes"``."""
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
