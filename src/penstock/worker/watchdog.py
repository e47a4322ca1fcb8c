"""The watchdog: notices when the worker's event loop has stopped turning, and says where it stands.

It runs on the heartbeat's loop, in a thread of its own. A handler that blocks the worker's loop keeps its lease,
because the heartbeat goes on; but nobody can settle, cancel or stop anything meanwhile. So the watchdog logs the
stack of the loop's thread after 10 s, and after ``stuck_after`` the heartbeat stops renewing: other workers take
the jobs over.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Sequence
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

    def __init__(self, lanes: Sequence[Lane], *, worker_id: str, stuck_after_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._lanes = lanes
        self._worker_id = worker_id
        self._stuck_after_s = stuck_after_s
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
        if self.stalled_s >= WARN_AFTER_S and not self._warned:
            self._warned = True
            self._warn()

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
        self._warned = False
        self.stalled_s = 0.0
        self._awaits_turn = False

    def _warn(self) -> None:
        frame = sys._current_frames().get(self._thread_id)
        stack = "".join(traceback.format_stack(frame)[-_MOST_FRAMES:]) if frame else "(its thread has ended)"
        logger.error(
            "The event loop of worker %s has not turned for %.0f s, so no job can be settled, cancelled or stopped. "
            "Do not block in async handlers: use a sync function, which runs in a thread. Its thread is at:\n%s",
            self._worker_id,
            self.stalled_s,
            stack,
        )
