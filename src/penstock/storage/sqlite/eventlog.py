"""The event log: reading by offset, holds by consumers, and trimming."""

from __future__ import annotations

from penstock.core.event import LOST, EntryPage, count_lost, pack, page_of, unpack
from penstock.storage.sqlite.queuerow import View
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import Consumer, QueueSettings

_sql = statements("events")


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
