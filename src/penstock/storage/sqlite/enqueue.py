"""``enqueue``: put new jobs in."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from penstock.core.flow import Node, woven
from penstock.core.job import Dependency, Dependent, Enqueued, EnqueueStatus, NewJob, check_staged
from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import Failure
from penstock.errors import CostTooHigh
from penstock.storage.sqlite import dedup, flows
from penstock.storage.sqlite.limits import check_costs, cost_refused
from penstock.storage.sqlite.messages import Put
from penstock.storage.sqlite.records import (
    ACTIVE,
    CANCELLED,
    COMPLETED,
    FAILED,
    REMOVED,
    SCHEDULED,
    STATES,
    WAITING,
    Record,
)
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.transitions import join_slot, keep_slot, new_record, queue_afresh, update
from penstock.storage.sqlite.unit import Step
from penstock.storage.values import AttachAnswer

_CHANGED = EventType.CHANGED.value
_FINISHED = (COMPLETED, FAILED, CANCELLED)


def enqueue(step: Step, jobs: Sequence[NewJob]) -> list[Enqueued]:
    """Answer each job as if those before it were in already."""
    answers = queue_all(step, jobs)
    return _enqueue_each(step, jobs) if answers is None else answers


def _enqueue_each(step: Step, jobs: Sequence[NewJob]) -> list[Enqueued]:
    check_costs(step, jobs)
    for job in jobs:
        if job.staged:
            check_staged(job)
    step.queue.used = 1
    known = step.find(job.id for job in jobs)
    if any(job.after for job in jobs):
        _refuse_unknown(step, jobs)
    touched: dict[str, Record] = {}
    answers: list[Enqueued] = []
    for job in jobs:
        earlier_life = known.get(job.id)
        status = _status(step, earlier_life, job)
        if status == "queued" and job.dedup is not None:
            earlier = dedup.meet(step, job.dedup, id_=job.id)
            if earlier is not None:
                answers.append(_duplicate_of(step, earlier, job))
                continue
        record = known[job.id] = _enqueue(step, earlier_life, job, status)
        if status in ("queued", "updated", "rerun"):
            touched[job.id] = record
        answers.append(_answer(record, status))
    step.save(touched.values())
    return answers


def _refuse_unknown(step: Step, jobs: Sequence[NewJob]) -> None:
    before: set[str] = set()
    for job in jobs:
        flows.refuse_unknown(step, job.after, before)
        before.add(job.id)


def enqueue_flows(step: Step, flows_: Sequence[Sequence[Node]]) -> list[Enqueued]:
    """Put in each root and, if it is new, all that comes with it."""
    for nodes in flows_:
        own = {job.id for queue, job in nodes if queue == step.queue.name}
        for queue, job in nodes:
            if queue == step.queue.name:
                flows.refuse_unknown(step, job.after, own)
                check_costs(step, [job])
    return [_enqueue_flow(step, nodes) for nodes in flows_]


def _enqueue_flow(step: Step, nodes: Sequence[Node]) -> Enqueued:
    to_come = frozenset((queue, job.id) for queue, job in nodes)
    answer = put(step, nodes[0].job, to_come)
    if answer.status == "queued":
        put_nodes(step, nodes[1:], to_come)
    return answer


def put_nodes(step: Step, nodes: Sequence[Node], to_come: frozenset[tuple[str, str]]) -> None:
    """Put in the nodes of this queue, and have the others put into theirs."""
    for queue, job in nodes:
        if queue == step.queue.name:
            put(step, job, to_come)
        else:
            step.outbox.append((queue, Put(job, to_come)))


def put_or_tell(step: Step, job: NewJob, to_come: frozenset[tuple[str, str]]) -> None:
    """Put in a job of a flow that was written in another queue. If it is refused, its dependents are told."""
    if (why := cost_refused(step, job)) is None:
        put(step, job, to_come)
    else:
        flows.refused(step, job, Failure(CostTooHigh.__name__, why))


def put(step: Step, job: NewJob, to_come: frozenset[tuple[str, str]] = frozenset()) -> Enqueued:
    """Enqueue a job whose dependencies need not be there: then it is told so. Dedup keys are not for flows."""
    if job.staged:
        check_staged(job)
    step.queue.used = 1
    known = step.find([job.id]).get(job.id)
    status = _status(step, known, job)
    record = _enqueue(step, known, msgspec.structs.replace(job, dedup=None), status, to_come)
    step.save([record] if status in ("queued", "updated", "rerun") else [])
    return _answer(record, status)


def _status(step: Step, record: Record | None, job: NewJob) -> EnqueueStatus:
    return "queued" if record is None else _decide(step, record, job)


def _enqueue(
    step: Step,
    record: Record | None,
    job: NewJob,
    status: EnqueueStatus,
    to_come: Collection[tuple[str, str]] = (),
) -> Record:
    if record is not None and record.binds and status == "queued":
        _replaced(step, record)
    if job.after and status == "queued":
        assert job.extras is not None
        flows.depend(step, job.id, job.extras.flow, job.after, to_come=to_come)
    if record is None:
        record = new_record(step, job)
        step.meet(record)
    else:
        _dispatch(step, record, job, status)
    if status == "queued" and job.dedup is not None:
        dedup.note(step, job.dedup, record)
    if job.extras is not None:
        _tie(step, record, job, status)
    if job.notify and record.state not in (*_FINISHED, REMOVED) and status != "rerun":
        _listen(step, record, job)
    return record


def _listen(step: Step, record: Record, job: NewJob) -> None:
    if record.rerun is not None and _repeats(record, job):
        join_slot(step, record, job.notify)
    else:
        step.listen(record, job.notify)


def _replaced(step: Step, record: Record) -> None:
    """An earlier life of the id is over for good."""
    if record.state in (FAILED, CANCELLED) or record.is_staged:
        step.links.removed(step, record)
    step.links.forget(step, [record.id])


def _tie(step: Step, record: Record, job: NewJob, status: EnqueueStatus) -> None:
    assert job.extras is not None
    if status == "queued" and job.after:
        flows.conclude(step, record)
    elif status != "queued" and job.extras.dependents:
        flows.link_to(step, record, job.extras.dependents)


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
    if job.unchecked or step.is_over(record):
        return "queued"
    if record.is_staged and job.write_id != record.write_id:
        return "queued"
    if _repeats(record, job) or job.conflict.mode == "absent":
        return "duplicate"
    finished = record.state in _FINISHED
    if job.conflict.mode == "redispatch":
        return "queued" if finished else "rerun" if record.state == ACTIVE else "updated"
    if record.state == COMPLETED:
        return "completed"
    return "queued" if finished else "duplicate"


def _repeats(record: Record, job: NewJob) -> bool:
    """Whether a job's newest dispatch, which may wait in its slot, is of the same write."""
    if not job.write_id:
        return False
    slot = record.slot
    return job.write_id == (record.write_id if slot is None else slot.write_id)


def _duplicate_of(step: Step, earlier: dedup.Earlier, job: NewJob) -> Enqueued:
    record = earlier.record
    if record is None:
        return Enqueued(earlier.id, "duplicate", None, earlier.incarnation)
    if job.notify and record.state not in _FINISHED:
        step.listen(record, job.notify)
    return _answer(record, "duplicate")


def _answer(record: Record, status: EnqueueStatus) -> Enqueued:
    result = record.result if record.state == COMPLETED else None
    # A job that failed at once by one it was to wait for, and is kept for no time, has no record any more.
    state = State.FAILED if record.state == REMOVED else STATES[record.state]
    return Enqueued(record.id, status, state, record.incarnation, result)


# The fast way through ``enqueue`` for what nearly every enqueue is: new jobs, to be run at once, without
# ties.
#
# It binds half the columns of a whole record and asks none of the questions that other jobs raise, for
# the same result.


_ENQUEUED = EventType.ENQUEUED.value
_STATE = State.WAITING

_sql = statements("arrive")
_records_sql = statements("records")
_news_sql = statements("news")


def queue_all(step: Step, jobs: Sequence[NewJob]) -> list[Enqueued] | None:
    """Put these jobs in; ``None``, and nothing done, if one of them needs more thought."""
    for job in jobs:
        if job.extras is not None or job.dedup is not None or job.delay_ms or job.run_at_ms is not None:
            return None
        if job.staged or job.after:
            return None
    ids = [job.id for job in jobs]
    if not ids or len(set(ids)) != len(ids) or step.knows_any(ids):
        return None
    numbers = step.draw_many(len(ids))
    _write(step, jobs, numbers)
    _note(step, jobs, numbers)
    step.queue.used = 1
    step.queue.move("", WAITING, len(ids))
    step.wakes.add("w")
    return [Enqueued(id_, "queued", _STATE, number) for id_, number in zip(ids, numbers, strict=True)]


def _write(step: Step, jobs: Sequence[NewJob], numbers: range) -> None:
    """A job's first number in line is its incarnation."""
    now_ms, queue = step.now_ms, step.queue.key
    first = step.next_key()
    keys = range(first, first + len(jobs))
    options, options_key = None, 0
    rows = []
    for key, number, job in zip(keys, numbers, jobs, strict=True):
        if job.options is not options:
            options = job.options
            options_key, _ = step.intern(options)
        ttl_ms = job.ttl_ms
        place = -number if job.lifo else number
        expires_at = now_ms + ttl_ms if ttl_ms else 0
        rows.append(
            (key, queue, job.id, number, job.priority, place, options_key, ttl_ms, job.run_id, job.write_id,
             now_ms, now_ms, now_ms, expires_at)
        )  # fmt: skip
    step.sql.executemany(_sql["insert"], rows)
    payloads = [(key, job.payload) for key, job in zip(keys, jobs, strict=True)]
    step.sql.executemany(_records_sql["insert_payload"], payloads)
    if waiters := [(key, job.notify) for key, job in zip(keys, jobs, strict=True) if job.notify]:
        step.sql.executemany(_news_sql["add_waiter"], waiters)


def _note(step: Step, jobs: Sequence[NewJob], numbers: range) -> None:
    now_ms = step.now_ms
    rows = [
        (
            now_ms,
            job.id,
            number,
            now_ms,
            job.run_id,
            job.options.task,
            job.options.version,
            WAITING,
            job.priority,
            len(job.payload),
        )
        for number, job in zip(numbers, jobs, strict=True)
    ]
    step.notes.add_rows(_ENQUEUED, ("pri", "size"), rows)


# ``attach``: more dependencies for a job that is there.


def attach(
    step: Step, id_: str, after: Sequence[Dependency], *, nodes: Sequence[Node], flow: str
) -> AttachAnswer:
    """Give the job further dependencies, and put in those that come along."""
    record = step.find([id_]).get(id_)
    if record is None or step.is_over(record) or record.is_staged:
        return "not_found"
    if record.state in (COMPLETED, FAILED, CANCELLED):
        return "ended"
    own = {job.id for queue, job in nodes if queue == step.queue.name}
    flows.refuse_unknown(step, after, own)
    check_costs(step, [job for queue, job in nodes if queue == step.queue.name])
    flow = record.extras.flow or flow
    to_come = frozenset((queue, job.id) for queue, job in nodes)
    record.extras = msgspec.structs.replace(record.extras, flow=flow, has_dependencies=True)
    flows.depend(step, id_, flow, after, to_come=to_come)
    if record.state in (SCHEDULED, WAITING) or record.blocked_by == "group":
        step.links.awaits_children(step, record)
    step.note(_CHANGED, record, run=record.runs)
    flows.conclude(step, record)
    step.save([record])
    put_nodes(step, woven(nodes, flow=flow, into=Dependent(step.queue.name, id_, flow), after=after), to_come)
    return "attached"
