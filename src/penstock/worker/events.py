"""Worker events: the recorder counts settled outcomes, logs failures and calls listeners."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, ParamSpec, assert_never, get_args

import msgspec

from penstock.core.command import COMMAND_TASK
from penstock.core.lifecycle import State
from penstock.core.outcome import (
    FAILURE_TEXTS,
    Abort,
    Await,
    Cancel,
    Complete,
    Fail,
    Failure,
    Limited,
    Release,
    Snooze,
    Suspend,
)
from penstock.core.text import get_logger
from penstock.core.units import describe
from penstock.errors import InvalidOption, Retry
from penstock.storage.values import Settled
from penstock.worker.health import WorkerStats
from penstock.worker.run import Run

EventName = Literal[
    "ready", "started",
    "completed", "failed", "retrying", "snoozed", "suspended", "released", "limited", "cancelled", "stalled", "stuck",
    "drained", "error", "reconnected", "stopping", "stopped",
]  # fmt: skip
_NAMES: Final = frozenset(get_args(EventName))

P = ParamSpec("P")

logger = get_logger("penstock.worker")

_HANDED_BACK: Final = "; the job is handed back, and runs again from the start"


class WorkerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event in a worker. ``queue``, ``id`` and ``task`` are empty if the event concerns no queue or job.

    ``completed``, ``failed``, ``retrying``, ``snoozed``, ``suspended``, ``released`` and ``cancelled`` come after
    the store has accepted the outcome, ``stalled`` when the lease, and with it the run, is lost. ``error`` is an
    exception of the worker itself, such as a lost connection; ``failure`` is an exception of a handler.
    """

    type: EventName
    worker: str
    queue: str = ""
    id: str = ""
    task: str = ""
    run: int = 0
    run_ms: int = 0
    failure: Failure | None = None
    error: BaseException | None = None


Listener = Callable[[WorkerEvent], Any]


class Listeners:
    """Functions by event, called on the worker's loop. An exception in one is logged and affects nothing else."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[Listener]] = {}
        self._tasks: set[asyncio.Future[Any]] = set()

    def __contains__(self, name: EventName) -> bool:
        return name in self._by_name

    def add(self, name: str, listener: Listener) -> None:
        """Call ``listener`` at every event ``name``; run a coroutine function as a separate task.

        Raises:
            InvalidOption: the event is unknown.
        """
        self.check(name)
        self._by_name.setdefault(name, []).append(listener)

    @staticmethod
    def check(name: str) -> None:
        """Raise ``InvalidOption`` if the event is unknown."""
        if name not in _NAMES:
            raise InvalidOption(f"unknown worker event {name!r}. Use one of: {', '.join(sorted(_NAMES))}.")

    def emit(self, event: WorkerEvent) -> None:
        for listener in self._by_name.get(event.type, ()):
            try:
                answer = listener(event)
                if inspect.isawaitable(answer):
                    task = asyncio.ensure_future(answer)
                    self._tasks.add(task)
                    task.add_done_callback(self._ended)
            # Even a KeyboardInterrupt: the worker handles Ctrl-C itself, so the listener raised it.
            except BaseException:
                logger.exception("a listener of %r failed", event.type)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a listener failed", exc_info=task.exception())


class Recorder:
    """Counts the outcomes that the store accepts and emits events. Called on the worker's loop, per batch."""

    def __init__(self, worker_id: str, listeners: Listeners) -> None:
        self.stats = WorkerStats()
        self.handed_back = 0
        """The released runs, and those snoozed runs whose task this worker does not know."""
        self._worker_id = worker_id
        self._listeners = listeners

    def started(self, runs: Sequence[Run]) -> None:
        self.stats.claimed += len(runs)
        if "started" in self._listeners:
            for run in runs:
                self._emit("started", run)

    def settled(self, runs: Sequence[Run], answers: Sequence[Settled]) -> None:
        emits = "completed" in self._listeners
        completed = 0
        for run, answer in zip(runs, answers, strict=True):
            if type(run.outcome) is Complete and answer.applied:
                completed += 1
                if emits:
                    self._emit("completed", run)
            else:
                self._note_other_outcome(run, answer)
        self.stats.completed += completed

    def stalled(self, run: Run) -> None:
        """Record a run whose lease was lost."""
        self.stats.stalled += 1
        logger.warning(
            "job %r of queue %r was lost to another worker",
            run.lease.id,
            run.served.name,
            extra=_log_fields(run),
        )
        self._emit("stalled", run)

    def stuck(self, run: Run) -> None:
        logger.warning(
            "the handler of job %r of queue %r was asked to stop, but still runs%s",
            *(run.lease.id, run.served.name, _HANDED_BACK if run.abort is Abort.RELEASE else ""),
            extra=_log_fields(run),
        )
        self._emit("stuck", run)

    def error(self, error: BaseException, *, queue: str = "") -> None:
        """Record an error of the worker itself."""
        self.stats.errors += 1
        event = WorkerEvent(type="error", worker=self._worker_id, queue=queue, error=error)
        self._listeners.emit(event)

    def emit(self, name: EventName, *, queue: str = "") -> None:
        """Emit an event of the worker or of a queue."""
        self._listeners.emit(WorkerEvent(type=name, worker=self._worker_id, queue=queue))

    def _note_other_outcome(self, run: Run, answer: Settled) -> None:
        if not answer.applied:
            self.stalled(run)
            return
        name = event_name(run, answer.state)
        setattr(self.stats, name, getattr(self.stats, name) + 1)
        self.handed_back += name == "released" or (type(run.outcome) is Snooze and run.outcome.unknown)
        if name == "failed":
            _log_failure(run)
        elif name == "retrying":
            _log_retry(run)
        # The traceback refers to the run; without this only the garbage collector would free them.
        run.error = None
        if name in self._listeners:
            self._emit(name, run)

    def _emit(self, name: EventName, run: Run) -> None:
        lease = run.lease
        outcome = run.outcome
        self._listeners.emit(
            WorkerEvent(
                type=name,
                worker=self._worker_id,
                queue=run.served.name,
                id=lease.id,
                task=lease.options.task,
                run=lease.run,
                run_ms=round((time.monotonic() - run.claimed_at) * 1000),
                failure=_failure(run) if name == "failed" or isinstance(outcome, Fail) else None,
            )
        )


def warn_if_it_blocked(run: Run) -> None:
    """Warn of a function that blocked the event loop beyond its timeout: the timer could not stop it."""
    ran_ms = round((time.monotonic() - run.started_at) * 1000)
    timeout_ms = run.lease.options.timeout_ms
    if run.abort is None and run.handler.runner == "async" and ran_ms > timeout_ms:
        logger.warning(
            "job %r of queue %r (task %r) ran %s, timeout %s: the function blocked the event loop; use a plain def, "
            "which runs in a thread",
            *(run.lease.id, run.served.name, run.lease.options.task),
            *(describe(ran_ms), describe(timeout_ms)),
            extra=_log_fields(run),
        )


def _log_failure(run: Run) -> None:
    logger.error(
        "job %r of queue %r (task %r) failed for good in run %d: %s",
        *(run.lease.id, run.served.name, run.lease.options.task, run.lease.run, _reason(run)),
        exc_info=_exception(run),
        extra=_log_fields(run),
    )


def _log_retry(run: Run) -> None:
    """Log a retry: as information if the handler raised ``Retry`` without another error, as a warning otherwise."""
    assert isinstance(run.outcome, Fail)
    is_requested = isinstance(run.error, Retry) and run.error.wrapped is None
    logger.log(
        logging.INFO if is_requested else logging.WARNING,
        "job %r of queue %r (task %r) failed in run %s and is retried in %s: %s",
        *(run.lease.id, run.served.name, run.lease.options.task, _numbered(run)),
        *(describe(run.outcome.retry_in_ms), _reason(run)),
        exc_info=None if is_requested else _exception(run),
        extra=_log_fields(run),
    )


def _numbered(run: Run) -> str:
    """Return the number of a run, and of the runs that the attempts allow if only failures have counted so far."""
    lease = run.lease
    is_bounded = lease.run == lease.failures + 1
    return f"{lease.run} of {lease.options.attempts}" if is_bounded else str(lease.run)


def _log_fields(run: Run) -> dict[str, Any]:
    """Return the log fields that name the job, for structured logs and error trackers."""
    lease = run.lease
    return {"queue": run.served.name, "id": lease.id, "task": lease.options.task, "run": lease.run}


def _reason(run: Run) -> str:
    failure = _failure(run)
    return f"{failure.type}: {failure.message}"


def _failure(run: Run) -> Failure:
    """Return why a run failed, or why its job ended instead of being postponed."""
    match run.outcome:
        case Fail(failure=failure):
            return failure
        case Await():
            text = "its ttl has passed, or it has no more children to wait for"
            return Failure("NothingToWaitFor", text)
        case _:
            return Failure("Expired", FAILURE_TEXTS["Expired"])


def _exception(run: Run) -> BaseException | None:
    """Return the handler's exception. A handler that is still running after its timeout has raised none yet."""
    of_command = run.lease.options.task == COMMAND_TASK and isinstance(run.error, TimeoutError)
    if (run.error is None or of_command) and isinstance(run.outcome, Fail):
        # The traceback of a command that timed out shows only Penstock's own code.
        return TimeoutError(run.outcome.failure.message)
    return run.error


def event_name(run: Run, state: State | None) -> EventName:
    """Return the event of a settled run. The job's new ``state`` decides: a failed run may have been its last."""
    outcome = run.outcome
    if state is State.CANCELLED:
        return "cancelled"
    match outcome:
        case Complete():
            return "completed"
        case Fail():
            # None: without retention the job was removed when it ended.
            return "failed" if state in (State.FAILED, None) else "retrying"
        case Snooze():
            return "failed" if state is State.FAILED else "snoozed"
        case Suspend() | Await():
            return "failed" if state is State.FAILED else "suspended"
        case Release():
            return "released"
        case Limited():
            return "limited"
        case Cancel():
            return "cancelled"
        case None:
            return "stalled"
        case _ as never:
            assert_never(never)


def guarded(callback: Callable[P, None]) -> Callable[P, None]:
    """Return ``callback`` with its exceptions logged, because they must not fail its caller."""

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(*args, **kwargs)
        except Exception:
            logger.exception("a worker callback failed: %r", callback)

    return run
