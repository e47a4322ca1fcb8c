"""``sweep``: the time-based maintenance, about ``limit`` items of each kind at most."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.lifecycle import EventType
from penstock.core.outcome import FAILURE_TEXTS, Failure
from penstock.storage.bounds import CLOCK_TERM_MS, NEWS_KEPT_MS, REPLAY_KEPT_MS, WORKERS_KEPT_MS
from penstock.storage.sqlite import dedup, flows, schedules, statements
from penstock.storage.sqlite.claim import promote_due
from penstock.storage.sqlite.clock import wall_ms
from penstock.storage.sqlite.eventlog import trim
from penstock.storage.sqlite.groups import USES_LIMITS
from penstock.storage.sqlite.holds import lapse
from penstock.storage.sqlite.job_verbs import time_out
from penstock.storage.sqlite.limits import sweep_groups
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
)
from penstock.storage.sqlite.steps import step_data, step_under_way
from penstock.storage.sqlite.transitions import (
    absorb_slot,
    end_lease,
    expire,
    fail,
    finish,
    return_to_waiting,
)
from penstock.storage.sqlite.unit import Unit
from penstock.storage.sqlite.usage import forget_usage
from penstock.storage.values import QueueSettings, Swept

_sql = statements("sweep")
_news_sql = statements("news")


def sweep(unit: Unit, *, limit: int = 1000) -> Swept:
    """Run one bounded round."""
    settings = unit.queue.settings
    promoted = promote_due(unit, limit=limit)
    unblocked = _each_of(unit, time_out, _records(unit, "timed_out", unit.now_ms, limit))
    _renew_leases(unit)
    rescued = _rescue(unit, limit)
    expired = _each_of(unit, _expire, _records(unit, "past_ttl", unit.now_ms, limit))
    regrouped = sweep_groups(unit, limit=limit)
    if rescued and unit.queue.uses & USES_LIMITS and unit.queue.waiting:
        unit.wakes.add("w")
    pruned = _prune(unit, settings, limit)
    trimmed = trim(unit, settings, limit=limit)
    _forget(unit)
    schedules.tidy(unit)
    forgotten = dedup.forget(unit, limit=limit)
    more = (
        limit in (promoted, unblocked, rescued, expired, forgotten)
        or max(pruned, trimmed, regrouped) >= limit
        or unit.moment.marks.follow > 0
    )
    slot_wait_ms = schedules.slot_wait_ms(unit)
    return Swept(
        promoted=promoted, rescued=rescued, expired=expired, pruned=pruned, trimmed=trimmed, unblocked=unblocked,
        more=more, wait_ms=0 if more else _wait_ms(unit, slot_wait_ms), due=schedules.due(unit, limit=limit),
        slot_wait_ms=slot_wait_ms, awaiting=schedules.is_awaiting(unit), damaged=unit.mended,
    )  # fmt: skip


def _records(unit: Unit, statement: str, *arguments: object) -> list[Record]:
    rows = unit.sql.execute(_sql[statement], (unit.queue.key, *arguments))
    return unit.adopt(rows)


def _each_of(unit: Unit, act: Callable[[Unit, Record], None], records: list[Record]) -> int:
    """Apply ``act`` to the records, and save them. Return their number."""
    for record in records:
        act(unit, record)
    unit.save(records)
    return len(records)


def _renew_leases(unit: Unit) -> None:
    """Renew the leases that ran out during a gap, because their holders could not extend them.

    Each lease continues for the time that it had left, but at least for one term.
    """
    marks = unit.moment.marks
    if marks.gap_from != marks.gap_to:
        values = (marks.gap_to, marks.gap_from, unit.now_ms + CLOCK_TERM_MS, unit.queue.key, marks.gap_to)
        unit.sql.execute(_sql["renew_leases"], values)
        unit.set_moment(unit.moment.renewed())


def _rescue(unit: Unit, limit: int) -> int:
    """Rescue the jobs whose leases ran out while their holders could extend them."""
    active = unit.sql.execute(_sql["active"], (unit.queue.key,)).fetchone()[0]
    if active != unit.queue.active:
        raise Unreadable(f"{unit.queue.active} jobs are counted as active, but {active} are")
    now_ms = unit.now_ms
    most, least = protected_ms(unit.sql)
    stalled = _records(unit, "stalled", now_ms, now_ms - most, now_ms - least, limit)
    return _each_of(unit, _rescue_one, stalled)


def _rescue_one(unit: Unit, record: Record) -> None:
    """Take the job back from its holder. If that is still alive, its token no longer counts."""
    worker = record.worker
    record.stalls += 1
    record.token = 0
    if record.cancelling:
        finish(unit, record, CANCELLED, run=record.runs)
    elif record.is_past_ttl(unit.now_ms):
        expire(unit, record)
    elif (cause := flows.dependency_failure(unit, record)) is not None:
        fail(unit, record, cause)
    elif record.stalls > record.options.max_stalls:
        fail(unit, record, _stalled(unit, record, worker))
    else:
        step = step_under_way(unit, record)
        end_lease(record)
        return_to_waiting(unit, record)
        absorb_slot(unit, record)
        unit.note(EventType.STALLED, record, run=record.runs, **({"data": step_data(step)} if step else {}))


def _stalled(unit: Unit, record: Record, worker: str) -> Failure:
    if step := step_under_way(unit, record):
        return Failure("Stalled", FAILURE_TEXTS["StalledInStep"] % (record.stalls, worker, step))
    return Failure("Stalled", FAILURE_TEXTS["Stalled"] % (record.stalls, worker))


def _expire(unit: Unit, record: Record) -> None:
    """End a job past its ttl, unless the expiry of a dependency has ended it already."""
    if record.state in (SCHEDULED, WAITING, BLOCKED):
        expire(unit, record)


def _prune(unit: Unit, settings: QueueSettings, limit: int) -> int:
    lag_ms, edge = unit.moment.lag
    pruned = _each_of(unit, _drop, _records(unit, "forgotten", 0, unit.now_ms - lag_ms, limit))
    if lag_ms and edge > unit.now_ms - lag_ms:
        pruned += _each_of(unit, _drop, _records(unit, "forgotten", edge, unit.now_ms, limit))
    lapse(unit, limit=limit)
    queue = unit.queue
    for state, keep, held in (
        (COMPLETED, settings.keep_completed, queue.held_completed),
        (FAILED, settings.keep_failed, queue.held_failed),
    ):
        if keep is not None:
            total = getattr(queue, state)
            surplus = min(total - keep, total - held)
            if surplus > 0:
                pruned += _each_of(unit, _drop, _records(unit, "surplus", state, min(surplus, limit)))
    return pruned


def _drop(unit: Unit, record: Record) -> None:
    if record.has_links and record.state != COMPLETED:
        unit.links.removed(unit, record)
    record.state = REMOVED


def _forget(unit: Unit) -> None:
    forget_usage(unit)
    sure_ms = unit.now_ms - unit.moment.lag[0]
    unit.sql.execute(_sql["forget_consumers"], (unit.queue.key, sure_ms))
    unit.sql.execute(_sql["forget_workers"], (unit.queue.key, sure_ms - WORKERS_KEPT_MS))
    unit.sql.execute(_sql["forget_replays"], (unit.queue.key, unit.now_ms - REPLAY_KEPT_MS))
    unit.sql.execute(_news_sql["forget"], (unit.queue.key, wall_ms() - NEWS_KEPT_MS))


def _wait_ms(unit: Unit, slot_wait_ms: int | None) -> int | None:
    is_lagging = unit.moment.lag[0] > 0  # Deletions are put off, so no sweep needs to come for them.
    [at] = unit.sql.execute(_sql["next_time"], {"queue": unit.queue.key, "is_lagging": is_lagging}).fetchone()
    if at is None:
        return slot_wait_ms
    wait_ms = max(0, int(at) - unit.now_ms)
    return wait_ms if slot_wait_ms is None else min(wait_ms, slot_wait_ms)
