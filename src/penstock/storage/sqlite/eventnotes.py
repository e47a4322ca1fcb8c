"""The events of a transaction, gathered in columns until they are packed into one entry per queue."""

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


class EventNotes:
    """Events in the order they happened. Neighbours of one type and one set of columns share a group."""

    __slots__ = ("_groups", "count")

    def __init__(self) -> None:
        self.count = 0
        self._groups: list[tuple[tuple[str, ...], list[tuple[Any, ...]]]] = []

    def add(self, kind: str, at_ms: int, record: Record, **extra: Any) -> None:
        """Note what happened to a job, with its record as it is now."""
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
        """Note the same kind of event many times; the columns begin with those of a job."""
        self._rows((kind, *_JOB_COLUMNS, *columns)).extend(rows)
        self.count += len(rows)

    def add_queue(self, kind: str, at_ms: int, **extra: Any) -> None:
        """Note what happened to the queue itself."""
        self._rows((kind, "at", *extra)).append((at_ms, *extra.values()))
        self.count += 1

    def extend(self, later: EventNotes) -> None:
        """Take over the events of a later call."""
        for shape, rows in later._groups:
            self._rows(shape).extend(rows)
        self.count += later.count

    @property
    def groups(self) -> Sequence[tuple[tuple[str, ...], Sequence[tuple[Any, ...]]]]:
        """Events of one type and one set of columns (named after the type), with a row for each."""
        return self._groups

    def pack(self) -> bytes:
        """The entry of the event log that holds them all."""
        return pack([_columns(shape, rows) for shape, rows in self._groups])

    def _rows(self, shape: tuple[str, ...]) -> list[tuple[Any, ...]]:
        """Where events of this shape go: the last group if it has it, else a new one."""
        if not self._groups or self._groups[-1][0] != shape:
            self._groups.append((shape, []))
        return self._groups[-1][1]


def _columns(shape: tuple[str, ...], rows: list[tuple[Any, ...]]) -> dict[str, Any]:
    kind, *names = shape
    columns = (list(column) for column in zip(*rows, strict=True))
    return {"t": kind, "n": len(rows), **dict(zip(names, columns, strict=True))}


# Per-minute metrics: counted from the events of a transaction, kept in the queue's row until the minute
# is over.


_metrics_sql = statements("queue")
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
        sql.execute(_metrics_sql["keep_minute"], (queue, last.at_ms // MINUTE_MS % DAY_MINUTES, packed))
    return _pack(present)


def told(
    sql: sqlite3.Connection, queue: int, packed: bytes | None, *, last_ms: int, now_ms: int
) -> list[Minute]:
    """The minutes of the last 24 hours in which something happened, the present one (``packed``) included."""
    rows = [minute for (minute,) in sql.execute(_metrics_sql["minutes"], (queue,))]
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
