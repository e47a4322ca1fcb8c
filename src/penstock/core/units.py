"""Durations: what users write (``"1h30m"``, ``90``, ``timedelta``), and the milliseconds the engines count
in.

Text is one or more amounts with a unit, largest unit first, each unit at most once: ``"250ms"``, ``"30s"``,
``"1.5h"``, ``"1h30m"``, ``"5min"``, ``"2 days"``, ``"1w"``. Numbers are seconds. Text without a unit is refused,
because its unit would be a guess.
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

# Ten thousand weeks (about 190 years): longer is a mistake in the unit. Sums of a few of these stay exact
# in a float, which is what Lua counts in.
MAX_MS: Final = 10_000 * _UNITS_MS["w"]

_SPELLINGS: Final = {
    "w": "w(?:eeks?)?",
    "d": "d(?:ays?)?",
    "h": "h(?:rs?|ours?)?",
    "m": "m(?:ins?|inutes?)?",
    "s": "s(?:ecs?|econds?)?",
    "ms": "ms|msecs?|milliseconds?",
}
# [0-9] and not \d, which would take any script's digits.
_TEXT: Final = re.compile(
    r"\s*".join(rf"(?:([0-9]+(?:\.[0-9]+)?) ?(?:{_SPELLINGS[unit]}))?" for unit in _UNITS_MS)
)
_LONGEST_TEXT: Final = 100
_ACCEPTED: Final = (
    'a timedelta, a number of seconds, or a text such as "250ms", "30s", "5min", "1h30m", "2d", "1w"'
)


def milliseconds(value: Duration, *, what: str = "delay") -> int:
    """``value`` as whole milliseconds, rounded to the nearest; more than nothing never becomes nothing.

    Raises:
        InvalidOption: not a duration, negative, not finite, or longer than ``MAX_MS``; the message names
        ``what``.
    """
    exact = _exact(value, what)
    if exact < 0:
        raise _refused(value, what, "it is negative")
    if exact > MAX_MS:
        raise _refused(value, what, f"it is longer than the longest allowed, {describe(MAX_MS)}")
    return max(round(exact), 1) if exact else 0


def describe(ms: int) -> str:
    """``ms`` as the shortest text that ``milliseconds`` reads back: ``5_400_000`` is ``"1h30m"``, ``0`` is
    ``"0s"``.

    Weeks are left out, as people count days; a negative duration gets a leading minus, which only a display
    may show.
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
    """The milliseconds before rounding and before the limits are checked; NaN and infinity are refused."""
    # bool is an int to Python; delay=True is a mistake to everybody else.
    if isinstance(value, bool):
        raise _refused(value, what, "it is a truth value")
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
    # The limit on length comes first: int() of a million digits is a way to keep a server busy.
    found = _TEXT.fullmatch(stripped) if 0 < len(stripped) <= _LONGEST_TEXT else None
    if found is None:
        raise _refused(text, what, "it cannot be read")
    amounts = zip(found.groups(), _UNITS_MS.values(), strict=True)
    return sum((Fraction(amount) * size for amount, size in amounts if amount), Fraction(0))


def _refused(value: object, what: str, cause: str) -> InvalidOption:
    return InvalidOption(f"{what}={shown(value)} is not a valid duration: {cause}. Give {_ACCEPTED}.")


# Sizes: what users write (``"1MiB"``, ``4096``), and the bytes that are counted.
#
# A number is bytes; a text is an amount with a unit. ``kB``, ``MB``, ``GB`` are powers of 1000, ``KiB``,
# ``MiB``, ``GiB`` of 1024.


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
    """``value`` in bytes, at least 1. Raises ``InvalidOption`` for what is no size; the message names ``what``."""
    count = 0
    if isinstance(value, int) and not isinstance(value, bool):
        count = value
    elif isinstance(value, str):
        found = _SIZE_TEXT.fullmatch(value.strip())
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
