"""Causes in a queue, its workers and its groups that keep a job from running, each a sentence with a remedy.

``why`` adds those in the state of the job itself, and chooses the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, assert_never

import msgspec
from msgspec.structs import replace

from penstock.client.situation import (
    NAMED,
    SEEN_LATELY_MS,
    Situation,
    at_second,
    command_context,
    command_line,
    counted,
    group_of,
    in_units,
    instant,
    listed,
    spent_budgets,
    start_command,
    worker_command,
)
from penstock.core.command import COMMAND_TASK
from penstock.core.job import EMPTY_EXTRAS
from penstock.core.lifecycle import State
from penstock.core.limits import MILLION, Bucket, GroupState, Limit
from penstock.core.names import ref_of
from penstock.core.units import describe

if TYPE_CHECKING:
    from penstock.core.flow import DependencyRecord
    from penstock.core.job import Job
    from penstock.storage.values import Budget, WorkerRecord


Cause: TypeAlias = Literal[
    "paused", "no worker", "not consuming", "busy", "unknown task", "queue limit", "rate limit", "budget",
    "group paused", "group limit", "group rate limit", "group order", "children", "signal", "not due", "retry",
    "staged", "ready", "active", "worker died", "completed", "failed", "cancelled",
]  # fmt: skip


ALIKE: Final = 0.75
"""Names this similar are likely to be meant for each other, as ``difflib`` measures it."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a job is in its state. ``remedy`` is empty if you can only wait.

    ``until`` is when the cause goes away by itself, if it does. ``jobs`` names a few jobs that are in the way, each
    as ``queue/id``.
    """

    kind: Cause
    text: str
    remedy: str = ""
    until: datetime | None = None
    jobs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}" if self.remedy else self.text


# Causes in the queue


def stoppage(situation: Situation) -> Reason | None:
    """Return the reason why no job of the queue starts; ``None`` if jobs can start."""
    return stopped(situation) or unattended(situation, worker_command(situation.queue))


def stopped(situation: Situation) -> Reason | None:
    """Return the pause, budget or limit that stops the queue. A claim checks them in the same order."""
    gate = situation.gate
    if gate.why == "paused":
        return _paused(gate, situation)
    if (spent := next(spent_budgets(situation.budgets), None)) is not None:
        return over_budget(spent, situation.queue)
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
    """Return the reason for a paused queue or group."""
    key, queue, pause = state.key, situation.queue, situation.pause
    kind: Cause = "group paused" if key else "paused"
    subject = f"Group {key}" if key else f"Queue {queue}"
    resume = command_line("resume", "-q", queue, *(("--group", key) if key else ()))
    if state.why != "asked":
        paused = f"has been paused since {at_second(pause.at_ms)}" if pause is not None else "is paused"
        return Reason(kind=kind, text=f"{subject} {paused}.", remedy=f"Run {resume}.")
    verb = "starts no jobs"
    if pause is not None and not pause.job:
        verb = f"has been paused since {at_second(pause.at_ms)},"
    text = f"{subject} {verb} until {situation.until(state.wait_ms)}"
    if pause is not None and pause.job:
        text += f" because job {pause.job} raised RateLimited"
    until = situation.after(state.wait_ms)
    return Reason(kind=kind, text=f"{text}.", remedy=f"Run {resume} to resume it now.", until=until)


def over_budget(budget: Budget, queue: str) -> Reason:
    """Return the reason for a budget of the queue that is spent."""
    renews = f" It renews at {at_second(budget.until_ms)}." if budget.until_ms else ""
    return Reason(
        kind="budget",
        text=f"The budget {budget.name!r} of queue {queue} is spent: "
        f"{budget.spent / MILLION:g} of {budget.micros / MILLION:g}.{renews}",
        remedy=f"Raise it with {_budget_command(budget, queue)}.",
        until=instant(budget.until_ms) if budget.until_ms else None,
    )


def _budget_command(budget: Budget, queue: str) -> str:
    """Return the command that doubles a budget, or what is spent of it if that is more."""
    amount = f"{2 * max(budget.micros, budget.spent, MILLION) / MILLION:.15g}"
    of_flow = ("--flow", budget.flow) if budget.flow else ()
    return command_line("budget", "set", budget.name, amount, "-q", queue, *of_flow)


def lost_holder(jobs: Iterable[Job], situation: Situation) -> Reason | None:
    """Return the reason for the first of these active jobs whose worker died or fell silent, if there is one."""
    records = {record.id: record for record in situation.workers}
    for job in jobs:
        worker = records.get(job.worker)
        if worker is not None and (worker.dead or worker.age_ms >= SEEN_LATELY_MS):
            return _lost(job, worker, situation)
    return None


def _lost(job: Job, worker: WorkerRecord, situation: Situation) -> Reason:
    state = "died" if worker.dead else f"has been silent for {in_units(worker.age_ms)}"
    if not situation.live:
        # Only a worker of the queue takes back jobs whose leases have ended.
        return Reason(
            kind="worker died",
            text=f"Its worker {job.worker} {state}, and no other worker runs for queue {job.queue}, "
            "so the job stays active.",
            remedy=f"Start one with {start_command(job)}.",
            jobs=(ref_to(job),),
        )
    is_over = job.lease_until_ms <= situation.now_ms
    at = at_second(job.lease_until_ms)
    end = f"ended at {at}" if is_over else f"ends at {at} at the latest"
    return Reason(
        kind="worker died",
        text=f"Its worker {job.worker} {state}. Its lease {end}.",
        remedy=f"Run {command_line('reset', ref_to(job))} to take it back now.",
        until=None if is_over else instant(job.lease_until_ms),
        jobs=(ref_to(job),),
    )


def _full(reason: Reason, holders: Sequence[Job], situation: Situation) -> Reason:
    """Return ``reason``, a reached limit; if the worker of a holder is gone, say so and how to free its place."""
    gone = lost_holder(holders, situation)
    if gone is None:
        return reason
    text = f"{reason.text} {gone.jobs[0]}: {gone.text[0].lower()}{gone.text[1:]}"
    return replace(reason, text=text, remedy=gone.remedy, until=gone.until)


def process_of(worker: str, situation: Situation) -> str:
    """Return the name of a worker, with its process and host if its record has them."""
    info = next((info for info in situation.live if info["id"] == worker), {})
    where = f" (process {info['pid']} on {info['host']})" if info.get("pid") and info.get("host") else ""
    return f"worker {worker}{where}"


def _queue_full(situation: Situation) -> Reason:
    limit = situation.limits.get("", Limit()).concurrency
    running = _named(situation.active[:NAMED], situation.gate.active)
    raised = situation.limit_command("concurrency")
    reason = Reason(
        kind="queue limit",
        text=f"Queue {situation.queue} is at its limit of {limit}: {running}.",
        remedy=f"Wait until a job finishes, or raise the limit with {raised}.",
        jobs=refs_to(situation.active[:NAMED]),
    )
    return _full(reason, situation.active, situation)


def _queue_rate(situation: Situation) -> Reason:
    gate, rate = situation.gate, situation.limits.get("", Limit()).rate
    allowed = f" to {counted(rate.count, 'start')} in {describe(rate.per_ms)}" if rate is not None else ""
    return Reason(
        kind="rate limit",
        text=f"Queue {situation.queue} is limited{allowed}, until {situation.until(gate.wait_ms)}.",
        remedy=f"Wait, or raise the limit with {situation.limit_command('rate')}.",
        until=situation.after(gate.wait_ms),
    )


def _losses(workers: Sequence[WorkerRecord]) -> str:
    """Return how many workers are gone, and since when the last one is; one that ended properly has no record."""
    if not workers:
        return ""
    last = min(workers, key=lambda worker: worker.age_ms)
    if len(workers) == 1:
        return f" Worker {last.id} died or fell silent {in_units(last.age_ms)} ago."
    count = counted(len(workers), "worker")
    return f" {count} died or fell silent, the last one ({last.id}) {in_units(last.age_ms)} ago."


def unattended(situation: Situation, start: str) -> Reason | None:
    """Return the reason if no worker takes jobs of the queue. ``start`` is the command that starts a worker."""
    workers, queue = situation.live, situation.queue
    if not workers:
        return Reason(
            kind="no worker",
            text=f"No worker runs for queue {queue}.{_losses(situation.workers)}",
            remedy=f"Start one with {start}.",
        )
    if any(worker.get("consuming", True) for worker in workers):
        return None
    first = next((worker for worker in workers if worker.get("blocked_by")), workers[0])
    cause, blocked_by = str(first.get("reason", "")).rstrip("."), str(first.get("blocked_by", ""))
    return Reason(
        kind="not consuming",
        text=f"No worker of queue {queue} takes jobs. {first['id']}{f': {cause}' * bool(cause)}.",
        remedy=_unblock(blocked_by, first["id"], situation)
        if blocked_by
        else f"See {command_line('workers')}.",
        jobs=(blocked_by,) if blocked_by else (),
    )


def _unblock(ref: str, worker: str, situation: Situation) -> str:
    return (
        f"Run {command_line('cancel', ref)}, then kill {process_of(worker, situation)}. "
        "Make the function of that job a plain def, which runs in a thread."
    )


def busy(situation: Situation) -> Reason | None:
    """Return the reason if all slots of the workers are full."""
    slots, running = situation.slots
    if not slots or running < slots:
        return None
    return Reason(
        kind="busy",
        text=f"All slots are full: {situation.workload}.",
        remedy="Wait, or start another worker.",
        jobs=refs_to(situation.active[:NAMED]),
    )


# Causes in the job


def unknown_task(job: Job, situation: Situation) -> Reason | None:
    """Return the reason if no live worker knows the task, or if the last worker that took the job did not."""
    workers, task = situation.live, job.options.task
    name = task or f"(no task, queue {job.queue})"
    if task == COMMAND_TASK:
        can, cannot = "runs commands", "does not run commands"
    else:
        subject = f"task {task!r}" if task else "jobs without a task"
        can, cannot = f"knows {subject}", f"does not know {subject}"
    if workers and all(name in worker.get("unknown", ()) for worker in workers):
        text = f"No live worker of queue {job.queue} {can}."
    elif job.is_handed_back:
        if (newcomer := _newcomer(job, name, situation)) is not None:
            return newcomer
        text = f"The worker that took it last {cannot} and handed it back.{_next_offer(job, situation)}"
    else:
        return None
    remedy = _meant(job, situation) + _unknown_remedy(job, is_live=bool(workers))
    return Reason(kind="unknown task", text=text, remedy=remedy)


_LATE_HEARTBEAT_MS: Final = 5_000
"""The time that a heartbeat may take to arrive. Until then, its worker seems to have started later than it did."""


def _newcomer(job: Job, name: str, situation: Situation) -> Reason | None:
    """Return the reason if a worker that may know the task has started since the job was handed back."""
    for worker in situation.live:
        if situation.started_ms(worker) > job.claimed_at_ms + _LATE_HEARTBEAT_MS and name not in worker.get(
            "unknown", ()
        ):
            offer = _next_offer(job, situation)
            return Reason(
                kind="not due" if offer else "ready",
                text=f"A worker that does not know its task handed it back. Worker {worker['id']} has started since "
                f"and is offered the job.{offer}",
                remedy=f"Run {command_line('promote', ref_to(job))} to offer it now." if offer else "",
                until=instant(job.run_at_ms) if offer else None,
            )
    return None


def _next_offer(job: Job, situation: Situation) -> str:
    if not situation.live:
        return f" No worker runs for queue {job.queue} now."
    is_later = job.state is State.SCHEDULED and job.run_at_ms > situation.now_ms
    return f" The next try is at {situation.moment(job.run_at_ms)}." if is_later else ""


def _meant(job: Job, situation: Situation) -> str:
    """Return a question with a task of the live workers whose name resembles that of the job."""
    known = {name for worker in situation.live for name in worker.get("tasks") or ()}
    close = get_close_matches(job.options.task, known - {job.options.task}, n=1, cutoff=ALIKE)
    return f"Did you mean the task {close[0]!r}? " if close else ""


def _unknown_remedy(job: Job, *, is_live: bool) -> str:
    if job.options.task == COMMAND_TASK:
        return f"Start one with {start_command(job)}."
    if not job.options.task:
        return f"Start a worker with {start_command(job)}."
    if not is_live:
        defines = command_context.get().defines(job.options.task)
        return f"Start a worker whose app defines the task{f', with {start_command(job)}' * defines}."
    return "Import the module that defines the task in the worker's app, then restart the worker."


def flow_spent(job: Job, situation: Situation) -> Reason | None:
    """Return the reason if a budget of the job's flow is spent."""
    flow = (job.extras or EMPTY_EXTRAS).flow
    spent = next(spent_budgets(situation.budgets, flow), None) if flow else None
    if spent is None:
        return None
    return Reason(
        kind="budget",
        text=f"The budget {spent.name!r} of its flow {flow} is spent. The next claim fails the job.",
        remedy=f"Raise it with {_budget_command(spent, job.queue)}.",
    )


def held_by_group(job: Job, situation: Situation) -> Reason | None:
    """Return the reason why the job's group does not start it; ``None`` without a group, or if it has room."""
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
            return _holders_stopped(state, situation) or _group_full(key, state, situation)
        case "rate":
            return _holders_stopped(state, situation) or _group_rate(key, state, situation)
        case "bucket":
            return _holders_stopped(state, situation) or _group_bucket(key, state, situation)
        case "":
            return None
        case _ as never:
            assert_never(never)


def _holders_stopped(state: GroupState, situation: Situation) -> Reason | None:
    """Return what stops the queue if the places of the group are held by jobs that only wait for a worker."""
    is_held_by_waiting = not state.active and not state.held and state.wait_ms is None
    return stoppage(situation) if is_held_by_waiting else None


def _group_full(key: str, state: GroupState, situation: Situation) -> Reason:
    limit = situation.limit_of(key)
    members = [job for job in situation.active if group_of(job) == key][:NAMED]
    in_the_way = state.waiting + state.active + state.held
    who = (
        _named(members, in_the_way)
        if members
        else f"{counted(in_the_way, 'job')} in line or between two runs"
    )
    reason = Reason(
        kind="group limit",
        text=f"Group {key} is at its limit of {limit.concurrency}: {who}.",
        remedy=f"Wait until a job finishes, or raise the limit with {situation.limit_command('concurrency', key)}"
        f"{', which gives up the strict order' * (limit.concurrency == 1)}.",
        jobs=refs_to(members),
    )
    return _full(reason, members, situation)


def _group_rate(key: str, state: GroupState, situation: Situation) -> Reason:
    return Reason(
        kind="group rate limit",
        text=f"Group {key} has used up its rate{_wait_of_group(state, situation)}.",
        remedy=f"Wait, or raise the limit with {situation.limit_command('rate', key)}.",
        until=situation.after(state.wait_ms),
    )


def _group_bucket(key: str, state: GroupState, situation: Situation) -> Reason:
    bucket, text = situation.limit_of(key).bucket, f"Group {key} has used up its bucket"
    if bucket is not None and state.wait_ms is not None:
        text += f": {_missing_tokens(bucket, state.wait_ms)}"
    return Reason(
        kind="group rate limit",
        text=f"{text}{_wait_of_group(state, situation)}.",
        remedy=f"Wait. To fill the bucket faster, run {situation.limit_command('bucket', key)}.",
        until=situation.after(state.wait_ms),
    )


def _missing_tokens(bucket: Bucket, wait_ms: int) -> str:
    count = max(1, -(-wait_ms * bucket.refill // bucket.per_ms))
    return f"{counted(count, 'token')} short"


def _wait_of_group(state: GroupState, situation: Situation) -> str:
    if state.wait_ms is None:
        return f", with {counted(state.waiting + state.active, 'job')} ahead"
    return f", until {situation.moment(situation.now_ms + state.wait_ms)}"


def group_order(job: Job, situation: Situation) -> Reason:
    """Return the reason for a job whose group has room, or was not read: the next claim or sweep admits it."""
    turn = Reason(kind="group order", text=f"It waits for its turn in group {group_of(job)}.")
    return stoppage(situation) or turn


# Naming jobs


def ref_to(job: Job | DependencyRecord) -> str:
    """Return a job as ``queue/id``."""
    return ref_of(job.queue, job.id)


def refs_to(jobs: Iterable[Job | DependencyRecord]) -> tuple[str, ...]:
    """Return jobs as ``queue/id``."""
    return tuple(map(ref_to, jobs))


def _named(jobs: Sequence[Job], count: int) -> str:
    return listed([job.id for job in jobs], count)
