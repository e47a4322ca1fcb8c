"""The transitions of a job, as docs/verbs.md has them: records in memory, no SQL."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.core.job import STAGED_FROM_MS, NewJob, staged_at_ms
from penstock.core.lifecycle import EventType
from penstock.core.outcome import FAILURE_TEXTS, Failure
from penstock.storage.sqlite.queuerow import USES_INSTANTS, USES_STAGED
from penstock.storage.sqlite.records import (
    BLOCKED,
    CANCELLED,
    COMPLETED,
    FAILED,
    REMOVED,
    SCHEDULED,
    WAITING,
    Record,
    Slot,
    pack_failure,
)
from penstock.storage.sqlite.unit import Step

_ENQUEUED = EventType.ENQUEUED.value
_EXPIRED = EventType.EXPIRED.value
_REMOVED = EventType.REMOVED.value

_EXPIRY = Failure("Expired", FAILURE_TEXTS["Expired"])
_PACKED_EXPIRY = pack_failure(_EXPIRY)


def instant(step: Step, job: NewJob) -> int:
    """When a dispatch is due."""
    if job.staged:
        return staged_at_ms(job.write_id)
    return step.now_ms + job.delay_ms if job.run_at_ms is None else step.moment.when(job.run_at_ms)


def _go_by(step: Step, record: Record, wall_at: int) -> None:
    """Have a job that is due at an instant of the wall clock (0: that is not) follow the clock."""
    record.wall_at = wall_at
    if wall_at:
        step.queue.uses |= USES_INSTANTS


def enter_waiting(step: Step, record: Record) -> None:
    """Stand at the end of the line."""
    record.renumber(step.draw(), lifo=record.lifo)
    _wait(step, record, keeps_number=False)


def return_to_waiting(step: Step, record: Record) -> None:
    """Stand where its number has its place: it was handed back."""
    _wait(step, record, keeps_number=True)


def _wait(step: Step, record: Record, *, keeps_number: bool) -> None:
    """Be ready, unless something holds it back."""
    record.blocked_by = ""
    if record.binds and step.links.hold_back(step, record, keeps_number=keeps_number):
        return
    record.state = WAITING
    record.ready_at = step.now_ms


def schedule(step: Step, record: Record, run_at: int) -> None:
    """Wait for a time to come."""
    record.state = SCHEDULED
    record.run_at = run_at
    if record.part:
        step.links.scheduled(step, record)


def due_at(step: Step, record: Record, run_at: int) -> None:
    """A new time for a pending job: scheduled if it is still to come, else waiting."""
    if run_at > step.now_ms:
        schedule(step, record, run_at)
        return
    record.run_at = run_at
    if record.state == SCHEDULED:
        enter_waiting(step, record)


def end_lease(record: Record) -> None:
    """Nobody holds it any more. The token stays, so that a repeated settle is known as such."""
    record.worker = ""
    record.lease_until = 0


def finish(step: Step, record: Record, state: str, kind: str, **extra: Any) -> None:
    """End the job: log it, tell who waits, keep it as long as its options say; then its rerun, if one was asked for."""
    end_lease(record)
    record.state = state
    record.blocked_by = ""
    record.finished_at = step.now_ms
    record.keep()
    step.note(kind, record, **extra)
    slot = record.slot
    if state == FAILED:
        step.links.failed(step, record)
    if record.binds:
        step.links.ended(step, record)
    if slot is not None and state != CANCELLED:
        step.tell(record, state=state)
        _rerun(step, record, slot)
        return
    step.tell(record, state=state, also=slot.listeners if slot else ())
    record.rerun = None
    if record.kept_until <= step.now_ms:
        if record.binds and state != COMPLETED:
            step.links.removed(step, record)
        record.state = REMOVED


def change_ttls(
    step: Step, record: Record, *, result_ms: int | None = None, failure_ms: int | None = None
) -> None:
    """For how long to keep it once it has ended, or since it has; ``None`` leaves that as it is."""
    if result_ms is None and failure_ms is None:
        return
    options = record.options
    changed = msgspec.structs.replace(
        options,
        result_ttl_ms=options.result_ttl_ms if result_ms is None else result_ms,
        failure_ttl_ms=options.failure_ttl_ms if failure_ms is None else failure_ms,
    )
    record.options_key, record.packed_options = step.intern(changed)
    if record.state in (COMPLETED, FAILED, CANCELLED):
        record.keep()


def expire(step: Step, record: Record, **extra: Any) -> None:
    """End a job whose ttl has passed."""
    record.failure = _PACKED_EXPIRY
    run = extra or {"run": record.runs}
    finish(step, record, FAILED, _EXPIRED, **run, et=_EXPIRY.type, em=_EXPIRY.message)


def remove(step: Step, record: Record) -> None:
    """Delete the record. Who waits for a job that had not ended is told that it was cancelled."""
    state = record.state
    is_open = state not in (COMPLETED, FAILED, CANCELLED)
    if is_open:
        step.tell(record, state=CANCELLED)
    record.state = REMOVED
    step.note(_REMOVED, record, run=record.runs)
    if record.binds and is_open:
        step.links.ended(step, record)
    elif record.binds and state != COMPLETED:
        step.links.removed(step, record)


def new_record(step: Step, job: NewJob) -> Record:
    """A job that was not there before."""
    options_key, packed = step.intern(job.options)
    record = Record(
        0, job.id, 0, "", job.priority, 0, options_key, packed, job.ttl_ms, job.run_id, job.write_id,
        payload=job.payload,
    )  # fmt: skip
    if job.extras is not None or job.dedup is not None or job.staged:
        record.extras = job.stored_extras
    _queue(step, record, run_at=instant(step, job), wall_at=job.run_at_ms or 0, lifo=job.lifo)
    return record


def queue_afresh(step: Step, record: Record, job: NewJob) -> None:
    """A new life for a known id; nothing of the old one is left."""
    if record.part:  # The promise that the id is new was broken, and the job was open.
        step.links.ended(step, record)
    take_options(step, record, job)
    record.ttl_ms, record.run_id, record.write_id = job.ttl_ms, job.run_id, job.write_id
    record.payload = job.payload
    step.clear_signals(record)
    record.extras = job.stored_extras
    record.token = 0
    record.settled_as = ""
    _clear(step, record)
    _queue(step, record, run_at=instant(step, job), wall_at=job.run_at_ms or 0, lifo=job.lifo)


def take_options(step: Step, record: Record, job: NewJob | Slot) -> None:
    """Options and priority of a new dispatch."""
    assert job.options is not None
    record.options_key, record.packed_options = step.intern(job.options)
    record.priority = job.priority
    record.ttl_ms = job.ttl_ms


def _clear(step: Step, record: Record) -> None:
    record.blocked_by = ""
    record.grip = 0
    record.runs = record.failures = record.stalls = 0
    record.claimed_at = record.finished_at = record.kept_until = 0
    record.cancelling = 0
    record.failure = record.result = record.progress = record.rerun = None
    end_lease(record)
    step.clear_log(record)


def _queue(step: Step, record: Record, *, run_at: int, wall_at: int, lifo: bool) -> None:
    record.incarnation = step.draw()
    record.renumber(record.incarnation, lifo=lifo)
    record.enqueued_at = step.now_ms
    record.expires_at = step.now_ms + record.ttl_ms if record.ttl_ms else 0
    record.run_at = run_at
    _go_by(step, record, wall_at)
    record.ready_at = 0
    if record.binds and step.links.awaits_children(step, record):
        pass
    elif run_at > step.now_ms:
        record.state = SCHEDULED
        if run_at >= STAGED_FROM_MS:
            record.expires_at = 0
            step.queue.uses |= USES_STAGED
    else:
        return_to_waiting(step, record)
    step.note(_ENQUEUED, record, pri=record.priority, size=step.payload_size(record))


def update(step: Step, record: Record, job: NewJob) -> None:
    """Redispatch of a pending job, as far as its flags go. It is of that run and write from now on."""
    conflict = job.conflict
    record.run_id, record.write_id = job.run_id, job.write_id
    if conflict.payload == "replace":
        record.payload = job.payload
    if conflict.options == "replace":
        _replace_options(step, record, job)
    if conflict.reset_counts:
        record.failures = record.stalls = 0
    _take_time(step, record, run_at=instant(step, job), wall_at=job.run_at_ms or 0, mode=conflict.run_at)


def _replace_options(step: Step, record: Record, job: NewJob | Slot) -> None:
    take_options(step, record, job)
    record.renumber(abs(record.place), lifo=job.lifo)
    record.expires_at = step.now_ms + job.ttl_ms if job.ttl_ms else 0
    if record.part:
        step.links.reordered(step, record)


def _take_time(step: Step, record: Record, *, run_at: int, wall_at: int, mode: str) -> None:
    if not replaces(run_at, record.run_at, mode):
        return
    _go_by(step, record, wall_at)
    if record.state != BLOCKED:
        due_at(step, record, run_at)
    elif record.blocked_by == "children":
        record.run_at = run_at  # It does not move; its time counts when they have ended.


def replaces(new: int, old: int, mode: str) -> bool:
    """Whether a dispatch's time takes the place of the one that is there."""
    match mode:
        case "always":
            return True
        case "if_earlier":
            return new < old
        case "if_later":
            return new > old
        case _:
            return False


def keep_slot(step: Step, record: Record, job: NewJob) -> None:
    """Keep a dispatch for after the run under way; a later one merges into it by its own flags."""
    conflict = job.conflict
    run_at, wall_at = instant(step, job), job.run_at_ms or 0
    slot = record.slot
    if slot is None:
        slot = Slot(None, None, 0, False, 0, run_at, conflict.run_at, False, "", "", [], wall_at)
    elif replaces(run_at, _due_of(step, slot), conflict.run_at):
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


def _due_of(step: Step, slot: Slot) -> int:
    return step.moment.when(slot.wall_at) if slot.wall_at else slot.run_at


def join_slot(step: Step, record: Record, listener: str) -> None:
    """Have the dispatch that waits in the slot tell one more listener of its end."""
    slot = record.slot
    assert slot is not None
    if listener not in slot.listeners:
        slot.listeners.append(listener)
        record.slot = slot
        step.touch(record)


def absorb_slot(step: Step, record: Record) -> None:
    """The job was put back: the dispatch that waited is applied to it as an update, before the one event is noted."""
    slot = record.slot
    if slot is None:
        return
    record.run_id, record.write_id = slot.run_id, slot.write_id
    if slot.payload is not None:
        record.payload = slot.payload
    if slot.options is not None:
        _replace_options(step, record, slot)
    if slot.reset_counts:
        record.failures = record.stalls = 0
    run_at = _due_of(step, slot)
    _take_time(step, record, run_at=run_at, wall_at=slot.wall_at, mode=slot.run_at_mode)
    drop_slot(step, record)


def drop_slot(step: Step, record: Record) -> None:
    """There will be no rerun; who waited for it waits for the job itself."""
    slot = record.slot
    if slot is not None:
        for listener in slot.listeners:
            step.listen(record, listener)
        record.slot = None


def _rerun(step: Step, record: Record, slot: Slot) -> None:
    """After the end, the dispatch that waited: a new incarnation that still knows the token it was settled under."""
    lifo = record.lifo
    if slot.payload is not None:
        record.payload = slot.payload
    if slot.options is not None:
        take_options(step, record, slot)
        lifo = slot.lifo
    record.run_id, record.write_id = slot.run_id, slot.write_id
    step.clear_signals(record)
    if record.binds:
        if record.state == FAILED:
            step.links.removed(step, record)
        step.links.forget(step, [record.id])
    record.extras = record.extras.shed()
    _clear(step, record)
    _queue(step, record, run_at=_due_of(step, slot), wall_at=slot.wall_at, lifo=lifo)
    for listener in slot.listeners:
        step.listen(record, listener)
