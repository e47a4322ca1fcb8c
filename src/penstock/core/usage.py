"""Usage: named numbers that jobs report (tokens, money), kept exactly.

Amounts are stored as whole millionths, so that sums do not drift and every engine gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from penstock.core.display import shown
from penstock.errors import InvalidOption

__all__ = ["MILLION", "amounts", "check_usage_name", "micros"]

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
