"""``settle``: apply outcomes of leased jobs. ``report``: what a running job says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

import msgspec

from penstock.core.job import EMPTY_EXTRAS
from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import (
    Await,
    Cancel,
    Complete,
    Fail,
    Failure,
    Limited,
    Outcome,
    Release,
    Snooze,
    Suspend,
)
from penstock.storage.sqlite import admission, flows, groups
from penstock.storage.sqlite.claim import claim
from penstock.storage.sqlite.records import (
    ACTIVE,
    CANCELLED,
    COMPLETED,
    FAILED,
    REMOVED,
    STATES,
    Record,
    as_extras,
    pack_failure,
    unpack_options,
)
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.suspend import go_to, hand_back, named, suspend
from penstock.storage.sqlite.transitions import (
    absorb_slot,
    change_ttls,
    end_lease,
    enter_waiting,
    expire,
    finish,
    return_to_waiting,
    schedule,
)
from penstock.storage.sqlite.unit import Step
from penstock.storage.sqlite.usage import add_usage
from penstock.storage.values import Finished, Report, Settled, SettledBatch, Settlement, Take

_COMPLETED = EventType.COMPLETED.value
_FAILED = EventType.FAILED.value
_RETRYING = EventType.RETRYING.value
_SNOOZED = EventType.SNOOZED.value
_SUSPENDED = EventType.SUSPENDED.value
_RELEASED = EventType.RELEASED.value
_LIMITED = EventType.LIMITED.value
_CANCELLED = EventType.CANCELLED.value
_PROGRESSED = EventType.PROGRESSED.value
_LOG_LINES_KEPT = 1000

_sql = statements("settle")


def settle(step: Step, settlements: Sequence[Settlement], *, take: Take | None) -> SettledBatch:
    """Apply what the holders say, in order; then claim."""
    answers = complete_all(step, settlements)
    if answers is None:
        answers = _settle_each(step, settlements)
    if step.groups:
        admission.settle(step)
        step.save(())
    if take is None and step.queue.uses & groups.USES_LIMITS and step.queue.waiting:
        step.wakes.add("w")  # A slot of the queue may have become free.
    return SettledBatch(answers, None if take is None else claim(step, take))


def _settle_each(step: Step, settlements: Sequence[Settlement]) -> list[Settled]:
    known = step.find(settlement.id for settlement in settlements)
    applied: dict[str, Record] = {}
    answers: list[Settled] = []
    for settlement in settlements:
        record = known.get(settlement.id)
        if record is not None and record.state == REMOVED:
            record = None  # An earlier item ended it, with nothing to keep.
        if record is not None and _holds(record, settlement.token):
            _apply(step, record, settlement.outcome)
            applied[record.id] = record
        answers.append(_answer(record, settlement.token))
    step.save(applied.values())
    return answers


def _holds(record: Record, token: int) -> bool:
    return record.state == ACTIVE and record.token == token


def _answer(record: Record | None, token: int) -> Settled:
    if record is None:
        return Settled(False, None)
    if record.token == token and record.settled_as:
        return Settled(True, STATES[record.settled_as])
    return Settled(False, STATES[record.state] if record.state else None)


def _apply(step: Step, record: Record, outcome: Outcome) -> None:
    run: dict[str, Any] = {
        "run": record.runs,
        "tok": record.token,
        "w": record.worker,
        "ms": step.now_ms - record.claimed_at,
    }
    match outcome:
        case Complete():
            record.result = outcome.result
            record.settled_as = COMPLETED
            change_ttls(step, record, result_ms=outcome.ttl_ms)
            finish(step, record, COMPLETED, _COMPLETED, **run, size=len(outcome.result))
        case Fail():
            _fail(step, record, outcome, run)
        case Snooze() | Suspend() | Await():
            if _may_go_on(step, record, run):
                _put_off(step, record, outcome, run)
        case Release():
            _release(step, record, _RELEASED, run)
        case Limited():
            _limit(step, record, outcome, run)
        case Cancel():
            record.settled_as = CANCELLED
            finish(step, record, CANCELLED, _CANCELLED, **run)
        case _:
            assert_never(outcome)


def _put_off(step: Step, record: Record, outcome: Snooze | Suspend | Await, run: dict[str, Any]) -> None:
    match outcome:
        case Snooze():
            go_to(record, outcome.step)
            if outcome.unknown:
                hand_back(record)
            _run_again(step, record, outcome.delay_ms)
            _noted(step, record, _SNOOZED, run)
        case Suspend():
            go_to(record, outcome.step)
            suspend(step, record, outcome.signal, timeout_ms=outcome.timeout_ms)
            _noted(step, record, _SUSPENDED, run | named(outcome.signal))
        case Await():
            if (cause := flows.await_all(step, record)) is not None:
                _end_by(step, record, cause, run)
                return
            enter_waiting(step, record)
            _noted(step, record, _SUSPENDED, run)
        case _:
            assert_never(outcome)


def _fail(step: Step, record: Record, outcome: Fail, run: dict[str, Any]) -> None:
    record.failures += 1
    record.failure = pack_failure(outcome.failure)
    error = {"et": outcome.failure.type, "em": outcome.failure.message}
    if outcome.final or record.failures >= record.options.attempts:
        record.settled_as = FAILED
        change_ttls(step, record, failure_ms=outcome.ttl_ms)
        finish(step, record, FAILED, _FAILED, **run, **error)
    elif _may_go_on(step, record, run):
        _run_again(step, record, outcome.retry_in_ms)
        _noted(step, record, _RETRYING, run | error)


def _may_go_on(step: Step, record: Record, run: dict[str, Any]) -> bool:
    """End its lease. False if it ends with it: it is to be cancelled, its time is over, or a dependency failed it."""
    if record.cancelling:
        record.settled_as = CANCELLED
        finish(step, record, CANCELLED, _CANCELLED, **run)
        return False
    if record.is_past_ttl(step.now_ms):
        record.settled_as = FAILED
        expire(step, record, **run)
        return False
    if (cause := flows.fail_if_told(step, record)) is not None:
        _end_by(step, record, cause, run)
        return False
    end_lease(record)
    return True


def _run_again(step: Step, record: Record, delay_ms: int) -> None:
    if delay_ms > 0:
        schedule(step, record, step.now_ms + delay_ms)
    else:
        enter_waiting(step, record)


def _limit(step: Step, record: Record, outcome: Limited, run: dict[str, Any]) -> None:
    groups.park_of(step, record, queue=outcome.scope == "queue", until_ms=step.now_ms + outcome.delay_ms)
    _release(step, record, _LIMITED, run)


def _release(step: Step, record: Record, kind: str, run: dict[str, Any]) -> None:
    if record.cancelling:
        record.settled_as = CANCELLED
        finish(step, record, CANCELLED, _CANCELLED, **run)
        return
    if (cause := flows.fail_if_told(step, record)) is not None:
        _end_by(step, record, cause, run)
        return
    end_lease(record)
    return_to_waiting(step, record)
    _noted(step, record, kind, run)


def _end_by(step: Step, record: Record, cause: Failure, run: dict[str, Any]) -> None:
    """A dependency failed it while it ran, or it waits for none."""
    record.failure = pack_failure(cause)
    record.settled_as = FAILED
    finish(step, record, FAILED, _FAILED, **run, et=cause.type, em=cause.message)


def _noted(step: Step, record: Record, kind: str, run: dict[str, Any]) -> None:
    absorb_slot(step, record)
    record.settled_as = record.state
    step.note(kind, record, **run)


def report(step: Step, reports: Sequence[Report]) -> list[bool]:
    """Store progress, log lines and payloads of those who hold their jobs."""
    known = step.find(report.id for report in reports)
    touched: dict[str, Record] = {}
    answers: list[bool] = []
    for one in reports:
        record = known.get(one.id)
        holds = record is not None and _holds(record, one.token)
        answers.append(holds)
        if record is not None and holds:
            touched[record.id] = record
            _report(step, record, one)
    step.save(touched.values())
    return answers


def _report(step: Step, record: Record, one: Report) -> None:
    if one.payload is not None:
        record.payload = one.payload
    if one.usage:
        add_usage(step, record, one.usage)
    if one.progress is not None:
        record.progress = one.progress
        step.note(_PROGRESSED, record, run=record.runs, data=one.progress.decode())
    if one.log:
        _log(step, record, one)


def _log(step: Step, record: Record, one: Report) -> None:
    """Append log lines. Kept lines have consecutive numbers: those before skipped lines go."""
    last = step.sql.execute(_sql["last_line"], (record.key,)).fetchone()[0] or 0
    last += one.log_skipped
    lines = [(record.key, last + 1 + i, line) for i, line in enumerate(one.log)]
    step.sql.executemany(_sql["add_line"], lines)
    gone = max(last if one.log_skipped else 0, last + len(lines) - _LOG_LINES_KEPT)
    step.sql.execute(_sql["trim_lines"], (record.key, gone))


# The fast way through ``settle`` for what nearly every settle is: all completed, all held, nothing to
# rerun, no ties but perhaps to groups.
#
# It reads and writes half the columns of a whole record, for the same result.


_ANSWER = Settled(True, State.COMPLETED)

_fast_sql = statements("complete")
_json = msgspec.json.Encoder()


class _Held(msgspec.Struct, gc=False):
    key: int
    id: str
    state: str
    token: int
    needs_more: int
    incarnation: int
    runs: int
    worker: str
    claimed_at: int
    enqueued_at: int
    run_id: str
    packed_options: bytes
    packed_extras: bytes | None


def complete_all(step: Step, settlements: Sequence[Settlement]) -> list[Settled] | None:
    """Complete these jobs; ``None``, and nothing done, if one of them needs more thought."""
    results = [
        one.outcome.result
        for one in settlements
        if isinstance(one.outcome, Complete) and one.outcome.ttl_ms is None
    ]
    if not results or len(results) != len(settlements):
        return None
    ids = [one.id for one in settlements]
    rows = step.sql.execute(_fast_sql["held"], (_json.encode(ids).decode(), step.queue.key))
    jobs = [_Held(*row) for row in rows]
    if len(set(ids)) != len(jobs) or not all(map(_is_plain, jobs, settlements)):
        return None
    keys = _groups_of(jobs)
    if keys is None:
        return None
    _write(step, jobs, results)
    _note(step, jobs, results, keys)
    for key in keys:
        groups.end(step, key)
    return [_ANSWER] * len(jobs)


def _is_plain(job: _Held, settlement: Settlement) -> bool:
    return (
        job.id == settlement.id
        and job.token == settlement.token
        and job.state == ACTIVE
        and not job.needs_more
        and unpack_options(job.packed_options).result_ttl_ms > 0
    )


def _groups_of(jobs: list[_Held]) -> list[str] | None:
    """The group of each; an empty list if no job has one, ``None`` if some have, or if there are other ties."""
    packed = [job.packed_extras for job in jobs]
    if not any(packed):
        return []
    extrases = [as_extras(one) or EMPTY_EXTRAS for one in packed]
    if any(not extras.group or extras.binds_beyond_group for extras in extrases):
        return None
    return [extras.group for extras in extrases]


def _write(step: Step, jobs: list[_Held], results: list[bytes]) -> None:
    now_ms = step.now_ms
    awaited = step.awaited([job.key for job in jobs])
    rows = []
    for job, result in zip(jobs, results, strict=True):
        kept_until = now_ms + unpack_options(job.packed_options).result_ttl_ms
        rows.append((now_ms, kept_until, result, job.key))
        if job.key in awaited:
            step.tell_of(job.key, Finished(job.id, job.incarnation, State.COMPLETED, result))
    step.sql.executemany(_fast_sql["complete"], rows)
    step.queue.move(ACTIVE, COMPLETED, len(jobs))
    step.save(())


def _note(step: Step, jobs: list[_Held], results: list[bytes], keys: list[str]) -> None:
    now_ms = step.now_ms
    rows: list[tuple[Any, ...]] = []
    for job, result in zip(jobs, results, strict=True):
        options = unpack_options(job.packed_options)
        rows.append(
            (
                now_ms,
                job.id,
                job.incarnation,
                job.enqueued_at,
                job.run_id,
                options.task,
                options.version,
                COMPLETED,
                job.runs,
                job.token,
                job.worker,
                now_ms - job.claimed_at,
                len(result),
            )
        )
    columns: tuple[str, ...] = ("run", "tok", "w", "ms", "size")
    if keys:
        columns = (*columns, "grp")
        rows = [(*row, key) for row, key in zip(rows, keys, strict=True)]
    step.notes.add_rows(_COMPLETED, columns, rows)
