"""Rates, limits of queues and groups, and usage: what users write, and the numbers behind it.

A rate (``"100/s"``, ``"5/2m"``) is a sliding window: *any* ``per_ms`` sees at most ``count`` starts. A counter that
is reset every second would let twice as many through around the reset. Storage enforces limits as docs/verbs.md
describes.
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
"""The largest count: the enforcer of a rate remembers that many starts."""

_ACCEPTED: Final = 'a text such as "100/s", "5/2m" or "1/500ms", a pair such as (5, "2m"), or a Rate'


class Rate(msgspec.Struct, frozen=True, array_like=True):
    """At most ``count`` in any ``per_ms``. Use ``parse_rate``, which validates."""

    count: int
    per_ms: int

    def __str__(self) -> str:
        """Return the text that ``parse_rate`` reads: ``"5/2m"``, and ``"100/s"`` rather than ``"100/1s"``."""
        period = describe(self.per_ms)
        return f"{self.count}/{period[1:] if period[1:].isalpha() and period[0] == '1' else period}"


RateLike: TypeAlias = str | tuple[int, Duration] | Rate


def parse_rate(value: RateLike, *, what: str = "rate") -> Rate:
    """Return ``value`` as a rate.

    Raises:
        InvalidOption: not a rate, a count outside 1 to ``MOST``, or an invalid period; the message names ``what``.
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
    # Check the length first: an attacker could keep a server busy with int() of a million digits.
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
        raise _refused(value, what, "its period is zero")
    return Rate(count, per_ms)


def _refused(value: object, what: str, cause: str) -> InvalidOption:
    return InvalidOption(f"{what}={shown(value)} is not a valid rate: {cause}. Give {_ACCEPTED}.")


# Limits of queues and groups

EVERY_GROUP: Final = "*"
"""Stands for all groups without a limit of their own."""

Obstacle: TypeAlias = Literal["", "paused", "asked", "concurrency", "rate", "bucket"]
"""The condition that keeps a group's first blocked member out. ``asked``: paused for a time, as by ``RateLimited``."""


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """Holds up to ``capacity`` tokens and gains ``refill`` of them in every ``per_ms``, continuously."""

    capacity: int
    refill: int
    per_ms: int

    def __str__(self) -> str:
        """Return the text that ``penstock limit set --bucket`` reads: ``"100:10/s"``."""
        return f"{self.capacity}:{Rate(self.refill, self.per_ms)}"


class Limit(msgspec.Struct, frozen=True, omit_defaults=True):
    """The limits of a queue or group; ``None`` means unlimited. Only groups have a bucket; a job's cost is charged to
    it."""

    concurrency: int | None = None
    rate: Rate | None = None
    bucket: Bucket | None = None


LimitsOfQueue: TypeAlias = dict[str, Limit]
"""Limits by group: ``""`` is the queue itself, ``"*"`` every group without its own limit."""


class GroupState(msgspec.Struct, frozen=True):
    """A group as it is now.

    ``held`` is the number of slots kept for members that will run again. ``why`` says what keeps out the first
    blocked member, and ``wait_ms`` until when, if that is known.
    """

    key: str
    waiting: int
    active: int
    held: int
    blocked: int
    paused: bool
    why: Obstacle = ""
    wait_ms: int | None = None


def charged(cost: int, bucket: Bucket) -> int:
    """Return the tokens that a job takes from the bucket: at most its capacity."""
    return min(cost, bucket.capacity)


# Usage: named numbers that jobs report (tokens, money). Amounts are stored as whole millionths, so that
# sums do not drift and all engines return the same.


MILLION: Final = 1_000_000
_LARGEST_AMOUNT: Final = 2**53
_LONGEST_NAME: Final = 100


def micros(name: str, amount: Any) -> int:
    """Return ``amount`` in millionths, rounded to the nearest integer.

    Raises:
        InvalidOption: not a number, negative, not finite, or too large for exact sums.
    """
    if isinstance(amount, bool) or not isinstance(amount, (int, float, Decimal)):
        raise InvalidOption(
            f"usage {name}={shown(amount)} is not a number. Give an int, a float or a Decimal."
        )
    # Test Decimal separately: math.isfinite raises for its signalling NaN, and for integers too large for a
    # float.
    is_finite = amount.is_finite() if isinstance(amount, Decimal) else abs(amount) < math.inf
    if not is_finite or amount < 0 or amount * MILLION > _LARGEST_AMOUNT:
        raise InvalidOption(f"usage {name}={shown(amount)} is not valid. Give a number from 0 to 9 billion.")
    return round(amount * MILLION)


def amounts(usage: Mapping[Any, Any]) -> dict[str, int]:
    """Return the amounts other than zero in millionths. Raise ``InvalidOption`` for an invalid amount or name."""
    checked = {check_usage_name(name): micros(name, amount) for name, amount in usage.items()}
    return {name: amount for name, amount in checked.items() if amount}


def check_usage_name(name: Any) -> str:
    """Return ``name`` if it can name a usage. Raise ``InvalidOption`` otherwise."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
        raise InvalidOption(
            f"{shown(name)} cannot name a usage. Use 1 to {_LONGEST_NAME} printable characters."
        )
    return str.__str__(name)
