"""The transaction that the calls of a group share, one step after the other."""

from __future__ import annotations

import sqlite3
from copy import copy
from time import monotonic
from typing import Any, Final

import msgspec

from penstock.storage.sqlite.eventnotes import EventNotes, count_events
from penstock.storage.sqlite.lock import LONG_S, write_long_lock
from penstock.storage.sqlite.queuerow import QueueRow, find_queue
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.unit import Links, Step

Signal = tuple[str, str]
"""What a commit tells those who wait: a kind (``w`` work, ``n`` news, ``e`` events) and ``namespace/queue``."""

_sql = statements("queue")


_SEEN_MS: Final = 2_000


def _is_due(step: Step, before: QueueRow) -> bool:
    """Return whether the time of a call that leaves the queue as it was is kept all the same. While jobs are active, a
    queue that nobody calls is one whose workers are cut off."""
    return before.active > 0 and step.now_ms - before.now_ms >= _SEEN_MS


class Transaction:
    """The state that the calls of one group share. Each queue's row is read once and written once; its events are one
    entry.

    ``locked_at`` is since when no other process could write, by the monotonic clock.
    """

    def __init__(
        self,
        sql: sqlite3.Connection,
        option_keys: dict[bytes, int],
        links: Links,
        *,
        locked_at: float,
    ) -> None:
        self.locked_at = locked_at
        self.sql = sql
        self.option_keys = option_keys
        self.links = links
        self.signals: set[Signal] = set()
        self._rows: dict[tuple[str, str], QueueRow] = {}
        self._changed: dict[tuple[str, str], EventNotes] = {}

    def step(self, namespace: str, queue: str) -> Step:
        """Begin a call. It works on a copy of the queue's row, so a call that fails leaves no trace."""
        self.note_lock()
        row = self._rows.get((namespace, queue))
        if row is None:
            row = find_queue(self.sql, namespace, queue) or self._create(namespace, queue)
            self._rows[namespace, queue] = row
        return Step(self.sql, namespace, copy(row), option_keys=self.option_keys, links=self.links)

    def note_lock(self) -> None:
        """Record if no other process could write for long."""
        locked_s = monotonic() - self.locked_at
        if locked_s >= LONG_S:
            write_long_lock(self.sql, since_s=locked_s, until_s=0)

    def _create(self, namespace: str, queue: str) -> QueueRow:
        self.sql.execute(_sql["create"], (namespace, queue))
        row = find_queue(self.sql, namespace, queue)
        assert row is not None
        return row

    def forget(self) -> None:
        """A call was rolled back, and with it whatever it may have created first."""
        self.option_keys.clear()
        for place in self._rows.keys() - self._changed.keys():
            del self._rows[place]

    def places(self) -> list[tuple[str, str]]:
        """Return namespace and name of the queues that were looked at so far."""
        return list(self._rows)

    def roll_back_call(self) -> None:
        """Undo what the call under way has done since it began, or since ``keep_call``."""
        self.sql.execute("ROLLBACK TO call")
        self.forget()

    def keep_call(self) -> None:
        """Keep what the call under way has done so far, whatever becomes of it."""
        self.sql.execute("RELEASE call")
        self.sql.execute("SAVEPOINT call")

    def accept(self, step: Step) -> None:
        """Take over what a successful call did."""
        if step.groups:
            step.links.settle(step)
            step.save(())
        place = (step.namespace, step.queue.name)
        before = self._rows[place]
        step.queue.events += step.notes.count
        if step.queue != before or step.moment.packed_marks != before.clock_marks or _is_due(step, before):
            step.queue.see(step.moment)
            self._rows[place] = step.queue
            self._changed.setdefault(place, EventNotes()).extend(step.notes)
        address = f"{step.namespace}/{step.queue.name}"
        self.signals.update((kind, address) for kind in step.wakes)
        if step.notes.count:
            self.signals.add(("e", address))

    def flush(self) -> None:
        """Write the queues' rows and events. To be called once, before the commit."""
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
            except OverflowError:  # A count was damaged: 0 is as wrong, and ``mend`` counts anew.
                self.sql.execute(_sql["save"], (*map(_bounded, rest), key))


def _bounded(value: Any) -> Any:
    return 0 if isinstance(value, int) and abs(value) >= 2**62 else value
