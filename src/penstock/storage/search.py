"""What a search asks for, and what it finds."""

from __future__ import annotations

import msgspec

from penstock.core.job import Job
from penstock.core.lifecycle import State

__all__ = ["Found", "Query"]


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
