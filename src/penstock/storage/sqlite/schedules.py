"""Jobs that are due at a wall time, and schedulers. docs/verbs.md has the rules under *Time* and *Schedulers*.

Every job has a queue time at which it is due. The table ``instants`` has the wall time behind it, so that the job
can follow corrections of the clock. A row counts only while its job still has that queue time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.core.job import NewJob
from penstock.core.lifecycle import SchedulerAnswer
from penstock.storage.sqlite import statements
from penstock.storage.sqlite.enqueue import enqueue
from penstock.storage.sqlite.queuerow import USES_INSTANTS, View
from penstock.storage.sqlite.records import Record
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import DueScheduler, Fired, NewScheduler, Scheduler, Schedulers

_instants_sql = statements("instants")
_sql = statements("schedulers")
_Row = tuple[str, int, int]
_NOT_AFTER_COMPLETION = -1
_NO_END = 2**53


def follow(unit: Unit, *, limit: int) -> None:
    """After a correction of the clock, compute the queue time of about ``limit`` jobs again."""
    rows, next_at = _to_follow(unit, limit)
    records = unit.find(id_ for id_, _, _ in rows)
    moved: list[Record] = []
    stale: list[str] = []
    for id_, wall_at, run_at in rows:
        record = records.get(id_)
        if record is None or record.run_at != run_at or not record.is_timed:
            stale.append(id_)
        elif (new := unit.moment.when(wall_at)) != run_at:
            record.run_at, record.wall_at = new, wall_at
            moved.append(record)
    unit.save(moved)
    unit.forget_instants(stale)
    unit.set_moment(unit.moment.followed(next_at))


def _to_follow(unit: Unit, limit: int) -> tuple[list[_Row], int]:
    """Return the next rows, all rows of a wall time or none, and the time to continue from (0: the end)."""
    queue, first = unit.queue.key, unit.moment.marks.follow
    rows: list[_Row] = unit.sql.execute(_instants_sql["to_follow"], (queue, first, limit)).fetchall()
    if len(rows) < limit:
        return rows, 0
    last = rows[-1][1]
    if rows[0][1] == last:
        return unit.sql.execute(_instants_sql["at"], (queue, last)).fetchall(), last + 1
    return [row for row in rows if row[1] < last], last


def tidy(unit: Unit) -> None:
    """Clear the bit of jobs with a wall time if there are none left."""
    if (
        unit.queue.uses & USES_INSTANTS
        and not unit.sql.execute(_instants_sql["any"], (unit.queue.key,)).fetchone()
    ):
        unit.queue.uses &= ~USES_INSTANTS


# Schedulers. The client computes their slots; the engine fires each slot once.


class _SchedulerRow(msgspec.Struct):
    """A row, in the order of its columns."""

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
        """Count the next slot from now: the job that the scheduler waited for has ended."""
        self.awaits = 0
        self.next_at = now_ms + self.repeat_ms
        if 0 < self.end_at < self.next_at:
            self.next_at = 0


def _find(unit: Unit, name: str) -> _SchedulerRow | None:
    row = unit.sql.execute(_sql["get"], (unit.queue.key, name)).fetchone()
    return None if row is None else _SchedulerRow(*row)


def _save(unit: Unit, row: _SchedulerRow) -> None:
    unit.sql.execute(_sql["put"], (unit.queue.key, *msgspec.structs.astuple(row)))


def put_scheduler(unit: Unit, scheduler: NewScheduler) -> SchedulerAnswer:
    """Create the scheduler, or change the one of that name."""
    unit.queue.used = 1
    new = scheduler
    row = _find(unit, new.name)
    if row is not None and row.spec == new.spec:
        return "unchanged"
    answer: SchedulerAnswer = "created" if row is None else "updated"
    if row is None:
        row = _SchedulerRow(new.name, new.spec, new.next_ms, 0, 0, 0, 0, 0, "", 0)
    elif not new.keep_next:
        row.next_at, row.awaits = new.next_ms, 0
    row.spec, row.limit, row.end_at = new.spec, new.limit, new.end_ms
    row.repeat_ms = _NOT_AFTER_COMPLETION if new.repeat_ms is None else new.repeat_ms
    _save(unit, row)
    return answer


def pause_scheduler(unit: Unit, name: str) -> bool:
    """Stop firing slots."""
    row = _find(unit, name)
    if row is None:
        return False
    row.paused = 1
    _save(unit, row)
    return True


def resume_scheduler(unit: Unit, name: str, *, next_ms: int | None = None) -> bool:
    """End the pause. ``next_ms`` replaces a slot that has passed since."""
    row = _find(unit, name)
    if row is None:
        return False
    row.paused = 0
    if next_ms is not None and row.is_due(unit.moment.wall_ms):
        row.next_at = next_ms
    _save(unit, row)
    return True


def move_slot(unit: Unit, name: str, *, slot_ms: int, next_ms: int) -> bool:
    """Make ``next_ms`` the next slot, if that still is ``slot_ms``."""
    row = _find(unit, name)
    if row is None or row.next_at != slot_ms:
        return False
    row.next_at = next_ms
    _save(unit, row)
    return True


def remove_scheduler(unit: Unit, name: str) -> bool:
    """Forget the scheduler."""
    return unit.sql.execute(_sql["remove"], (unit.queue.key, name)).rowcount > 0


def fire(unit: Unit, name: str, *, slot_ms: int, next_ms: int, job: NewJob) -> Fired:
    """Enqueue the job of the slot, unless it was fired already."""
    row = _find(unit, name)
    if row is None or not row.is_due(unit.moment.wall_ms) or row.next_at != slot_ms:
        return Fired(False)
    [answer] = enqueue(unit, [job])
    row.fired += 1
    row.last_id, row.next_at = answer.id, next_ms
    if row.repeat_ms != _NOT_AFTER_COMPLETION:
        row.next_at, row.awaits = 0, answer.incarnation
        if answer.status != "queued":
            row.go_on(unit.moment.wall_ms)
    if row.limit and row.fired >= row.limit:
        row.next_at = row.awaits = 0
    _save(unit, row)
    return Fired(True, answer)


def ended(unit: Unit, name: str, record: Record) -> None:
    """Continue a scheduler that may wait for the end of this job."""
    row = _find(unit, name)
    if row is not None and row.awaits == record.incarnation:
        row.go_on(unit.moment.wall_ms)
        _save(unit, row)


def last_ended(unit: Unit, id_: str) -> None:
    """Continue the schedulers that wait for the end of the job of this id."""
    for values in unit.sql.execute(_sql["awaiting"], (unit.queue.key,)).fetchall():
        row = _SchedulerRow(*values)
        if row.last_id == id_:
            row.go_on(unit.now_ms)
            _save(unit, row)


def forget_jobs(unit: Unit) -> None:
    """Continue all waiting schedulers, because all jobs are gone."""
    for values in unit.sql.execute(_sql["awaiting"], (unit.queue.key,)).fetchall():
        row = _SchedulerRow(*values)
        row.go_on(unit.moment.wall_ms)
        _save(unit, row)


def due(unit: Unit, *, limit: int) -> tuple[DueScheduler, ...]:
    """Return the schedulers that are due. After the clock was set back, return all, so that the caller computes their
    slots again."""
    wall_ms = unit.moment.wall_ms
    is_set_back = unit.now_ms < unit.moment.marks.recheck_until
    rows = unit.sql.execute(_sql["due"], (unit.queue.key, _NO_END if is_set_back else wall_ms, limit))
    return tuple(DueScheduler(name, next_at, wall_ms, spec) for name, next_at, spec in rows)


def is_awaiting(unit: Unit) -> bool:
    """Return whether a scheduler waits for the end of a job."""
    return bool(unit.sql.execute(_sql["is_awaiting"], (unit.queue.key,)).fetchone()[0])


def slot_wait_ms(unit: Unit) -> int | None:
    """Return the time until the first slot that is not due."""
    at = unit.sql.execute(_sql["next_slot"], (unit.queue.key, unit.moment.wall_ms)).fetchone()[0]
    return None if at is None else int(at) - unit.moment.wall_ms


def schedulers(view: View, names: Sequence[str] | None = None) -> Schedulers:
    """Return the schedulers of these names, or all, by name."""
    rows = [_SchedulerRow(*values) for values in view.sql.execute(_sql["all"], (view.queue.key,))]
    shown = [_shown(row) for row in rows if names is None or row.name in names]
    return Schedulers(view.queue.moment().wall_ms, shown)


def _shown(row: _SchedulerRow) -> Scheduler:
    repeat_ms = None if row.repeat_ms == _NOT_AFTER_COMPLETION else row.repeat_ms
    return Scheduler(
        name=row.name, spec=row.spec, next_ms=row.next_at, paused=bool(row.paused), fired=row.fired,
        limit=row.limit, end_ms=row.end_at, repeat_ms=repeat_ms, last_id=row.last_id, awaiting=row.awaits > 0,
    )  # fmt: skip
