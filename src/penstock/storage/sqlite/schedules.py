"""Jobs that are due at an instant of the wall clock. docs/verbs.md has the rules under *Time*.

A job has the queue time at which it is due, like every other. The table ``instants`` has the instant that stands for,
so that the job can follow the clock when that is corrected. A row counts only while its job still has that queue time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from penstock.core.job import NewJob
from penstock.storage.sqlite.clock import wall_ms
from penstock.storage.sqlite.enqueue import enqueue
from penstock.storage.sqlite.queuerow import USES_INSTANTS, find_queue
from penstock.storage.sqlite.records import Record
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.unit import Step
from penstock.storage.values import DueScheduler, Fired, NewScheduler, Scheduler, SchedulerAnswer, Schedulers

_sql = statements("instants")
_Row = tuple[str, int, int]


def follow(step: Step, *, limit: int) -> None:
    """Compute the queue time of about ``limit`` jobs again, after a correction of the clock."""
    rows, next_at = _to_follow(step, limit)
    records = step.find(id_ for id_, _, _ in rows)
    moved: list[Record] = []
    stale: list[str] = []
    for id_, wall_at, run_at in rows:
        record = records.get(id_)
        if record is None or record.run_at != run_at or not record.is_timed:
            stale.append(id_)
        elif (new := step.moment.when(wall_at)) != run_at:
            record.run_at, record.wall_at = new, wall_at
            moved.append(record)
    step.save(moved)
    step.forget_instants(stale)
    step.set_moment(step.moment.followed(next_at))


def _to_follow(step: Step, limit: int) -> tuple[list[_Row], int]:
    """Return the next rows, all of an instant or none, and the instant to go on from (0: there are no more)."""
    queue, first = step.queue.key, step.moment.marks.follow
    rows: list[_Row] = step.sql.execute(_sql["to_follow"], (queue, first, limit)).fetchall()
    if len(rows) < limit:
        return rows, 0
    last = rows[-1][1]
    if rows[0][1] == last:
        return step.sql.execute(_sql["at"], (queue, last)).fetchall(), last + 1
    return [row for row in rows if row[1] < last], last


def tidy(step: Step) -> None:
    """Notice that no job goes by the wall clock any more."""
    if step.queue.uses & USES_INSTANTS and not step.sql.execute(_sql["any"], (step.queue.key,)).fetchone():
        step.queue.uses &= ~USES_INSTANTS


# Schedulers: what stands between a slot and its job. Which slots there are, the client computes.


_NOT_AFTER_COMPLETION = -1
_NO_END = 2**53

_schedulers_sql = statements("schedulers")


class _SchedulerRow(msgspec.Struct):
    """In the order of the columns."""

    name: str
    spec: bytes
    next_at: int
    paused: int
    fired: int
    limit: int
    end_at: int
    repeat_ms: int
    last_id: str
    awaits: int

    def is_due(self, now_ms: int) -> bool:
        return not self.paused and 0 < self.next_at <= now_ms

    def go_on(self, now_ms: int) -> None:
        """The job it waited for has ended."""
        self.awaits = 0
        self.next_at = now_ms + self.repeat_ms
        if 0 < self.end_at < self.next_at:
            self.next_at = 0


def _find(step: Step, name: str) -> _SchedulerRow | None:
    row = step.sql.execute(_schedulers_sql["get"], (step.queue.key, name)).fetchone()
    return None if row is None else _SchedulerRow(*row)


def _save(step: Step, row: _SchedulerRow) -> None:
    step.sql.execute(_schedulers_sql["put"], (step.queue.key, *msgspec.structs.astuple(row)))


def put_scheduler(step: Step, new: NewScheduler) -> SchedulerAnswer:
    """Create it, or change the one of that name."""
    step.queue.used = 1
    row = _find(step, new.name)
    if row is not None and row.spec == new.spec:
        return "unchanged"
    answer: SchedulerAnswer = "created" if row is None else "updated"
    if row is None:
        row = _SchedulerRow(new.name, new.spec, new.next_ms, 0, 0, 0, 0, 0, "", 0)
    elif not new.keep_next:
        row.next_at, row.awaits = new.next_ms, 0
    row.spec, row.limit, row.end_at = new.spec, new.limit, new.end_ms
    row.repeat_ms = _NOT_AFTER_COMPLETION if new.repeat_ms is None else new.repeat_ms
    _save(step, row)
    return answer


def pause_scheduler(step: Step, name: str) -> bool:
    """No slot is due from now on."""
    row = _find(step, name)
    if row is None:
        return False
    row.paused = 1
    _save(step, row)
    return True


def resume_scheduler(step: Step, name: str, *, next_ms: int | None) -> bool:
    """The end of a pause; a slot that passed meanwhile gives way."""
    row = _find(step, name)
    if row is None:
        return False
    row.paused = 0
    if next_ms is not None and row.is_due(step.moment.wall_ms):
        row.next_at = next_ms
    _save(step, row)
    return True


def move_slot(step: Step, name: str, *, slot_ms: int, next_ms: int) -> bool:
    """Make ``next_ms`` the next slot, if that still is ``slot_ms``."""
    row = _find(step, name)
    if row is None or row.next_at != slot_ms:
        return False
    row.next_at = next_ms
    _save(step, row)
    return True


def remove_scheduler(step: Step, name: str) -> bool:
    """Forget it."""
    return step.sql.execute(_schedulers_sql["remove"], (step.queue.key, name)).rowcount > 0


def fire(step: Step, name: str, *, slot_ms: int, next_ms: int, job: NewJob) -> Fired:
    """Put in the job of the slot, if that is still to be fired."""
    row = _find(step, name)
    if row is None or not row.is_due(step.moment.wall_ms) or row.next_at != slot_ms:
        return Fired(False)
    [answer] = enqueue(step, [job])
    row.fired += 1
    row.last_id, row.next_at = answer.id, next_ms
    if row.repeat_ms != _NOT_AFTER_COMPLETION:
        row.next_at, row.awaits = 0, answer.incarnation
        if answer.status != "queued":
            row.go_on(step.moment.wall_ms)
    if row.limit and row.fired >= row.limit:
        row.next_at = row.awaits = 0
    _save(step, row)
    return Fired(True, answer)


def ended(step: Step, name: str, record: Record) -> None:
    """A job that its scheduler may wait for has ended."""
    row = _find(step, name)
    if row is not None and row.awaits == record.incarnation:
        row.go_on(step.moment.wall_ms)
        _save(step, row)


def last_ended(step: Step, id_: str) -> None:
    """The job of this id has ended: schedulers that wait for it go on."""
    for values in step.sql.execute(_schedulers_sql["awaiting"], (step.queue.key,)).fetchall():
        row = _SchedulerRow(*values)
        if row.last_id == id_:
            row.go_on(step.now_ms)
            _save(step, row)


def forget_jobs(step: Step) -> None:
    """All jobs are gone: none of them will tell that it has ended."""
    for values in step.sql.execute(_schedulers_sql["awaiting"], (step.queue.key,)).fetchall():
        row = _SchedulerRow(*values)
        row.go_on(step.moment.wall_ms)
        _save(step, row)


def due(step: Step, *, limit: int) -> tuple[DueScheduler, ...]:
    """Return those whose slot has come; after the clock was set back, all slots, which are to be computed again."""
    wall_ms = step.moment.wall_ms
    is_set_back = step.now_ms < step.moment.marks.recheck_until
    rows = step.sql.execute(
        _schedulers_sql["due"], (step.queue.key, _NO_END if is_set_back else wall_ms, limit)
    )
    return tuple(DueScheduler(name, next_at, wall_ms, spec) for name, next_at, spec in rows)


def is_awaiting(step: Step) -> bool:
    """Whether one awaits the end of a job."""
    return bool(step.sql.execute(_schedulers_sql["is_awaiting"], (step.queue.key,)).fetchone()[0])


def slot_wait_ms(step: Step) -> int | None:
    """The time to the first slot that is not due."""
    at = step.sql.execute(_schedulers_sql["next_slot"], (step.queue.key, step.moment.wall_ms)).fetchone()[0]
    return None if at is None else int(at) - step.moment.wall_ms


def schedulers(
    sql: sqlite3.Connection, namespace: str, queue: str, names: Sequence[str] | None
) -> Schedulers:
    """Those of these names, or all, by name."""
    row = find_queue(sql, namespace, queue)
    if row is None:
        return Schedulers(wall_ms(), [])
    wanted = None if names is None else set(names)
    rows = (_SchedulerRow(*values) for values in sql.execute(_schedulers_sql["all"], (row.key,)))
    found = [_shown(one) for one in rows if wanted is None or one.name in wanted]
    return Schedulers(row.moment().wall_ms, found)


def _shown(row: _SchedulerRow) -> Scheduler:
    return Scheduler(
        name=row.name,
        spec=row.spec,
        next_ms=row.next_at,
        paused=bool(row.paused),
        fired=row.fired,
        limit=row.limit,
        end_ms=row.end_at,
        repeat_ms=None if row.repeat_ms == _NOT_AFTER_COMPLETION else row.repeat_ms,
        last_id=row.last_id,
        awaiting=row.awaits > 0,
    )
