"""The rows of a queue and of its groups as the verbs see them: counters, clock, limits. ``groups`` has the SQL of
groups."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from penstock.core.limits import Limit, Obstacle, charged
from penstock.storage.bounds import CLOCK_GAP_MS, CLOCK_NEAR_MS
from penstock.storage.sqlite import statements
from penstock.storage.sqlite.clock import Moment, Reading, moment_after, read_clocks
from penstock.storage.values import QueueSettings

USES_STAGED: Final = 4
"""The bit of ``QueueRow.uses`` for staged jobs."""

USES_INSTANTS: Final = 8
"""The bit for jobs that are due at a wall time."""

_sql = statements("queue")
_settings = msgspec.json.Decoder(QueueSettings)


class QueueRow(msgspec.Struct):
    """A queue's row: its two counters, clock (``clock.py``), flags, and the number of jobs in each state.

    ``uses`` has a bit for each feature that costs a query. A bit that is not set saves the query.
    """

    key: int
    name: str
    seq: int = 0
    events: int = 0
    event_bytes: int = 0
    now_ms: int = 0
    shift_ms: int = 0
    paused: int = 0
    used: int = 0
    has_budgets: int = 0
    settings_json: str = "{}"
    uses: int = 0
    regroup: str = ""
    scheduled: int = 0
    waiting: int = 0
    blocked: int = 0
    active: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    held_completed: int = 0
    held_failed: int = 0
    minute: bytes | None = None
    clock_ms: int = 0
    boot_ms: int = 0
    boot: int = 0
    clock_marks: str = ""

    def moment(self) -> Moment:
        """Return the queue's time, never earlier than before."""
        reading = read_clocks()
        boot_ms, last_ms = reading.boot_ms, self.now_ms
        elapsed, wall = boot_ms - self.boot_ms, reading.wall_ms + self.shift_ms
        if (  # The usual case: the same boot, no gap, and clocks that agree and agreed before.
            reading.boot == self.boot
            and 0 <= elapsed < CLOCK_GAP_MS
            and -CLOCK_NEAR_MS <= last_ms + elapsed - wall <= CLOCK_NEAR_MS
            and -CLOCK_NEAR_MS <= last_ms - self.clock_ms <= CLOCK_NEAR_MS
        ):
            return Moment(last_ms + elapsed, wall, boot_ms, reading.boot, self.clock_marks)
        seen = Reading(self.clock_ms or last_ms, self.boot_ms, self.boot)
        return moment_after(last_ms, seen, self.clock_marks, shift_ms=self.shift_ms, reading=reading)

    def clock(self) -> int:
        """Return the queue's now."""
        return self.moment().now_ms

    def see(self, moment: Moment) -> None:
        """Store a moment, from which the next one is computed."""
        self.now_ms, self.clock_ms = moment.now_ms, moment.wall_ms
        self.boot_ms, self.boot, self.clock_marks = moment.boot_ms, moment.boot, moment.packed_marks

    @property
    def settings(self) -> QueueSettings:
        return _settings.decode(self.settings_json)

    def move(self, was: str, state: str, count: int) -> None:
        """Count jobs in another state; the empty state stands for none."""
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
    """Return the queue's row; ``None`` if the queue was never used."""
    try:
        row = sql.execute(_sql["load"], (namespace, name)).fetchone()
    except sqlite3.OperationalError as error:
        if "decode to UTF-8" not in str(error):
            raise
        return _damaged_queue(sql, namespace, name)
    return None if row is None else QueueRow(*row)


def _damaged_queue(sql: sqlite3.Connection, namespace: str, name: str) -> QueueRow:
    """Return the row of a queue with a text that is not UTF-8, with unreadable settings for ``repair``."""
    with any_text(sql):
        row = QueueRow(*sql.execute(_sql["load"], (namespace, name)).fetchone())
    row.settings_json, row.regroup = "damaged", ""
    return row


class View(msgspec.Struct):
    """A queue as reads see it, in one committed state of the database. A queue that was never used is empty."""

    sql: sqlite3.Connection
    namespace: str
    name: str
    _row: QueueRow | None = None

    @property
    def queue(self) -> QueueRow:
        row = self._row
        if row is None:
            row = self._row = find_queue(self.sql, self.namespace, self.name) or QueueRow(0, self.name)
        return row


HOLDING = 2
"""The ``slot_hold`` of a record that keeps a slot of its group while it is neither waiting nor active."""


class Group(msgspec.Struct):
    """A group as the verbs see it. The queue itself is the group with the empty key.

    The fields up to ``over_at`` are the columns of ``job_groups``. ``waiting``, ``active``, ``held`` and
    ``blocked`` count members; ``cost`` is that of the waiting ones. ``level`` is the bucket's level at
    ``level_at``, in fractions of a token of which ``level_per`` make one (0: never used). ``look_at``: when time
    may make room for blocked members. ``over_at``: when nothing is left of a group without members.
    """

    key: str
    waiting: int = 0
    active: int = 0
    held: int = 0
    blocked: int = 0
    cost: int = 0
    parked_until: int = 0
    paused: int = 0
    starts: int = 0
    level: int = 0
    level_at: int = 0
    level_per: int = 0
    look_at: int = 0
    over_at: int = 0
    limit: Limit = Limit()
    first_start: int = 0
    started: int = 0
    is_stored: bool = False
    is_touched: bool = False
    is_changed: bool = False

    @property
    def is_strict(self) -> bool:
        """Return whether members run strictly in order."""
        return self.limit.concurrency == 1

    def is_stopped(self, now_ms: int) -> bool:
        return bool(self.paused) or self.parked_until > now_ms

    def is_full(self, slots_taken: int) -> bool:
        return self.limit.concurrency is not None and slots_taken >= self.limit.concurrency

    def refill(self, now_ms: int) -> None:
        """Bring the bucket's level up to date."""
        bucket = self.limit.bucket
        if bucket is None:
            return
        full = bucket.capacity * bucket.per_ms
        level = self.level
        if not self.level_per:
            level = full
        elif self.level_per != bucket.per_ms:
            level = level // self.level_per * bucket.per_ms
        self.level = min(full, level + (now_ms - self.level_at) * bucket.refill)
        self.level_at, self.level_per = now_ms, bucket.per_ms

    def why_no_room(
        self, now_ms: int, *, cost: int | None = None, slot_hold: int = 0
    ) -> tuple[Obstacle, int]:
        """Return why a member with this cost and hold has to wait, and until when (0: unknown).

        Without a cost, return only reasons that apply to every member. ``""`` means that there is room.
        """
        limit, busy = self.limit, self.waiting + self.active
        if self.paused:
            return "paused", 0
        if self.parked_until > now_ms:
            return "asked", self.parked_until
        if self.is_full(busy if cost is None or slot_hold == HOLDING else busy + self.held):
            return "concurrency", 0
        if limit.rate is not None and self.starts + self.waiting >= limit.rate.count:
            return "rate", self.first_start + limit.rate.per_ms if self.first_start else 0
        return ("", 0) if cost is None else self._lacks(cost, now_ms)

    def _lacks(self, cost: int, now_ms: int) -> tuple[Obstacle, int]:
        bucket = self.limit.bucket
        if bucket is None:
            return "", 0
        needed = self.cost + charged(cost, bucket)
        missing = needed * bucket.per_ms - self.level
        if missing <= 0:
            return "", 0
        return "bucket", now_ms + -(-missing // bucket.refill) if needed <= bucket.capacity else 0

    def can_start(self, cost: int, now_ms: int) -> bool:
        """Return whether a waiting member of that cost may be leased now."""
        limit = self.limit
        if self.is_stopped(now_ms) or self.is_full(self.active):
            return False
        if limit.rate is not None and self.starts >= limit.rate.count:
            return False
        bucket = limit.bucket
        return bucket is None or self.level >= charged(cost, bucket) * bucket.per_ms

    def charge(self, starts: int, *, cost: int, now_ms: int) -> None:
        """Count ``starts``, and take their cost from the bucket."""
        if self.limit.rate is not None:
            self.starts += starts
            self.started += starts
            self.first_start = self.first_start or now_ms
        if self.limit.bucket is not None:
            self.level -= charged(cost, self.limit.bucket) * self.limit.bucket.per_ms
        self.is_changed = True

    def full_again_at(self, now_ms: int) -> int:
        """Return when the bucket is full."""
        bucket = self.limit.bucket
        if bucket is None:
            return now_ms
        return now_ms + -(-(bucket.capacity * bucket.per_ms - self.level) // bucket.refill)
