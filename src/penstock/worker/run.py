"""One run of one job, from the claim to the settle, and the timeouts of runs.

Only the worker's loop changes a run. Other threads may read it, and may set ``started_at`` (the thread that
starts the run) and ``saw_abort`` (the handler that checked).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.job import Lease
from penstock.core.outcome import Abort, Outcome
from penstock.core.text import get_logger

if TYPE_CHECKING:
    from penstock.client.execution import Runner
    from penstock.client.task import Task
    from penstock.worker.context import JobContext
    from penstock.worker.slots import ServedQueue


logger = get_logger("penstock.worker")

PATIENCE_S: Final = 5.0
"""The time that an aborted handler has to clean up before its job is settled without it."""

Call = Callable[["Run"], Awaitable[Any]]
"""Runs the handler of a run and returns its result; middleware wraps one call in another."""


class EncodedResult(NamedTuple):
    """A result from another process, already encoded for the store."""

    data: bytes


class Handler(NamedTuple):
    """The code that runs the jobs of one task; made when its first job arrives.

    ``definition`` is the task or the handler of the app, if there is one. ``is_batched``: one call serves several jobs.
    """

    task: str
    runner: Runner
    call: Call
    encode: Callable[[Any], bytes]
    pack: Callable[[tuple[Any, ...], dict[str, Any]], bytes]
    definition: Task[..., Any] | None = None
    is_batched: bool = False


@dataclass(slots=True, eq=False)
class Run:
    """One run of one job. ``outcome`` is set once; whatever the handler does after that is ignored.

    ``started_at`` is 0.0 while the run waits for a thread or a process: its timeout counts from there. ``error`` is the
    exception that failed the run, until it is logged.
    """

    lease: Lease
    served: ServedQueue
    handler: Handler
    claimed_at: float
    started_at: float
    abort: Abort | None = None
    outcome: Outcome | None = None
    error: BaseException | None = None
    aio_task: asyncio.Task[None] | None = None
    context: JobContext | None = None
    kill: Callable[[], None] | None = None
    discarded: bool = False
    saw_abort: bool = False
    stuck: bool = False


class Deadlines:
    """Calls ``overdue(run)`` when a run times out, and again if it is still running ``PATIENCE_S`` later.

    One timer serves all runs with a timeout, never more than the worker has slots. So a run costs one comparison when
    it starts and nothing when it ends; when the timer fires, it checks all runs.
    """

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
