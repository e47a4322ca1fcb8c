"""Timeouts of runs, with one timer for all of them.

Only runs with a timeout are watched, never more than the worker has slots. So a run costs one comparison when it
starts and nothing when it ends; when the timer fires, it checks all runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from penstock.core.text import get_logger
from penstock.worker.run import Run

logger = get_logger("penstock.worker")

PATIENCE_S: Final = 5.0
"""The time that an aborted handler has to clean up before its job is settled without it."""


class Deadlines:
    """Calls ``overdue(run)`` when a run times out, and again if it is still running ``PATIENCE_S`` later."""

    def __init__(self, overdue: Callable[[Run], None]) -> None:
        self._overdue = overdue
        self._watched: set[Run] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._fires_at = 0.0
        self._loop = asyncio.get_running_loop()

    def watch(self, run: Run) -> None:
        """Watch ``run`` until ``forget``."""
        self._watched.add(run)
        self._arm(run.claimed_at + run.lease.options.timeout_ms / 1000)

    def forget(self, run: Run) -> None:
        """Stop watching a run that has ended."""
        self._watched.discard(run)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, deadline: float) -> None:
        if self._timer is not None:
            if self._fires_at <= deadline:
                return
            self._timer.cancel()
        self._fires_at = deadline
        self._timer = self._loop.call_later(max(deadline - time.monotonic(), 0), self._look)

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        for run in list(self._watched):
            if _deadline(run, now) <= now:
                try:
                    self._overdue(run)
                except Exception:
                    logger.exception("job %r could not be stopped at its timeout", run.lease.id)
            if run.outcome is not None or (run.abort is not None and _deadline(run, now) <= now):
                self._watched.discard(run)
            else:
                self._arm(_deadline(run, now))


def _deadline(run: Run, now: float) -> float:
    """Return when the run times out. The time of a run that waits for a thread has not started."""
    timeout_s = run.lease.options.timeout_ms / 1000
    deadline = (run.started_at or now) + timeout_s
    return deadline if run.abort is None else deadline + PATIENCE_S
