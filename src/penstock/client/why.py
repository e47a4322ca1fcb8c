"""The reason why a job does not run: the first cause in its way, as a sentence with a remedy.

``explain`` answers for one job. ``explain_all`` reads the ``Situation`` of each queue once and derives the answers for
all jobs from it.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, assert_never

from msgspec.structs import replace

from penstock.client.causes import (
    Reason,
    busy,
    flow_spent,
    group_order,
    held_by_group,
    lost_holder,
    process_of,
    ref_to,
    refs_to,
    stopped,
    unattended,
    unknown_task,
)
from penstock.client.session import shown_store
from penstock.client.situation import (
    MOST_CHILDREN,
    NAMED,
    Situation,
    at_second,
    command_line,
    counted,
    group_of,
    in_units,
    instant,
    listed,
    read_pause,
    read_situation,
    start_command,
)
from penstock.core.command import COMMAND_TASK
from penstock.core.job import EMPTY_EXTRAS
from penstock.core.lifecycle import TERMINAL, State

if TYPE_CHECKING:
    from penstock.core.job import Job
    from penstock.core.outcome import Failure
    from penstock.storage.contract import Storage


_FAILED_DEPENDENCY: Final = re.compile(r"dependency (\S+/.+?) (?:failed|was cancelled)(?::|$)")
"""The message of ``DependencyFailed``, with the ref of the job to retry first."""


async def explain(storage: Storage, job: Job) -> Reason:
    """Return why ``job``, which was just read, does not run. The number of round trips is bounded."""
    if job.is_staged:
        return _staged(job)
    if job.state in TERMINAL:
        return _finished(job)
    children, group = None, group_of(job)
    if job.blocked_by == "children":
        children = await storage.dependencies(job.queue, job.id, limit=MOST_CHILDREN)
    situation = await read_situation(storage, job.queue, groups=[group] if group else ())
    situation = replace(situation, children=children)
    reason = reason_of(job, situation)
    if reason.kind not in ("paused", "group paused"):
        return reason
    pause = await read_pause(storage, situation, group if reason.kind == "group paused" else "")
    return reason_of(job, replace(situation, pause=pause))


def in_store(reason: Reason, url: str, namespace: str | None) -> Reason:
    """Add the store to the remedy for a queue without a worker: a worker may run on another store."""
    if reason.kind != "no worker" or url.startswith("memory:"):
        return reason
    return replace(reason, remedy=f"{reason.remedy} The store is {shown_store(url, namespace)}.")


async def explain_all(storage: Storage, jobs: Iterable[Job]) -> dict[tuple[str, str], Reason]:
    """Return why these open jobs do not run, by queue and id. Each queue is read once."""
    by_queue: defaultdict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        if job.state not in TERMINAL:
            by_queue[job.queue].append(job)
    situations = await asyncio.gather(
        *(
            read_situation(storage, queue, groups=map(group_of, members))
            for queue, members in by_queue.items()
        )
    )
    return {
        (situation.queue, job.id): reason_of(job, situation)
        for situation in situations
        for job in by_queue[situation.queue]
    }


def reason_of(job: Job, situation: Situation) -> Reason:
    """Return why ``job`` does not run, as far as ``situation`` explains it."""
    match job.state:
        case State.SCHEDULED:
            return _scheduled(job, situation)
        case State.BLOCKED:
            return _blocked(job, situation)
        case State.WAITING:
            return _waiting(job, situation)
        case State.ACTIVE:
            return _active(job, situation)
        case State.COMPLETED | State.FAILED | State.CANCELLED:
            return _finished(job)
        case _ as never:
            assert_never(never)


# By state


def _scheduled(job: Job, situation: Situation) -> Reason:
    if job.is_staged:
        return _staged(job)
    if (unknown := unknown_task(job, situation)) is not None:
        return unknown
    if job.run_at_ms <= situation.now_ms:
        return _waiting(job, situation)
    due = situation.moment(job.run_at_ms)
    remedy = f"Run {command_line('promote', ref_to(job))} to run it now."
    if job.failure is not None and job.failures:
        text = (
            f"{job.failures} of {job.options.attempts} attempts failed ({job.failure.type}). "
            f"It is retried at {due}."
        )
        return Reason(kind="retry", text=text, remedy=remedy, until=instant(job.run_at_ms))
    return Reason(
        kind="not due", text=f"It is not due until {due}.", remedy=remedy, until=instant(job.run_at_ms)
    )


def _waiting(job: Job, situation: Situation) -> Reason:
    return (
        stopped(situation)
        or flow_spent(job, situation)
        or held_by_group(job, situation)
        or unknown_task(job, situation)
        or unattended(situation, start_command(job))
        or busy(situation)
        or Reason(
            kind="ready",
            text=f"It is ready: {counted(max(1, situation.gate.waiting), 'job')} in line. "
            f"{situation.workload}.",
        )
    )


def _blocked(job: Job, situation: Situation) -> Reason:
    match job.blocked_by:
        case "children":
            return _waits_for_children(situation)
        case "signal":
            return _waits_for_signal(job)
        case _:
            return held_by_group(job, situation) or group_order(job, situation)


def _active(job: Job, situation: Situation) -> Reason:
    if (lost := lost_holder([job], situation)) is not None:
        return lost
    since = f"since {at_second(job.claimed_at_ms)} ({in_units(situation.now_ms - job.claimed_at_ms)})"
    text = f"It has been running {since} on worker {job.worker}"
    if not job.cancelling:
        return Reason(kind="active", text=f"{text}.")
    return Reason(
        kind="active",
        text=f"{text} and was asked to stop. A plain function goes on unless it checks context.cancelled.",
        remedy=f"If it does not stop, kill {process_of(job.worker, situation)}: the job is then cancelled.",
    )


def _staged(job: Job) -> Reason:
    return Reason(
        kind="staged",
        text=f"It is staged: its write {job.write_id!r} is not complete.",
        remedy="It is released when that write commits. If the writer died, run the write again, or run "
        f"{command_line('remove', ref_to(job))}.",
    )


def _finished(job: Job) -> Reason:
    at, failure = at_second(job.finished_at_ms), job.failure
    again = command_line("retry", ref_to(job))
    match job.state:
        case State.FAILED:
            cause = f": {failure.type}: {failure.message}".rstrip(".") if failure is not None else ""
            text = f"It failed at {at} after {counted(job.runs, 'run')}{cause}."
            return Reason(kind="failed", text=text, remedy=_after_failure(job, failure, again))
        case State.CANCELLED:
            text = f"It was cancelled at {at}."
            return Reason(kind="cancelled", text=text, remedy=f"Run {again} to run it again.")
        case _:
            return Reason(kind="completed", text=f"It completed at {at}.")


def _after_failure(job: Job, failure: Failure | None, again: str) -> str:
    if failure is not None and failure.type == "DependencyFailed":
        if (dependency := _FAILED_DEPENDENCY.match(failure.message)) is not None:
            return (
                f"Run {command_line('retry', dependency[1])} first. When that job has completed, run {again}."
            )
        return f"Run {again} to run it again."
    has_traceback = failure is not None and failure.traceback and job.options.task != COMMAND_TASK
    see = f"{command_line('show', ref_to(job), '--traceback')} shows the traceback. " if has_traceback else ""
    return f"{see}Fix the cause, then run {again}."


def _waits_for_children(situation: Situation) -> Reason:
    """Return the reason for a parent: the jobs that it waits for, as far as they were read."""
    if situation.children is None:
        return Reason(kind="children", text="It waits for other jobs.")
    pending = [child for child in situation.children if child.state == "pending"]
    more = "at least " if len(situation.children) == MOST_CHILDREN else ""
    count = f"{more}{counted(len(pending), 'job')}"
    refs = refs_to(pending[:NAMED])
    failed = [child for child in situation.children if child.state == "failed" and child.policy == "wait"]
    if not pending and failed:
        ref = ref_to(failed[0])
        text, remedy = f"It waits for {ref}, which failed.", f"Run {command_line('retry', ref)}."
        return Reason(kind="children", text=text, remedy=remedy, jobs=(ref,))
    return Reason(
        kind="children",
        text=f"It waits for {count} to finish{f': {listed(refs, len(pending))}' if refs else ''}.",
        remedy=f"See {command_line('why', refs[0])}." if refs else "",
        jobs=refs,
    )


def _waits_for_signal(job: Job) -> Reason:
    """Return the reason for a job that waits for a signal."""
    extras = job.extras or EMPTY_EXTRAS
    until_ms = extras.awaits_until_ms
    until = f", until {at_second(until_ms)} at the latest" if until_ms else ""
    return Reason(
        kind="signal",
        text=f"It waits for the signal {extras.awaits!r}{until}.",
        remedy=f"Send it with {command_line('signal', ref_to(job), extras.awaits)}.",
        until=instant(until_ms) if until_ms else None,
    )
