"""``enqueue``: put new jobs in."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.job import Enqueued, EnqueueStatus, NewJob
from penstock.core.lifecycle import EventType
from penstock.storage.sqlite.records import ACTIVE, CANCELLED, COMPLETED, FAILED, STATES, Record
from penstock.storage.sqlite.step import Step
from penstock.storage.sqlite.transitions import keep_slot, new_record, queue_afresh, update

__all__ = ["enqueue"]

_CHANGED = EventType.CHANGED.value
_FINISHED = (COMPLETED, FAILED, CANCELLED)


def enqueue(step: Step, jobs: Sequence[NewJob]) -> list[Enqueued]:
    """Answer each job as if those before it were in already."""
    step.queue.used = 1
    known = step.find(job.id for job in jobs)
    touched: dict[str, Record] = {}
    answers: list[Enqueued] = []
    for job in jobs:
        record = known.get(job.id)
        if record is None:
            record = known[job.id] = new_record(step, job)
            step.meet(record)
            status: EnqueueStatus = "queued"
        else:
            status = _dispatch(step, record, job)
        if status in ("queued", "updated", "rerun"):
            touched[job.id] = record
        if job.notify and record.state not in _FINISHED and status != "rerun":
            step.listen(record, job.notify)
        answers.append(_answer(record, status))
    step.save(touched.values())
    return answers


def _dispatch(step: Step, record: Record, job: NewJob) -> EnqueueStatus:
    """What an enqueue does to an id that is known."""
    status = _decide(step, record, job)
    match status:
        case "queued":
            queue_afresh(step, record, job)
        case "updated":
            update(step, record, job)
            step.note(_CHANGED, record, run=record.runs)
        case "rerun":
            keep_slot(step, record, job)
            step.note(_CHANGED, record, run=record.runs)
        case "duplicate" | "completed":
            pass
    return status


def _decide(step: Step, record: Record, job: NewJob) -> EnqueueStatus:
    if job.unchecked or record.is_forgotten(step.now_ms):
        return "queued"
    if (job.write_id and job.write_id == record.write_id) or job.conflict.mode == "absent":
        return "duplicate"
    finished = record.state in _FINISHED
    if job.conflict.mode == "redispatch":
        return "queued" if finished else "rerun" if record.state == ACTIVE else "updated"
    if record.state == COMPLETED:
        return "completed"
    return "queued" if finished else "duplicate"


def _answer(record: Record, status: EnqueueStatus) -> Enqueued:
    result = record.result if record.state == COMPLETED else None
    return Enqueued(record.id, status, STATES[record.state], record.incarnation, result)
