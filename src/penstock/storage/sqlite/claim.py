"""``claim``: promote what is due, then lease the head of the line. ``extend``: keep the leases."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec

from penstock.core.job import EMPTY_EXTRAS, Lease
from penstock.core.lifecycle import EventType
from penstock.core.outcome import FAILURE_TEXTS, Failure
from penstock.storage.metrics import flow_scope
from penstock.storage.sqlite import admission, groups, schedules
from penstock.storage.sqlite.budgets import look
from penstock.storage.sqlite.records import (
    ACTIVE,
    FAILED,
    WAITING,
    Record,
    Unreadable,
    as_extras,
    as_lease,
    pack_failure,
    unpack_options,
)
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.suspend import received_data
from penstock.storage.sqlite.transitions import enter_waiting, expire, finish
from penstock.storage.sqlite.unit import Step
from penstock.storage.values import Claimed, Extended, Held, Take

_PROMOTED = EventType.PROMOTED.value
_CLAIMED = EventType.CLAIMED.value
_PROMOTED_PER_CLAIM = 1000
_GROUPS_PER_CLAIM = 100

_sql = statements("claim")
_json = msgspec.json.Encoder()
_FAILED = EventType.FAILED.value
_SPENT = Failure("BudgetExceeded", FAILURE_TEXTS["BudgetExceeded"])


def claim(step: Step, take: Take) -> Claimed:
    """Lease up to ``take.count`` jobs."""
    if step.queue.paused:
        return Claimed([], None, paused=True)
    if step.queue.has_budgets:
        spent = look(step)
        if spent.over:
            return Claimed([], spent.wait_ms, over_budget=True)
    promote_due(step, limit=_PROMOTED_PER_CLAIM)
    admission.look_again(step, limit=_GROUPS_PER_CLAIM)
    allowed, _ = admission.allowance(step, take.count)
    leases = _take(step, take, allowed)
    if step.queue.uses & groups.USES_LIMITS and leases:
        groups.group_of(step, "").charge(len(leases), cost=0, now_ms=step.now_ms)
    if step.groups:
        admission.settle(step)
        step.save(())
    return _answer(step, take, leases)


def _take(step: Step, take: Take, count: int) -> list[Lease]:
    leases: list[Lease] = []
    while len(leases) < count:
        head = _head(step, count - len(leases))
        if not head and step.queue.waiting:
            raise Unreadable(f"{step.queue.waiting} jobs are counted as waiting, but none can be read")
        if not head:
            break
        leases += _take_from(step, take, head)
    return leases


def _answer(step: Step, take: Take, leases: list[Lease]) -> Claimed:
    """With when to come again. Whom a limit of the queue keeps from more wakes nobody else for nothing."""
    waiting = step.queue.waiting > 0
    room, wait_ms = admission.allowance(step, 1)
    if waiting and room:
        step.wakes.add("w")
    elif waiting:
        step.wakes.discard("w")
    is_all = len(leases) == take.count
    if waiting and not room and not is_all:
        return Claimed(leases, wait_ms, limited=True)
    return Claimed(leases, 0 if is_all or waiting else _next_due_in(step))


def promote_due(step: Step, *, limit: int) -> int:
    """Let scheduled jobs whose time has come wait; how many there were, at most ``limit``."""
    if step.moment.packed_marks and step.moment.marks.follow:
        schedules.follow(step, limit=limit)
    if not step.queue.scheduled:
        return 0
    rows = step.sql.execute(_sql["due"], (step.queue.key, step.now_ms, limit))
    due = step.adopt(rows)
    for record in due:
        enter_waiting(step, record)
        step.note(_PROMOTED, record, run=record.runs)
    if due:
        step.save(due)
    return len(due)


class _Ready(msgspec.Struct, gc=False):
    """A job at the head of the line, with what a lease needs of it: reading whole records takes thrice as long.

    ``concern``: 0 none, 1 it has ties, 2 its ttl has passed.
    """

    key: int
    expires_at: int
    ready_at: int
    run_id: str
    cancelling: int
    enqueued_at: int
    priority: int
    packed_options: bytes
    payload: bytes
    stalls: int
    failures: int
    runs: int
    incarnation: int
    id: str
    packed_extras: bytes | None
    concern: int


_concern_of = attrgetter("concern")


def _head(step: Step, count: int) -> list[_Ready]:
    if not step.queue.waiting:
        return []
    return [_Ready(*row) for row in step.sql.execute(_sql["head"], (step.now_ms, step.queue.key, count))]


def _take_from(step: Step, take: Take, head: list[_Ready]) -> list[Lease]:
    """Lease these in order; those whose ttl has passed end instead, those whose group is full go back to it."""
    leases: list[Lease] = []
    for concern, jobs in groupby(head, key=_concern_of):
        match concern:
            case 0:
                leases += _lease(step, take, list(jobs))
            case 1:
                leases += _lease_members(step, take, list(jobs))
            case _:
                _expire(step, [job.id for job in jobs])
    return leases


def _expire(step: Step, ids: list[str]) -> None:
    ended = step.find(ids)
    for record in ended.values():
        expire(step, record)
    step.save(ended.values())


def _lease_members(step: Step, take: Take, jobs: list[_Ready]) -> list[Lease]:
    """The same for jobs that may be members of groups, or of flows that have spent their budget."""
    leases: list[Lease] = []
    allowed: list[_Ready] = []
    for job in jobs:
        extras = as_extras(job.packed_extras) or EMPTY_EXTRAS
        is_over = bool(step.queue.has_budgets and extras.flow and look(step, flow_scope(extras.flow)).over)
        if not is_over and (not extras.group or groups.start(step, extras.group, extras.cost)):
            allowed.append(job)
            continue
        leases += _lease(step, take, allowed, grouped=True)  # First: the log has the order of the line.
        allowed = []
        record = step.find([job.id])[job.id]
        if is_over:
            record.failure = pack_failure(_SPENT)
            finish(step, record, FAILED, _FAILED, run=record.runs, et=_SPENT.type, em=_SPENT.message)
        else:
            groups.send_back(step, record)
        step.save([record])
    return leases + _lease(step, take, allowed, grouped=True)


def _lease(step: Step, take: Take, jobs: list[_Ready], *, grouped: bool = False) -> list[Lease]:
    now_ms, worker = step.now_ms, take.worker
    leases = [
        Lease(
            job.id,
            token,
            job.incarnation,
            job.runs + 1,
            job.failures,
            job.stalls,
            job.payload,
            unpack_options(job.packed_options),
            job.priority,
            job.enqueued_at,
            now_ms,
            job.expires_at,
            job.cancelling != 0,
            job.run_id,
            extras := None if job.packed_extras is None else as_extras(job.packed_extras),
            received_data(step, job.key) if extras is not None and extras.received else None,
        )
        for token, job in zip(step.draw_many(len(jobs)), jobs, strict=True)
    ]
    until_ms = now_ms + take.lease_ms
    rows = [(lease.token, now_ms, until_ms, worker, job.key) for lease, job in zip(leases, jobs, strict=True)]
    step.sql.executemany(_sql["lease"], rows)
    step.queue.move(WAITING, ACTIVE, len(jobs))
    if leases:
        _note_claims(step, leases, [now_ms - job.ready_at for job in jobs], worker, grouped=grouped)
    return leases


def _note_claims(step: Step, leases: list[Lease], waits_ms: list[int], worker: str, *, grouped: bool) -> None:
    rows: list[tuple[Any, ...]] = [
        (
            step.now_ms,
            lease.id,
            lease.incarnation,
            lease.enqueued_at_ms,
            lease.run_id,
            lease.options.task,
            lease.options.version,
            ACTIVE,
            lease.run,
            lease.token,
            worker,
            wait_ms,
            lease.priority,
        )
        for lease, wait_ms in zip(leases, waits_ms, strict=True)
    ]
    columns: tuple[str, ...] = ("run", "tok", "w", "wait", "pri")
    if grouped:
        columns = (*columns, "grp")
        rows = [
            (*row, lease.extras.group if lease.extras else "")
            for row, lease in zip(rows, leases, strict=True)
        ]
    step.notes.add_rows(_CLAIMED, columns, rows)


def _next_due_in(step: Step) -> int | None:
    first = step.next_due() if step.queue.scheduled else None
    times = [at for at in (first, admission.next_look(step)) if at is not None]
    return max(0, min(times) - step.now_ms) if times else None


def read_back(step: Step, held: Sequence[Held]) -> list[Lease]:
    """The leases a call had got, for its repetition; without those that are no longer held."""
    tokens = {lease.id: lease.token for lease in held}
    ids = _json.encode([lease.id for lease in held]).decode()
    rows = step.sql.execute(_sql["held"], (ids, step.queue.key)).fetchall()
    records = ((Record(*row), payload) for payload, *row in rows)
    return [
        as_lease(record, payload, signal=received_data(step, record.key))
        for record, payload in records
        if record.token == tokens[record.id]
    ]


def extend(
    step: Step, held: Sequence[Held], *, worker: str, lease_ms: int, info: bytes | None
) -> list[Extended]:
    """Push the deadlines of the leases that are still held."""
    if info is not None:
        step.sql.execute(_sql["see_worker"], (step.queue.key, worker, info, step.now_ms))
    known = step.find(lease.id for lease in held)
    answers = [_extended(step, known.get(lease.id), lease.token) for lease in held]
    until_ms = step.now_ms + lease_ms
    kept = [
        (until_ms, known[lease.id].key)
        for lease, answer in zip(held, answers, strict=True)
        if answer != "lost"
    ]
    step.sql.executemany(_sql["push"], kept)
    return answers


def _extended(step: Step, record: Record | None, token: int) -> Extended:
    if record is None or record.state != ACTIVE or record.token != token:
        return "lost"
    if record.cancelling:
        return "cancel"
    return "expired" if record.is_past_ttl(step.now_ms) else "extended"
