"""Rates: at most so many in any stretch of so long. What users write (``"100/s"``, ``"5/2m"``), and the two
numbers behind it.

A rate is a sliding window, here and wherever else one is kept to: in *any* ``per_ms`` there are at most ``count``
starts. A counter that is reset every second would let twice as many through around the reset.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from penstock.core.display import shown
from penstock.core.duration import Duration, describe, milliseconds
from penstock.errors import InvalidOption

__all__ = ["MOST", "Rate", "RateLike", "parse_rate"]

MOST: Final = 1_000_000
"""The largest count: whoever keeps to a rate has to remember so many starts."""

_ACCEPTED: Final = 'a text such as "100/s", "5/2m" or "1/500ms", a pair such as (5, "2m"), or a Rate'


class Rate(msgspec.Struct, frozen=True, array_like=True):
    """At most ``count`` in any ``per_ms``. Made by ``parse_rate``, which checks."""

    count: int
    per_ms: int

    def __str__(self) -> str:
        """As ``parse_rate`` reads it: ``"5/2m"``, and ``"100/s"`` rather than ``"100/1s"``."""
        period = describe(self.per_ms)
        return f"{self.count}/{period[1:] if period[1:].isalpha() and period[0] == '1' else period}"


RateLike: TypeAlias = str | tuple[int, Duration] | Rate


def parse_rate(value: RateLike, *, what: str = "rate") -> Rate:
    """The rate that ``value`` says.

    Raises:
        InvalidOption: it is none, its count is not from 1 to ``MOST``, or its period is nothing or no duration; the
        message names ``what``.
    """
    match value:
        case Rate(count=count, per_ms=per_ms) if type(per_ms) is int:
            return _checked(value, what, count, per_ms)
        case str():
            return _parse(value, what)
        case (int() as count, period):
            return _checked(value, what, count, milliseconds(period, what=what))
        case _:
            raise _refused(value, what, "it cannot be read")


def _parse(text: str, what: str) -> Rate:
    number, slash, period = text.partition("/")
    number, period = number.strip(), period.strip()
    # The length first: int() of a million digits is a way to keep a server busy.
    if not slash or len(number) > 10 or not (number.isascii() and number.isdigit()):
        raise _refused(text, what, "it cannot be read")
    try:
        per_ms = milliseconds(f"1{period}" if period.isalpha() else period, what=what)
    except InvalidOption as error:
        raise _refused(text, what, f"{shown(period[:40])} is not a period") from error
    return _checked(text, what, int(number), per_ms)


def _checked(value: object, what: str, count: int, per_ms: int) -> Rate:
    if type(count) is not int or not 1 <= count <= MOST:
        raise _refused(value, what, f"its count is not a whole number from 1 to {MOST}")
    if per_ms < 1:
        raise _refused(value, what, "its period is nothing")
    return Rate(count, per_ms)


def _refused(value: object, what: str, cause: str) -> InvalidOption:
    return InvalidOption(f"{what}={shown(value)} is not a valid rate: {cause}. Give {_ACCEPTED}.")
