"""A queue's own row, which every call on it reads and most of them change; and the clock it goes by."""

from __future__ import annotations

import sqlite3
import time
from typing import Final

import msgspec

from penstock.storage.sqlite.statements import statements
from penstock.storage.values import QueueSettings

__all__ = ["USES_STAGED", "QueueRow", "clock_ms", "find_queue"]

USES_STAGED: Final = 4
"""The bit of ``QueueRow.uses`` that says that there may be staged jobs."""

_sql = statements("queue")
_settings = msgspec.json.Decoder(QueueSettings)


def clock_ms() -> int:
    """The store's clock."""
    return time.time_ns() // 1_000_000


class QueueRow(msgspec.Struct):
    """A queue's own row: its two counters, clock, flags, and how many jobs it has in each state.

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

    def clock(self) -> int:
        """The queue's now: never earlier than any it has had."""
        return max(clock_ms() + self.shift_ms, self.now_ms)

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
