"""How a worker is: for probes, for its record in the store, and for people."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from penstock.core.command import COMMAND_TASK, command_text
from penstock.core.names import ref_of
from penstock.core.text import storable
from penstock.errors import StorageDamaged, StorageFull, StorageReadOnly, StorageRefused

if TYPE_CHECKING:
    from penstock.worker.shift import Shift

__all__ = [
    "ActiveJob",
    "Description",
    "Health",
    "WorkerState",
    "WorkerStats",
    "describe",
    "examine",
    "running_commands",
]

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


def examine(shift: Shift) -> Health:
    """The health of a worker that runs; may be called from any thread."""
    now = time.monotonic()
    running = list(shift.executor.running)
    reason = _why_not_consuming(shift, now, running=len(running))
    return Health(
        state=shift.worker.state,
        consuming=not reason,
        reason=reason,
        connected=not shift.failing,
        last_claim_age_s=now - shift.fetcher.last_claim_at,
        last_heartbeat_age_s=now - shift.heartbeat.last_at if shift.heartbeat else 0.0,
        concurrency=shift.options.concurrency,
        stuck=sum(run.stuck for run in running),
        active=tuple(
            ActiveJob(run.lane.name, run.lease.id, run.lease.options.task, now - run.claimed_at, run.stuck)
            for run in running
        ),
    )


def running_commands(shift: Shift) -> dict[tuple[str, str], str]:
    """Return the commands of the command jobs that run, by queue and id."""
    runs = [run for run in list(shift.executor.running) if run.lease.options.task == COMMAND_TASK]
    return {(run.lane.name, run.lease.id): command_text(run.lease.payload) for run in runs}


def describe(shift: Shift) -> bytes:
    """The worker's record in the store, as JSON."""
    health = examine(shift)
    return msgspec.json.encode(
        Description(
            host=storable(platform.node()),
            pid=os.getpid(),
            version=_version(),
            started_at_ms=shift.started_at_ms,
            up_ms=round((time.monotonic() - shift.started_at) * 1000),
            queues=tuple(shift.options.queues),
            concurrency=health.concurrency,
            state=health.state,
            consuming=health.consuming,
            reason=health.reason,
            active=len(health.active),
            stuck=health.stuck,
            running=health.active[:_MOST_SHOWN],
            blocked_by=_blocking_job(shift) if _is_blocked(shift) else "",
            unknown=shift.plans.unknown.names(),
        )
    )


def _why_not_consuming(shift: Shift, now: float, *, running: int) -> str:
    """Empty if it is."""
    if shift.worker.state != "running":
        return f"the worker is {shift.worker.state}"
    if shift.failing:
        return _why_failing(dict(shift.failing))
    if _is_blocked(shift):
        who = f"job {ref}" if (ref := _blocking_job(shift)) else "a handler"
        return f"{who} has blocked the event loop for {shift.watchdog.stalled_s:.0f} s"
    if len(shift.executor.stuck) >= shift.options.concurrency:
        return "all slots are taken up by handlers that hang"
    limits = shift.fetcher.limits
    if limits is not None and limits.reached:
        return ""  # like one whose slots are all busy: it will
    silent_s = now - shift.fetcher.last_claim_at
    if silent_s > _SILENT_S and running < shift.options.concurrency:
        return f"no answer to a claim for {silent_s:.0f} s: the store is away, or a handler hogs the loop"
    return ""


def _why_failing(failing: dict[str, BaseException]) -> str:
    """Return which queues the store does not serve. One that answers, and cannot do what is asked, says why."""
    queues = ", ".join(sorted(failing))
    for error in failing.values():
        if isinstance(error, StorageFull | StorageReadOnly | StorageRefused | StorageDamaged):
            return f"the store fails for {queues}: {storable(str(error))[:_LONGEST_REASON]}"
    return f"the store does not answer for {queues}"


def _is_blocked(shift: Shift) -> bool:
    return shift.watchdog.stalled_s >= _BLOCKED_S


def _blocking_job(shift: Shift) -> str:
    """Return the ref of the job whose function holds the event loop; empty if a task of its own does."""
    current = asyncio.current_task(shift.loop)
    ids = {run.lease.id: run for run in list(shift.executor.running)}
    run = ids.get(current.get_name()) if current is not None else None
    return "" if run is None else ref_of(run.lane.name, run.lease.id)


def _version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:
        return ""
