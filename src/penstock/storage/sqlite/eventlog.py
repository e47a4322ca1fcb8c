"""The event log: events gathered per transaction and packed into one entry per queue, reads by offset, trimming, and
metrics.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.core.event import LOST, EntryPage, count_lost, pack, page_of, unpack
from penstock.storage.bounds import DAY_MINUTES, MINUTE_MS
from penstock.storage.metrics import Minute, counted, latest
from penstock.storage.sqlite import statements
from penstock.storage.sqlite.queuerow import View
from penstock.storage.sqlite.records import Record
from penstock.storage.values import Consumer, QueueSettings

if TYPE_CHECKING:
    from penstock.storage.sqlite.unit import Unit

_JOB_COLUMNS = ("at", "id", "inc", "enq", "rid", "task", "ver", "st")
_sql = statements("events")
_queue_sql = statements("queue")
_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(Minute).decode


class EventNotes:
    """Events in order. Consecutive events of the same type and columns share a group."""

    __slots__ = ("_groups", "count")

    def __init__(self) -> None:
        self.count = 0
        self._groups: list[tuple[tuple[str, ...], list[tuple[Any, ...]]]] = []

    def add(self, kind: str, at_ms: int, record: Record, **extra: Any) -> None:
        """Add an event of a job, with its record as it is now."""
        options = record.options
        row = (
            at_ms, record.id, record.incarnation, record.enqueued_at, record.run_id, options.task,
            options.version, record.state, *extra.values(),
        )  # fmt: skip
        self._rows((kind, *_JOB_COLUMNS, *extra)).append(row)
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
    """Return the queue's current minute with these events added. Store the last one if it is over."""
    at_ms = now_ms // MINUTE_MS * MINUTE_MS
    last = _read(packed)
    present = counted(last if last is not None and last.at_ms == at_ms else Minute(at_ms), notes.groups)
    if present is None:
        return packed
    if last is not None and last.at_ms != at_ms:
        sql.execute(_queue_sql["keep_minute"], (queue, last.at_ms // MINUTE_MS % DAY_MINUTES, packed))
    return _pack(present)


def minutes_of(
    sql: sqlite3.Connection, queue: int, packed: bytes | None, *, last_ms: int, now_ms: int
) -> list[Minute]:
    """Return the minutes of the last ``last_ms`` in which something happened, including the current one
    (``packed``)."""
    rows = [minute for (minute,) in sql.execute(_queue_sql["minutes"], (queue,))]
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


# Reading, checking and trimming


def read_entries(view: View, *, after: int, limit: int = 10_000) -> EntryPage:
    """Return whole entries with about ``limit`` events; a gap if the first ones are no longer kept."""
    epoch = str(view.sql.execute(_sql["epoch"]).fetchone()[0])
    last = view.queue.events
    if after >= last:
        return EntryPage([], after, last, epoch)
    rows = view.sql.execute(_sql["after"], (view.queue.key, after))
    try:
        entries = ((last_seq, entry) for last_seq, _, entry in rows)
        return page_of(entries, after=after, limit=limit, last=last, epoch=epoch)
    finally:
        rows.close()


def check_log(unit: Unit, *, repair: bool) -> dict[str, int]:
    """Count damaged entries and missing events. With ``repair``, replace both with lost events."""
    damaged, missing, previous = [], [], None
    for last_seq, first_seq, entry in unit.sql.execute(_sql["after"], (unit.queue.key, 0)):
        if previous is not None and first_seq > previous + 1:
            missing.append((previous + 1, first_seq - 1))
        if not _is_sound(entry, last_seq - first_seq + 1):
            damaged.append((first_seq, last_seq))
        previous = last_seq
    if previous is not None and previous < unit.queue.events:
        missing.append((previous + 1, unit.queue.events))
    if repair:
        unit.sql.executemany(_sql["drop_entry"], [(unit.queue.key, last) for _, last in damaged])
        for first, last in (*damaged, *missing):
            entry = pack([{"t": LOST, "at": unit.now_ms, "n": last - first + 1}])
            unit.sql.execute(_sql["add_entry"], (unit.queue.key, last, first, unit.now_ms, len(entry), entry))
    return {
        "damaged_events": len(damaged),
        "missing_events": sum(last - first + 1 for first, last in missing),
    }


def _is_sound(entry: bytes, count: int) -> bool:
    """Return whether an entry has ``count`` readable events, or replaces that many lost ones."""
    try:
        return count_lost(entry) == count or len(unpack(entry, last_seq=count, queue="")) == count
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def trim(unit: Unit, settings: QueueSettings, *, limit: int) -> int:
    """Drop up to ``limit`` of the oldest entries beyond the bounds. Return the number of dropped events."""
    oldest = unit.sql.execute(_sql["oldest"], (unit.queue.key, limit)).fetchall()
    trimmed = 0
    upto = None
    for last_seq, at_ms, size, count in oldest:
        if not _is_beyond(unit, settings, last_seq, at_ms):
            break
        upto = last_seq
        trimmed += count
        unit.queue.event_bytes -= size
    if upto is not None:
        unit.sql.execute(_sql["trim"], (unit.queue.key, upto))
    return trimmed


def _is_beyond(unit: Unit, settings: QueueSettings, last_seq: int, at_ms: int) -> bool:
    """Return whether an entry may go. Entries that a consumer has not read stay, up to the hard cap."""
    behind = unit.queue.events - last_seq
    if behind >= settings.events_hard_cap:
        return True
    held = unit.sql.execute(_sql["furthest_behind"], (unit.queue.key,)).fetchone()[0]
    if held is not None and last_seq > held:
        return False
    return (
        (settings.events_count is not None and behind >= settings.events_count)
        or (settings.events_age_ms is not None and unit.moment.is_past(at_ms + settings.events_age_ms))
        or (settings.events_bytes is not None and unit.queue.event_bytes > settings.events_bytes)
    )


def hold_events(unit: Unit, consumer: str, *, offset: int, ttl_ms: int) -> None:
    """Register a consumer, or move its offset forward."""
    unit.sql.execute(_sql["hold"], (unit.queue.key, consumer, offset, unit.now_ms + ttl_ms))


def release_events(unit: Unit, consumer: str) -> None:
    """Forget a consumer."""
    unit.sql.execute(_sql["release"], (unit.queue.key, consumer))


def consumers(view: View) -> list[Consumer]:
    """Return all consumers by name."""
    return [Consumer(*values) for values in view.sql.execute(_sql["consumers"], (view.queue.key,))]
