"""The slots of a worker: its limits on starts, the state of each queue it serves, and how queues share slots.

The fetcher checks the limits before it claims, so a job that may not start yet stays in the store, where another worker
can claim it. All of this happens on the worker's loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock.core.limits import Rate
from penstock.worker.reporter import Reporter
from penstock.worker.run import Run

if TYPE_CHECKING:
    from penstock.client.app import App


# Loops may fire a timer slightly early.
_MARGIN_S: Final = 0.001


class Window:
    """The starts of the last ``rate.per_ms``, and those that pending claims may add."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self.reserved = 0
        self._per_s = rate.per_ms / 1000
        self._starts: deque[tuple[float, int]] = deque()
        self._started = 0

    def room(self, now: float) -> int:
        """Return how many more jobs may start or be claimed now."""
        while self._starts and self._starts[0][0] + self._per_s <= now:
            self._started -= self._starts.popleft()[1]
        return self.rate.count - self._started - self.reserved

    def note(self, count: int, now: float) -> None:
        """Count ``count`` starts."""
        self._starts.append((now, count))
        self._started += count

    def room_at(self) -> float:
        """Return when the oldest starts leave the window."""
        return self._starts[0][0] + self._per_s if self._starts else float("inf")


class Limits:
    """The windows of the worker and of single queues. The fetcher sets ``on_room``, which is called when a full window
    has room again."""

    on_room: Callable[[], None]

    def __init__(self, overall: Rate | None, by_queue: Mapping[str, Rate]) -> None:
        self._overall = None if overall is None else Window(overall)
        self._by_queue = {queue: Window(rate) for queue, rate in by_queue.items()}
        self._timer: asyncio.TimerHandle | None = None
        self._fires_at = float("inf")
        self.reached = False
        """True while a limit keeps the worker from claiming. Any thread may read this."""

    def room(self, queue: str) -> int:
        """Return how many jobs of ``queue`` may be claimed now."""
        now = time.monotonic()
        return min((window.room(now) for window in self._windows(queue)), default=1 << 30)

    def capped(self, grants: dict[ServedQueue, int]) -> dict[ServedQueue, int]:
        """Return the slots by queue, capped by the room of each."""
        return {served: min(count, self.room(served.name)) for served, count in grants.items()}

    def room_of_worker(self) -> int:
        """Return how many jobs may be claimed now, of all queues together."""
        return 1 << 30 if self._overall is None else self._overall.room(time.monotonic())

    def reserve(self, queue: str, count: int) -> None:
        """Reserve room for a claim; a negative count frees it when the claim is answered."""
        for window in self._windows(queue):
            window.reserved += count

    def note(self, queue: str, count: int) -> None:
        """Count starts. Call this after the last of them, so that no window counts as older than it is."""
        now = time.monotonic()
        for window in self._windows(queue):
            window.note(count, now)

    def set_timer(self) -> None:
        """Set the timer for ``on_room``. Call this after sending claims, or deciding not to."""
        now = time.monotonic()
        used_up = [window for window in self._all_windows() if window.room(now) <= 0]
        self.reached = bool(used_up)
        room_at = min((window.room_at() for window in used_up), default=float("inf"))
        # An earlier timer can stay: firing without effect does no harm.
        if room_at < self._fires_at:
            self.close()
            self._fires_at = room_at
            delay_s = max(room_at - now, 0.0) + _MARGIN_S
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _fire(self) -> None:
        self._timer, self._fires_at = None, float("inf")
        self.on_room()

    def _windows(self, queue: str) -> list[Window]:
        own = self._by_queue.get(queue)
        return [window for window in (self._overall, own) if window is not None]

    def _all_windows(self) -> list[Window]:
        return [*self._by_queue.values(), *([self._overall] if self._overall is not None else [])]


@dataclass(slots=True, eq=False)
class ServedQueue:
    """A queue as a worker sees it: ``held`` has all runs not yet settled, by token, ``outcomes`` those ready to settle.

    Only the worker's loop changes it; the heartbeat thread reads ``held``, ``call_starts`` and ``unsure``.
    """

    name: str
    weight: float = 1
    held: dict[int, Run] = field(default_factory=dict)
    outcomes: list[Run] = field(default_factory=list)
    in_flight: int = 0
    claims: int = 0
    # The number of claims whose answers are late.
    late: int = 0
    # Start times of calls whose answers have not been read: they may bring leases that are not held yet.
    call_starts: list[float] = field(default_factory=list)
    # A dry queue returned less than requested: it is claimed from again when its waiter wakes.
    dry: bool = False
    # The last claim was answered in full: more jobs than one call can return are likely.
    flowing: bool = False
    # The last answer had one job or none: its sender probably waits for the result.
    trickling: bool = False
    dried_at: float = 0.0
    alarm: asyncio.TimerHandle | None = None
    alarm_at: float = 0.0
    waiter: asyncio.Task[None] | None = None
    # The slots reserved for the jobs that the waiter may bring.
    spare: int = 0
    # A waiting claim was abandoned: the store may have leased jobs to this worker.
    unsure: bool = False
    # Jobs received per weight: the queue with the least progress is served first.
    progress: float = 0.0
    reporter: Reporter | None = None
    app: App | None = None
    lease_ms: int = 0
    recovering: asyncio.Task[None] | None = None
    # The time of the last recovery, and the pause if the store fails again soon.
    recovered_at: float = float("-inf")
    backoff_s: float = 0.0

    def note_call(self) -> float:
        """Note in ``call_starts`` the start of a call that may bring leases; return its time."""
        began_at = time.monotonic()
        self.call_starts.append(began_at)
        return began_at

    def set_alarm(
        self, now: float, due: float, wake: Callable[[ServedQueue], None], context: contextvars.Context
    ) -> None:
        """Claim again when the next job falls due; the waiter may have gone to sleep before that job arrived."""
        if self.alarm is not None:
            if now < self.alarm_at <= due:
                return
            self.alarm.cancel()
        self.alarm_at = due
        self.alarm = asyncio.get_running_loop().call_later(due - now, wake, self, context=context)

    def drop_alarm(self) -> None:
        """Cancel the alarm."""
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None


class Reservation:
    """The slots that a claim of a queue has reserved for its jobs.

    A late claim lends them to other queues, because the store of its own may be out of reach. That queue gets no more
    slots until it has answered.
    """

    __slots__ = ("_free", "_lent", "_reserve", "_served", "count")

    def __init__(
        self,
        served: ServedQueue,
        count: int,
        *,
        reserve: Callable[[ServedQueue, int], None],
        free: Callable[[ServedQueue], int],
    ) -> None:
        self.count = count
        self._lent = 0
        self._served = served
        self._reserve = reserve
        self._free = free
        reserve(served, count)

    def lend(self) -> None:
        """Free the slots."""
        self._reserve(self._served, -self.count)
        self._lent, self.count = self.count, 0
        self._served.late += 1

    def take_back(self) -> None:
        """Reserve those of the lent slots that are free now."""
        if self._lent:
            self._served.late -= 1
            self.count, self._lent = max(0, min(self._lent, self._free(self._served))), 0
            self._reserve(self._served, self.count)

    def end(self) -> None:
        """Free the slots for good."""
        self.take_back()
        self._reserve(self._served, -self.count)


def apportion(slots: int, served_queues: Sequence[ServedQueue]) -> dict[ServedQueue, int]:
    """Share ``slots`` among ``served_queues`` by weight: one at a time, to the queue that is furthest behind.

    A queue that was idle may catch up by at most one round.
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
