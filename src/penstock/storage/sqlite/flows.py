"""Jobs that depend on others: what docs/verbs.md tells under *Flows*.

Entries of dependencies are rows, written as they change; jobs are records, written by ``Step.save``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import msgspec

from penstock.core.flow import (
    NOTHING_TO_WAIT_FOR,
    UNKNOWN_DEPENDENCY,
    DependencyRecord,
    DependencyState,
    blame,
    not_found,
)
from penstock.core.job import Dependency, Dependent, NewJob
from penstock.core.lifecycle import EventType
from penstock.core.outcome import Failure
from penstock.errors import JobNotFound
from penstock.storage.sqlite.messages import Done, End, Link
from penstock.storage.sqlite.records import (
    ACTIVE,
    BLOCKED,
    CANCELLED,
    COMPLETED,
    FAILED,
    REMOVED,
    Record,
    pack_failure,
    unpack_failure,
)
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.transitions import enter_waiting, finish, schedule
from penstock.storage.sqlite.unit import Step

_FAILED: Final = EventType.FAILED.value
_UNBLOCKED: Final = EventType.UNBLOCKED.value
_FINISHED: Final = (COMPLETED, FAILED, CANCELLED)
_CHILDREN: Final = "children"

_sql = statements("flows")
_json = msgspec.json.Encoder()


# What a job waits for


def refuse_unknown(step: Step, after: Iterable[Dependency], known: Collection[str]) -> None:
    """Raises ``JobNotFound`` for a dependency in this queue that has no record. ``known``: ids that are about to."""
    here = [dependency.id for dependency in after if dependency.queue == step.queue.name]
    found = step.find(here)
    for id_ in here:
        record = found.get(id_)
        if id_ not in known and (record is None or not _is_there(step, record)):
            raise JobNotFound.in_queue(step.queue.name, id_, UNKNOWN_DEPENDENCY)


def depend(
    step: Step, id_: str, flow: str, after: Sequence[Dependency], *, to_come: Collection[tuple[str, str]]
) -> None:
    """Give the job of this id entries for ``after``, and look at each.

    ``to_come``: jobs that tell by themselves.
    """
    where = (step.queue.key, id_)
    step.sql.execute(_sql["add_parent"], (*where, flow))
    given = step.sql.execute(_sql["parent"], where).fetchone()[1]
    new = _without_known(step, id_, after)
    rows = [(*where, given + n, *dependency) for n, dependency in enumerate(new, start=1)]
    step.sql.executemany(_sql["add_dependency"], rows)
    step.sql.execute(_sql["give"], (len(new), len(new), *where))
    _look_at(step, [one for one in new if one[:2] not in to_come], Dependent(step.queue.name, id_, flow))


def _without_known(step: Step, id_: str, after: Sequence[Dependency]) -> list[Dependency]:
    unique: dict[tuple[str, str], Dependency] = {}
    for dependency in after:
        unique.setdefault((dependency.queue, dependency.id), dependency)
    pairs = _json.encode(list(unique)).decode()
    for pair in step.sql.execute(_sql["known_dependencies"], (pairs, step.queue.key, id_)).fetchall():
        del unique[pair]
    return list(unique.values())


def _look_at(step: Step, after: Iterable[Dependency], dependent: Dependent) -> None:
    """Count those that have ended already; the verb that asks sees to what follows for the dependent."""
    step.giving = dependent.id
    for dependency in after:
        if dependency.queue == step.queue.name:
            link(step, dependency.id, dependent)
        else:
            step.outbox.append((dependency.queue, Link(dependency.id, dependent)))
    step.giving = ""


def look_again(step: Step, record: Record) -> None:
    """At a retry: dependencies whose end counted, but was no success, are waited for once more."""
    where = (step.queue.key, record.id)
    rows = step.sql.execute(_sql["unfinished"], where).fetchall()
    step.sql.execute(_sql["clear_failed"], where)
    step.sql.execute(_sql["give"], (0, len(rows), *where))
    for key, *_ in rows:
        step.sql.execute(_sql["set_end"], ("pending", None, None, key))
    after = [Dependency(queue, id_, policy) for _, queue, id_, policy in rows]
    _look_at(step, after, Dependent(step.queue.name, record.id, _parent(step, record.id)[0]))


def to_look_at_again(step: Step, record: Record) -> list[str]:
    """Those of this queue that a retry of the job waits for once more, in the order they were given."""
    rows = step.sql.execute(_sql["unfinished"], (step.queue.key, record.id))
    return [id_ for _, queue, id_, _ in rows if queue == step.queue.name]


def is_parent(record: Record) -> bool:
    """Whether it has dependencies."""
    return bool(record.binds) and record.extras.has_dependencies


def hold_back(step: Step, record: Record) -> bool:
    """Block the job if some of its dependencies do not count yet."""
    if not is_parent(record) or not _parent(step, record.id)[2]:
        return False
    record.state = BLOCKED
    record.blocked_by = _CHILDREN
    return True


def conclude(step: Step, record: Record) -> None:
    """After its event: fail a job that a dependency has failed, unless it is active."""
    if record.state not in (ACTIVE, REMOVED, *_FINISHED) and (cause := _cause(step, record)) is not None:
        _fail(step, record, cause)


def fail_if_told(step: Step, record: Record) -> Failure | None:
    """Why an active job that is put back has to fail instead; ``None`` if it has not."""
    return _cause(step, record) if is_parent(record) else None


def await_all(step: Step, record: Record) -> Failure | None:
    """A running job is to wait for its dependencies. Why it has to fail instead, if it has waited for all of them
    before: it would run again for ever."""
    where = (step.queue.key, record.id)
    if not is_parent(record) or step.sql.execute(_sql["awaits_nothing_new"], where).fetchone():
        return NOTHING_TO_WAIT_FOR
    step.sql.execute(_sql["await"], where)
    return None


def _cause(step: Step, record: Record) -> Failure | None:
    number = _parent(step, record.id)[3]
    if not number:
        return None
    row = step.sql.execute(_sql["by_number"], (step.queue.key, record.id, number)).fetchone()
    queue, id_, _, state, _, failure = row
    return blame(queue, id_, state, unpack_failure(failure))


def _parent(step: Step, id_: str) -> tuple[str, int, int, int]:
    row: tuple[str, int, int, int] | None = step.sql.execute(_sql["parent"], (step.queue.key, id_)).fetchone()
    return row or ("", 0, 0, 0)


# What a job has to tell


def link(step: Step, id_: str, dependent: Dependent) -> None:
    """Tell ``dependent`` of the end of the job of this id: now, if it has ended, or is not there."""
    record = step.find([id_]).get(id_)
    if record is None or not _is_there(step, record):
        _send(step, dependent, End(step.queue.name, id_, "removed", None, not_found(step.queue.name, id_)))
        _work_off(step)
    else:
        link_to(step, record, [dependent])


def link_to(step: Step, record: Record, dependents: Sequence[Dependent]) -> None:
    """The same for a job that is there."""
    told = record.extras.dependents or ()
    new = [dependent for dependent in dependents if dependent not in told]
    if new and record.state != COMPLETED:
        rows = [(step.queue.key, record.id, *dependent) for dependent in new]
        step.sql.executemany(_sql["add_dependent"], rows)
        record.extras = msgspec.structs.replace(record.extras, has_later_dependents=True)
        step.touch(record)
    if record.state in _FINISHED:
        for dependent in dependents:
            _send(step, dependent, _end(step, record))
    _work_off(step)


def ended(step: Step, record: Record) -> None:
    """A job has ended, or is removed before its end: tell its dependents."""
    tell(step, _dependents(step, record), _end(step, record))


def tell(step: Step, dependents: Iterable[Dependent], end: End) -> None:
    """Tell these dependents of the end of a job."""
    for dependent in dependents:
        _send(step, dependent, end)
    _work_off(step)


def refused(step: Step, job: NewJob, failure: Failure) -> None:
    """A job that others were to depend on cannot be put in."""
    assert job.extras is not None
    for dependent in job.extras.dependents or ():
        _send(step, dependent, End(step.queue.name, job.id, "removed", None, failure))
    _work_off(step)


def removed(step: Step, record: Record) -> None:
    """The record of a failed or cancelled job goes: nobody need wait for its retry."""
    for dependent in _dependents(step, record):
        _send(step, dependent, End(step.queue.name, record.id, "removed", None, None))
    _work_off(step)


def _dependents(step: Step, record: Record) -> list[Dependent]:
    extras = record.extras
    dependents = list(extras.dependents or ())
    if extras.has_later_dependents:
        rows = step.sql.execute(_sql["later_dependents"], (step.queue.key, record.id))
        dependents += (Dependent(*row) for row in rows)
    return dependents


def _end(step: Step, record: Record) -> End:
    queue, id_ = step.queue.name, record.id
    match record.state:
        case "completed":
            return End(queue, id_, "completed", record.result or b"", None)
        case "failed":
            failure = unpack_failure(record.failure)
            shown = failure and Failure(failure.type, failure.message)
            return End(queue, id_, "failed", None, shown)
        case "cancelled":
            return End(queue, id_, "cancelled", None, None)
        case _:
            return End(queue, id_, "removed", None, None)


def _send(step: Step, dependent: Dependent, end: End) -> None:
    if dependent.queue == step.queue.name:
        step.ends.append((dependent, end))
    else:
        step.outbox.append((dependent.queue, Done(dependent, end)))


def _work_off(step: Step) -> None:
    """One after the other, not one inside the other: a chain may be longer than the stack is deep."""
    if step.works_off:
        return
    step.works_off = True
    while step.ends:
        dependent, end = step.ends.popleft()
        done(step, dependent, end)
    step.works_off = False


def done(step: Step, dependent: Dependent, end: End) -> None:
    """A dependency of a job of this queue has ended."""
    where = (step.queue.key, dependent.id)
    row = step.sql.execute(_sql["edge"], (*where, end.queue, end.id)).fetchone()
    if row is None or row[0] != dependent.flow or _counts(row[3], row[4]):
        return
    _, key, number, policy, _ = row
    failure = pack_failure(end.failure) if end.failure else None
    step.sql.execute(_sql["set_end"], (end.state, end.result, failure, key))
    if not _counts(policy, end.state):
        return
    pending = step.sql.execute(_sql["count_one"], where).fetchone()[0]
    failed = end.state != "completed" and policy != "ignore"
    if failed:
        step.sql.execute(_sql["mark_failed"], (number, *where))
    if step.giving == dependent.id or (pending and not failed):
        return
    record = step.find([dependent.id]).get(dependent.id)
    if failed and record is not None:
        conclude(step, record)
    elif record is not None and record.state == BLOCKED and record.blocked_by == _CHILDREN:
        _unblock(step, record)


def _counts(policy: str, state: DependencyState) -> bool:
    if policy == "wait":
        return state in ("completed", "removed")
    return state != "pending"


def _fail(step: Step, record: Record, cause: Failure) -> None:
    record.failure = pack_failure(cause)
    finish(step, record, FAILED, _FAILED, run=record.runs, et=cause.type, em=cause.message)
    step.touch(record)


def _unblock(step: Step, record: Record) -> None:
    record.blocked_by = ""
    if record.run_at > step.now_ms:
        schedule(step, record, record.run_at)
    else:
        enter_waiting(step, record)
    step.note(_UNBLOCKED, record, run=record.runs)
    step.touch(record)


def _is_there(step: Step, record: Record) -> bool:
    return record.state != REMOVED and not step.is_over(record)


def forget(step: Step, ids: Sequence[str]) -> None:
    """The records of these ids go, and with them what they knew of others."""
    where = (step.queue.key, _json.encode(ids).decode())
    for table in ("parents", "dependencies", "dependents"):
        step.sql.execute(_sql[f"forget_{table}"], where)


def obliterated(step: Step) -> None:
    """All records go. Dependents in other queues are told; those in this one go as well."""
    # By what the dependents know, so that no record has to be read.
    here = (step.namespace, step.queue.name, step.queue.key)
    for queue, parent, flow, id_ in step.sql.execute(_sql["waiting_elsewhere"], here).fetchall():
        _send(step, Dependent(queue, parent, flow), End(step.queue.name, id_, "removed", None, None))
    for table in ("parents", "dependencies", "dependents"):
        step.sql.execute(_sql[f"obliterate_{table}"], (step.queue.key,))


def dependencies(
    sql: sqlite3.Connection, namespace: str, queue: str, id_: str, *, start: int, limit: int
) -> list[DependencyRecord]:
    """What a job knows of those it waits for, in the order they were given."""
    rows = sql.execute(_sql["page"], (namespace, queue, id_, start, limit))
    return [
        DependencyRecord(on_queue, on_id, policy, state, result, unpack_failure(failure))
        for on_queue, on_id, policy, state, result, failure in rows
    ]
