"""Parsers of the values of options.

Each takes the name of the option, for its message, and the value that the user wrote. It returns a plain value, or
raises ``InvalidOption`` or ``InvalidName``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from penstock.core.job import STAGED_FROM_MS, Conflict, Dedup, Policy
from penstock.core.names import check_consumer, check_id, check_queue
from penstock.core.outcome import wall_clock
from penstock.core.retry import Backoff, parse_backoff
from penstock.core.text import check_text, shown
from penstock.core.units import MAX_MS, Duration, milliseconds
from penstock.errors import InvalidOption

INT32: Final = 2**31 - 1
_LAST_YEAR: Final = 6429
_MOST_HEADERS: Final = 16_384
_CONFLICTS: Final[Mapping[str, Conflict]] = {
    each.mode: each for each in (Conflict(), Conflict(mode="absent"), Conflict(mode="redispatch"))
}


def whole_number(name: str, value: Any, *, least: int, most: int = INT32) -> int:
    """Return ``value`` if it is an ``int`` in the range. Raise ``InvalidOption`` otherwise."""
    if type(value) is not int or not least <= value <= most:
        raise InvalidOption(f"{name} must be an integer from {least} to {most}, got {shown(value)}.")
    return value


def listed(name: str, value: Any, *, of: str) -> list[Any]:
    """Return the items of ``value``. Raise ``InvalidOption`` for a string, or if it is not iterable."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Iterable):
        raise InvalidOption(f"{name} must be a list of {of}, got {shown(value)}.")
    return list(value)


def check_wait(value: Duration | None) -> Duration | None:
    """Return ``value``, or raise ``InvalidOption`` if it is not a duration. ``None`` waits without a limit."""
    if value is not None:
        milliseconds(value, what="wait")
    return value


def epoch_ms(name: str, value: Any) -> int:
    """Return the time in milliseconds since the epoch. Raise ``InvalidOption`` for a time without a zone."""
    if not isinstance(value, datetime):
        raise InvalidOption(
            f"{name} must be a datetime with a time zone, got {shown(value)}. For a duration, use delay."
        )
    if value.utcoffset() is None:
        raise InvalidOption(
            f"{name}={value.isoformat()} has no time zone, so it is ambiguous. "
            "Use datetime.now(UTC) or value.astimezone()."
        )
    return max(round(value.timestamp() * 1000), 0)


def due_ms(name: str, value: Any) -> int:
    """Return the due time of a job. Times beyond the last year are reserved for staged jobs."""
    at_ms = epoch_ms(name, value)
    if at_ms >= STAGED_FROM_MS:
        raise InvalidOption(f"{name} must be before the year {_LAST_YEAR}, got {value.isoformat()}.")
    return at_ms


def count(least: int) -> Any:
    """Return a parser of integers of at least ``least``."""
    return lambda name, value: whole_number(name, value, least=least)


def limit(name: str, value: Any) -> int:
    """Return a duration; 0 means no limit in the store, so a limit of 0 is refused."""
    if value is None:
        return 0
    if (limit := milliseconds(value, what=name)) < 1:
        raise InvalidOption(f"{name} must be longer than 0, got {shown(value)}. Give None for no limit.")
    return limit


def deadline(name: str, value: Any) -> int:
    """Return the time until then, by the clock of this machine. A deadline that has passed expires immediately."""
    if not isinstance(value, datetime):
        return limit(name, value)
    at_ms = epoch_ms(name, value)
    return max(at_ms - round(wall_clock.get()().timestamp() * 1000), 1)


def kept(name: str, value: Any) -> int:
    """Return how long something is kept; ``None`` means forever."""
    return MAX_MS if value is None else milliseconds(value, what=name)


def text(name: str, value: Any) -> str:
    """Return a short text of one line."""
    if not isinstance(value, str) or len(value) > 200 or not (value.isprintable()):
        raise InvalidOption(
            f"{name} must be a string of at most 200 printable characters, got {shown(value)}."
        )
    return str(value)


def flag(name: str, value: Any) -> bool:
    """Return a flag."""
    if not isinstance(value, bool):
        raise InvalidOption(f"{name} must be True or False, got {shown(value)}.")
    return value


def backoff(name: str, value: Any) -> Backoff:
    """Return a policy of delays between attempts."""
    if isinstance(value, str) and value != "exponential" and value.lower().startswith("exp"):
        raise InvalidOption(f"{name}={shown(value)} is not valid. Did you mean 'exponential'?")
    return parse_backoff(value)


def headers(name: str, value: Any) -> dict[str, str] | None:
    """Return headers; ``None`` if there are none."""
    if not isinstance(value, Mapping):
        raise InvalidOption(f"{name} must be a mapping of strings to strings, got {shown(value)}.")
    headers: dict[str, str] = {}
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise InvalidOption(
                f"{name}: {shown(key)} and its value must be strings. Encode other values as text."
            )
        check_text(key, what=f"{name}: the name")
        check_text(text, what=f"{name}: the value of {shown(key)}")
        headers[str.__str__(key)] = str.__str__(text)
    if sum(len(key) + len(text) for key, text in headers.items()) > _MOST_HEADERS:
        raise InvalidOption(
            f"{name} must have at most {_MOST_HEADERS} characters in total. Put large values in the payload."
        )
    return headers or None


def dedup(name: str, value: Any) -> Dedup:
    """Return the rule of a dedup key."""
    if isinstance(value, str):
        return Dedup.simple(value)
    if isinstance(value, Dedup):
        return value
    raise InvalidOption(
        f"{name} must be a key, or one of Dedup.simple, Dedup.throttle and Dedup.debounce, got {shown(value)}."
    )


def holds(name: str, value: Any) -> dict[str, int] | None:
    """Return the milliseconds of each consumer; ``None`` if there are none."""
    if not isinstance(value, Mapping):
        raise InvalidOption(
            f'{name} must be a mapping of consumers to durations, such as {{"ledger": "7d"}}, got {shown(value)}.'
        )
    return {
        check_consumer(consumer): max(milliseconds(ttl, what=name), 1) for consumer, ttl in value.items()
    } or None


def places(name: str, value: Any) -> list[tuple[str, str]]:
    """Return queue and id of each job, which is a handle, a ``job()``, or a pair."""
    places: list[tuple[str, str]] = []
    for job in [value] if hasattr(value, "id") else listed(name, value, of="jobs"):
        pair = job if isinstance(job, tuple) and len(job) == 2 else None
        queue, id = pair or (getattr(job, "queue", None), getattr(job, "id", None))
        if not isinstance(queue, str) or not isinstance(id, str):
            raise InvalidOption(
                f"{name} must list handles, task.job(...)s, or pairs of queue and id, got {shown(job)}."
            )
        places.append((check_queue(queue), check_id(id)))
    return places


def policy(name: str, value: Any) -> Policy:
    """Return what the failure of a dependency does."""
    if value in ("fail", "ignore", "wait"):
        return value  # type: ignore[no-any-return]
    raise InvalidOption(f"{name} must be 'fail', 'ignore' or 'wait', got {shown(value)}.")


def conflict(name: str, value: Any) -> Conflict:
    """Return the rule for a known id."""
    if isinstance(value, Conflict):
        return value
    if isinstance(value, str) and value in _CONFLICTS:
        return _CONFLICTS[value]
    raise InvalidOption(
        f"{name} must be {', '.join(map(repr, _CONFLICTS))} or a Conflict, got {shown(value)}."
    )
