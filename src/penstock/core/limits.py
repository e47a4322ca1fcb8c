"""Rates: at most so many in any stretch of so long. What users write (``"100/s"``, ``"5/2m"``), and the two
numbers behind it.

A rate is a sliding window, here and wherever else one is kept to: in *any* ``per_ms`` there are at most ``count``
starts. A counter that is reset every second would let twice as many through around the reset.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final, Literal, TypeAlias

import msgspec

from penstock.core.text import shown
from penstock.core.units import Duration, describe, milliseconds
from penstock.errors import InvalidOption

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


# Limits of a queue, and of the groups in it: how many at a time, how many in a stretch of time, at which
# cost.
#
# Plain values; ``storage`` keeps to them, docs/verbs.md says how exactly.


EVERY_GROUP: Final = "*"
"""Stands for the groups that have no limit of their own."""

Reason: TypeAlias = Literal["", "paused", "asked", "concurrency", "rate", "bucket"]


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """Holds up to ``capacity`` tokens; ``refill`` of them come in every ``per_ms``, continuously."""

    capacity: int
    refill: int
    per_ms: int

    def __str__(self) -> str:
        """As ``penstock limit set --bucket`` reads it: ``"100:10/s"``."""
        return f"{self.capacity}:{Rate(self.refill, self.per_ms)}"


class Limit(msgspec.Struct, frozen=True, omit_defaults=True):
    """``None`` is no bound. A queue has no bucket: cost is what a job takes from its group's."""

    concurrency: int | None = None
    rate: Rate | None = None
    bucket: Bucket | None = None


LimitsOfQueue: TypeAlias = dict[str, Limit]
"""Limits by the group they are of: ``""`` is the queue itself, ``"*"`` every group without one of its own."""


class GroupState(msgspec.Struct, frozen=True):
    """A group as it is now. ``held`` are slots of members that will run again; ``why`` it has no room for the first of
    those that are blocked, and the time until then if it is known."""

    key: str
    waiting: int
    active: int
    held: int
    blocked: int
    paused: bool
    why: Reason = ""
    wait_ms: int | None = None


def charged(cost: int, bucket: Bucket) -> int:
    """What a job takes from the bucket: never more than it can hold."""
    return min(cost, bucket.capacity)


# Usage: named numbers that jobs report (tokens, money), kept exactly.
#
# Amounts are stored as whole millionths, so that sums do not drift and every engine gives the same.


MILLION: Final = 1_000_000
_MOST: Final = 2**53
_LONGEST_NAME: Final = 100


def micros(name: str, amount: Any) -> int:
    """``amount`` in whole millionths, rounded to the nearest.

    Raises:
        InvalidOption: it is no number, negative, not finite, or too large to be summed exactly.
    """
    if isinstance(amount, bool) or not isinstance(amount, (int, float, Decimal)):
        raise InvalidOption(
            f"usage {name}={shown(amount)} is not a number. Give an int, a float or a Decimal."
        )
    # Decimal first: math.isfinite raises for its signalling NaN, and for integers too large for a float.
    is_finite = amount.is_finite() if isinstance(amount, Decimal) else abs(amount) < math.inf
    if not is_finite or amount < 0 or amount * MILLION > _MOST:
        raise InvalidOption(f"usage {name}={shown(amount)} is not valid. Give a number from 0 to 9 billion.")
    return round(amount * MILLION)


def amounts(given: Mapping[Any, Any]) -> dict[str, int]:
    """Named amounts in millionths, those of zero left out. Raises ``InvalidOption`` as ``micros``, and for names."""
    found = {check_usage_name(name): micros(name, amount) for name, amount in given.items()}
    return {name: value for name, value in found.items() if value}


def check_usage_name(name: Any) -> str:
    """Return ``name`` if it can name a usage. Raise ``InvalidOption`` otherwise."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
        raise InvalidOption(
            f"{shown(name)} cannot name a usage. Use 1 to {_LONGEST_NAME} printable characters."
        )
    return str.__str__(name)
