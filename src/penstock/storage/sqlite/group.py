"""A group of jobs as the verbs see it: its counts, its window, its bucket, and whether it has room.

No SQL here: ``groups`` reads and writes it. The queue itself is the group of the empty key.
"""

from __future__ import annotations

import msgspec

from penstock.core.limits import Limit, Reason, charged

__all__ = ["HOLDING", "Group"]

HOLDING = 2
"""The grip of a record that holds a slot of its group while it is neither waiting nor active."""


class Group(msgspec.Struct):
    """The fields up to ``over_at`` are the columns of ``job_groups``.

    ``waiting``, ``active``, ``held`` and ``blocked`` count members; ``cost`` is that of the waiting ones. ``level`` is
    the bucket's at ``level_at``, in parts of a token of which ``level_per`` make one (0: it was never used).
    ``look_at``: when time may make room for the blocked. ``over_at``: when nothing is left of a group without members.
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
        """Whether its members run strictly in order."""
        return self.limit.concurrency == 1

    def is_stopped(self, now_ms: int) -> bool:
        return bool(self.paused) or self.parked_until > now_ms

    def is_full(self, slots_taken: int) -> bool:
        return self.limit.concurrency is not None and slots_taken >= self.limit.concurrency

    def refill(self, now_ms: int) -> None:
        """Bring the bucket's level up to now."""
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

    def why_full(self, now_ms: int, *, cost: int | None = None, grip: int = 0) -> tuple[Reason, int]:
        """Why it has no room for a member of that cost and grip, and when it may have (0: time does not tell).

        Without a cost, only what holds for any member is said. ``""``: there is room.
        """
        limit, busy = self.limit, self.waiting + self.active
        if self.paused:
            return "paused", 0
        if self.parked_until > now_ms:
            return "asked", self.parked_until
        if self.is_full(busy if cost is None or grip == HOLDING else busy + self.held):
            return "concurrency", 0
        if limit.rate is not None and self.starts + self.waiting >= limit.rate.count:
            return "rate", self.first_start + limit.rate.per_ms if self.first_start else 0
        return ("", 0) if cost is None else self._lacks(cost, now_ms)

    def _lacks(self, cost: int, now_ms: int) -> tuple[Reason, int]:
        bucket = self.limit.bucket
        if bucket is None:
            return "", 0
        needed = self.cost + charged(cost, bucket)
        missing = needed * bucket.per_ms - self.level
        if missing <= 0:
            return "", 0
        return "bucket", now_ms + -(-missing // bucket.refill) if needed <= bucket.capacity else 0

    def can_start(self, cost: int, now_ms: int) -> bool:
        """Whether a waiting member of that cost may be leased now."""
        limit = self.limit
        if self.is_stopped(now_ms) or self.is_full(self.active):
            return False
        if limit.rate is not None and self.starts >= limit.rate.count:
            return False
        bucket = limit.bucket
        return bucket is None or self.level >= charged(cost, bucket) * bucket.per_ms

    def charge(self, starts: int, *, cost: int, now_ms: int) -> None:
        """So many were started, and took that from the bucket."""
        if self.limit.rate is not None:
            self.starts += starts
            self.started += starts
            self.first_start = self.first_start or now_ms
        if self.limit.bucket is not None:
            self.level -= charged(cost, self.limit.bucket) * self.limit.bucket.per_ms
        self.is_changed = True

    def full_again_at(self, now_ms: int) -> int:
        """When its bucket is full."""
        bucket = self.limit.bucket
        if bucket is None:
            return now_ms
        return now_ms + -(-(bucket.capacity * bucket.per_ms - self.level) // bucket.refill)
