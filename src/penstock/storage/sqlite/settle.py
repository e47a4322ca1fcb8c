"""``settle``, which applies the outcomes of leased jobs, with a fast path for plain completions; and ``report``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, assert_never

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
from penstock.storage.bounds import LOG_LINES_KEPT
from penstock.storage.sqlite import flows, groups, limits, statements
from penstock.storage.sqlite.claim import claim
from penstock.storage.sqlite.job_verbs import go_to, hand_back, named, suspend
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
from penstock.storage.sqlite.transitions import (
    absorb_slot,
    change_ttls,
    end_lease,
    enter_waiting,
    expire,
    fail,
    finish,
    return_to_waiting,
    schedule,
)
from penstock.storage.sqlite.unit import Unit
from penstock.storage.sqlite.usage import add_usage
from penstock.storage.values import Finished, Report, Settled, SettledBatch, Settlement, Take

_COMPLETED: Final = EventType.COMPLETED.value
_sql = statements("settle")
_ANSWER = Settled(True, State.COMPLETED)
_fast_sql = statements("fast_settle")
_json = msgspec.json.Encoder()


def settle(unit: Unit, settlements: Sequence[Settlement], *, take: Take | None) -> SettledBatch:
    """Apply the outcomes in order; then claim."""
    answers = _complete_plain(unit, settlements)
    if answers is None:
        answers = _settle_in_order(unit, settlements)
    if unit.groups:
        limits.fill_touched(unit)
        unit.flush()
    if take is None and unit.queue.uses & groups.USES_LIMITS and unit.queue.waiting:
        unit.wakes.add("w")  # A slot of the queue may have become free.
    return SettledBatch(answers, None if take is None else claim(unit, take))


def _settle_in_order(unit: Unit, settlements: Sequence[Settlement]) -> list[Settled]:
    known = unit.find(settlement.id for settlement in settlements)
    applied: dict[str, Record] = {}
    answers: list[Settled] = []
    for settlement in settlements:
        record = known.get(settlement.id)
        if record is not None and record.state == REMOVED:
            record = None  # An earlier item ended it, and it is not kept.
        if record is not None and _holds(record, settlement.token):
            _apply(unit, record, settlement.outcome)
            applied[record.id] = record
        answers.append(_answer(record, settlement.token))
    unit.save(applied.values())
    return answers


def _holds(record: Record, token: int) -> bool:
    return record.state == ACTIVE and record.token == token


def _answer(record: Record | None, token: int) -> Settled:
    if record is None:
        return Settled(False, None)
    if record.token == token and record.settled_as:
        return Settled(True, STATES[record.settled_as])
    return Settled(False, STATES[record.state] if record.state else None)


def _apply(unit: Unit, record: Record, outcome: Outcome) -> None:
    run: dict[str, Any] = {
        "run": record.runs,
        "tok": record.token,
        "w": record.worker,
        "ms": unit.now_ms - record.claimed_at,
    }
    match outcome:
        case Complete():
            record.result = outcome.result
            record.settled_as = COMPLETED
            change_ttls(unit, record, result_ms=outcome.ttl_ms)
            finish(unit, record, COMPLETED, **run, size=len(outcome.result))
        case Fail():
            _fail(unit, record, outcome, run)
        case Snooze() | Suspend() | Await():
            if _may_go_on(unit, record, run):
                _postpone(unit, record, outcome, run)
        case Release():
            _release(unit, record, EventType.RELEASED, run)
        case Limited():
            _limit(unit, record, outcome, run)
        case Cancel():
            _cancel(unit, record, run)
        case _:
            assert_never(outcome)


def _postpone(unit: Unit, record: Record, outcome: Snooze | Suspend | Await, run: dict[str, Any]) -> None:
    match outcome:
        case Snooze():
            go_to(record, outcome.stage)
            if outcome.unknown:
                hand_back(record)
            _run_again(unit, record, outcome.delay_ms)
            _note_handed_back(unit, record, EventType.SNOOZED, run)
        case Suspend():
            go_to(record, outcome.stage)
            suspend(unit, record, outcome.signal, timeout_ms=outcome.timeout_ms)
            _note_handed_back(unit, record, EventType.SUSPENDED, run | named(outcome.signal))
        case Await():
            if (cause := flows.await_all(unit, record)) is not None:
                _fail_by(unit, record, cause, run)
                return
            enter_waiting(unit, record)
            _note_handed_back(unit, record, EventType.SUSPENDED, run)
        case _:
            assert_never(outcome)


def _fail(unit: Unit, record: Record, outcome: Fail, run: dict[str, Any]) -> None:
    record.failures += 1
    record.failure = pack_failure(outcome.failure)
    error = {"et": outcome.failure.type, "em": outcome.failure.message}
    if outcome.final or record.failures >= record.options.attempts:
        record.settled_as = FAILED
        change_ttls(unit, record, failure_ms=outcome.ttl_ms)
        finish(unit, record, FAILED, **run, **error)
    elif _may_go_on(unit, record, run):
        _run_again(unit, record, outcome.retry_in_ms)
        _note_handed_back(unit, record, EventType.RETRYING, run | error)


def _may_go_on(unit: Unit, record: Record, run: dict[str, Any]) -> bool:
    """End the lease. Return false if the job ends too: cancelled, expired, or failed by a dependency."""
    if record.cancelling:
        _cancel(unit, record, run)
        return False
    if record.is_past_ttl(unit.now_ms):
        record.settled_as = FAILED
        expire(unit, record, **run)
        return False
    if (cause := flows.dependency_failure(unit, record)) is not None:
        _fail_by(unit, record, cause, run)
        return False
    end_lease(record)
    return True


def _run_again(unit: Unit, record: Record, delay_ms: int) -> None:
    if delay_ms > 0:
        schedule(unit, record, unit.now_ms + delay_ms)
    else:
        enter_waiting(unit, record)


def _limit(unit: Unit, record: Record, outcome: Limited, run: dict[str, Any]) -> None:
    groups.park_of(unit, record, queue=outcome.scope == "queue", until_ms=unit.now_ms + outcome.delay_ms)
    _release(unit, record, EventType.LIMITED, run)


def _release(unit: Unit, record: Record, kind: str, run: dict[str, Any]) -> None:
    if record.cancelling:
        _cancel(unit, record, run)
        return
    if (cause := flows.dependency_failure(unit, record)) is not None:
        _fail_by(unit, record, cause, run)
        return
    end_lease(record)
    return_to_waiting(unit, record)
    _note_handed_back(unit, record, kind, run)


def _cancel(unit: Unit, record: Record, run: dict[str, Any]) -> None:
    record.settled_as = CANCELLED
    finish(unit, record, CANCELLED, **run)


def _fail_by(unit: Unit, record: Record, cause: Failure, run: dict[str, Any]) -> None:
    """Fail a job because of a dependency, or because it waits for none."""
    record.settled_as = FAILED
    fail(unit, record, cause, **run)


def _note_handed_back(unit: Unit, record: Record, kind: str, run: dict[str, Any]) -> None:
    absorb_slot(unit, record)
    record.settled_as = record.state
    unit.note(kind, record, **run)


def report(unit: Unit, reports: Sequence[Report]) -> list[bool]:
    """Store the progress, log lines, payloads and usage of jobs whose lease is held."""
    known = unit.find(report.id for report in reports)
    touched: dict[str, Record] = {}
    answers: list[bool] = []
    for report_ in reports:
        record = known.get(report_.id)
        holds = record is not None and _holds(record, report_.token)
        answers.append(holds)
        if record is not None and holds:
            touched[record.id] = record
            _report(unit, record, report_)
    unit.save(touched.values())
    return answers


def _report(unit: Unit, record: Record, report_: Report) -> None:
    if report_.payload is not None:
        record.payload = report_.payload
    if report_.usage:
        add_usage(unit, record, report_.usage)
    if report_.progress is not None:
        record.progress = report_.progress
        unit.note(EventType.PROGRESSED, record, run=record.runs, data=report_.progress.decode())
    if report_.log:
        _log(unit, record, report_)


def _log(unit: Unit, record: Record, report_: Report) -> None:
    """Append log lines. Delete the lines before skipped ones, so that the numbers of kept lines are consecutive."""
    last = unit.sql.execute(_sql["last_line"], (record.key,)).fetchone()[0] or 0
    last += report_.log_skipped
    lines = [(record.key, last + 1 + i, line) for i, line in enumerate(report_.log)]
    unit.sql.executemany(_sql["add_line"], lines)
    gone = max(last if report_.log_skipped else 0, last + len(lines) - LOG_LINES_KEPT)
    unit.sql.execute(_sql["trim_lines"], (record.key, gone))


# The fast path, for almost every settle: all jobs completed, all leases are held, none has a rerun, and none has
# links other than its group. It has the same result, but reads and writes half the columns of a whole record.


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


def _complete_plain(unit: Unit, settlements: Sequence[Settlement]) -> list[Settled] | None:
    """Complete these jobs, or return ``None``, with nothing changed, if one of them needs the slow path."""
    results = [
        settlement.outcome.result
        for settlement in settlements
        if isinstance(settlement.outcome, Complete) and settlement.outcome.ttl_ms is None
    ]
    if not results or len(results) != len(settlements):
        return None
    ids = [settlement.id for settlement in settlements]
    rows = unit.sql.execute(_fast_sql["held"], (_json.encode(ids).decode(), unit.queue.key))
    jobs = [_Held(*row) for row in rows]
    if len(set(ids)) != len(jobs) or not all(map(_is_plain, jobs, settlements)):
        return None
    keys = _groups_of(jobs)
    if keys is None:
        return None
    _write(unit, jobs, results)
    _note(unit, jobs, results, keys)
    for key in keys:
        groups.end(unit, key)
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
    """Return the group of each job, or an empty list if no job has links. Return ``None`` if only some jobs have a
    group, or if there are other links."""
    packed = [job.packed_extras for job in jobs]
    if not any(packed):
        return []
    unpacked = [as_extras(extras) or EMPTY_EXTRAS for extras in packed]
    if any(not extras.group or extras.has_links_beyond_group for extras in unpacked):
        return None
    return [extras.group for extras in unpacked]


def _write(unit: Unit, jobs: list[_Held], results: list[bytes]) -> None:
    now_ms = unit.now_ms
    awaited = unit.awaited([job.key for job in jobs])
    rows = []
    for job, result in zip(jobs, results, strict=True):
        kept_until = now_ms + unpack_options(job.packed_options).result_ttl_ms
        rows.append((now_ms, kept_until, result, job.key))
        if job.key in awaited:
            unit.tell_of(job.key, Finished(job.id, job.incarnation, State.COMPLETED, result))
    unit.sql.executemany(_fast_sql["complete"], rows)
    unit.queue.move(ACTIVE, COMPLETED, len(jobs))
    unit.flush()


def _note(unit: Unit, jobs: list[_Held], results: list[bytes], keys: list[str]) -> None:
    now_ms = unit.now_ms
    rows: list[tuple[Any, ...]] = []
    for job, result in zip(jobs, results, strict=True):
        options = unpack_options(job.packed_options)
        rows.append(
            (
                now_ms, job.id, job.incarnation, job.enqueued_at, job.run_id, options.task, options.version,
                COMPLETED, job.runs, job.token, job.worker, now_ms - job.claimed_at, len(result),
            )
        )  # fmt: skip
    columns: tuple[str, ...] = ("run", "tok", "w", "ms", "size")
    if keys:
        columns = (*columns, "grp")
        rows = [(*row, key) for row, key in zip(rows, keys, strict=True)]
    unit.notes.add_rows(_COMPLETED, columns, rows)
