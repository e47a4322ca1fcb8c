"""A queue's own row, which every call on it reads and most of them change; and the clock it goes by."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from penstock.storage.sqlite.clock import GAP_MS, NEAR_MS, Moment, Reading, moment_after, read_clocks
from penstock.storage.sqlite.statements import statements
from penstock.storage.values import QueueSettings

__all__ = ["USES_INSTANTS", "USES_STAGED", "QueueRow", "any_text", "find_queue"]

USES_STAGED: Final = 4
"""The bit of ``QueueRow.uses`` that says that there may be staged jobs."""

USES_INSTANTS: Final = 8
"""The bit that says that there may be jobs that are due at an instant of the wall clock."""

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
        reading = read_clocks()
        boot_ms, last_ms = reading.boot_ms, self.now_ms
        elapsed, wall = boot_ms - self.boot_ms, reading.wall_ms + self.shift_ms
        if (  # As a rule: the same boot, no gap, and clocks that agree and agreed before.
            reading.boot == self.boot
            and 0 <= elapsed < GAP_MS
            and -NEAR_MS <= last_ms + elapsed - wall <= NEAR_MS
            and -NEAR_MS <= last_ms - self.clock_ms <= NEAR_MS
        ):
            return Moment(last_ms + elapsed, wall, boot_ms, reading.boot, self.clock_marks)
        seen = Reading(self.clock_ms or last_ms, self.boot_ms, self.boot)
        return moment_after(last_ms, seen, self.clock_marks, shift_ms=self.shift_ms, reading=reading)

    def clock(self) -> int:
        """Return the queue's now."""
        return self.moment().now_ms

    def see(self, moment: Moment) -> None:
        """Keep a moment: the next one is counted from it."""
        self.now_ms, self.clock_ms = moment.now_ms, moment.wall_ms
        self.boot_ms, self.boot, self.clock_marks = moment.boot_ms, moment.boot, moment.packed_marks

    @property
    def settings(self) -> QueueSettings:
        return _settings.decode(self.settings_json)

    def move(self, was: str, state: str, count: int) -> None:
        """Count jobs over from one state to another; the empty state is none."""
        if was:
            setattr(self, was, getattr(self, was) - count)
        if state:
            setattr(self, state, getattr(self, state) + count)


@contextmanager
def any_text(sql: sqlite3.Connection) -> Iterator[None]:
    """Read text that is not UTF-8 as surrogates instead of failing on it."""
    sql.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    try:
        yield
    finally:
        sql.text_factory = str


def find_queue(sql: sqlite3.Connection, namespace: str, name: str) -> QueueRow | None:
    """The queue's row; ``None`` if nobody has used it yet."""
    try:
        row = sql.execute(_sql["load"], (namespace, name)).fetchone()
    except sqlite3.OperationalError as error:
        if "decode to UTF-8" not in str(error):
            raise
        return _damaged_queue(sql, namespace, name)
    return None if row is None else QueueRow(*row)


def _damaged_queue(sql: sqlite3.Connection, namespace: str, name: str) -> QueueRow:
    """The queue's row if a text in it is not UTF-8: with settings that cannot be read, for ``mend``."""
    with any_text(sql):
        row = QueueRow(*sql.execute(_sql["load"], (namespace, name)).fetchone())
    row.settings_json, row.regroup = "damaged", ""
    return row
