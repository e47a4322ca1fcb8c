"""``claim``, which promotes due jobs and leases the first in line, and ``extend``, which renews leases."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

import msgspec

from penstock.core.job import EMPTY_EXTRAS, Lease
from penstock.core.lifecycle import EventType
from penstock.core.outcome import FAILURE_TEXTS, Failure
from penstock.storage.bounds import GROUPS_PER_CLAIM, PROMOTED_PER_CLAIM
from penstock.storage.metrics import flow_scope
from penstock.storage.sqlite import groups, limits, schedules, statements
from penstock.storage.sqlite.job_verbs import received_data
from penstock.storage.sqlite.records import (
    ACTIVE,
    WAITING,
    Record,
    Unreadable,
    as_extras,
    as_lease,
    unpack_options,
)
from penstock.storage.sqlite.steps import sent_steps
from penstock.storage.sqlite.transitions import enter_waiting, expire, fail
from penstock.storage.sqlite.unit import Unit
from penstock.storage.sqlite.usage import check_budgets
from penstock.storage.values import Claimed, Extended, Held, Take

_CLAIMED: Final = EventType.CLAIMED.value
_sql = statements("claim")
_json = msgspec.json.Encoder()
_SPENT = Failure("BudgetExceeded", FAILURE_TEXTS["BudgetExceeded"])


def claim(unit: Unit, take: Take) -> Claimed:
    """Lease up to ``take.count`` jobs."""
    if unit.queue.paused:
        return Claimed([], None, paused=True)
    if unit.queue.has_budgets:
        spent = check_budgets(unit)
        if spent.over:
            return Claimed([], spent.wait_ms, over_budget=True)
    promote_due(unit, limit=PROMOTED_PER_CLAIM)
    limits.fill_due(unit, limit=GROUPS_PER_CLAIM)
    allowed, _ = limits.allowance(unit, take.count)
    leases = _take(unit, take, allowed)
    if unit.queue.uses & groups.USES_LIMITS and leases:
        groups.group_of(unit, "").charge(len(leases), cost=0, now_ms=unit.now_ms)
    if unit.groups:
        limits.fill_touched(unit)
        unit.flush()
    return _answer(unit, take, leases)


def _take(unit: Unit, take: Take, count: int) -> list[Lease]:
    leases: list[Lease] = []
    while len(leases) < count:
        head = _head(unit, count - len(leases))
        if not head and unit.queue.waiting:
            raise Unreadable(f"{unit.queue.waiting} jobs are counted as waiting, but none can be read")
        if not head:
            break
        leases += _take_from(unit, take, head)
    return leases


def _answer(unit: Unit, take: Take, leases: list[Lease]) -> Claimed:
    """Return the leases and when to claim again. Wake no other worker if a limit of the queue stops claims."""
    waiting = unit.queue.waiting > 0
    room, wait_ms = limits.allowance(unit, 1)
    if waiting and room:
        unit.wakes.add("w")
    elif waiting:
        unit.wakes.discard("w")
    is_all = len(leases) == take.count
    if waiting and not room and not is_all:
        return Claimed(leases, wait_ms, limited=True)
    return Claimed(leases, 0 if is_all or waiting else _next_due_in(unit))


def promote_due(unit: Unit, *, limit: int) -> int:
    """Make due jobs wait. Return their number, at most ``limit``."""
    if unit.moment.packed_marks and unit.moment.marks.follow:
        schedules.follow(unit, limit=limit)
    if not unit.queue.scheduled:
        return 0
    rows = unit.sql.execute(_sql["due"], (unit.queue.key, unit.now_ms, limit))
    due = unit.adopt(rows)
    for record in due:
        enter_waiting(unit, record)
        unit.note(EventType.PROMOTED, record, run=record.runs)
    if due:
        unit.save(due)
    return len(due)


class _Ready(msgspec.Struct, gc=False):
    """A job at the head of the line, with the fields of a lease: reading whole records takes three times as long.

    ``concern`` is 1 if the job has links, 2 if its ttl has passed, otherwise 0.
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


def _head(unit: Unit, count: int) -> list[_Ready]:
    if not unit.queue.waiting:
        return []
    return [_Ready(*row) for row in unit.sql.execute(_sql["head"], (unit.now_ms, unit.queue.key, count))]


def _take_from(unit: Unit, take: Take, head: list[_Ready]) -> list[Lease]:
    """Lease these jobs in order. Expired ones end instead; members of full groups go back to their group."""
    leases: list[Lease] = []
    for concern, jobs in groupby(head, key=_concern_of):
        match concern:
            case 0:
                leases += _lease(unit, take, list(jobs))
            case 1:
                leases += _lease_members(unit, take, list(jobs))
            case _:
                _expire(unit, [job.id for job in jobs])
    return leases


def _expire(unit: Unit, ids: list[str]) -> None:
    ended = unit.find(ids)
    for record in ended.values():
        expire(unit, record)
    unit.save(ended.values())


def _lease_members(unit: Unit, take: Take, jobs: list[_Ready]) -> list[Lease]:
    """Lease jobs with links. They may belong to full groups, or to flows that have spent their budget."""
    leases: list[Lease] = []
    allowed: list[_Ready] = []
    for job in jobs:
        extras = as_extras(job.packed_extras) or EMPTY_EXTRAS
        is_over = bool(
            unit.queue.has_budgets and extras.flow and check_budgets(unit, flow_scope(extras.flow)).over
        )
        if not is_over and (not extras.group or groups.start(unit, extras.group, extras.cost)):
            allowed.append(job)
            continue
        leases += _lease(
            unit, take, allowed, grouped=True
        )  # Lease them first, so that the log keeps their order.
        allowed = []
        record = unit.find([job.id])[job.id]
        if is_over:
            fail(unit, record, _SPENT)
        else:
            groups.send_back(unit, record)
        unit.save([record])
    return leases + _lease(unit, take, allowed, grouped=True)


def _lease(unit: Unit, take: Take, jobs: list[_Ready], *, grouped: bool = False) -> list[Lease]:
    now_ms, worker = unit.now_ms, take.worker
    leases = [
        Lease(
            job.id, token, job.incarnation, job.runs + 1, job.failures, job.stalls, job.payload,
            unpack_options(job.packed_options), job.priority, job.enqueued_at, now_ms, job.expires_at,
            job.cancelling != 0, job.run_id,
            extras := None if job.packed_extras is None else as_extras(job.packed_extras),
            received_data(unit, job.key) if extras is not None and extras.received else None,
            sent_steps(unit, job.key) if extras is not None and extras.has_steps else None,
        )
        for token, job in zip(unit.draw_many(len(jobs)), jobs, strict=True)
    ]  # fmt: skip
    until_ms = now_ms + take.lease_ms
    rows = [(lease.token, now_ms, until_ms, worker, job.key) for lease, job in zip(leases, jobs, strict=True)]
    unit.sql.executemany(_sql["lease"], rows)
    unit.queue.move(WAITING, ACTIVE, len(jobs))
    if leases:
        _note_claims(unit, leases, [now_ms - job.ready_at for job in jobs], worker, grouped=grouped)
    return leases


def _note_claims(unit: Unit, leases: list[Lease], waits_ms: list[int], worker: str, *, grouped: bool) -> None:
    rows: list[tuple[Any, ...]] = [
        (
            unit.now_ms, lease.id, lease.incarnation, lease.enqueued_at_ms, lease.run_id, lease.options.task,
            lease.options.version, ACTIVE, lease.run, lease.token, worker, wait_ms, lease.priority,
        )
        for lease, wait_ms in zip(leases, waits_ms, strict=True)
    ]  # fmt: skip
    columns: tuple[str, ...] = ("run", "tok", "w", "wait", "pri")
    if grouped:
        columns = (*columns, "grp")
        rows = [
            (*row, lease.extras.group if lease.extras else "")
            for row, lease in zip(rows, leases, strict=True)
        ]
    unit.notes.add_rows(_CLAIMED, columns, rows)


def _next_due_in(unit: Unit) -> int | None:
    first = unit.next_due() if unit.queue.scheduled else None
    times = [at for at in (first, limits.next_look(unit)) if at is not None]
    return max(0, min(times) - unit.now_ms) if times else None


def read_back(unit: Unit, held: Sequence[Held]) -> list[Lease]:
    """Return the leases of an earlier call that are still held, because the call is repeated."""
    tokens = {lease.id: lease.token for lease in held}
    ids = _json.encode([lease.id for lease in held]).decode()
    rows = unit.sql.execute(_sql["held"], (ids, unit.queue.key)).fetchall()
    records = ((Record(*row), payload) for payload, *row in rows)
    return [
        as_lease(
            record,
            payload,
            signal=received_data(unit, record.key),
            steps=sent_steps(unit, record.key) if record.extras.has_steps else None,
        )
        for record, payload in records
        if record.token == tokens[record.id]
    ]


def extend(
    unit: Unit, held: Sequence[Held], *, worker: str, lease_ms: int, info: bytes | None = None
) -> list[Extended]:
    """Renew the leases that are still held."""
    if info is not None:
        unit.sql.execute(_sql["see_worker"], (unit.queue.key, worker, info, unit.now_ms))
    known = unit.find(lease.id for lease in held)
    answers = [_extended(unit, known.get(lease.id), lease.token) for lease in held]
    until_ms = unit.now_ms + lease_ms
    renewals = [
        (until_ms, known[lease.id].key)
        for lease, answer in zip(held, answers, strict=True)
        if answer != "lost"
    ]
    unit.sql.executemany(_sql["push"], renewals)
    return answers


def _extended(unit: Unit, record: Record | None, token: int) -> Extended:
    if record is None or record.state != ACTIVE or record.token != token:
        return "lost"
    if record.cancelling:
        return "cancel"
    return "expired" if record.is_past_ttl(unit.now_ms) else "extended"
