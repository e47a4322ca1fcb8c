"""The watchdog: notices when the worker's event loop has stopped turning, and says where it stands.

It runs on the heartbeat's loop, in a thread of its own. A handler that blocks the worker's loop keeps its lease,
because the heartbeat goes on; but nobody can settle, cancel or stop anything meanwhile. So the watchdog logs the
stack of the loop's thread after 10 s, and after ``stuck_after`` the heartbeat stops renewing: other workers take
the jobs over. A worker that a signal asked to stop does not wait for that: when its time is over, the watchdog sends
the signal again, and ``LoopBlocked`` is raised where the handler stands. Its job is handed back.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Final

from penstock.core.display import get_logger
from penstock.worker.deadlines import PATIENCE_S
from penstock.worker.lane import Lane

__all__ = ["Watchdog"]

logger = get_logger("penstock.worker")

WARN_AFTER_S: Final = 10.0
_TICK_S: Final = 1.0
_MOST_FRAMES: Final = 30


class Watchdog:
    """Make it on the loop that it watches. ``stuck`` may be read from any thread."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        worker_id: str,
        stuck_after_s: float,
        interrupt_at: Callable[[], float] = lambda: float("inf"),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._lanes = lanes
        self._worker_id = worker_id
        self._stuck_after_s = stuck_after_s
        self._interrupt_at = interrupt_at
        self.interrupting = False
        """True if the next signal is to end the handler that blocks the loop."""
        self._awaits_turn = False
        self._warned = False
        self._looked_at = time.monotonic()
        self.stalled_s = 0.0
        """How long the loop has not turned, as far as this thread saw."""

    async def run(self) -> None:
        """Look every second, until cancelled or until the watched loop is closed."""
        try:
            while True:
                self.look(time.monotonic())
                await asyncio.sleep(_TICK_S)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def look(self, now: float) -> None:
        """Note whether the loop has turned since the last look. Raise ``RuntimeError`` if it is closed."""
        # A machine that was suspended stops this thread, too: that time is nobody's fault.
        elapsed_s = min(now - self._looked_at, 2 * _TICK_S)
        self._looked_at = now
        if not self._awaits_turn:
            self._awaits_turn = True
            self._loop.call_soon_threadsafe(self._turned)
            return
        self.stalled_s += elapsed_s
        overdue = now >= self._interrupt_at() and self.stalled_s >= PATIENCE_S
        if not self._warned and (self.stalled_s >= WARN_AFTER_S or overdue):
            self._warned = True
            self._warn()
        if overdue:
            self.interrupting = True
            os.kill(os.getpid(), signal.SIGTERM)

    @property
    def stuck(self) -> bool:
        """Whether the leases are to be given up. No run is given up before its own timeout has passed."""
        if self.stalled_s < self._stuck_after_s:
            return False
        timeouts_ms = [
            run.lease.options.timeout_ms for lane in self._lanes for run in list(lane.held.values())
        ]
        return self.stalled_s >= max(timeouts_ms, default=0) / 1000 + PATIENCE_S

    def _turned(self) -> None:
        if self._warned:
            logger.warning(
                "The event loop of worker %s turns again after %.0f s", self._worker_id, self.stalled_s
            )
        self._warned = self.interrupting = self._awaits_turn = False
        self.stalled_s = 0.0

    def _warn(self) -> None:
        frame = sys._current_frames().get(self._thread_id)
        logger.error(
            "The event loop of worker %s has not turned for %.0f s, so no job can be settled, cancelled or stopped. "
            "Do not block in async handlers: use a sync function, which runs in a thread",
            self._worker_id,
            self.stalled_s,
            exc_info=TimeoutError("the event loop is blocked here").with_traceback(_stack(frame)),
        )


def _stack(frame: FrameType | None) -> TracebackType | None:
    """Return the innermost calls that led to ``frame``, in the form of a traceback."""
    stack: TracebackType | None = None
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        stack = TracebackType(stack, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return stack
