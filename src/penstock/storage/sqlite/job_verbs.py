"""The verbs that operate on single jobs: ``cancel``, ``retry``, ``promote``, ``change``, ``remove`` and ``signal``.

Also stages and suspensions: where a job continues, the signal it waits for, and signals that came early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from penstock.core.lifecycle import (
    CancelAnswer,
    ChangeAnswer,
    EventType,
    PromoteAnswer,
    RemoveAnswer,
    RetryAnswer,
    SignalAnswer,
    UnchangedAnswer,
)
from penstock.storage.bounds import SIGNALS_KEPT
from penstock.storage.sqlite import flows, statements
from penstock.storage.sqlite.records import (
    ACTIVE,
    BLOCKED,
    CANCELLED,
    FAILED,
    FINISHED,
    REMOVED,
    SCHEDULED,
    SIGNAL,
    WAITING,
    Record,
)
from penstock.storage.sqlite.steps import forgive
from penstock.storage.sqlite.transitions import change_ttls, drop_slot, due_at, enter_waiting, finish
from penstock.storage.sqlite.transitions import remove as remove_record
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import Change, Unchanged

_OPEN: Final = (SCHEDULED, WAITING, BLOCKED, ACTIVE)

_sql = statements("signals")


Answer = TypeVar("Answer", bound=str)


def cancel(unit: Unit, ids: Sequence[str], *, rerun_only: bool = False) -> list[CancelAnswer]:
    """End pending jobs, and ask active ones to stop; with ``rerun_only``, drop the reruns behind active jobs."""
    if rerun_only:
        return each(unit, ids, _cancel_rerun, "not_found", changed=("rerun_cancelled",))
    return each(unit, ids, _cancel, "not_found", changed=("cancelled", "requested"))


def each(
    unit: Unit,
    ids: Sequence[str],
    act: Callable[[Unit, Record], Answer],
    unknown: Answer,
    *,
    changed: Sequence[Answer],
) -> list[Answer]:
    """Apply ``act`` to each job in order, and save those whose answer is in ``changed``."""
    known = unit.find(ids)
    touched: dict[str, Record] = {}
    answers: list[Answer] = []
    for id_ in ids:
        record = known.get(id_)
        answer = unknown if record is None or record.state == REMOVED else act(unit, record)
        answers.append(answer)
        if record is not None and answer in changed:
            touched[id_] = record
    unit.save(touched.values())
    return answers


def _cancel(unit: Unit, record: Record) -> CancelAnswer:
    match record.state:
        case "completed":
            return "completed"
        case "failed":
            return "failed"
        case "cancelled":
            return "already_cancelled"
        case "active":
            drop_slot(unit, record)
            if not record.cancelling:
                record.cancelling = 1
                unit.note(EventType.CANCELLING, record, run=record.runs)
            return "requested"
        case _:
            if record.is_staged:
                record.run_at = unit.now_ms  # A retry must not stage it again.
            finish(unit, record, CANCELLED, run=record.runs)
            return "cancelled"


def _cancel_rerun(unit: Unit, record: Record) -> CancelAnswer:
    if record.rerun is None:
        return "no_rerun"
    drop_slot(unit, record)
    unit.note(EventType.CHANGED, record, run=record.runs)
    return "rerun_cancelled"


def retry(unit: Unit, ids: Sequence[str]) -> list[RetryAnswer]:
    """Run failed and cancelled jobs again."""
    to_come = set(ids)
    ahead: set[str] = set()

    def act(unit: Unit, record: Record) -> RetryAnswer:
        if record.id in ahead:
            ahead.discard(record.id)
            return "retried"
        if record.state not in (FAILED, CANCELLED):
            return "not_failed"
        to_come.add(record.id)
        retried = retry_in_order(
            unit, record, lambda job: job.id in to_come and job.state in (FAILED, CANCELLED)
        )
        to_come.difference_update(retried)
        ahead.update(retried)
        ahead.discard(record.id)
        return "retried"

    return each(unit, ids, act, "not_found", changed=("retried",))


def retry_in_order(unit: Unit, record: Record, is_included: Callable[[Record], bool]) -> dict[str, Record]:
    """Retry the job, after the included jobs of this queue that it waits for again. Return the retried jobs.

    A dependency that is retried later would already have failed the job again.
    """
    stack, opened, retried = [record], set[str](), dict[str, Record]()
    while stack:
        top = stack[-1]
        if top.id in opened or not flows.is_parent(top):
            stack.pop()
            if top.id not in retried and is_included(top):
                _retry(unit, top)
                unit.touch(top)
                retried[top.id] = top
            continue
        opened.add(top.id)
        awaited = unit.find(flows.to_await_again(unit, top)).values()
        stack += [
            job
            for job in reversed(awaited)
            if job.id not in opened and job.id not in retried and is_included(job)
        ]
    return retried


def _retry(unit: Unit, record: Record) -> None:
    """Queue the job again with counts and ttl from zero, in the same incarnation."""
    record.failures = record.stalls = 0
    record.failure = record.result = None
    record.finished_at = record.kept_until = 0
    record.token = record.cancelling = 0
    record.settled_as = ""
    record.expires_at = unit.now_ms + record.ttl_ms if record.ttl_ms else 0
    forgive(unit, record)
    is_parent = flows.is_parent(record)
    if is_parent:
        flows.await_again(unit, record)
    enter_waiting(unit, record)
    unit.note(EventType.RETRIED, record, run=record.runs)
    if is_parent:
        flows.conclude(unit, record)


def promote(unit: Unit, ids: Sequence[str]) -> list[PromoteAnswer]:
    """Make scheduled jobs wait from now on."""
    return each(unit, ids, _promote, "not_found", changed=("promoted",))


def _promote(unit: Unit, record: Record) -> PromoteAnswer:
    if record.state != SCHEDULED or record.is_staged:
        return "not_scheduled"
    enter_waiting(unit, record)
    unit.note(EventType.PROMOTED, record, run=record.runs)
    return "promoted"


def remove(unit: Unit, ids: Sequence[str]) -> list[RemoveAnswer]:
    """Delete jobs that are not active."""
    return each(unit, ids, _remove, "not_found", changed=("removed",))


def _remove(unit: Unit, record: Record) -> RemoveAnswer:
    if record.state == ACTIVE:
        return "active"
    remove_record(unit, record)
    return "removed"


def remove_unchanged(unit: Unit, jobs: Sequence[Unchanged], *, consumer: str = "") -> list[UnchangedAnswer]:
    """Delete jobs that have not changed since they were read."""
    known = unit.find({job.id for job in jobs})
    answers: list[UnchangedAnswer] = []
    touched: dict[str, Record] = {}
    for job in jobs:
        record = known.get(job.id)
        answer = _remove_unchanged(unit, record, job, consumer)
        if record is not None and answer == "removed":
            touched[job.id] = record
        answers.append(answer)
    unit.save(touched.values())
    return answers


def _remove_unchanged(unit: Unit, record: Record | None, job: Unchanged, consumer: str) -> UnchangedAnswer:
    if record is None or record.state == REMOVED:
        return "not_found"
    is_finished = record.state in FINISHED
    if not is_finished or (record.incarnation, record.finished_at) != job[1:]:
        return "changed"
    holds = (record.extras.holds if record.has_links else None) or {}
    if any(record.finished_at + ms > unit.now_ms for name, ms in holds.items() if name != consumer):
        return "held"
    remove_record(unit, record)
    return "removed"


def change(unit: Unit, id_: str, values: Change) -> ChangeAnswer:
    """Change one job: all of ``change``, or nothing."""
    record = unit.find([id_]).get(id_)
    if record is None:
        return "not_found"
    if not _is_allowed(record, values):
        return "wrong_state"
    _change(unit, record, values)
    unit.note(EventType.CHANGED, record, run=record.runs)
    unit.save([record])
    return "changed"


def _is_allowed(record: Record, values: Change) -> bool:
    finished = record.state in FINISHED
    if values.payload is not None and finished:
        return False
    if values.priority is not None and (finished or record.state == ACTIVE):
        return False
    return values.delay_ms is None or (record.state in (WAITING, SCHEDULED) and not record.is_staged)


def _change(unit: Unit, record: Record, values: Change) -> None:
    if values.payload is not None:
        record.payload = values.payload
    if values.priority is not None:
        record.priority = values.priority
        if record.group_role:
            unit.links.reordered(unit, record)
    change_ttls(unit, record, result_ms=values.result_ttl_ms, failure_ms=values.failure_ttl_ms)
    if values.delay_ms:
        due_at(unit, record, unit.now_ms + values.delay_ms)
    elif values.delay_ms == 0 and record.state == SCHEDULED:
        enter_waiting(unit, record)


# Stages and signals


def named(signal: str) -> dict[str, Any]:
    """Return the event columns for a signal's name. Such names need no JSON escapes."""
    return {"data": f'{{"signal":"{signal}"}}'}


def go_to(record: Record, stage: str | None) -> None:
    """Start the next run at this stage; ``None`` keeps the current one."""
    if stage is not None:
        record.extras = replace(record.extras, stage=stage)


def hand_back(record: Record) -> None:
    """Record that the worker of this run does not know the task."""
    record.extras = replace(record.extras, unknown_run=record.runs)


def suspend(unit: Unit, record: Record, name: str, *, timeout_ms: int) -> None:
    """Block the job until the signal comes. If it came early, the job waits for a worker instead."""
    extras = record.extras
    if extras.received:
        unit.sql.execute(_sql["forget"], (record.key, 0))
    early = unit.sql.execute(_sql["oldest"], (record.key, name)).fetchone() if extras.kept else None
    record.extras = extras = replace(extras, received="", timed_out=False, awaits="", awaits_until_ms=0)
    if early is not None:
        number, data = early
        unit.sql.execute(_sql["forget"], (record.key, number))
        record.extras = replace(extras, kept=extras.kept - 1)
        _receive(unit, record, name, data)
        return
    until_ms = unit.now_ms + timeout_ms if timeout_ms else 0
    record.extras = replace(extras, awaits=name, awaits_until_ms=until_ms)
    record.state = BLOCKED
    record.blocked_by = SIGNAL
    if record.group_role:
        unit.links.scheduled(unit, record)


def signal(unit: Unit, id: str, name: str, data: bytes) -> SignalAnswer:
    """Resume the job that waits for the signal, or keep the signal for later."""
    record = unit.find([id]).get(id)
    if record is None or unit.is_over(record):
        return "not_found"
    if record.state not in _OPEN:
        return "ended"
    extras = record.extras
    answer: SignalAnswer = "kept"
    if record.state == BLOCKED and record.blocked_by == SIGNAL and extras.awaits == name:
        _receive(unit, record, name, data)
        answer = "resumed"
    elif extras.kept >= SIGNALS_KEPT:
        return "full"
    else:
        unit.sql.execute(_sql["keep"], {"job": record.key, "name": name, "data": data})
        record.extras = replace(extras, kept=extras.kept + 1)
    unit.note(EventType.SIGNALLED, record, run=record.runs, **named(name))
    unit.save([record])
    return answer


def time_out(unit: Unit, record: Record) -> None:
    """Resume a job whose signal did not come in time."""
    record.extras = replace(record.extras, timed_out=True, awaits="", awaits_until_ms=0)
    enter_waiting(unit, record)
    unit.note(EventType.UNBLOCKED, record, run=record.runs)


def received_data(unit: Unit, key: int) -> bytes | None:
    """Return the data of the signal that ended the last suspension of the job with this key."""
    row = unit.sql.execute(_sql["received"], (key,)).fetchone()
    return None if row is None else bytes(row[0])


def _receive(unit: Unit, record: Record, name: str, data: bytes) -> None:
    unit.sql.execute(_sql["receive"], (record.key, name, data))
    record.extras = replace(record.extras, received=name, awaits="", awaits_until_ms=0)
    enter_waiting(unit, record)
