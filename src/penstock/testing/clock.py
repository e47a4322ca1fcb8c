"""The clock of a harness: the store's own, moved forward by hand."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from penstock.core.duration import Duration, milliseconds

if TYPE_CHECKING:
    from penstock.storage.base import Storage

__all__ = ["ManualClock"]


class ManualClock:
    """Moves all queues of a harness. Real time goes on as well: a test takes its milliseconds.

    A queue is told when it is next touched, so queues that come later stand where the others do. Any thread may
    move it.
    """

    def __init__(self) -> None:
        self.moved_ms = 0
        self._told: dict[str, int] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ManualClock {self.now().isoformat()}, moved by {timedelta(milliseconds=self.moved_ms)}>"

    def now(self) -> datetime:
        """What time it is in the queues."""
        return datetime.now(UTC) + timedelta(milliseconds=self.moved_ms)

    def advance(self, duration: Duration) -> None:
        """Let ``duration`` pass. Nothing is run by this: see ``Harness.drain``."""
        self.advance_ms(milliseconds(duration, what="duration"))

    def advance_ms(self, ms: int) -> None:
        with self._lock:
            self.moved_ms += ms

    async def tell(self, storage: Storage, queue: str) -> None:
        """Bring ``queue`` up to date."""
        with self._lock:
            behind_ms = self.moved_ms - self._told.get(queue, 0)
            self._told[queue] = self.moved_ms
        if behind_ms:
            await storage.shift_clock(queue, behind_ms)
