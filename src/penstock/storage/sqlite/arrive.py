"""The fast way through ``enqueue`` for what nearly every enqueue is: new jobs, to be run at once, without ties.

It binds half the columns of a whole record and asks none of the questions that other jobs raise, for the same result.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.job import Enqueued, NewJob
from penstock.core.lifecycle import EventType, State
from penstock.storage.sqlite.records import WAITING
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.step import Step

__all__ = ["queue_all"]

_ENQUEUED = EventType.ENQUEUED.value
_STATE = State.WAITING

_sql = statements("arrive")
_records_sql = statements("records")
_news_sql = statements("news")


def queue_all(step: Step, jobs: Sequence[NewJob]) -> list[Enqueued] | None:
    """Put these jobs in; ``None``, and nothing done, if one of them needs more thought."""
    for job in jobs:
        if job.annex is not None or job.dedup is not None or job.delay_ms or job.run_at_ms is not None:
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
