"""A page of the event log as it is stored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from penstock.core.event import Event, unpack
from penstock.core.job import Job
from penstock.core.lifecycle import State
from penstock.storage.values import EventPage, Gap

LOST: Final = "lost"
"""The type of events that stand for those of an entry that was damaged or missing."""


class _Group(msgspec.Struct):
    """The columns that every group of an entry has."""

    t: str
    n: int


_groups: Final = msgspec.msgpack.Decoder(list[_Group])


def count_events(entry: bytes) -> int:
    """Return how many events an entry holds; 0 if it is damaged, or stands for events that are lost."""
    try:
        groups = _groups.decode(entry)
    except (ValueError, RecursionError):
        return 0
    is_sound = all(group.n > 0 and group.t != LOST for group in groups)
    return sum(group.n for group in groups) if is_sound else 0


def count_lost(entry: bytes) -> int:
    """Return how many lost events an entry stands for; 0 if it is another."""
    try:
        groups = _groups.decode(entry)
    except (ValueError, RecursionError):
        return 0
    return groups[0].n if len(groups) == 1 and groups[0].t == LOST else 0


class EntryPage(msgspec.Struct, frozen=True):
    """Entries as they are stored: the number of the last event in each, and its bytes (``core.event`` has the format).

    The first may begin before the asked offset; ``core.eventcolumns`` and ``core.event`` read them. All else is as in
    ``EventPage``.
    """

    entries: list[tuple[int, bytes]]
    next: int
    last: int
    epoch: str
    gap: Gap | None = None

    def events(self, queue: str, *, after: int) -> EventPage:
        """The same page, each event after the offset unpacked. It ends before an entry that cannot be unpacked; one at
        its beginning is a gap."""
        found: list[Event] = []
        gap, reached = self.gap, after
        for last_seq, entry in self.entries:
            try:
                events = unpack(entry, last_seq=last_seq, queue=queue)
            except (ValueError, LookupError, TypeError):
                if found:
                    return EventPage(found, reached, self.last, self.epoch, gap)
                gap = Gap(after + 1, last_seq)
            else:
                found += [event for event in events if event.seq > after]
            reached = last_seq
        return EventPage(found, self.next, self.last, self.epoch, gap)


def page_of(
    rows: Iterable[tuple[int, bytes]], *, after: int, limit: int, last: int, epoch: str, trimmed: int = 0
) -> EntryPage:
    """Return the page of these rows, each the number of the last event of an entry and its bytes.

    The page ends before what is damaged or missing. If that stands at its beginning, it is skipped and told as a
    gap. ``trimmed`` is the number of the last event that is known to be gone.
    """
    entries: list[tuple[int, bytes]] = []
    gap, start, reached = None, after, max(after, min(trimmed, last))
    is_empty = True
    for last_seq, entry in rows:
        is_empty = False
        count = count_events(entry)
        before = last_seq - count
        if entries and (not count or before > reached or reached - start >= limit):
            break
        if count and not entries:
            start = reached = max(reached, before)
            gap = Gap(after + 1, start) if start > after else None
        if count:
            entries.append((last_seq, entry))
        reached = last_seq
    if not entries and reached < last and is_empty:
        reached = last
    if not entries and reached > after:
        gap = Gap(after + 1, reached)
    return EntryPage(entries, reached, last, epoch, gap)


# What a search asks for, and what it finds.


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs are looked for. Times are epoch milliseconds, from (inclusive) and to (exclusive); 0: no bound.

    ``error_type`` needs the state ``failed``.
    """

    state: State
    task: str = ""
    error_type: str = ""
    enqueued_from_ms: int = 0
    enqueued_to_ms: int = 0
    finished_from_ms: int = 0
    finished_to_ms: int = 0

    def fits(self, task: str, enqueued_at_ms: int, finished_at_ms: int) -> bool:
        """Whether a job of the state (and class) is one of them."""
        return (
            (not self.task or task == self.task)
            and enqueued_at_ms >= self.enqueued_from_ms
            and not 0 < self.enqueued_to_ms <= enqueued_at_ms
            and finished_at_ms >= self.finished_from_ms
            and not 0 < self.finished_to_ms <= finished_at_ms
        )


class Found(msgspec.Struct, frozen=True):
    """Jobs that match, how many were looked at for them, the cursor to go on from (empty: that was all), and the
    queue's time."""

    jobs: list[Job]
    scanned: int
    cursor: str = ""
    now_ms: int = 0
