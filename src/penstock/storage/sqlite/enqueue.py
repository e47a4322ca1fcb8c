"""``enqueue``: put new jobs in."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.job import Enqueued, EnqueueStatus, NewJob
from penstock.core.lifecycle import EventType
from penstock.storage.sqlite import dedup
from penstock.storage.sqlite.limits import check_costs
from penstock.storage.sqlite.records import ACTIVE, CANCELLED, COMPLETED, FAILED, STATES, Record
from penstock.storage.sqlite.step import Step
from penstock.storage.sqlite.transitions import keep_slot, new_record, queue_afresh, update

__all__ = ["enqueue"]

_CHANGED = EventType.CHANGED.value
_FINISHED = (COMPLETED, FAILED, CANCELLED)


def enqueue(step: Step, jobs: Sequence[NewJob]) -> list[Enqueued]:
    """Answer each job as if those before it were in already."""
    check_costs(step, jobs)
    step.queue.used = 1
    known = step.find(job.id for job in jobs)
    touched: dict[str, Record] = {}
    answers: list[Enqueued] = []
    for job in jobs:
        record = known.get(job.id)
        status: EnqueueStatus = "queued" if record is None else _decide(step, record, job)
        if status == "queued" and job.dedup is not None:
            earlier = dedup.meet(step, job.dedup, id_=job.id)
            if earlier is not None:
                answers.append(_duplicate_of(step, earlier, job))
                continue
        if record is None:
            record = known[job.id] = new_record(step, job)
            step.meet(record)
        else:
            _dispatch(step, record, job, status)
        if status == "queued" and job.dedup is not None:
            dedup.note(step, job.dedup, record)
        if status in ("queued", "updated", "rerun"):
            touched[job.id] = record
        if job.notify and record.state not in _FINISHED and status != "rerun":
            step.listen(record, job.notify)
        answers.append(_answer(record, status))
    step.save(touched.values())
    return answers


def _dispatch(step: Step, record: Record, job: NewJob, status: EnqueueStatus) -> None:
    """What an enqueue does to an id that is known."""
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


def _duplicate_of(step: Step, earlier: dedup.Earlier, job: NewJob) -> Enqueued:
    record = earlier.record
    if record is None:
        return Enqueued(earlier.id, "duplicate", None, earlier.incarnation)
    if job.notify and record.state not in _FINISHED:
        step.listen(record, job.notify)
    return _answer(record, "duplicate")


def _answer(record: Record, status: EnqueueStatus) -> Enqueued:
    result = record.result if record.state == COMPLETED else None
    return Enqueued(record.id, status, STATES[record.state], record.incarnation, result)
