"""A worker's own limits: so many starts in any stretch of so long, for all its queues and for each.

The fetcher asks before it claims, so a job that may not start yet stays in the store, where another worker can
have it. Here are the counts; all of it happens on the worker's loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from penstock.core.rate import Rate
from penstock.worker.lane import Lane

__all__ = ["Limits", "Window"]

# Loops may fire a timer a little early: then it would be set again for nothing.
_MARGIN_S: Final = 0.001


class Window:
    """The starts of the last ``rate.per_ms``, and those that claims under way may bring."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self.reserved = 0
        self._per_s = rate.per_ms / 1000
        self._starts: deque[tuple[float, int]] = deque()
        self._started = 0

    def room(self, now: float) -> int:
        """How many more may start, or be claimed to start, now."""
        while self._starts and self._starts[0][0] + self._per_s <= now:
            self._started -= self._starts.popleft()[1]
        return self.rate.count - self._started - self.reserved

    def note(self, count: int, now: float) -> None:
        """So many have started."""
        self._starts.append((now, count))
        self._started += count

    def room_at(self) -> float:
        """When the oldest starts are out of it."""
        return self._starts[0][0] + self._per_s if self._starts else float("inf")


class Limits:
    """The window of the whole worker, and those of single queues. ``room_again``, set by the fetcher, is called when
    one that was used up is not any more."""

    room_again: Callable[[], None]

    def __init__(self, whole: Rate | None, by_queue: Mapping[str, Rate]) -> None:
        self._whole = None if whole is None else Window(whole)
        self._by_queue = {queue: Window(rate) for queue, rate in by_queue.items()}
        self._timer: asyncio.TimerHandle | None = None
        self._fires_at = float("inf")
        self.reached = False
        """Whether a limit keeps the worker from claiming just now; may be read from any thread."""

    def room(self, queue: str) -> int:
        """How many jobs of ``queue`` may be claimed now."""
        now = time.monotonic()
        return min((window.room(now) for window in self._windows(queue)), default=1 << 30)

    def capped(self, grants: dict[Lane, int]) -> dict[Lane, int]:
        """Slots by lane, no more than there is room for in each."""
        return {lane: min(count, self.room(lane.name)) for lane, count in grants.items()}

    def whole(self) -> int:
        """How many jobs may be claimed now, of all queues together."""
        return 1 << 30 if self._whole is None else self._whole.room(time.monotonic())

    def reserve(self, queue: str, count: int) -> None:
        """A claim for so many is sent; with a negative count, it has its answer."""
        for window in self._windows(queue):
            window.reserved += count

    def note(self, queue: str, count: int) -> None:
        """So many were started. Told after the last of them, so that no window is taken for older than it is."""
        now = time.monotonic()
        for window in self._windows(queue):
            window.note(count, now)

    def tend(self) -> None:
        """See to it that ``room_again`` is called in time. To be called after claims were sent, or were not."""
        now = time.monotonic()
        used_up = [window for window in self._all() if window.room(now) <= 0]
        self.reached = bool(used_up)
        room_at = min((window.room_at() for window in used_up), default=float("inf"))
        # Not before: a timer that fires for nothing does no harm.
        if room_at < self._fires_at:
            self.close()
            self._fires_at = room_at
            delay_s = max(room_at - now, 0.0) + _MARGIN_S
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def close(self) -> None:
        """Call nobody any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self) -> None:
        self._timer, self._fires_at = None, float("inf")
        self.room_again()

    def _windows(self, queue: str) -> list[Window]:
        own = self._by_queue.get(queue)
        return [window for window in (self._whole, own) if window is not None]

    def _all(self) -> list[Window]:
        return [*self._by_queue.values(), *([self._whole] if self._whole is not None else [])]
