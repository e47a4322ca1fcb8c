"""What each option may be, and the plain value it becomes.

A parser takes the option's name, for its message, and the value as the user wrote it; it raises ``InvalidOption`` or
``InvalidName``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from penstock.core.dedup import Dedup
from penstock.core.job import STAGED_FROM_MS, Conflict, Policy
from penstock.core.names import check_consumer, check_group, check_id, check_queue
from penstock.core.retry import Backoff, parse_backoff
from penstock.core.text import check_text, shown
from penstock.core.units import MAX_MS, milliseconds
from penstock.errors import InvalidOption

_INT32: Final = 2**31 - 1
_LAST_YEAR: Final = 6429
_MOST_HEADERS: Final = 16_384
_CONFLICTS: Final = {
    "default": Conflict(),
    "absent": Conflict(mode="absent"),
    "redispatch": Conflict(mode="redispatch"),
}


def whole_number(name: str, value: Any, *, least: int, most: int = _INT32) -> int:
    """``value`` if it is an ``int`` in the range; raises ``InvalidOption``."""
    if type(value) is not int or not least <= value <= most:
        raise InvalidOption(
            f"{name}={shown(value)} is not valid. Give a whole number from {least} to {most}."
        )
    return value


def listed(name: str, value: Any, *, of: str) -> list[Any]:
    """Return the items of ``value``. Raise ``InvalidOption`` unless it is a list or the like; a text is none."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Iterable):
        raise InvalidOption(f"{name} must be a list of {of}, got {shown(value)}.")
    return list(value)


def epoch_ms(name: str, value: Any) -> int:
    """The instant ``value`` names. Raises ``InvalidOption`` for a naive time: whose clock would it be?"""
    if not isinstance(value, datetime):
        raise InvalidOption(
            f"{name}={shown(value)} is not a time. Give a datetime with a time zone, or use delay."
        )
    if value.utcoffset() is None:
        raise InvalidOption(
            f"{name}={value.isoformat()} has no time zone, so it could mean several instants. "
            "Use datetime.now(UTC) or value.astimezone()."
        )
    return max(round(value.timestamp() * 1000), 0)


def _due_ms(name: str, value: Any) -> int:
    """The instant a job may be due at: what lies beyond is the store's own (``core.staging``)."""
    at_ms = epoch_ms(name, value)
    if at_ms >= STAGED_FROM_MS:
        raise InvalidOption(
            f"{name}={value.isoformat()} is too far away. Give a time before the year {_LAST_YEAR}."
        )
    return at_ms


def _count(least: int) -> Any:
    return lambda name, value: whole_number(name, value, least=least)


def _limit(name: str, value: Any) -> int:
    """A duration, ``None`` for no limit, which is 0 in the store; so a limit of 0 cannot be meant."""
    if value is None:
        return 0
    if (limit := milliseconds(value, what=name)) < 1:
        raise InvalidOption(f"{name}={shown(value)} leaves no time at all. Give None for no limit.")
    return limit


def _kept(name: str, value: Any) -> int:
    return MAX_MS if value is None else milliseconds(value, what=name)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > 200 or not (value.isprintable()):
        raise InvalidOption(
            f"{name}={shown(value)} is not valid. Give a text of at most 200 printable characters."
        )
    return str(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidOption(f"{name}={shown(value)} is not valid. Give True or False.")
    return value


def _backoff(value: Any) -> Backoff:
    if isinstance(value, str) and value != "exponential" and value.lower().startswith("exp"):
        raise InvalidOption(f"backoff={shown(value)} is not valid. Did you mean 'exponential'?")
    return parse_backoff(value)


def _headers(name: str, value: Any) -> dict[str, str] | None:
    if not isinstance(value, Mapping):
        raise InvalidOption(f"{name}={shown(value)} is not valid. Give a mapping of names to texts.")
    headers: dict[str, str] = {}
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise InvalidOption(
                f"{name}: {shown(key)} or its value is not a str. Encode other values as text."
            )
        check_text(key, what=f"{name}: the name")
        check_text(text, what=f"{name}: the value of {shown(key)}")
        headers[str.__str__(key)] = str.__str__(text)
    if sum(len(key) + len(text) for key, text in headers.items()) > _MOST_HEADERS:
        raise InvalidOption(
            f"{name}: together they have more than {_MOST_HEADERS} characters. What is large belongs into the payload."
        )
    return headers or None


def _dedup(name: str, value: Any) -> Dedup:
    if isinstance(value, str):
        return Dedup.simple(value)
    if isinstance(value, Dedup):
        return value
    raise InvalidOption(
        f"{name}={shown(value)} is not valid. Give a key, or one of Dedup.simple, Dedup.throttle, Dedup.debounce."
    )


def _holds(name: str, value: Any) -> dict[str, int] | None:
    if not isinstance(value, Mapping):
        raise InvalidOption(
            f'{name}={shown(value)} is not valid. Give consumers and durations: {{"ledger": "7d"}}.'
        )
    return {check_consumer(who): _hold_ms(name, ttl) for who, ttl in value.items()} or None


def _hold_ms(name: str, ttl: Any) -> int:
    return max(milliseconds(ttl, what=name), 1)


def _places(name: str, value: Any) -> list[tuple[str, str]]:
    """Queue and id of each job: of a handle, a ``job()``, or a pair."""
    places: list[tuple[str, str]] = []
    for one in [value] if hasattr(value, "id") else listed(name, value, of="jobs"):
        pair = one if isinstance(one, tuple) and len(one) == 2 else None
        queue, id = pair or (getattr(one, "queue", None), getattr(one, "id", None))
        if not isinstance(queue, str) or not isinstance(id, str):
            raise InvalidOption(
                f"{name}: {shown(one)} is not a job. Give handles, task.job(...)s, or pairs of queue and id."
            )
        places.append((check_queue(queue), check_id(id)))
    return places


def _policy(name: str, value: Any) -> Policy:
    match value:
        case "fail" | "ignore" | "wait":
            return value  # type: ignore[no-any-return]
        case _:
            raise InvalidOption(f"{name}={shown(value)} is not valid. Give 'fail', 'ignore' or 'wait'.")


def _conflict(name: str, value: Any) -> Conflict:
    if isinstance(value, Conflict):
        return value
    if isinstance(value, str) and value in _CONFLICTS:
        return _CONFLICTS[value]
    raise InvalidOption(
        f"{name}={shown(value)} is not valid. Give {', '.join(map(repr, _CONFLICTS))} or a Conflict."
    )


TREATMENT_PARSERS: Final[Mapping[str, tuple[str, Any]]] = {
    "attempts": ("attempts", _count(1)),
    "max_retries": ("attempts", lambda name, value: whole_number(name, value, least=0, most=_INT32 - 1) + 1),
    "backoff": ("backoff", lambda name, value: _backoff(value)),
    "timeout": ("timeout_ms", _limit),
    "max_stalls": ("max_stalls", _count(0)),
    "result_ttl": ("result_ttl_ms", _kept),
    "failure_ttl": ("failure_ttl_ms", _kept),
    "version": ("version", _text),
}
PLACEMENT_PARSERS: Final[Mapping[str, tuple[str, Any]]] = {
    "id": ("id", lambda name, value: check_id(value)),
    "delay": ("delay_ms", lambda name, value: milliseconds(value, what=name)),
    "run_at": ("run_at_ms", _due_ms),
    "priority": ("priority", _count(-_INT32)),
    "lifo": ("lifo", _flag),
    "ttl": ("ttl_ms", _limit),
    "on_conflict": ("conflict", _conflict),
    "dedup": ("dedup", _dedup),
    "unchecked": ("unchecked", _flag),
    "group": ("group", lambda name, value: check_group(value)),
    "cost": ("cost", _count(0)),
    "headers": ("headers", _headers),
    "hold": ("holds", _holds),
    "after": ("after", _places),
    "after_failure": ("after_failure", _policy),
    "run_id": ("run_id", _text),
    "write_id": ("write_id", _text),
}
