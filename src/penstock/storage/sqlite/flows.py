"""Dependencies between jobs. docs/verbs.md describes them under *Flows*.

Dependencies are rows, written as they change; jobs are records, written by ``Unit.save``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import cast

import msgspec

from penstock.core.flow import (
    NOTHING_TO_WAIT_FOR,
    UNKNOWN_DEPENDENCY,
    DependencyRecord,
    DependencyState,
    failure_from,
    not_found,
)
from penstock.core.job import Dependency, Dependent, NewJob
from penstock.core.lifecycle import EventType
from penstock.core.outcome import Failure
from penstock.errors import JobNotFound
from penstock.storage.sqlite import statements
from penstock.storage.sqlite.queuerow import View
from penstock.storage.sqlite.records import (
    ACTIVE,
    BLOCKED,
    CHILDREN,
    COMPLETED,
    FAILED,
    FINISHED,
    REMOVED,
    Record,
    pack_failure,
    unpack_failure,
)
from penstock.storage.sqlite.transitions import enter_waiting, fail, schedule
from penstock.storage.sqlite.unit import Done, End, Link, Unit

_sql = statements("flows")
_json = msgspec.json.Encoder()


# The dependencies of a job


def refuse_unknown(unit: Unit, after: Iterable[Dependency], known: Collection[str]) -> None:
    """Raise ``JobNotFound`` for a dependency in this queue that has no record and is not in ``known``."""
    here = [dependency.id for dependency in after if dependency.queue == unit.queue.name]
    records = unit.find(here)
    for id_ in here:
        record = records.get(id_)
        if id_ not in known and (record is None or not _is_there(unit, record)):
            raise JobNotFound.in_queue(unit.queue.name, id_, UNKNOWN_DEPENDENCY)


def depend(
    unit: Unit, id_: str, flow: str, after: Sequence[Dependency], *, to_come: Collection[tuple[str, str]]
) -> None:
    """Add dependencies to the job of this id. Link it to each of them, except those in ``to_come``, which notify it by
    themselves."""
    where = (unit.queue.key, id_)
    unit.sql.execute(_sql["add_parent"], (*where, flow))
    last_number = unit.sql.execute(_sql["parent"], where).fetchone()[1]
    new = _without_known(unit, id_, after)
    rows = [(*where, number, *dependency) for number, dependency in enumerate(new, start=last_number + 1)]
    unit.sql.executemany(_sql["add_dependency"], rows)
    unit.sql.execute(_sql["give"], (len(new), len(new), *where))
    present = [dependency for dependency in new if dependency[:2] not in to_come]
    _link_all(unit, present, Dependent(unit.queue.name, id_, flow))


def _without_known(unit: Unit, id_: str, after: Sequence[Dependency]) -> list[Dependency]:
    unique: dict[tuple[str, str], Dependency] = {}
    for dependency in after:
        unique.setdefault((dependency.queue, dependency.id), dependency)
    pairs = _json.encode(list(unique)).decode()
    for pair in unit.sql.execute(_sql["known_dependencies"], (pairs, unit.queue.key, id_)).fetchall():
        del unique[pair]
    return list(unique.values())


def _link_all(unit: Unit, after: Iterable[Dependency], dependent: Dependent) -> None:
    """Link the dependent to its dependencies, and count those that have ended."""
    unit.linking_id = dependent.id
    for dependency in after:
        if dependency.queue == unit.queue.name:
            link(unit, dependency.id, dependent)
        else:
            unit.outbox.append((dependency.queue, Link(dependency.id, dependent)))
    unit.linking_id = ""


def await_again(unit: Unit, record: Record) -> None:
    """At a retry, wait again for dependencies that ended without success."""
    where = (unit.queue.key, record.id)
    rows = unit.sql.execute(_sql["unfinished"], where).fetchall()
    unit.sql.execute(_sql["clear_failed"], where)
    unit.sql.execute(_sql["give"], (0, len(rows), *where))
    for key, *_ in rows:
        unit.sql.execute(_sql["set_end"], ("pending", None, None, key))
    after = [Dependency(queue, id_, policy) for _, queue, id_, policy in rows]
    _link_all(unit, after, Dependent(unit.queue.name, record.id, _parent(unit, record.id)[0]))


def to_await_again(unit: Unit, record: Record) -> list[str]:
    """Return the ids of this queue that a retry of the job waits for again, in order."""
    rows = unit.sql.execute(_sql["unfinished"], (unit.queue.key, record.id))
    return [id_ for _, queue, id_, _ in rows if queue == unit.queue.name]


def is_parent(record: Record) -> bool:
    """Return whether the job has dependencies."""
    return bool(record.has_links) and record.extras.has_dependencies


def maybe_block(unit: Unit, record: Record) -> bool:
    """Block the job if it has unfinished dependencies. Return whether it was blocked."""
    if not is_parent(record) or not _parent(unit, record.id)[2]:
        return False
    record.state = BLOCKED
    record.blocked_by = CHILDREN
    return True


def conclude(unit: Unit, record: Record) -> None:
    """Fail the job if a dependency has failed it, unless it is active. Call it after the event of the job."""
    if record.state not in (ACTIVE, REMOVED, *FINISHED) and (cause := _cause(unit, record)) is not None:
        fail(unit, record, cause)
        unit.touch(record)


def dependency_failure(unit: Unit, record: Record) -> Failure | None:
    """Return the failure of an active job that is handed back after a dependency failed; ``None`` without one."""
    return _cause(unit, record) if is_parent(record) else None


def await_all(unit: Unit, record: Record) -> Failure | None:
    """Have a running job wait for its dependencies.

    Return a failure if it has waited for all of them before: it would run again forever.
    """
    where = (unit.queue.key, record.id)
    if not is_parent(record) or unit.sql.execute(_sql["awaits_nothing_new"], where).fetchone():
        return NOTHING_TO_WAIT_FOR
    unit.sql.execute(_sql["await"], where)
    return None


def _cause(unit: Unit, record: Record) -> Failure | None:
    number = _parent(unit, record.id)[3]
    if not number:
        return None
    row = unit.sql.execute(_sql["by_number"], (unit.queue.key, record.id, number)).fetchone()
    queue, id_, _, state, _, failure = row
    return failure_from(queue, id_, state, unpack_failure(failure))


def _parent(unit: Unit, id_: str) -> tuple[str, int, int, int]:
    row: tuple[str, int, int, int] | None = unit.sql.execute(_sql["parent"], (unit.queue.key, id_)).fetchone()
    return row or ("", 0, 0, 0)


# The dependents of a job


def link(unit: Unit, id_: str, dependent: Dependent) -> None:
    """Add a dependent to the job of this id, and notify it immediately if the job has ended or does not exist."""
    record = unit.find([id_]).get(id_)
    if record is None or not _is_there(unit, record):
        tell(unit, [dependent], End(unit.queue.name, id_, "removed", None, not_found(unit.queue.name, id_)))
    else:
        link_to(unit, record, [dependent])


def link_to(unit: Unit, record: Record, dependents: Sequence[Dependent]) -> None:
    """Add dependents to an existing job."""
    known = record.extras.dependents or ()
    new = [dependent for dependent in dependents if dependent not in known]
    if new and record.state != COMPLETED:
        rows = [(unit.queue.key, record.id, *dependent) for dependent in new]
        unit.sql.executemany(_sql["add_dependent"], rows)
        record.extras = msgspec.structs.replace(record.extras, has_later_dependents=True)
        unit.touch(record)
    if record.state in FINISHED:
        tell(unit, dependents, _end(unit, record))


def ended(unit: Unit, record: Record) -> None:
    """Notify the dependents of a job that has ended, or is removed while open."""
    tell(unit, _dependents(unit, record), _end(unit, record))


def tell(unit: Unit, dependents: Iterable[Dependent], end: End) -> None:
    """Send the end of a job to these dependents."""
    for dependent in dependents:
        _send(unit, dependent, end)
    _deliver_ends(unit)


def refused(unit: Unit, job: NewJob, failure: Failure) -> None:
    """Notify the dependents of a job that was refused."""
    assert job.extras is not None
    tell(unit, job.extras.dependents or (), End(unit.queue.name, job.id, "removed", None, failure))


def removed(unit: Unit, record: Record) -> None:
    """Notify the dependents of a failed or cancelled job that is deleted, so that none waits for its retry."""
    tell(unit, _dependents(unit, record), End(unit.queue.name, record.id, "removed", None, None))


def _dependents(unit: Unit, record: Record) -> list[Dependent]:
    extras = record.extras
    dependents = list(extras.dependents or ())
    if extras.has_later_dependents:
        rows = unit.sql.execute(_sql["later_dependents"], (unit.queue.key, record.id))
        dependents += (Dependent(*row) for row in rows)
    return dependents


def _end(unit: Unit, record: Record) -> End:
    failure = unpack_failure(record.failure) if record.state == FAILED else None
    shown = failure and Failure(failure.type, failure.message)
    result = (record.result or b"") if record.state == COMPLETED else None
    state = cast("DependencyState", record.state if record.state in FINISHED else "removed")
    return End(unit.queue.name, record.id, state, result, shown)


def _send(unit: Unit, dependent: Dependent, end: End) -> None:
    if dependent.queue == unit.queue.name:
        unit.ends.append((dependent, end))
    else:
        unit.outbox.append((dependent.queue, Done(dependent, end)))


def _deliver_ends(unit: Unit) -> None:
    """Deliver the ends in a loop, not recursively: a chain may be longer than the stack is deep."""
    if unit.is_delivering:
        return
    unit.is_delivering = True
    while unit.ends:
        dependent, end = unit.ends.popleft()
        done(unit, dependent, end)
    unit.is_delivering = False


def done(unit: Unit, dependent: Dependent, end: End) -> None:
    """Handle the end of a dependency of a job of this queue."""
    where = (unit.queue.key, dependent.id)
    row = unit.sql.execute(_sql["edge"], (*where, end.queue, end.id)).fetchone()
    if row is None or row[0] != dependent.flow or _counts(row[3], row[4]):
        return
    _, key, number, policy, _ = row
    failure = pack_failure(end.failure) if end.failure else None
    unit.sql.execute(_sql["set_end"], (end.state, end.result, failure, key))
    if not _counts(policy, end.state):
        return
    pending = unit.sql.execute(_sql["count_one"], where).fetchone()[0]
    failed = end.state != "completed" and policy != "ignore"
    if failed:
        unit.sql.execute(_sql["mark_failed"], (number, *where))
    if unit.linking_id == dependent.id or (pending and not failed):
        return
    record = unit.find([dependent.id]).get(dependent.id)
    if failed and record is not None:
        conclude(unit, record)
    elif record is not None and record.state == BLOCKED and record.blocked_by == CHILDREN:
        _unblock(unit, record)


def _counts(policy: str, state: DependencyState) -> bool:
    if policy == "wait":
        return state in ("completed", "removed")
    return state != "pending"


def _unblock(unit: Unit, record: Record) -> None:
    record.blocked_by = ""
    if record.run_at > unit.now_ms:
        schedule(unit, record, record.run_at)
    else:
        enter_waiting(unit, record)
    unit.note(EventType.UNBLOCKED, record, run=record.runs)
    unit.touch(record)


def _is_there(unit: Unit, record: Record) -> bool:
    return record.state != REMOVED and not unit.is_over(record)


def forget(unit: Unit, ids: Sequence[str]) -> None:
    """Delete the dependencies and dependents of these ids."""
    where = (unit.queue.key, _json.encode(ids).decode())
    for table in ("parents", "dependencies", "dependents"):
        unit.sql.execute(_sql[f"forget_{table}"], where)


def obliterated(unit: Unit) -> None:
    """Notify dependents in other queues that all jobs of this queue are gone. Those in this queue are deleted too."""
    # The dependents' rows are enough: no record of this queue has to be read.
    here = (unit.namespace, unit.queue.name, unit.queue.key)
    for queue, parent, flow, id_ in unit.sql.execute(_sql["waiting_elsewhere"], here).fetchall():
        _send(unit, Dependent(queue, parent, flow), End(unit.queue.name, id_, "removed", None, None))
    for table in ("parents", "dependencies", "dependents"):
        unit.sql.execute(_sql[f"obliterate_{table}"], (unit.queue.key,))


def dependencies(view: View, id: str, *, start: int = 0, limit: int = 1000) -> list[DependencyRecord]:
    """Return the dependencies of a job, in order."""
    rows = view.sql.execute(_sql["page"], (view.queue.key, id, start, limit))
    return [
        DependencyRecord(on_queue, on_id, policy, state, result, unpack_failure(failure))
        for on_queue, on_id, policy, state, result, failure in rows
    ]
