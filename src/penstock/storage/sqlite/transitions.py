"""The transitions of a job, as docs/verbs.md defines them: records in memory, no SQL."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.core.job import STAGED_FROM_MS, NewJob
from penstock.core.lifecycle import EventType
from penstock.core.outcome import FAILURE_TEXTS, Failure
from penstock.core.staging import staged_at_ms
from penstock.storage.sqlite.queuerow import USES_INSTANTS, USES_STAGED
from penstock.storage.sqlite.records import (
    BLOCKED,
    CANCELLED,
    CHILDREN,
    COMPLETED,
    FAILED,
    FINISHED,
    REMOVED,
    SCHEDULED,
    WAITING,
    Record,
    Slot,
    pack_failure,
)
from penstock.storage.sqlite.unit import Unit

_EXPIRY = Failure("Expired", FAILURE_TEXTS["Expired"])


def instant(unit: Unit, job: NewJob) -> int:
    """Return when a dispatch is due."""
    if job.staged:
        return staged_at_ms(job.write_id)
    return unit.now_ms + job.delay_ms if job.run_at_ms is None else unit.moment.when(job.run_at_ms)


def _go_by(unit: Unit, record: Record, wall_at: int) -> None:
    """Have a job with a ``run_at`` follow the wall clock (0: a job without)."""
    record.wall_at = wall_at
    if wall_at:
        unit.queue.uses |= USES_INSTANTS


def enter_waiting(unit: Unit, record: Record) -> None:
    """Wait at the end of the line."""
    record.renumber(unit.draw(), lifo=record.lifo)
    _wait(unit, record, keeps_number=False)


def return_to_waiting(unit: Unit, record: Record) -> None:
    """Wait at the place of the current number: the job was handed back."""
    _wait(unit, record, keeps_number=True)


def _wait(unit: Unit, record: Record, *, keeps_number: bool) -> None:
    """Make the job ready, unless its links block it."""
    record.blocked_by = ""
    if record.has_links and unit.links.maybe_block(unit, record, keeps_number=keeps_number):
        return
    record.state = WAITING
    record.ready_at = unit.now_ms


def schedule(unit: Unit, record: Record, run_at: int) -> None:
    """Wait until ``run_at``."""
    record.state = SCHEDULED
    record.run_at = run_at
    if record.group_role:
        unit.links.scheduled(unit, record)


def due_at(unit: Unit, record: Record, run_at: int) -> None:
    """Give a pending job a new time: scheduled if that is in the future, otherwise waiting."""
    if run_at > unit.now_ms:
        schedule(unit, record, run_at)
        return
    record.run_at = run_at
    if record.state == SCHEDULED:
        enter_waiting(unit, record)


def end_lease(record: Record) -> None:
    """End the lease. The token stays, so that a repeated settle is recognised."""
    record.worker = ""
    record.lease_until = 0


def finish(unit: Unit, record: Record, state: str, kind: str = "", **extra: Any) -> None:
    """End the job: log it, notify its waiters, set its expiry, then start its rerun, if there is one.

    ``kind`` is the type of the event, by default the name of the state.
    """
    end_lease(record)
    record.state = state
    record.blocked_by = ""
    record.finished_at = unit.now_ms
    record.keep()
    unit.note(kind or state, record, **extra)
    slot = record.slot
    if state == FAILED:
        unit.links.failed(unit, record)
    if record.has_links:
        unit.links.ended(unit, record)
    if slot is not None and state != CANCELLED:
        unit.tell(record, state=state)
        _rerun(unit, record, slot)
        return
    unit.tell(record, state=state, also=slot.listeners if slot else ())
    record.rerun = None
    if record.kept_until <= unit.now_ms:
        if record.has_links and state != COMPLETED:
            unit.links.removed(unit, record)
        record.state = REMOVED


def fail(
    unit: Unit, record: Record, failure: Failure, kind: str = "", *, state: str = FAILED, **run: Any
) -> None:
    """End the job with this failure."""
    record.failure = pack_failure(failure)
    run = run or {"run": record.runs}
    finish(unit, record, state, kind, **run, et=failure.type, em=failure.message)


def change_ttls(
    unit: Unit, record: Record, *, result_ms: int | None = None, failure_ms: int | None = None
) -> None:
    """Change how long the job is kept after its end; ``None`` leaves a ttl as it is."""
    if result_ms is None and failure_ms is None:
        return
    options = record.options
    changed = msgspec.structs.replace(
        options,
        result_ttl_ms=options.result_ttl_ms if result_ms is None else result_ms,
        failure_ttl_ms=options.failure_ttl_ms if failure_ms is None else failure_ms,
    )
    record.options_key, record.packed_options = unit.intern(changed)
    if record.state in FINISHED:
        record.keep()


def expire(unit: Unit, record: Record, **extra: Any) -> None:
    """End a job whose ttl has passed."""
    fail(unit, record, _EXPIRY, EventType.EXPIRED, **extra)


def remove(unit: Unit, record: Record) -> None:
    """Delete the record. Waiters of an open job are notified that it was cancelled."""
    state = record.state
    is_open = state not in FINISHED
    if is_open:
        unit.tell(record, state=CANCELLED)
    record.state = REMOVED
    unit.note(EventType.REMOVED, record, run=record.runs)
    if record.has_links and is_open:
        unit.links.ended(unit, record)
    elif record.has_links and state != COMPLETED:
        unit.links.removed(unit, record)


def new_record(unit: Unit, job: NewJob) -> Record:
    """Return the record of a new job."""
    options_key, packed = unit.intern(job.options)
    record = Record(
        0, job.id, 0, "", job.priority, 0, options_key, packed, job.ttl_ms, job.run_id, job.write_id,
        payload=job.payload,
    )  # fmt: skip
    if job.extras is not None or job.dedup is not None or job.staged:
        record.extras = job.stored_extras
    _queue(unit, record, run_at=instant(unit, job), wall_at=job.run_at_ms or 0, lifo=job.lifo)
    return record


def queue_afresh(unit: Unit, record: Record, job: NewJob) -> None:
    """Start a new incarnation of an existing id. Nothing of the old one stays."""
    if record.group_role:  # The promise that the id is new was broken, and the job was open.
        unit.links.ended(unit, record)
    take_options(unit, record, job)
    record.ttl_ms, record.run_id, record.write_id = job.ttl_ms, job.run_id, job.write_id
    record.payload = job.payload
    unit.clear_side_values(record)
    record.extras = job.stored_extras
    record.token = 0
    record.settled_as = ""
    _clear(unit, record)
    _queue(unit, record, run_at=instant(unit, job), wall_at=job.run_at_ms or 0, lifo=job.lifo)


def take_options(unit: Unit, record: Record, job: NewJob | Slot) -> None:
    """Take the options and priority of a new dispatch."""
    assert job.options is not None
    record.options_key, record.packed_options = unit.intern(job.options)
    record.priority = job.priority
    record.ttl_ms = job.ttl_ms


def _clear(unit: Unit, record: Record) -> None:
    record.blocked_by = ""
    record.slot_hold = 0
    record.runs = record.failures = record.stalls = 0
    record.claimed_at = record.finished_at = record.kept_until = 0
    record.cancelling = 0
    record.failure = record.result = record.progress = record.rerun = None
    end_lease(record)
    unit.clear_log(record)


def _queue(unit: Unit, record: Record, *, run_at: int, wall_at: int, lifo: bool) -> None:
    record.incarnation = unit.draw()
    record.renumber(record.incarnation, lifo=lifo)
    record.enqueued_at = unit.now_ms
    record.expires_at = unit.now_ms + record.ttl_ms if record.ttl_ms else 0
    record.run_at = run_at
    _go_by(unit, record, wall_at)
    record.ready_at = 0
    if record.has_links and unit.links.awaits_children(unit, record):
        pass
    elif run_at > unit.now_ms:
        record.state = SCHEDULED
        if run_at >= STAGED_FROM_MS:
            record.expires_at = 0
            unit.queue.uses |= USES_STAGED
    else:
        return_to_waiting(unit, record)
    unit.note(EventType.ENQUEUED, record, pri=record.priority, size=unit.payload_size(record))


def update(unit: Unit, record: Record, job: NewJob) -> None:
    """Update a pending job as the flags of the dispatch say. It then belongs to that run and write."""
    conflict = job.conflict
    record.run_id, record.write_id = job.run_id, job.write_id
    if conflict.payload == "replace":
        record.payload = job.payload
    if conflict.options == "replace":
        _replace_options(unit, record, job)
    if conflict.reset_counts:
        record.failures = record.stalls = 0
    _take_time(unit, record, run_at=instant(unit, job), wall_at=job.run_at_ms or 0, mode=conflict.run_at)


def _replace_options(unit: Unit, record: Record, job: NewJob | Slot) -> None:
    take_options(unit, record, job)
    record.renumber(abs(record.place), lifo=job.lifo)
    record.expires_at = unit.now_ms + job.ttl_ms if job.ttl_ms else 0
    if record.group_role:
        unit.links.reordered(unit, record)


def _take_time(unit: Unit, record: Record, *, run_at: int, wall_at: int, mode: str) -> None:
    if not replaces(run_at, record.run_at, mode):
        return
    _go_by(unit, record, wall_at)
    if record.state != BLOCKED:
        due_at(unit, record, run_at)
    elif record.blocked_by == CHILDREN:
        record.run_at = run_at  # The job stays blocked; the time counts when its children have ended.


def replaces(new: int, old: int, mode: str) -> bool:
    """Return whether a dispatch's time replaces the current one."""
    match mode:
        case "always":
            return True
        case "if_earlier":
            return new < old
        case "if_later":
            return new > old
        case _:
            return False


def keep_slot(unit: Unit, record: Record, job: NewJob) -> None:
    """Keep a dispatch until the current run has ended. A later dispatch is merged into it, as its own flags say."""
    conflict = job.conflict
    run_at, wall_at = instant(unit, job), job.run_at_ms or 0
    slot = record.slot
    if slot is None:
        slot = Slot(None, None, 0, False, 0, run_at, conflict.run_at, False, "", "", [], wall_at)
    elif replaces(run_at, _due_of(unit, slot), conflict.run_at):
        slot.run_at, slot.wall_at = run_at, wall_at
        slot.run_at_mode = "always" if slot.run_at_mode == "always" else conflict.run_at
    if conflict.payload == "replace":
        slot.payload = job.payload
    if conflict.options == "replace":
        slot.options, slot.priority, slot.lifo, slot.ttl_ms = job.options, job.priority, job.lifo, job.ttl_ms
    slot.reset_counts = slot.reset_counts or conflict.reset_counts
    slot.run_id, slot.write_id = job.run_id, job.write_id
    if job.notify and job.notify not in slot.listeners:
        slot.listeners.append(job.notify)
    record.slot = slot


def _due_of(unit: Unit, slot: Slot) -> int:
    return unit.moment.when(slot.wall_at) if slot.wall_at else slot.run_at


def join_slot(unit: Unit, record: Record, listener: str) -> None:
    """Add a listener to the dispatch that waits in the slot."""
    slot = record.slot
    assert slot is not None
    if listener not in slot.listeners:
        slot.listeners.append(listener)
        record.slot = slot
        unit.touch(record)


def absorb_slot(unit: Unit, record: Record) -> None:
    """Apply the waiting dispatch to a job that was handed back, before its one event is logged."""
    slot = record.slot
    if slot is None:
        return
    record.run_id, record.write_id = slot.run_id, slot.write_id
    if slot.payload is not None:
        record.payload = slot.payload
    if slot.options is not None:
        _replace_options(unit, record, slot)
    if slot.reset_counts:
        record.failures = record.stalls = 0
    run_at = _due_of(unit, slot)
    _take_time(unit, record, run_at=run_at, wall_at=slot.wall_at, mode=slot.run_at_mode)
    drop_slot(unit, record)


def drop_slot(unit: Unit, record: Record) -> None:
    """Drop the rerun. Its listeners wait for the job itself."""
    slot = record.slot
    if slot is not None:
        for listener in slot.listeners:
            unit.listen(record, listener)
        record.slot = None


def _rerun(unit: Unit, record: Record, slot: Slot) -> None:
    """Start the waiting dispatch after the job's end: a new incarnation that still has the token of its settle."""
    lifo = record.lifo
    if slot.payload is not None:
        record.payload = slot.payload
    if slot.options is not None:
        take_options(unit, record, slot)
        lifo = slot.lifo
    record.run_id, record.write_id = slot.run_id, slot.write_id
    unit.clear_side_values(record)
    if record.has_links:
        if record.state == FAILED:
            unit.links.removed(unit, record)
        unit.links.forget(unit, [record.id])
    record.extras = record.extras.for_new_incarnation()
    _clear(unit, record)
    _queue(unit, record, run_at=_due_of(unit, slot), wall_at=slot.wall_at, lifo=lifo)
    for listener in slot.listeners:
        unit.listen(record, listener)
