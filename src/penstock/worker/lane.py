"""One queue as a worker sees it: what it holds, what it owes, and whether there may be more to claim."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.worker.reporter import Reporter
from penstock.worker.run import Run

if TYPE_CHECKING:
    from penstock.app import App

__all__ = ["Lane", "apportion"]


class Lane:
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
        self, now: float, due: float, wake: Callable[[Lane], None], context: contextvars.Context
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


def apportion(slots: int, lanes: Sequence[Lane]) -> dict[Lane, int]:
    """Share ``slots`` among ``lanes`` by their weights: one at a time, to whoever is furthest behind.

    A lane that had nothing to ask for meanwhile has no claim to the time it was away, but for one round.
    """
    if len(lanes) == 1:
        return {lanes[0]: slots}
    grants = dict.fromkeys(lanes, 0)
    if not grants:
        return grants
    ahead = max(lane.progress for lane in lanes)
    longest_stride = 1 / min(lane.weight for lane in lanes)
    for lane in lanes:
        lane.progress = max(lane.progress, ahead - (slots + 1) * longest_stride)
    progress = {lane: lane.progress for lane in lanes}
    for _ in range(slots):
        lane = min(progress, key=progress.__getitem__)
        progress[lane] += 1 / lane.weight
        grants[lane] += 1
    return grants
