"""Per-minute metrics: counted from the events of a transaction, kept in the queue's row until the minute is over."""

from __future__ import annotations

import sqlite3
from typing import Final

import msgspec

from penstock.storage.minutes import DAY_MINUTES, MINUTE_MS, Minute, counted, latest
from penstock.storage.sqlite.eventnotes import EventNotes
from penstock.storage.sqlite.statements import statements

__all__ = ["count_events", "told"]

_sql = statements("queue")
_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(Minute).decode


def count_events(
    sql: sqlite3.Connection, queue: int, packed: bytes | None, notes: EventNotes, *, now_ms: int
) -> bytes | None:
    """The queue's present minute with these events. One that is over is written away."""
    at_ms = now_ms // MINUTE_MS * MINUTE_MS
    last = _read(packed)
    present = counted(last if last is not None and last.at_ms == at_ms else Minute(at_ms), notes.groups)
    if present is None:
        return packed
    if last is not None and last.at_ms != at_ms:
        sql.execute(_sql["keep_minute"], (queue, last.at_ms // MINUTE_MS % DAY_MINUTES, packed))
    return _pack(present)


def told(
    sql: sqlite3.Connection, queue: int, packed: bytes | None, *, last_ms: int, now_ms: int
) -> list[Minute]:
    """The minutes of the last 24 hours in which something happened, the present one (``packed``) included."""
    rows = [minute for (minute,) in sql.execute(_sql["minutes"], (queue,))]
    if packed is not None:
        rows.append(packed)
    minutes = (_read(row) for row in rows)
    return latest((minute for minute in minutes if minute is not None), last_ms=last_ms, now_ms=now_ms)


def _read(packed: bytes | None) -> Minute | None:
    """Return the minute of these bytes; ``None`` if they are damaged, because nothing depends on it."""
    try:
        return None if packed is None else _unpack(packed)
    except msgspec.DecodeError:
        return None
