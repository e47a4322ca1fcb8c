"""Jobs that are due at an instant of the wall clock. docs/verbs.md has the rules under *Time*.

A job has the queue time at which it is due, like every other. The table ``instants`` has the instant that stands for,
so that the job can follow the clock when that is corrected. A row counts only while its job still has that queue time.
"""

from __future__ import annotations

from penstock.storage.sqlite.queuerow import USES_INSTANTS
from penstock.storage.sqlite.records import Record
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.step import Step

__all__ = ["follow", "tidy"]

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
