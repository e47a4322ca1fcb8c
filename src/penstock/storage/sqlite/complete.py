"""The fast way through ``settle`` for what nearly every settle is: all completed, all held, nothing to rerun, no ties
but perhaps to groups.

It reads and writes half the columns of a whole record, for the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.core.annex import EMPTY_ANNEX
from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import Complete
from penstock.storage.sqlite import groups
from penstock.storage.sqlite.records import ACTIVE, COMPLETED, as_annex, unpack_options
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.step import Step
from penstock.storage.values import Finished, Settled, Settlement

__all__ = ["complete_all"]

_COMPLETED = EventType.COMPLETED.value
_ANSWER = Settled(True, State.COMPLETED)

_sql = statements("complete")
_json = msgspec.json.Encoder()


class _Held(msgspec.Struct, gc=False):
    key: int
    id: str
    state: str
    token: int
    needs_more: int
    incarnation: int
    runs: int
    worker: str
    claimed_at: int
    enqueued_at: int
    run_id: str
    packed_options: bytes
    packed_annex: bytes | None


def complete_all(step: Step, settlements: Sequence[Settlement]) -> list[Settled] | None:
    """Complete these jobs; ``None``, and nothing done, if one of them needs more thought."""
    results = [
        one.outcome.result
        for one in settlements
        if isinstance(one.outcome, Complete) and one.outcome.ttl_ms is None
    ]
    if not results or len(results) != len(settlements):
        return None
    ids = [one.id for one in settlements]
    rows = step.sql.execute(_sql["held"], (_json.encode(ids).decode(), step.queue.key))
    jobs = [_Held(*row) for row in rows]
    if len(set(ids)) != len(jobs) or not all(map(_is_plain, jobs, settlements)):
        return None
    keys = _groups_of(jobs)
    if keys is None:
        return None
    _write(step, jobs, results)
    _note(step, jobs, results, keys)
    for key in keys:
        groups.end(step, key)
    return [_ANSWER] * len(jobs)


def _is_plain(job: _Held, settlement: Settlement) -> bool:
    return (
        job.id == settlement.id
        and job.token == settlement.token
        and job.state == ACTIVE
        and not job.needs_more
        and unpack_options(job.packed_options).result_ttl_ms > 0
    )


def _groups_of(jobs: list[_Held]) -> list[str] | None:
    """The group of each; an empty list if no job has one, ``None`` if some have, or if there are other ties."""
    packed = [job.packed_annex for job in jobs]
    if not any(packed):
        return []
    annexes = [as_annex(one) or EMPTY_ANNEX for one in packed]
    if any(not annex.group or annex.binds_beyond_group for annex in annexes):
        return None
    return [annex.group for annex in annexes]


def _write(step: Step, jobs: list[_Held], results: list[bytes]) -> None:
    now_ms = step.now_ms
    awaited = step.awaited([job.key for job in jobs])
    rows = []
    for job, result in zip(jobs, results, strict=True):
        kept_until = now_ms + unpack_options(job.packed_options).result_ttl_ms
        rows.append((now_ms, kept_until, result, job.key))
        if job.key in awaited:
            step.tell_of(job.key, Finished(job.id, job.incarnation, State.COMPLETED, result))
    step.sql.executemany(_sql["complete"], rows)
    step.queue.move(ACTIVE, COMPLETED, len(jobs))
    step.save(())


def _note(step: Step, jobs: list[_Held], results: list[bytes], keys: list[str]) -> None:
    now_ms = step.now_ms
    rows: list[tuple[Any, ...]] = []
    for job, result in zip(jobs, results, strict=True):
        options = unpack_options(job.packed_options)
        rows.append(
            (
                now_ms,
                job.id,
                job.incarnation,
                job.enqueued_at,
                job.run_id,
                options.task,
                options.version,
                COMPLETED,
                job.runs,
                job.token,
                job.worker,
                now_ms - job.claimed_at,
                len(result),
            )
        )
    columns: tuple[str, ...] = ("run", "tok", "w", "ms", "size")
    if keys:
        columns = (*columns, "grp")
        rows = [(*row, key) for row, key in zip(rows, keys, strict=True)]
    step.notes.add_rows(_COMPLETED, columns, rows)
