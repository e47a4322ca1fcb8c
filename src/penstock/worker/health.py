"""How a worker is: for probes, for its record in the store, and for people."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from penstock.core.command import COMMAND_TASK, command_text
from penstock.core.names import ref_of
from penstock.core.text import get_logger, storable
from penstock.errors import StorageDamaged, StorageFull, StorageReadOnly, StorageRefused
from penstock.worker.deadlines import PATIENCE_S
from penstock.worker.slots import ServedQueue

if TYPE_CHECKING:
    from penstock.worker.session import WorkerSession


WorkerState = Literal["new", "starting", "running", "paused", "stopping", "stopped"]

# A worker that has room for jobs, and has had no answer to a claim for this long, does not consume.
_SILENT_S: Final = 10.0
# One whose event loop has not turned for this long does not, either.
_BLOCKED_S: Final = 5.0
_MOST_SHOWN: Final = 100
_LONGEST_REASON: Final = 300


class ActiveJob(msgspec.Struct, frozen=True):
    """A job that takes up a slot. ``stuck``: settled without its handler, which still runs."""

    queue: str
    id: str
    task: str
    age_s: float
    stuck: bool = False


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How the worker is just now.

    ``consuming`` is false for one that is alive and takes no jobs, and ``reason`` says why: paused, stopping, the
    store is away, all slots taken up by handlers that hang, no answer to a claim for long. A worker whose slots
    are all busy is consuming.
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
    """Counts since the worker began, of outcomes the store has accepted."""

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
    """The record that a worker writes with every heartbeat. ``running`` is cut at a hundred jobs.

    ``blocked_by`` is the job whose function blocks the event loop, as ``queue/id``. ``unknown`` are the tasks whose
    jobs it handed back lately because they are not registered in its app. ``up_ms`` is how long it has run, by a clock
    that nobody sets.
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


def examine(session: WorkerSession) -> Health:
    """The health of a worker that runs; may be called from any thread."""
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
    """Return the commands of the command jobs that run, by queue and id."""
    runs = [run for run in list(session.executor.running) if run.lease.options.task == COMMAND_TASK]
    return {(run.served.name, run.lease.id): command_text(run.lease.payload) for run in runs}


def describe(session: WorkerSession) -> bytes:
    """The worker's record in the store, as JSON."""
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
            unknown=session.plans.unknown.names(),
        )
    )


def _why_not_consuming(session: WorkerSession, now: float, *, running: int) -> str:
    """Empty if it is."""
    if session.worker.state != "running":
        return f"the worker is {session.worker.state}"
    if session.failing:
        return _why_failing(dict(session.failing))
    if _is_blocked(session):
        who = f"job {ref}" if (ref := _blocking_job(session)) else "a handler"
        return f"{who} has blocked the event loop for {session.watchdog.stalled_s:.0f} s"
    if len(session.executor.stuck) >= session.options.concurrency:
        return "all slots are taken up by handlers that hang"
    limits = session.fetcher.limits
    if limits is not None and limits.reached:
        return ""  # like one whose slots are all busy: it will
    silent_s = now - session.fetcher.last_claim_at
    if silent_s > _SILENT_S and running < session.options.concurrency:
        return f"no answer to a claim for {silent_s:.0f} s: the store is away, or a handler hogs the loop"
    return ""


def _why_failing(failing: dict[str, BaseException]) -> str:
    """Return which queues the store does not serve. One that answers, and cannot do what is asked, says why."""
    queues = ", ".join(sorted(failing))
    for error in failing.values():
        if isinstance(error, StorageFull | StorageReadOnly | StorageRefused | StorageDamaged):
            return f"the store fails for {queues}: {storable(str(error))[:_LONGEST_REASON]}"
    return f"the store does not answer for {queues}"


def _is_blocked(session: WorkerSession) -> bool:
    return session.watchdog.stalled_s >= _BLOCKED_S


def _blocking_job(session: WorkerSession) -> str:
    """Return the ref of the job whose function holds the event loop; empty if a task of its own does."""
    current = asyncio.current_task(session.loop)
    ids = {run.lease.id: run for run in list(session.executor.running)}
    run = ids.get(current.get_name()) if current is not None else None
    return "" if run is None else ref_of(run.served.name, run.lease.id)


def _version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:
        return ""


# The watchdog: notices when the worker's event loop has stopped turning, and says where it stands.
#
# It runs on the heartbeat's loop, in a thread of its own. A handler that blocks the worker's loop keeps
# its lease, because the heartbeat goes on; but nobody can settle, cancel or stop anything meanwhile. So
# the watchdog logs the stack of the loop's thread after 10 s, and after ``stuck_after`` the heartbeat
# stops renewing: other workers take the jobs over. A worker that a signal asked to stop does not wait for
# that: when its time is over, the watchdog sends the signal again, and ``LoopBlocked`` is raised where
# the handler stands. Its job is handed back.


logger = get_logger("penstock.worker")

WARN_AFTER_S: Final = 10.0
_TICK_S: Final = 1.0
_MOST_FRAMES: Final = 30


class Watchdog:
    """Make it on the loop that it watches. ``stuck`` may be read from any thread."""

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
            run.lease.options.timeout_ms
            for served in self._served_queues
            for run in list(served.held.values())
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
