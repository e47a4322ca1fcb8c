"""``enqueue``, with a fast path for plain jobs; ``enqueue_flows``; and ``attach``, which adds dependencies to a
job."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from penstock.core.flow import Node, link_nodes
from penstock.core.job import Dependency, Dependent, Enqueued, EnqueueStatus, NewJob
from penstock.core.lifecycle import AttachAnswer, EventType, State
from penstock.core.outcome import Failure
from penstock.core.staging import check_staged
from penstock.errors import CostTooHigh
from penstock.storage.sqlite import dedup, flows, statements
from penstock.storage.sqlite.limits import check_costs, cost_refused
from penstock.storage.sqlite.records import (
    ACTIVE,
    CANCELLED,
    COMPLETED,
    FAILED,
    FINISHED,
    GROUP,
    REMOVED,
    SCHEDULED,
    STATES,
    WAITING,
    Record,
)
from penstock.storage.sqlite.transitions import join_slot, keep_slot, new_record, queue_afresh, update
from penstock.storage.sqlite.unit import Put, Unit

_ENQUEUED: Final = EventType.ENQUEUED.value
_sql = statements("fast_enqueue")
_records_sql = statements("records")
_news_sql = statements("news")


def enqueue(unit: Unit, jobs: Sequence[NewJob]) -> list[Enqueued]:
    """Enqueue the jobs in order. Each sees the effects of those before it."""
    answers = _enqueue_plain(unit, jobs)
    return _enqueue_in_order(unit, jobs) if answers is None else answers


def _enqueue_in_order(unit: Unit, jobs: Sequence[NewJob]) -> list[Enqueued]:
    check_costs(unit, jobs)
    for job in jobs:
        if job.staged:
            check_staged(job)
    unit.queue.used = 1
    known = unit.find(job.id for job in jobs)
    if any(job.after for job in jobs):
        _refuse_unknown(unit, jobs)
    touched: dict[str, Record] = {}
    answers: list[Enqueued] = []
    for job in jobs:
        existing = known.get(job.id)
        status = _status(unit, existing, job)
        if status == "queued" and job.dedup is not None:
            earlier = dedup.meet(unit, job.dedup, id_=job.id)
            if earlier is not None:
                answers.append(_duplicate_of(unit, earlier, job))
                continue
        record = known[job.id] = _enqueue(unit, existing, job, status)
        if status in ("queued", "updated", "rerun"):
            touched[job.id] = record
        answers.append(_answer(record, status))
    unit.save(touched.values())
    return answers


def _refuse_unknown(unit: Unit, jobs: Sequence[NewJob]) -> None:
    before: set[str] = set()
    for job in jobs:
        flows.refuse_unknown(unit, job.after, before)
        before.add(job.id)


def enqueue_flows(unit: Unit, flows_: Sequence[Sequence[Node]]) -> list[Enqueued]:
    """Enqueue each root and, if it is new, the rest of its flow."""
    for nodes in flows_:
        own = {job.id for queue, job in nodes if queue == unit.queue.name}
        for queue, job in nodes:
            if queue == unit.queue.name:
                flows.refuse_unknown(unit, job.after, own)
                check_costs(unit, [job])
    return [_enqueue_flow(unit, nodes) for nodes in flows_]


def _enqueue_flow(unit: Unit, nodes: Sequence[Node]) -> Enqueued:
    to_come = frozenset((queue, job.id) for queue, job in nodes)
    answer = put(unit, nodes[0].job, to_come)
    if answer.status == "queued":
        put_nodes(unit, nodes[1:], to_come)
    return answer


def put_nodes(unit: Unit, nodes: Sequence[Node], to_come: frozenset[tuple[str, str]]) -> None:
    """Enqueue the nodes of this queue, and send the others to theirs."""
    for queue, job in nodes:
        if queue == unit.queue.name:
            put(unit, job, to_come)
        else:
            unit.outbox.append((queue, Put(job, to_come)))


def put_or_tell(unit: Unit, job: NewJob, to_come: frozenset[tuple[str, str]]) -> None:
    """Enqueue a job of a flow that comes from another queue. If it is refused, notify its dependents."""
    if (why := cost_refused(unit, job)) is None:
        put(unit, job, to_come)
    else:
        flows.refused(unit, job, Failure(CostTooHigh.__name__, why))


def put(unit: Unit, job: NewJob, to_come: frozenset[tuple[str, str]] = frozenset()) -> Enqueued:
    """Enqueue a job of a flow. Dependencies that are missing count as removed. Flows do not use dedup keys."""
    if job.staged:
        check_staged(job)
    unit.queue.used = 1
    known = unit.find([job.id]).get(job.id)
    status = _status(unit, known, job)
    record = _enqueue(unit, known, msgspec.structs.replace(job, dedup=None), status, to_come)
    unit.save([record] if status in ("queued", "updated", "rerun") else [])
    return _answer(record, status)


def _enqueue(
    unit: Unit,
    record: Record | None,
    job: NewJob,
    status: EnqueueStatus,
    to_come: Collection[tuple[str, str]] = (),
) -> Record:
    if record is not None and record.has_links and status == "queued":
        _replaced(unit, record)
    if job.after and status == "queued":
        assert job.extras is not None
        flows.depend(unit, job.id, job.extras.flow, job.after, to_come=to_come)
    if record is None:
        record = new_record(unit, job)
        unit.meet(record)
    else:
        _dispatch(unit, record, job, status)
    if status == "queued" and job.dedup is not None:
        dedup.note(unit, job.dedup, record)
    if job.extras is not None:
        _link(unit, record, job, status)
    if job.notify and record.state not in (*FINISHED, REMOVED) and status != "rerun":
        _listen(unit, record, job)
    return record


def _listen(unit: Unit, record: Record, job: NewJob) -> None:
    if record.rerun is not None and _repeats(record, job):
        join_slot(unit, record, job.notify)
    else:
        unit.listen(record, job.notify)


def _replaced(unit: Unit, record: Record) -> None:
    """End the links of an earlier incarnation of the id."""
    if record.state in (FAILED, CANCELLED) or record.is_staged:
        unit.links.removed(unit, record)
    unit.links.forget(unit, [record.id])


def _link(unit: Unit, record: Record, job: NewJob, status: EnqueueStatus) -> None:
    assert job.extras is not None
    if status == "queued" and job.after:
        flows.conclude(unit, record)
    elif status != "queued" and job.extras.dependents:
        flows.link_to(unit, record, job.extras.dependents)


def _dispatch(unit: Unit, record: Record, job: NewJob, status: EnqueueStatus) -> None:
    """Apply an enqueue to the existing job of its id."""
    match status:
        case "queued":
            queue_afresh(unit, record, job)
        case "updated":
            update(unit, record, job)
            unit.note(EventType.CHANGED, record, run=record.runs)
        case "rerun":
            keep_slot(unit, record, job)
            unit.note(EventType.CHANGED, record, run=record.runs)
        case "duplicate" | "completed":
            pass


def _status(unit: Unit, record: Record | None, job: NewJob) -> EnqueueStatus:
    if record is None or job.unchecked or unit.is_over(record):
        return "queued"
    if record.is_staged and job.write_id != record.write_id:
        return "queued"
    if _repeats(record, job) or job.conflict.mode == "absent":
        return "duplicate"
    finished = record.state in FINISHED
    if job.conflict.mode == "redispatch":
        return "queued" if finished else "rerun" if record.state == ACTIVE else "updated"
    if record.state == COMPLETED:
        return "completed"
    return "queued" if finished else "duplicate"


def _repeats(record: Record, job: NewJob) -> bool:
    """Return whether the job's newest dispatch, which may be waiting in its slot, belongs to the same write."""
    if not job.write_id:
        return False
    slot = record.slot
    return job.write_id == (record.write_id if slot is None else slot.write_id)


def _duplicate_of(unit: Unit, earlier: dedup.Earlier, job: NewJob) -> Enqueued:
    record = earlier.record
    if record is None:
        return Enqueued(earlier.id, "duplicate", None, earlier.incarnation)
    if job.notify and record.state not in FINISHED:
        unit.listen(record, job.notify)
    return _answer(record, "duplicate")


def _answer(record: Record, status: EnqueueStatus) -> Enqueued:
    result = record.result if record.state == COMPLETED else None
    # A job that a dependency has failed immediately, and that is not kept, has no record any more.
    state = State.FAILED if record.state == REMOVED else STATES[record.state]
    return Enqueued(record.id, status, state, record.incarnation, result)


# The fast path, for almost every enqueue: new jobs without links that are due immediately. It has the same
# result, but passes half the columns of a whole record to SQLite and skips the checks that other jobs need.


def _enqueue_plain(unit: Unit, jobs: Sequence[NewJob]) -> list[Enqueued] | None:
    """Enqueue these jobs, or return ``None``, with nothing changed, if one of them needs the slow path."""
    for job in jobs:
        if job.extras is not None or job.dedup is not None or job.delay_ms or job.run_at_ms is not None:
            return None
        if job.staged or job.after:
            return None
    ids = [job.id for job in jobs]
    if not ids or len(set(ids)) != len(ids) or unit.knows_any(ids):
        return None
    numbers = unit.draw_many(len(ids))
    _write_plain(unit, jobs, numbers)
    _note_plain(unit, jobs, numbers)
    unit.queue.used = 1
    unit.queue.move("", WAITING, len(ids))
    unit.wakes.add("w")
    return [Enqueued(id_, "queued", State.WAITING, number) for id_, number in zip(ids, numbers, strict=True)]


def _write_plain(unit: Unit, jobs: Sequence[NewJob], numbers: range) -> None:
    """Write the rows. A job's first number in line is its incarnation."""
    now_ms, queue = unit.now_ms, unit.queue.key
    first = unit.next_key()
    keys = range(first, first + len(jobs))
    options, options_key = None, 0
    rows = []
    for key, number, job in zip(keys, numbers, jobs, strict=True):
        if job.options is not options:
            options = job.options
            options_key, _ = unit.intern(options)
        ttl_ms = job.ttl_ms
        place = -number if job.lifo else number
        expires_at = now_ms + ttl_ms if ttl_ms else 0
        rows.append(
            (key, queue, job.id, number, job.priority, place, options_key, ttl_ms, job.run_id, job.write_id,
             now_ms, now_ms, now_ms, expires_at)
        )  # fmt: skip
    unit.sql.executemany(_sql["insert"], rows)
    payloads = [(key, job.payload) for key, job in zip(keys, jobs, strict=True)]
    unit.sql.executemany(_records_sql["insert_payload"], payloads)
    if waiters := [(key, job.notify) for key, job in zip(keys, jobs, strict=True) if job.notify]:
        unit.sql.executemany(_news_sql["add_waiter"], waiters)


def _note_plain(unit: Unit, jobs: Sequence[NewJob], numbers: range) -> None:
    now_ms = unit.now_ms
    rows = [
        (
            now_ms, job.id, number, now_ms, job.run_id, job.options.task, job.options.version, WAITING,
            job.priority, len(job.payload),
        )
        for number, job in zip(numbers, jobs, strict=True)
    ]  # fmt: skip
    unit.notes.add_rows(_ENQUEUED, ("pri", "size"), rows)


def attach(
    unit: Unit, id: str, after: Sequence[Dependency], *, nodes: Sequence[Node] = (), flow: str
) -> AttachAnswer:
    """Add dependencies to an open job, and enqueue the new ones."""
    record = unit.find([id]).get(id)
    if record is None or unit.is_over(record) or record.is_staged:
        return "not_found"
    if record.state in FINISHED:
        return "ended"
    own = {job.id for queue, job in nodes if queue == unit.queue.name}
    flows.refuse_unknown(unit, after, own)
    check_costs(unit, [job for queue, job in nodes if queue == unit.queue.name])
    flow = record.extras.flow or flow
    to_come = frozenset((queue, job.id) for queue, job in nodes)
    record.extras = msgspec.structs.replace(record.extras, flow=flow, has_dependencies=True)
    flows.depend(unit, id, flow, after, to_come=to_come)
    if record.state in (SCHEDULED, WAITING) or record.blocked_by == GROUP:
        unit.links.awaits_children(unit, record)
    unit.note(EventType.CHANGED, record, run=record.runs)
    flows.conclude(unit, record)
    unit.save([record])
    put_nodes(
        unit, link_nodes(nodes, flow=flow, into=Dependent(unit.queue.name, id, flow), after=after), to_come
    )
    return "attached"
