"""``sweep``: everything time brings, at most about ``limit`` of each kind."""

from __future__ import annotations

from penstock.core.job import HOUR_MS
from penstock.core.lifecycle import EventType
from penstock.core.outcome import FAILURE_TEXTS, Failure
from penstock.storage.sqlite import dedup, flows, schedules
from penstock.storage.sqlite.admission import sweep_groups
from penstock.storage.sqlite.claim import promote_due
from penstock.storage.sqlite.clock import TERM_MS, wall_ms
from penstock.storage.sqlite.eventlog import trim
from penstock.storage.sqlite.groups import USES_LIMITS
from penstock.storage.sqlite.holds import lapse
from penstock.storage.sqlite.lock import protected_ms
from penstock.storage.sqlite.records import (
    BLOCKED,
    CANCELLED,
    COMPLETED,
    FAILED,
    REMOVED,
    SCHEDULED,
    WAITING,
    Record,
    Unreadable,
    pack_failure,
)
from penstock.storage.sqlite.replay import MEMO_KEPT_MS
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.suspend import time_out
from penstock.storage.sqlite.transitions import absorb_slot, end_lease, expire, finish, return_to_waiting
from penstock.storage.sqlite.unit import Step
from penstock.storage.sqlite.usage import forget_usage
from penstock.storage.values import QueueSettings, Swept

_STALLED = EventType.STALLED.value
_FAILED = EventType.FAILED.value
_CANCELLED = EventType.CANCELLED.value

_NEWS_KEPT_MS = 60_000
_WORKERS_KEPT_MS = HOUR_MS

_sql = statements("sweep")
_news_sql = statements("news")


def sweep(step: Step, *, limit: int) -> Swept:
    """One bounded round."""
    settings = step.queue.settings
    promoted = promote_due(step, limit=limit)
    unblocked = _time_out(step, limit)
    _renew_leases(step)
    rescued = _rescue(step, limit)
    expired = _expire(step, limit)
    regrouped = sweep_groups(step, limit=limit)
    if rescued and step.queue.uses & USES_LIMITS and step.queue.waiting:
        step.wakes.add("w")
    pruned = _prune(step, settings, limit)
    trimmed = trim(step, settings, limit=limit)
    _forget(step)
    schedules.tidy(step)
    forgotten = dedup.forget(step, limit=limit)
    more = (
        limit in (promoted, unblocked, rescued, expired, forgotten)
        or max(pruned, trimmed, regrouped) >= limit
        or step.moment.marks.follow > 0
    )
    slot_wait_ms = schedules.slot_wait_ms(step)
    return Swept(
        promoted=promoted,
        rescued=rescued,
        expired=expired,
        pruned=pruned,
        trimmed=trimmed,
        unblocked=unblocked,
        more=more,
        wait_ms=0 if more else _wait_ms(step, slot_wait_ms),
        due=schedules.due(step, limit=limit),
        slot_wait_ms=slot_wait_ms,
        awaiting=schedules.is_awaiting(step),
        damaged=step.mended,
    )


def _records(step: Step, statement: str, *arguments: object) -> list[Record]:
    rows = step.sql.execute(_sql[statement], (step.queue.key, *arguments))
    return step.adopt(rows)


def _time_out(step: Step, limit: int) -> int:
    due = _records(step, "timed_out", step.now_ms, limit)
    for record in due:
        time_out(step, record)
    step.save(due)
    return len(due)


def _renew_leases(step: Step) -> None:
    """Let leases that ran out during a gap go on with what was left of them, and for a term at least: their holders
    could not extend them."""
    marks = step.moment.marks
    if marks.gap_from != marks.gap_to:
        values = (marks.gap_to, marks.gap_from, step.now_ms + TERM_MS, step.queue.key, marks.gap_to)
        step.sql.execute(_sql["renew_leases"], values)
        step.set_moment(step.moment.renewed())


def _rescue(step: Step, limit: int) -> int:
    """Take back the jobs whose leases ran out while their holders could extend them."""
    active = step.sql.execute(_sql["active"], (step.queue.key,)).fetchone()[0]
    if active != step.queue.active:
        raise Unreadable(f"{step.queue.active} jobs are counted as active, but {active} are")
    now_ms = step.now_ms
    most, least = protected_ms(step.sql)
    stalled = _records(step, "stalled", now_ms, now_ms - most, now_ms - least, limit)
    for record in stalled:
        _rescue_one(step, record)
    step.save(stalled)
    return len(stalled)


def _rescue_one(step: Step, record: Record) -> None:
    """Its holder is fenced off by the token, whether it lives or not."""
    worker = record.worker
    record.stalls += 1
    record.token = 0
    if record.cancelling:
        finish(step, record, CANCELLED, _CANCELLED, run=record.runs)
    elif record.is_past_ttl(step.now_ms):
        expire(step, record)
    elif (cause := flows.fail_if_told(step, record)) is not None:
        _fail(step, record, cause)
    elif record.stalls > record.options.max_stalls:
        _fail(step, record, Failure("Stalled", FAILURE_TEXTS["Stalled"] % (record.stalls, worker)))
    else:
        end_lease(record)
        return_to_waiting(step, record)
        absorb_slot(step, record)
        step.note(_STALLED, record, run=record.runs)


def _fail(step: Step, record: Record, failure: Failure) -> None:
    record.failure = pack_failure(failure)
    finish(step, record, FAILED, _FAILED, run=record.runs, et=failure.type, em=failure.message)


def _expire(step: Step, limit: int) -> int:
    past = _records(step, "past_ttl", step.now_ms, limit)
    for record in past:
        # One before it may have taken it along: it depended on that one.
        if record.state in (SCHEDULED, WAITING, BLOCKED):
            expire(step, record)
    step.save(past)
    return len(past)


def _prune(step: Step, settings: QueueSettings, limit: int) -> int:
    lag_ms, edge = step.moment.hole
    pruned = _drop(step, _records(step, "forgotten", 0, step.now_ms - lag_ms, limit))
    if lag_ms and edge > step.now_ms - lag_ms:
        pruned += _drop(step, _records(step, "forgotten", edge, step.now_ms, limit))
    lapse(step, limit=limit)
    queue = step.queue
    for state, keep, held in (
        (COMPLETED, settings.keep_completed, queue.held_completed),
        (FAILED, settings.keep_failed, queue.held_failed),
    ):
        if keep is not None:
            total = getattr(queue, state)
            surplus = min(total - keep, total - held)
            if surplus > 0:
                pruned += _drop(step, _records(step, "surplus", state, min(surplus, limit)))
    return pruned


def _drop(step: Step, records: list[Record]) -> int:
    for record in records:
        if record.binds and record.state != COMPLETED:
            step.links.removed(step, record)
        record.state = REMOVED
    step.save(records)
    return len(records)


def _forget(step: Step) -> None:
    forget_usage(step)
    sure_ms = step.now_ms - step.moment.hole[0]
    step.sql.execute(_sql["forget_consumers"], (step.queue.key, sure_ms))
    step.sql.execute(_sql["forget_workers"], (step.queue.key, sure_ms - _WORKERS_KEPT_MS))
    step.sql.execute(_sql["forget_memos"], (step.queue.key, step.now_ms - MEMO_KEPT_MS))
    step.sql.execute(_news_sql["forget"], (step.queue.key, wall_ms() - _NEWS_KEPT_MS))


def _wait_ms(step: Step, slot_wait_ms: int | None) -> int | None:
    is_lagging = step.moment.hole[0] > 0  # What was to go stays for now: nobody need come for it.
    at = step.sql.execute(_sql["next_time"], {"queue": step.queue.key, "is_lagging": is_lagging}).fetchone()[
        0
    ]
    if at is None:
        return slot_wait_ms
    wait_ms = max(0, int(at) - step.now_ms)
    return wait_ms if slot_wait_ms is None else min(wait_ms, slot_wait_ms)
