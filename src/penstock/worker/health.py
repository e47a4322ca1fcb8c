"""The health of a worker, for probes, its record in the store, and people; the watchdog of its loop, and its signals.

The watchdog runs on the heartbeat's loop, in another thread. A handler that blocks the worker's loop keeps its lease,
because the heartbeat continues, but no job can be settled, cancelled or stopped meanwhile. After 10 s the watchdog logs
the stack of the loop's thread. After ``stuck_after`` the heartbeat stops renewing leases, and other workers take the
jobs over. If a signal asked the worker to stop, the watchdog sends the signal again once the grace is over; that raises
``LoopBlocked`` in the handler, whose job is handed back.

The first SIGTERM or SIGINT stops the worker, the second one cuts its grace short. The event loop handles signals. While
a handler blocks the loop, Python still calls ``received`` in the main thread.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import parent_process
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from penstock.core.command import COMMAND_TASK, command_text
from penstock.core.names import ref_of
from penstock.core.text import get_logger, storable
from penstock.errors import StorageDamaged, StorageFull, StorageReadOnly, StorageRefused
from penstock.worker.run import PATIENCE_S
from penstock.worker.slots import ServedQueue

if TYPE_CHECKING:
    from penstock.worker.session import WorkerSession


WorkerState = Literal["new", "starting", "running", "paused", "stopping", "stopped"]

logger = get_logger("penstock.worker")

# A worker with free slots whose claims get no answer for this long is not consuming.
_SILENT_S: Final = 10.0
# Nor is one whose event loop is blocked for this long.
_BLOCKED_S: Final = 5.0
WARN_AFTER_S: Final = 10.0
_TICK_S: Final = 1.0
_MOST_FRAMES: Final = 30
_MOST_SHOWN: Final = 100
_LONGEST_REASON: Final = 300


class ActiveJob(msgspec.Struct, frozen=True):
    """A job that occupies a slot. ``stuck`` means that it is settled although its handler still runs."""

    queue: str
    id: str
    task: str
    age_s: float
    stuck: bool = False


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The current health of a worker.

    ``consuming`` is false for a worker that is alive but takes no jobs, and ``reason`` says why: it is paused or
    stopping, the store is away, all slots are occupied by handlers that hang, or claims get no answer. A worker whose
    slots are all busy is consuming.
    """

    state: WorkerState
    consuming: bool
    reason: str
    connected: bool = False
    last_claim_age_s: float = 0.0
    last_heartbeat_age_s: float = 0.0
    concurrency: int = 0
    active: tuple[ActiveJob, ...] = ()
    stuck: int = 0


class WorkerStats(msgspec.Struct):
    """Counts since the worker started, of outcomes that the store has accepted."""

    claimed: int = 0
    completed: int = 0
    failed: int = 0
    retrying: int = 0
    snoozed: int = 0
    suspended: int = 0
    released: int = 0
    limited: int = 0
    cancelled: int = 0
    stalled: int = 0
    errors: int = 0


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The record that a worker writes with every heartbeat. ``running`` has at most a hundred jobs.

    ``blocked_by`` is the job whose function blocks the event loop, as ``queue/id``. ``unknown`` lists the tasks that
    are not registered in its app and whose jobs it handed back lately. ``tasks`` has the queue of each task of its app;
    ``None`` if there are more than a hundred. ``up_ms`` is its uptime by the monotonic clock.
    """

    host: str
    pid: int
    version: str
    started_at_ms: int
    up_ms: int
    queues: tuple[str, ...]
    concurrency: int
    state: WorkerState
    consuming: bool
    reason: str
    active: int
    stuck: int
    running: tuple[ActiveJob, ...]
    blocked_by: str = ""
    unknown: tuple[str, ...] = ()
    tasks: dict[str, str] | None = None


def examine(session: WorkerSession) -> Health:
    """Return the health of a running worker. Any thread may call this."""
    now = time.monotonic()
    running = list(session.executor.running)
    reason = _why_not_consuming(session, now, running=len(running))
    return Health(
        state=session.worker.state,
        consuming=not reason,
        reason=reason,
        connected=not session.failing,
        last_claim_age_s=now - session.fetcher.last_claim_at,
        last_heartbeat_age_s=now - session.heartbeat.last_at if session.heartbeat else 0.0,
        concurrency=session.options.concurrency,
        stuck=sum(run.stuck for run in running),
        active=tuple(
            ActiveJob(run.served.name, run.lease.id, run.lease.options.task, now - run.claimed_at, run.stuck)
            for run in running
        ),
    )


def running_commands(session: WorkerSession) -> dict[tuple[str, str], str]:
    """Return the commands of the command jobs that the worker holds, by queue and id."""
    runs = [run for served in session.fetcher.served_queues for run in list(served.held.values())]
    return {
        (run.served.name, run.lease.id): command_text(run.lease.payload)
        for run in runs
        if run.lease.options.task == COMMAND_TASK
    }


def describe(session: WorkerSession) -> bytes:
    """Return the worker's record for the store, as JSON."""
    health = examine(session)
    return msgspec.json.encode(
        Description(
            host=storable(platform.node()),
            pid=os.getpid(),
            version=_version(),
            started_at_ms=session.started_at_ms,
            up_ms=round((time.monotonic() - session.started_at) * 1000),
            queues=tuple(session.options.queues),
            concurrency=health.concurrency,
            state=health.state,
            consuming=health.consuming,
            reason=health.reason,
            active=len(health.active),
            stuck=health.stuck,
            running=health.active[:_MOST_SHOWN],
            blocked_by=_blocking_job(session) if _is_blocked(session) else "",
            unknown=session.handlers.unknown.names(),
            tasks=_queues_by_task(session),
        )
    )


def _queues_by_task(session: WorkerSession) -> dict[str, str] | None:
    tasks = list(session.worker.app.tasks.values())
    return {task.name: task.source.queue for task in tasks} if len(tasks) <= _MOST_SHOWN else None


def _why_not_consuming(session: WorkerSession, now: float, *, running: int) -> str:
    """Return why the worker takes no jobs; empty if it does."""
    if session.worker.state != "running":
        return f"the worker is {session.worker.state}"
    if session.failing:
        return _why_failing(dict(session.failing))
    if _is_blocked(session):
        cause = f"job {ref}" if (ref := _blocking_job(session)) else "a handler"
        return f"{cause} has blocked the event loop for {session.watchdog.stalled_s:.0f} s"
    if len(session.executor.stuck) >= session.options.concurrency:
        return "all slots are occupied by handlers that hang"
    limits = session.fetcher.limits
    if limits is not None and limits.reached:
        return ""  # as for a worker whose slots are all busy
    silent_s = now - session.fetcher.last_claim_at
    if silent_s > _SILENT_S and running < session.options.concurrency:
        return f"no answer to a claim for {silent_s:.0f} s: the store is away, or a handler blocks the loop"
    return ""


def _why_failing(failing: dict[str, BaseException]) -> str:
    """Return which queues the store does not serve, and why if the store says so."""
    queues = ", ".join(sorted(failing))
    for error in failing.values():
        if isinstance(error, StorageFull | StorageReadOnly | StorageRefused | StorageDamaged):
            return f"the store fails for {queues}: {storable(str(error))[:_LONGEST_REASON]}"
    return f"the store does not answer for {queues}"


def _is_blocked(session: WorkerSession) -> bool:
    return session.watchdog.stalled_s >= _BLOCKED_S


def _blocking_job(session: WorkerSession) -> str:
    """Return the ref of the job whose function blocks the event loop; empty if another task does."""
    current = asyncio.current_task(session.loop)
    ids = {run.lease.id: run for run in list(session.executor.running)}
    run = ids.get(current.get_name()) if current is not None else None
    return "" if run is None else ref_of(run.served.name, run.lease.id)


def _version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:
        return ""


class Watchdog:
    """Notices when the event loop is blocked. Create it on that loop; any thread may read ``stuck``."""

    def __init__(
        self,
        served_queues: Sequence[ServedQueue],
        *,
        worker_id: str,
        stuck_after_s: float,
        interrupt_at: Callable[[], float] = lambda: float("inf"),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._served_queues = served_queues
        self._worker_id = worker_id
        self._stuck_after_s = stuck_after_s
        self._interrupt_at = interrupt_at
        self.interrupting = False
        """True if the next signal must end the handler that blocks the loop."""
        self._awaits_turn = False
        self._warned = False
        self._looked_at = time.monotonic()
        self.stalled_s = 0.0
        """The time that the loop has been blocked."""

    async def run(self) -> None:
        """Check every second, until cancelled or until the watched loop is closed."""
        try:
            while True:
                self.look(time.monotonic())
                await asyncio.sleep(_TICK_S)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def look(self, now: float) -> None:
        """Check whether the loop has run since the last check. Raise ``RuntimeError`` if it is closed."""
        # A suspended machine stops this thread, too: that time does not count.
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
        """Return whether to give up the leases. That never happens before the longest timeout has passed."""
        if self.stalled_s < self._stuck_after_s:
            return False
        timeouts_ms = [
            run.lease.options.timeout_ms
            for served in self._served_queues
            for run in list(served.held.values())
        ]
        return self.stalled_s >= max(timeouts_ms, default=0) / 1000 + PATIENCE_S

    def _turned(self) -> None:
        if self._warned:
            logger.warning(
                "the event loop of worker %s runs again after %.0f s", self._worker_id, self.stalled_s
            )
        self._warned = self.interrupting = self._awaits_turn = False
        self.stalled_s = 0.0

    def _warn(self) -> None:
        frame = sys._current_frames().get(self._thread_id)
        logger.error(
            "the event loop of worker %s has been blocked for %.0f s, so no job can be settled, cancelled or stopped. "
            "Do not block in async handlers: use a plain def, which runs in a thread",
            self._worker_id,
            self.stalled_s,
            exc_info=TimeoutError("the event loop is blocked here").with_traceback(_stack(frame)),
        )


def _stack(frame: FrameType | None) -> TracebackType | None:
    """Return the innermost calls that led to ``frame`` as a traceback."""
    stack: TracebackType | None = None
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        stack = TracebackType(stack, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return stack


STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class LoopBlocked(BaseException):
    """Raised in a handler that still blocks the event loop when the worker's grace is over."""


def sigint_is_ignored() -> bool:
    """Return whether this process inherited an ignored SIGINT, as background jobs of a script do.

    The processes of a pool ignore SIGINT on purpose, because their supervisor stops them.
    """
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN and parent_process() is None


@contextmanager
def handle_signals(on_signal: Callable[[], None], *, received: Callable[[], None]) -> Iterator[None]:
    """Call ``on_signal`` on the running loop at each stop signal; restore the old handlers at the end.

    ``received`` is called first, in the middle of whatever the main thread does. Only the main thread can handle
    signals: in other threads, and on platforms without signals, this does nothing. A signal that the process
    ignores stays ignored: a supervisor passes Ctrl-C on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    numbers = [number for number in STOP_SIGNALS if before[number] is not signal.SIG_IGN]
    try:
        for number in numbers:
            loop.add_signal_handler(number, on_signal)
            # The loop learns of signals from a file descriptor and does not need Python's own handler.
            signal.signal(number, lambda *_: received())
            signal.siginterrupt(number, False)
    except NotImplementedError:
        yield
        return
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number] or signal.SIG_DFL)
