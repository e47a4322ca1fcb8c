"""The event log: reading it by offset, holding it back for consumers, trimming it."""

from __future__ import annotations

import sqlite3

from penstock.core.event import pack, unpack
from penstock.storage.pages import LOST, EntryPage, count_lost, page_of
from penstock.storage.sqlite.queuerow import find_queue
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.unit import Step
from penstock.storage.values import Consumer, QueueSettings

_sql = statements("events")


def read_entries(sql: sqlite3.Connection, namespace: str, queue: str, *, after: int, limit: int) -> EntryPage:
    """Whole entries until ``limit`` events are read; a gap if the first ones are no longer kept."""
    epoch = str(sql.execute(_sql["epoch"]).fetchone()[0])
    row = find_queue(sql, namespace, queue)
    last = row.events if row else 0
    if row is None or after >= last:
        return EntryPage([], after, last, epoch)
    rows = sql.execute(_sql["after"], (row.key, after))
    try:
        entries = ((last_seq, entry) for last_seq, _, entry in rows)
        return page_of(entries, after=after, limit=limit, last=last, epoch=epoch)
    finally:
        rows.close()


def check_log(step: Step, *, repair: bool) -> dict[str, int]:
    """Count damaged entries and missing events. Repaired, both stand in the log as lost."""
    damaged, missing, before = [], [], None
    for last_seq, first_seq, entry in step.sql.execute(_sql["after"], (step.queue.key, 0)):
        if before is not None and first_seq > before + 1:
            missing.append((before + 1, first_seq - 1))
        if not _is_sound(entry, last_seq - first_seq + 1):
            damaged.append((first_seq, last_seq))
        before = last_seq
    if before is not None and before < step.queue.events:
        missing.append((before + 1, step.queue.events))
    if repair:
        step.sql.executemany(_sql["drop_entry"], [(step.queue.key, last) for _, last in damaged])
        for first, last in (*damaged, *missing):
            entry = pack([{"t": LOST, "at": step.now_ms, "n": last - first + 1}])
            step.sql.execute(_sql["add_entry"], (step.queue.key, last, first, step.now_ms, len(entry), entry))
    return {
        "damaged_events": len(damaged),
        "missing_events": sum(last - first + 1 for first, last in missing),
    }


def _is_sound(entry: bytes, count: int) -> bool:
    """Return whether an entry holds ``count`` readable events, or stands for that many lost ones."""
    try:
        return count_lost(entry) == count or len(unpack(entry, last_seq=count, queue="")) == count
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def trim(step: Step, settings: QueueSettings, *, limit: int) -> int:
    """Drop the oldest entries beyond the bounds, at most ``limit``; how many events went."""
    oldest = step.sql.execute(_sql["oldest"], (step.queue.key, limit)).fetchall()
    trimmed = 0
    upto = None
    for last_seq, at_ms, size, count in oldest:
        if not _is_beyond(step, settings, last_seq, at_ms):
            break
        upto = last_seq
        trimmed += count
        step.queue.event_bytes -= size
    if upto is not None:
        step.sql.execute(_sql["trim"], (step.queue.key, upto))
    return trimmed


def _is_beyond(step: Step, settings: QueueSettings, last_seq: int, at_ms: int) -> bool:
    """Whether an entry is to go; what a consumer has not read stays, up to the hard cap."""
    behind = step.queue.events - last_seq
    if behind >= settings.events_hard_cap:
        return True
    held = step.sql.execute(_sql["furthest_behind"], (step.queue.key,)).fetchone()[0]
    if held is not None and last_seq > held:
        return False
    return (
        (settings.events_count is not None and behind >= settings.events_count)
        or (settings.events_age_ms is not None and step.moment.is_past(at_ms + settings.events_age_ms))
        or (settings.events_bytes is not None and step.queue.event_bytes > settings.events_bytes)
    )


def hold_events(step: Step, consumer: str, *, offset: int, ttl_ms: int) -> None:
    """Register a consumer, or move it forward."""
    step.sql.execute(_sql["hold"], (step.queue.key, consumer, offset, step.now_ms + ttl_ms))


def release_events(step: Step, consumer: str) -> None:
    """Forget a consumer."""
    step.sql.execute(_sql["release"], (step.queue.key, consumer))


def consumers(sql: sqlite3.Connection, namespace: str, queue: str) -> list[Consumer]:
    """All consumers by name."""
    row = find_queue(sql, namespace, queue)
    if row is None:
        return []
    return [Consumer(*found) for found in sql.execute(_sql["consumers"], (row.key,))]
