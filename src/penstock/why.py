"""Why a job does not run: the first cause in the way, in a sentence, with the remedy.

``explain`` answers for one job. A list reads the ``Situation`` of its queue once, and ``reason_of`` derives the answer
for each row from that.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, assert_never

import msgspec
from msgspec.structs import replace

from penstock.core.annex import EMPTY_ANNEX
from penstock.core.command import COMMAND_TASK
from penstock.core.duration import describe
from penstock.core.lifecycle import TERMINAL, State
from penstock.core.limits import EVERY_GROUP, GroupState, Limit
from penstock.core.names import ref_of
from penstock.core.usage import MILLION
from penstock.situation import (
    NAMED,
    Situation,
    at_second,
    command_line,
    counted,
    group_of,
    in_units,
    instant,
    listed,
    pause_began_ms,
    read_situation,
    start_command,
)

if TYPE_CHECKING:
    from penstock.core.flow import DependencyRecord
    from penstock.core.job import Job
    from penstock.storage.base import Storage
    from penstock.storage.values import Budget

__all__ = ["Cause", "Reason", "explain", "explain_all", "reason_of", "stoppage"]

Cause: TypeAlias = Literal[
    "paused", "no worker", "not consuming", "busy", "unknown task", "queue limit", "rate limit", "budget",
    "group paused", "group limit", "group rate limit", "group order", "children", "signal", "not due", "retry",
    "staged", "ready", "active", "worker died", "completed", "failed", "cancelled",
]  # fmt: skip

_MOST_CHILDREN: Final = 1000


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job is where it is. ``remedy`` is empty if there is nothing to do but wait.

    ``until`` is when time removes the cause, if it does. ``jobs`` names a few jobs that stand in the way, each as
    ``queue/id``.
    """

    kind: Cause
    text: str
    remedy: str = ""
    until: datetime | None = None
    jobs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}" if self.remedy else self.text


async def explain(storage: Storage, job: Job) -> Reason:
    """Return why ``job``, as it was just read, does not run. The number of round trips is bounded."""
    if (reason := _ended(job)) is not None:
        return reason
    children, group = None, group_of(job)
    if job.blocked_by == "children":
        children = await storage.dependencies(job.queue, job.id, limit=_MOST_CHILDREN)
    situation = await read_situation(storage, job.queue, groups=[group] if group else ())
    situation = replace(situation, children=children)
    reason = reason_of(job, situation)
    if reason.kind not in ("paused", "group paused") or reason.until is not None:
        return reason
    began_ms = await pause_began_ms(storage, job.queue, group if reason.kind == "group paused" else "")
    return reason_of(job, replace(situation, paused_at_ms=began_ms))


async def explain_all(storage: Storage, jobs: Iterable[Job]) -> dict[tuple[str, str], Reason]:
    """Return why these jobs do not run, by queue and id. Read each queue once, however many its jobs are."""
    by_queue: defaultdict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        if job.state not in TERMINAL:
            by_queue[job.queue].append(job)
    read = (read_situation(storage, queue, groups=map(group_of, some)) for queue, some in by_queue.items())
    situations = await asyncio.gather(*read)
    return {(one.queue, job.id): reason_of(job, one) for one in situations for job in by_queue[one.queue]}


def reason_of(job: Job, situation: Situation) -> Reason:
    """Return why ``job`` does not run, as far as ``situation`` tells."""
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


def stoppage(situation: Situation) -> Reason | None:
    """Return what keeps every job of the queue from starting; ``None`` if nothing does."""
    return _stopped(situation) or _unattended(
        situation, f"`penstock worker [MODULE:APP] -q {situation.queue}`"
    )


# By state


def _scheduled(job: Job, situation: Situation) -> Reason:
    if job.is_staged:
        return _staged(job)
    if (unknown := _unknown_task(job, situation)) is not None:
        return unknown
    if job.run_at_ms <= situation.now_ms:
        return _waiting(job, situation)
    due = situation.moment(job.run_at_ms)
    remedy = f"Run {command_line('promote', _ref(job))} to run it now."
    if job.failure is not None and job.failures:
        tries = f"{job.failures} of {job.options.attempts} attempts failed ({job.failure.type})"
        text = f"{tries}. It is retried at {due}."
        return Reason(kind="retry", text=text, remedy=remedy, until=instant(job.run_at_ms))
    return Reason(
        kind="not due", text=f"It is not due until {due}.", remedy=remedy, until=instant(job.run_at_ms)
    )


def _waiting(job: Job, situation: Situation) -> Reason:
    return (
        _stopped(situation)
        or _flow_spent(job, situation)
        or _held_by_group(job, situation)
        or _unattended(situation, start_command(job))
        or _unknown_task(job, situation)
        or _busy(situation)
        or Reason(
            kind="ready",
            text=f"It is ready: it is one of {counted(max(1, situation.gate.waiting), 'job')} in line for "
            f"{counted(len(situation.live), 'worker')}.",
        )
    )


def _blocked(job: Job, situation: Situation) -> Reason:
    match job.blocked_by:
        case "children":
            return _waits_for_children(job, situation)
        case "signal":
            return _waits_for_signal(job, situation)
        case _:
            return _held_by_group(job, situation) or _group_order(job, situation)


def _active(job: Job, situation: Situation) -> Reason:
    worker = next((one for one in situation.workers if one.id == job.worker), None)
    since = f"since {at_second(job.claimed_at_ms)} ({in_units(situation.now_ms - job.claimed_at_ms)})"
    if worker is not None and worker.dead:
        return Reason(
            kind="worker died",
            text=f"Its worker {job.worker} died. Its lease ends at {at_second(job.lease_until_ms)} at the latest.",
            remedy=f"Run {command_line('reset', _ref(job))} to take it back now.",
            until=instant(job.lease_until_ms),
        )
    stopping = " and was asked to stop" if job.cancelling else ""
    return Reason(kind="active", text=f"It has been running {since} on worker {job.worker}{stopping}.")


def _ended(job: Job) -> Reason | None:
    """Return the reason for a job whose record alone tells it."""
    if job.is_staged:
        return _staged(job)
    return _finished(job) if job.state in TERMINAL else None


def _staged(job: Job) -> Reason:
    return Reason(
        kind="staged",
        text=f"It is staged: its write {job.write_id!r} is not complete.",
        remedy="It is released when that write commits. If the writer has died, run the write again.",
    )


def _finished(job: Job) -> Reason:
    at, failure = at_second(job.finished_at_ms), job.failure
    again = command_line("retry", _ref(job))
    match job.state:
        case State.FAILED:
            cause = f": {failure.type}: {failure.message}".rstrip(".") if failure is not None else ""
            text = f"It failed at {at} after {counted(job.runs, 'run')}{cause}."
            return Reason(kind="failed", text=text, remedy=f"Fix the cause, then run {again}.")
        case State.CANCELLED:
            text = f"It was cancelled at {at}."
            return Reason(kind="cancelled", text=text, remedy=f"Run {again} to run it again.")
        case _:
            return Reason(kind="completed", text=f"It completed at {at}.")


# Causes in the queue


def _stopped(situation: Situation) -> Reason | None:
    """Return which pause, budget or limit of the queue is in the way, in the order in which a claim looks at them."""
    gate = situation.gate
    if gate.why == "paused":
        return _paused(gate, situation)
    spent = [budget for budget in situation.budgets if not budget.flow and _is_spent(budget)]
    if spent:
        return _over_budget(spent[0], situation.queue)
    match gate.why:
        case "asked":
            return _paused(gate, situation)
        case "concurrency":
            return _queue_full(situation)
        case "rate":
            return _queue_rate(situation)
        case _:
            return None


def _paused(state: GroupState, situation: Situation) -> Reason:
    """Return the reason for a queue or a group that is paused, for a time or until it is resumed."""
    key, queue = state.key, situation.queue
    kind: Cause = "group paused" if key else "paused"
    what = f"Group {key}" if key else f"Queue {queue}"
    resume = command_line("resume", "-q", queue, *(("--group", key) if key else ()))
    if state.why == "asked":
        text = f"{what} is paused until {situation.until(state.wait_ms)}."
        until = situation.after(state.wait_ms)
        return Reason(kind=kind, text=text, remedy=f"Run {resume} to go on now.", until=until)
    since = f" since {at_second(situation.paused_at_ms)}" if situation.paused_at_ms else ""
    return Reason(kind=kind, text=f"{what} is paused{since}, until it is resumed.", remedy=f"Run {resume}.")


def _is_spent(budget: Budget) -> bool:
    return budget.spent >= budget.micros


def _over_budget(budget: Budget, queue: str) -> Reason:
    renews = f" It begins again at {at_second(budget.until_ms)}." if budget.until_ms else ""
    return Reason(
        kind="budget",
        text=f"The budget {budget.name!r} of queue {queue} is spent: "
        f"{budget.spent / MILLION:g} of {budget.micros / MILLION:g}.{renews}",
        remedy=f"Raise it: app.sync.queue({queue!r}).set_budget({budget.name!r}, ...).",
        until=instant(budget.until_ms) if budget.until_ms else None,
    )


def _queue_full(situation: Situation) -> Reason:
    limit = situation.limits.get("", Limit()).concurrency
    running = _named(situation.active[:NAMED], situation.gate.active)
    raised = situation.limit_command("concurrency")
    return Reason(
        kind="queue limit",
        text=f"Queue {situation.queue} is at its limit of {limit}: {running}.",
        remedy=f"Wait for one to end, or run {raised}.",
        jobs=_refs(situation.active[:NAMED]),
    )


def _queue_rate(situation: Situation) -> Reason:
    gate, rate = situation.gate, situation.limits.get("", Limit()).rate
    allowed = f" to {counted(rate.count, 'start')} in {describe(rate.per_ms)}" if rate is not None else ""
    return Reason(
        kind="rate limit",
        text=f"Queue {situation.queue} is limited{allowed}, until {situation.until(gate.wait_ms)}.",
        remedy=f"Wait, or run {situation.limit_command('rate')}.",
        until=situation.after(gate.wait_ms),
    )


def _unattended(situation: Situation, start: str) -> Reason | None:
    """Return why nobody works on the queue, if so. ``start`` is the command that starts a worker."""
    workers, queue = situation.live, situation.queue
    if not workers:
        gone = len(situation.workers)
        last = f" {counted(gone, 'worker')} died or fell silent." if gone else ""
        return Reason(
            kind="no worker",
            text=f"No worker runs for queue {queue}.{last}",
            remedy=f"Start one with {start}.",
        )
    if any(worker.get("consuming", True) for worker in workers):
        return None
    first = workers[0]
    return Reason(
        kind="not consuming",
        text=f"No worker of queue {queue} takes jobs. {first['id']}: {first.get('reason', '')}.",
        remedy="See `penstock workers`.",
    )


def _busy(situation: Situation) -> Reason | None:
    workers = situation.live
    slots = sum(worker.get("concurrency", 0) for worker in workers)
    if not slots or sum(worker.get("active", 0) for worker in workers) < slots:
        return None
    return Reason(
        kind="busy",
        text=f"All {counted(slots, 'slot')} of the {counted(len(workers), 'worker')} of queue {situation.queue} are "
        "busy.",
        remedy="Wait, or start another worker.",
        jobs=_refs(situation.active[:NAMED]),
    )


# Causes in the job


def _unknown_task(job: Job, situation: Situation) -> Reason | None:
    workers = situation.live
    name = job.options.task or f"(no task, queue {job.queue})"
    if not workers or not all(name in worker.get("unknown", ()) for worker in workers):
        return None
    if job.options.task == COMMAND_TASK:
        does, remedy = "runs commands", f"Start one with {start_command(job)}."
    else:
        does = f"knows task {job.options.task!r}" if job.options.task else "knows jobs without a task"
        remedy = "Import the module that defines the task in the worker's app, then restart the worker."
    return Reason(kind="unknown task", text=f"No live worker of queue {job.queue} {does}.", remedy=remedy)


def _flow_spent(job: Job, situation: Situation) -> Reason | None:
    flow = (job.annex or EMPTY_ANNEX).flow
    spent = next((one for one in situation.budgets if flow and one.flow == flow and _is_spent(one)), None)
    if spent is None:
        return None
    return Reason(
        kind="budget",
        text=f"The budget {spent.name!r} of its flow {flow} is spent. The next claim fails the job.",
        remedy=f"Raise it: app.sync.queue({job.queue!r}).set_budget({spent.name!r}, ..., flow={flow!r}).",
    )


def _held_by_group(job: Job, situation: Situation) -> Reason | None:
    key = group_of(job)
    state = situation.groups.get(key) if key else None
    if state is None:
        return None
    match state.why:
        case "paused" | "asked":
            return _paused(state, situation)
        case _ if job.state is not State.BLOCKED:
            return None
        case "concurrency":
            is_stuck = not state.active and not state.held
            halted = stoppage(situation) if is_stuck else None
            return halted or _group_full(key, state, situation)
        case "rate" | "bucket":
            return _group_rate(key, state, situation)
        case "":
            return None
        case _ as never:
            assert_never(never)


def _group_full(key: str, state: GroupState, situation: Situation) -> Reason:
    limit = situation.limits.get(key) or situation.limits.get(EVERY_GROUP, Limit())
    members = [job for job in situation.active if group_of(job) == key][:NAMED]
    busy = state.waiting + state.active + state.held
    raised = situation.limit_command("concurrency", key)
    who = _named(members, busy) if members else f"{counted(busy, 'job')} in line or between two runs"
    return Reason(
        kind="group limit",
        text=f"Group {key} is at its limit of {limit.concurrency}: {who}.",
        remedy=f"Wait for one to end, or run {raised}.",
        jobs=_refs(members),
    )


def _group_rate(key: str, state: GroupState, situation: Situation) -> Reason:
    raised = situation.limit_command("rate" if state.why == "rate" else "bucket", key)
    return Reason(
        kind="group rate limit",
        text=f"Group {key} has used up its {state.why}, until {situation.until(state.wait_ms)}.",
        remedy=f"Wait, or run {raised}.",
        until=situation.after(state.wait_ms),
    )


def _group_order(job: Job, situation: Situation) -> Reason:
    """Its group has room, or was not read: the next claim or sweep lets it in."""
    turn = Reason(kind="group order", text=f"It waits for its turn in group {group_of(job)}.")
    return stoppage(situation) or turn


def _waits_for_children(job: Job, situation: Situation) -> Reason:
    if situation.children is None:
        return Reason(kind="children", text="It waits for other jobs.")
    pending = [child for child in situation.children if child.state == "pending"]
    more = "at least " if len(situation.children) == _MOST_CHILDREN else ""
    count = f"{more}{counted(len(pending), 'job')}"
    refs = _refs(pending[:NAMED])
    failed = [child for child in situation.children if child.state == "failed" and child.policy == "wait"]
    if not pending and failed:
        ref = _ref(failed[0])
        text, remedy = f"It waits for {ref}, which failed.", f"Run {command_line('retry', ref)}."
        return Reason(kind="children", text=text, remedy=remedy, jobs=(ref,))
    return Reason(
        kind="children",
        text=f"It waits for {count} to end{f': {listed(refs, len(pending))}' if refs else ''}.",
        remedy=f"See {command_line('why', refs[0])}." if refs else "",
        jobs=refs,
    )


def _waits_for_signal(job: Job, situation: Situation) -> Reason:
    annex = job.annex or EMPTY_ANNEX
    until_ms = annex.awaits_until_ms
    until = f", until {at_second(until_ms)} at the latest" if until_ms else ""
    return Reason(
        kind="signal",
        text=f"It waits for the signal {annex.awaits!r}{until}.",
        remedy=f"Send it: app.sync.queue({job.queue!r}).signal({job.id!r}, {annex.awaits!r}).",
        until=instant(until_ms) if until_ms else None,
    )


# Words


def _ref(job: Job | DependencyRecord) -> str:
    return ref_of(job.queue, job.id)


def _refs(jobs: Iterable[Job | DependencyRecord]) -> tuple[str, ...]:
    return tuple(map(_ref, jobs))


def _named(jobs: Sequence[Job], count: int) -> str:
    return listed([job.id for job in jobs], count)
