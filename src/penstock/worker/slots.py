"""A worker's own limits: so many starts in any stretch of so long, for all its queues and for each.

The fetcher asks before it claims, so a job that may not start yet stays in the store, where another worker can
have it. Here are the counts; all of it happens on the worker's loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from penstock.core.limits import Rate
from penstock.worker.reporter import Reporter
from penstock.worker.run import Run

if TYPE_CHECKING:
    from penstock.client.app import App


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

    def capped(self, grants: dict[ServedQueue, int]) -> dict[ServedQueue, int]:
        """Slots by lane, no more than there is room for in each."""
        return {served: min(count, self.room(served.name)) for served, count in grants.items()}

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


# One queue as a worker sees it: what it holds, what it owes, and whether there may be more to claim.


class ServedQueue:
    """``held`` are all leases not yet settled, by token; ``outcomes`` those of them that are ready to be.

    Changed on the worker's loop only; the heartbeat thread reads ``held``, ``asked`` and ``unsure``.
    """

    __slots__ = (
        "alarm",
        "alarm_at",
        "app",
        "asked",
        "backoff_s",
        "claims",
        "dried_at",
        "dry",
        "flowing",
        "held",
        "in_flight",
        "name",
        "outcomes",
        "progress",
        "recovered_at",
        "recovering",
        "reporter",
        "spare",
        "trickling",
        "unsure",
        "waiter",
        "weight",
    )

    def __init__(self, name: str, weight: float = 1) -> None:
        self.name = name
        self.weight = weight
        self.held: dict[int, Run] = {}
        self.outcomes: list[Run] = []
        self.in_flight = 0
        self.claims = 0
        # When the calls began whose answers have not been read: they may have brought leases that are not held yet.
        self.asked: list[float] = []
        # A dry lane had less than was asked for: it is asked again when its waiter wakes.
        self.dry = False
        # The last claim was answered in full: there is likely to be more than one call can bring.
        self.flowing = False
        # The last answer had one job or none: whoever sent it is probably waiting for it.
        self.trickling = False
        self.dried_at = 0.0
        self.alarm: asyncio.TimerHandle | None = None
        self.alarm_at = 0.0
        self.waiter: asyncio.Task[None] | None = None
        # The slots reserved for what the waiter may bring.
        self.spare = 0
        # A claim was given up while it waited: the store may believe that we hold what it got.
        self.unsure = False
        # Jobs received per weight: the lane with the least progress is served first.
        self.progress = 0.0
        self.reporter: Reporter | None = None
        self.app: App | None = None
        self.recovering: asyncio.Task[None] | None = None
        # When the store last answered again, and how long to leave it alone if it fails at once.
        self.recovered_at = float("-inf")
        self.backoff_s = 0.0

    def ask(self) -> float:
        """Note in ``asked`` that a call begins which may bring leases; return when."""
        began_at = time.monotonic()
        self.asked.append(began_at)
        return began_at

    def set_alarm(
        self, now: float, due: float, wake: Callable[[ServedQueue], None], context: contextvars.Context
    ) -> None:
        """Ask again when the next job falls due. Apart from the waiter, which may have been asleep before that."""
        if self.alarm is not None:
            if now < self.alarm_at <= due:
                return
            self.alarm.cancel()
        self.alarm_at = due
        self.alarm = asyncio.get_running_loop().call_later(due - now, wake, self, context=context)

    def drop_alarm(self) -> None:
        """Nobody is to ask."""
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None


def apportion(slots: int, served_queues: Sequence[ServedQueue]) -> dict[ServedQueue, int]:
    """Share ``slots`` among ``served_queues`` by their weights: one at a time, to whoever is furthest behind.

    A lane that had nothing to ask for meanwhile has no claim to the time it was away, but for one round.
    """
    if len(served_queues) == 1:
        return {served_queues[0]: slots}
    grants = dict.fromkeys(served_queues, 0)
    if not grants:
        return grants
    ahead = max(served.progress for served in served_queues)
    longest_stride = 1 / min(served.weight for served in served_queues)
    for served in served_queues:
        served.progress = max(served.progress, ahead - (slots + 1) * longest_stride)
    progress = {served: served.progress for served in served_queues}
    for _ in range(slots):
        served = min(progress, key=progress.__getitem__)
        progress[served] += 1 / served.weight
        grants[served] += 1
    return grants
