"""A page of the event log as it is stored."""

from __future__ import annotations

import msgspec

from penstock.core.event import unpack
from penstock.storage.values import EventPage, Gap

__all__ = ["EntryPage"]


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
        """The same page, each event after the offset unpacked."""
        found = [
            event
            for last_seq, entry in self.entries
            for event in unpack(entry, last_seq=last_seq, queue=queue)
            if event.seq > after
        ]
        return EventPage(found, self.next, self.last, self.epoch, self.gap)
