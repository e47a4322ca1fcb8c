"""Where reads of event logs begin and end: ``{queue: {epoch, seq}}``, with the sequence of the last event read."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

import msgspec

from penstock.core.names import check_queue
from penstock.errors import InvalidOption
from penstock.storage.base import Storage

__all__ = ["Offset", "Offsets", "dumped", "instant_ms", "loaded", "position_at", "resolve"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


class Offset(msgspec.Struct, frozen=True):
    """A place in a queue's log. Sequences of another epoch mean nothing."""

    epoch: str
    seq: int


Offsets = dict[str, Offset]


def loaded(said: Mapping[str, Any]) -> Offsets:
    """What Spark keeps as JSON."""
    return msgspec.convert(said, Offsets)


def dumped(offsets: Offsets) -> dict[str, Any]:
    """Back to what Spark keeps."""
    return {queue: {"epoch": place.epoch, "seq": place.seq} for queue, place in sorted(offsets.items())}


def instant_ms(said: str | datetime, *, what: str) -> int:
    """Epoch milliseconds from a number of them or an ISO 8601 time, which without a zone is UTC."""
    if isinstance(said, str) and said.isdecimal():
        return int(said)
    try:
        moment = datetime.fromisoformat(said) if isinstance(said, str) else said
    except ValueError:
        raise InvalidOption(
            f"{what}={said!r} is not a time. Give ISO 8601 (2026-01-31T12:00:00Z) or epoch milliseconds."
        ) from None
    since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH
    # Up, not down: the first millisecond that is not before the instant.
    return -(-since // _MILLISECOND)


async def resolve(
    storage: Storage, queue: str, said: str, *, what: Literal["startingOffsets", "endingOffsets"]
) -> Offset:
    """``earliest``, ``latest``, or what the JSON has for this queue; for one it does not name, the default."""
    page = await storage.read_entries(queue, after=0, limit=1)
    first_kept = page.gap.last if page.gap else 0
    if said == "earliest":
        return Offset(page.epoch, first_kept)
    if said == "latest":
        return Offset(page.epoch, page.last)
    given = _named(said, what).get(queue)
    if given is None:
        return Offset(page.epoch, first_kept if what == "startingOffsets" else page.last)
    if isinstance(given, int):
        return Offset(page.epoch, page.last if given == -1 else given)
    return given


def _named(said: str, what: str) -> Mapping[str, Offset | int]:
    try:
        named = msgspec.json.decode(said, type=dict[str, Offset | int])
    except msgspec.MsgspecError as error:
        raise InvalidOption(
            f'{what}={said!r} is wrong: {error}. Give earliest, latest, or JSON such as {{"mail": 17}}.'
        ) from None
    for queue in named:
        check_queue(queue)
    return named


async def position_at(storage: Storage, queue: str, at_ms: int) -> int:
    """The sequence of the last event before an instant. Times never go back within a queue, so it can be bisected."""
    page = await storage.read_entries(queue, after=0, limit=1)
    low, high = (page.gap.last if page.gap else 0), page.last
    while low < high:
        middle = (low + high) // 2
        events = (await storage.read_events(queue, after=middle, limit=1)).events
        if events and events[0].at_ms >= at_ms:
            high = middle
        else:
            low = middle + 1
    return low
