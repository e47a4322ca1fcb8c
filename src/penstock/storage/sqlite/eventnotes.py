"""The events of a transaction, gathered in columns until they are packed into one entry per queue, and the metrics
that count them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from penstock.core.event import pack
from penstock.storage.metrics import DAY_MINUTES, MINUTE_MS, Minute, counted, latest
from penstock.storage.sqlite.records import Record
from penstock.storage.sqlite.statements import statements

_JOB_COLUMNS = ("at", "id", "inc", "enq", "rid", "task", "ver", "st")
_sql = statements("queue")
_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(Minute).decode


class EventNotes:
    """Events in order. Neighbours of the same type and columns share a group."""

    __slots__ = ("_groups", "count")

    def __init__(self) -> None:
        self.count = 0
        self._groups: list[tuple[tuple[str, ...], list[tuple[Any, ...]]]] = []

    def add(self, kind: str, at_ms: int, record: Record, **extra: Any) -> None:
        """Add an event of a job, with its record as it is now."""
        options = record.options
        self._rows((kind, *_JOB_COLUMNS, *extra)).append(
            (
                at_ms,
                record.id,
                record.incarnation,
                record.enqueued_at,
                record.run_id,
                options.task,
                options.version,
                record.state,
                *extra.values(),
            )
        )
        self.count += 1

    def add_rows(self, kind: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        """Add many events of one type. The columns begin with those of a job."""
        self._rows((kind, *_JOB_COLUMNS, *columns)).extend(rows)
        self.count += len(rows)

    def add_queue(self, kind: str, at_ms: int, **extra: Any) -> None:
        """Add an event of the queue itself."""
        self._rows((kind, "at", *extra)).append((at_ms, *extra.values()))
        self.count += 1

    def extend(self, later: EventNotes) -> None:
        """Append the events of a later call."""
        for shape, rows in later._groups:
            self._rows(shape).extend(rows)
        self.count += later.count

    @property
    def groups(self) -> Sequence[tuple[tuple[str, ...], Sequence[tuple[Any, ...]]]]:
        """Return each group as its type and columns, with the rows."""
        return self._groups

    def pack(self) -> bytes:
        """Return the entry of the event log with all events."""
        return pack([_columns(shape, rows) for shape, rows in self._groups])

    def _rows(self, shape: tuple[str, ...]) -> list[tuple[Any, ...]]:
        """Return the rows for events of this shape: those of the last group if it fits, otherwise of a new one."""
        if not self._groups or self._groups[-1][0] != shape:
            self._groups.append((shape, []))
        return self._groups[-1][1]


def _columns(shape: tuple[str, ...], rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    kind, *names = shape
    columns = (list(column) for column in zip(*rows, strict=True))
    return {"t": kind, "n": len(rows), **dict(zip(names, columns, strict=True))}


# Metrics per minute, kept in the queue's row until the minute is over


def count_events(
    sql: sqlite3.Connection, queue: int, packed: bytes | None, notes: EventNotes, *, now_ms: int
) -> bytes | None:
    """Return the queue's present minute with these events added. A minute that is over is stored."""
    at_ms = now_ms // MINUTE_MS * MINUTE_MS
    last = _read(packed)
    present = counted(last if last is not None and last.at_ms == at_ms else Minute(at_ms), notes.groups)
    if present is None:
        return packed
    if last is not None and last.at_ms != at_ms:
        sql.execute(_sql["keep_minute"], (queue, last.at_ms // MINUTE_MS % DAY_MINUTES, packed))
    return _pack(present)


def minutes_of(
    sql: sqlite3.Connection, queue: int, packed: bytes | None, *, last_ms: int, now_ms: int
) -> list[Minute]:
    """Return the minutes of the last ``last_ms`` in which something happened, including the present one
    (``packed``)."""
    rows = [minute for (minute,) in sql.execute(_sql["minutes"], (queue,))]
    if packed is not None:
        rows.append(packed)
    minutes = (_read(row) for row in rows)
    return latest((minute for minute in minutes if minute is not None), last_ms=last_ms, now_ms=now_ms)


def _read(packed: bytes | None) -> Minute | None:
    """Return the minute of these bytes; ``None`` if they are damaged. No other data depends on it."""
    try:
        return None if packed is None else _unpack(packed)
    except msgspec.DecodeError:
        return None
