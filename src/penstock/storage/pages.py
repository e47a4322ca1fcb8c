"""Pages of the event log as it is stored, and searches among jobs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from penstock.core.event import Event, unpack
from penstock.core.job import Job
from penstock.core.lifecycle import State
from penstock.storage.values import EventPage, Gap

LOST: Final = "lost"
"""The type of events that replace those of a damaged or missing entry."""


class _Group(msgspec.Struct):
    """The columns that every group of an entry has."""

    t: str
    n: int


_groups: Final = msgspec.msgpack.Decoder(list[_Group])


def count_events(entry: bytes) -> int:
    """Return the number of events in an entry; 0 if it is damaged or replaces lost events."""
    try:
        groups = _groups.decode(entry)
    except (ValueError, RecursionError):
        return 0
    is_sound = all(group.n > 0 and group.t != LOST for group in groups)
    return sum(group.n for group in groups) if is_sound else 0


def count_lost(entry: bytes) -> int:
    """Return the number of lost events that an entry replaces; 0 for other entries."""
    try:
        groups = _groups.decode(entry)
    except (ValueError, RecursionError):
        return 0
    return groups[0].n if len(groups) == 1 and groups[0].t == LOST else 0


class EntryPage(msgspec.Struct, frozen=True):
    """Stored entries: the number of the last event of each, and its bytes (see ``core.event``).

    The first entry may begin before the requested offset. The other fields are those of ``EventPage``.
    """

    entries: list[tuple[int, bytes]]
    next: int
    last: int
    epoch: str
    gap: Gap | None = None

    def events(self, queue: str, *, after: int) -> EventPage:
        """Return the page with the events after the offset unpacked.

        The page ends before an entry that cannot be unpacked. If that is the first one, the page skips it and
        reports a gap.
        """
        unpacked: list[Event] = []
        gap, reached = self.gap, after
        for last_seq, entry in self.entries:
            try:
                events = unpack(entry, last_seq=last_seq, queue=queue)
            except (ValueError, LookupError, TypeError):
                if unpacked:
                    return EventPage(unpacked, reached, self.last, self.epoch, gap)
                gap = Gap(after + 1, last_seq)
            else:
                unpacked += [event for event in events if event.seq > after]
            reached = last_seq
        return EventPage(unpacked, self.next, self.last, self.epoch, gap)


def page_of(
    rows: Iterable[tuple[int, bytes]], *, after: int, limit: int, last: int, epoch: str, trimmed: int = 0
) -> EntryPage:
    """Return the page of these rows, each the number of the last event of an entry and its bytes.

    The page ends before a damaged or missing entry. If that is the first one, the page skips it and reports a gap.
    ``trimmed`` is the number of the last event known to be gone.
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


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """The criteria of a search. Times are epoch milliseconds, from (inclusive) and to (exclusive); 0 means unbounded.

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
        """Return whether a job of the state (and error class) matches."""
        return (
            (not self.task or task == self.task)
            and enqueued_at_ms >= self.enqueued_from_ms
            and not 0 < self.enqueued_to_ms <= enqueued_at_ms
            and finished_at_ms >= self.finished_from_ms
            and not 0 < self.finished_to_ms <= finished_at_ms
        )


class Found(msgspec.Struct, frozen=True):
    """The matching jobs, the number of jobs scanned, the cursor for the next page (empty: the end), and the queue's
    time."""

    jobs: list[Job]
    scanned: int
    cursor: str = ""
    now_ms: int = 0
