"""The transaction that the calls of a group share. Each call is a unit, and they run one after the other."""

from __future__ import annotations

import sqlite3
from copy import copy
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.storage.sqlite import statements
from penstock.storage.sqlite.eventlog import EventNotes, count_events
from penstock.storage.sqlite.lock import LONG_S, write_long_lock
from penstock.storage.sqlite.queuerow import QueueRow, find_queue
from penstock.storage.sqlite.unit import Unit

if TYPE_CHECKING:
    from penstock.storage.sqlite.links import Links

Signal = tuple[str, str]
"""A signal to waiters after a commit: a kind (``w`` work, ``n`` news, ``e`` events) and ``namespace/queue``."""

_sql = statements("queue")


_SEEN_MS: Final = 2_000


def _is_due(unit: Unit, before: QueueRow) -> bool:
    """Return whether to store the time of a call that did not change the queue.

    A gap in these times while jobs are active means that the workers were cut off.
    """
    return before.active > 0 and unit.now_ms - before.now_ms >= _SEEN_MS


class Transaction:
    """The state that the calls of a group share. It reads and writes each queue's row once, and writes the events of a
    queue as one entry.

    No other process has been able to write since ``locked_at``, by the monotonic clock.
    """

    def __init__(
        self, sql: sqlite3.Connection, option_keys: dict[bytes, int], links: Links, *, locked_at: float
    ) -> None:
        self.locked_at = locked_at
        self.sql = sql
        self.option_keys = option_keys
        self.links = links
        self.signals: set[Signal] = set()
        self._rows: dict[tuple[str, str], QueueRow] = {}
        self._changed: dict[tuple[str, str], EventNotes] = {}

    def unit(self, namespace: str, queue: str) -> Unit:
        """Begin a call. It works on a copy of the queue's row, so a failed call leaves no trace."""
        self.note_lock()
        row = self._rows.get((namespace, queue))
        if row is None:
            row = find_queue(self.sql, namespace, queue) or self._create(namespace, queue)
            self._rows[namespace, queue] = row
        return Unit(self.sql, namespace, copy(row), option_keys=self.option_keys, links=self.links)

    def note_lock(self) -> None:
        """Record the long lock if no other process has been able to write for a long time."""
        locked_s = monotonic() - self.locked_at
        if locked_s >= LONG_S:
            write_long_lock(self.sql, since_s=locked_s, until_s=0)

    def _create(self, namespace: str, queue: str) -> QueueRow:
        self.sql.execute(_sql["create"], (namespace, queue))
        row = find_queue(self.sql, namespace, queue)
        assert row is not None
        return row

    def forget(self) -> None:
        """Forget the queues and options that only the rolled-back call may have created."""
        self.option_keys.clear()
        for place in self._rows.keys() - self._changed.keys():
            del self._rows[place]

    def places(self) -> list[tuple[str, str]]:
        """Return the namespace and name of all queues used so far."""
        return list(self._rows)

    def roll_back_call(self) -> None:
        """Undo the current call, back to its beginning or the last ``keep_call``."""
        self.sql.execute("ROLLBACK TO call")
        self.forget()

    def keep_call(self) -> None:
        """Keep what the current call has done so far, even if it fails later."""
        self.sql.execute("RELEASE call")
        self.sql.execute("SAVEPOINT call")

    def accept(self, unit: Unit) -> None:
        """Take over the changes of a successful call."""
        if unit.groups:
            unit.links.settle(unit)
            unit.flush()
        place = (unit.namespace, unit.queue.name)
        before = self._rows[place]
        unit.queue.events += unit.notes.count
        if unit.queue != before or unit.moment.packed_marks != before.clock_marks or _is_due(unit, before):
            unit.queue.see(unit.moment)
            self._rows[place] = unit.queue
            self._changed.setdefault(place, EventNotes()).extend(unit.notes)
        address = f"{unit.namespace}/{unit.queue.name}"
        self.signals.update((kind, address) for kind in unit.wakes)
        if unit.notes.count:
            self.signals.add(("e", address))

    def flush(self) -> None:
        """Write the queues' rows and events. Call it once, before the commit."""
        for place, notes in self._changed.items():
            row = self._rows[place]
            if notes.count:
                entry = notes.pack()
                first = row.events - notes.count + 1
                row.event_bytes += len(entry)
                values = (row.key, row.events, first, row.now_ms, len(entry), entry)
                self.sql.execute(_sql["append_events"], values)
                row.minute = count_events(self.sql, row.key, row.minute, notes, now_ms=row.now_ms)
            key, _, *rest = msgspec.structs.astuple(row)
            try:
                self.sql.execute(_sql["save"], (*rest, key))
            except OverflowError:  # A count is damaged. Store 0; ``mend`` recounts it.
                self.sql.execute(_sql["save"], (*map(_bounded, rest), key))


def _bounded(value: Any) -> Any:
    return 0 if isinstance(value, int) and abs(value) >= 2**62 else value
