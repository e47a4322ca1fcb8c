"""A queue's own row, which every call on it reads and most of them change; and the clock it goes by."""

from __future__ import annotations

import sqlite3
from typing import Final

import msgspec

from penstock.storage.sqlite.clock import Moment, Reading, moment_after, read_clocks
from penstock.storage.sqlite.statements import statements
from penstock.storage.values import QueueSettings

__all__ = ["USES_STAGED", "QueueRow", "find_queue"]

USES_STAGED: Final = 4
"""The bit of ``QueueRow.uses`` that says that there may be staged jobs."""

_sql = statements("queue")
_settings = msgspec.json.Decoder(QueueSettings)


class QueueRow(msgspec.Struct):
    """A queue's own row: its two counters, clock (``clock.py``), flags, and how many jobs it has in each state.

    ``uses``: a bit for each feature that costs a look; what is not in use is not looked for.
    """

    key: int
    name: str
    seq: int
    events: int
    event_bytes: int
    now_ms: int
    shift_ms: int
    paused: int
    used: int
    has_budgets: int
    settings_json: str
    uses: int
    regroup: str
    scheduled: int
    waiting: int
    blocked: int
    active: int
    completed: int
    failed: int
    cancelled: int
    held_completed: int
    held_failed: int
    minute: bytes | None
    clock_ms: int
    boot_ms: int
    boot: int
    clock_marks: str

    def moment(self) -> Moment:
        """Return the queue's time: never earlier than any it has had."""
        seen = Reading(self.clock_ms or self.now_ms, self.boot_ms, self.boot)
        return moment_after(
            self.now_ms, seen, self.clock_marks, shift_ms=self.shift_ms, reading=read_clocks()
        )

    def clock(self) -> int:
        """Return the queue's now."""
        return self.moment().now_ms

    def see(self, moment: Moment) -> None:
        """Keep a moment: the next one is counted from it."""
        self.now_ms, self.clock_ms, reading, self.clock_marks = moment
        self.boot_ms, self.boot = reading.boot_ms, reading.boot

    @property
    def settings(self) -> QueueSettings:
        return _settings.decode(self.settings_json)

    def move(self, was: str, state: str, count: int) -> None:
        """Count jobs over from one state to another; the empty state is none."""
        if was:
            setattr(self, was, getattr(self, was) - count)
        if state:
            setattr(self, state, getattr(self, state) + count)


def find_queue(sql: sqlite3.Connection, namespace: str, name: str) -> QueueRow | None:
    """The queue's row; ``None`` if nobody has used it yet."""
    row = sql.execute(_sql["load"], (namespace, name)).fetchone()
    return None if row is None else QueueRow(*row)
