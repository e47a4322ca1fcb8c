"""Durable steps: ``record_steps``, ``steps`` and ``reset_step``, and the records that a lease carries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from penstock.core.job import EMPTY_EXTRAS, pack_extras
from penstock.core.lifecycle import CopyStepsAnswer, EventType, ResetAnswer, StepAnswer
from penstock.core.step import (
    FINAL,
    SENT_RESULT,
    SENT_STEPS,
    NewStep,
    Step,
    StepBody,
    event_data,
    pack_body,
    unpack_body,
)
from penstock.storage.sqlite import statements
from penstock.storage.sqlite.queuerow import View
from penstock.storage.sqlite.records import ACTIVE, UNREADABLE, Record, as_extras, unpack_options
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import unreadable_step

_RECORDED: Final = EventType.RECORDED.value
_sql = statements("steps")
_json: Final = msgspec.json.Encoder()

_Place = tuple[int, str]
"""The key of a job and the name of a step."""


class _Job(msgspec.Struct, gc=False):
    """The fields of a job that recording a step needs. Reading whole records would take longer than all the rest."""

    key: int
    id: str
    state: str
    token: int
    incarnation: int
    enqueued_at: int
    run_id: str
    packed_options: bytes
    runs: int
    worker: str
    packed_extras: bytes | None


def record_steps(unit: Unit, steps: Sequence[NewStep], *, lease_ms: int = 0) -> list[StepAnswer]:
    """Record steps of jobs whose lease is held, each at most once, and extend the leases."""
    ids = _json.encode(list({step.id for step in steps})).decode()
    jobs = {
        job.id: job for job in (_Job(*row) for row in unit.sql.execute(_sql["held"], (ids, unit.queue.key)))
    }
    held = [_held(jobs.get(step.id), step) for step in steps]
    known = _known(unit, [(job.key, step.name) for job, step in zip(held, steps, strict=True) if job])
    rows: list[tuple[Any, ...]] = []
    noted: list[tuple[_Job, NewStep]] = []
    answers: list[StepAnswer] = []
    for job, step in zip(held, steps, strict=True):
        if job is None:
            answers.append("lost")
            continue
        number, status = known.get((job.key, step.name), (0, ""))
        is_unused = step.status == "unused"
        if (is_unused and not number) or (not is_unused and status in FINAL and not step.replaces):
            answers.append("known")
            continue
        if not is_unused:
            number = number or unit.draw()
            known[job.key, step.name] = number, step.status
            rows.append(_row(unit, job, step, number))
        noted.append((job, step))
        answers.append("recorded")
    unit.sql.executemany(_sql["record"], rows)
    _note_all(unit, noted)
    changed = {job.key: job for job in held if job}
    _mark_and_extend(unit, changed.values(), stepped={row[0] for row in rows}, lease_ms=lease_ms)
    return answers


def _held(job: _Job | None, step: NewStep) -> _Job | None:
    return job if job is not None and job.state == ACTIVE and job.token == step.token else None


def _known(unit: Unit, places: list[_Place]) -> dict[_Place, tuple[int, str]]:
    """Return the number and status of the steps that have a record."""
    rows = unit.sql.execute(_sql["known"], (_json.encode(places).decode(),))
    return {(job, name): (number, status) for job, name, number, status in rows}


def _row(unit: Unit, job: _Job, step: NewStep, number: int) -> tuple[Any, ...]:
    until_ms = unit.now_ms + step.delay_ms if step.delay_ms else 0
    large = step.result if len(step.result) > SENT_RESULT else None
    body = pack_body(StepBody.of(step))
    return (job.key, step.name, number, step.status, unit.now_ms, until_ms, body, large)


def _note_all(unit: Unit, noted: list[tuple[_Job, NewStep]]) -> None:
    rows: list[tuple[Any, ...]] = []
    for job, step in noted:
        options, failure = unpack_options(job.packed_options), step.failure
        extras = as_extras(job.packed_extras)
        rows.append(
            (
                unit.now_ms, job.id, job.incarnation, job.enqueued_at, job.run_id, options.task, options.version,
                ACTIVE, job.runs, job.token, job.worker, step.run_ms, len(step.result), event_data(step),
                "" if failure is None else failure.type, "" if failure is None else failure.message,
                extras.group if extras else "",
            )
        )  # fmt: skip
    if rows:
        unit.notes.add_rows(_RECORDED, ("run", "tok", "w", "ms", "size", "data", "et", "em", "grp"), rows)


def _mark_and_extend(unit: Unit, jobs: Iterable[_Job], *, stepped: Set[int], lease_ms: int) -> None:
    """Extend the leases of the jobs, and note in the extras of those with the keys ``stepped`` that they have steps."""
    until_ms = unit.now_ms + lease_ms if lease_ms else 0
    rows = []
    for job in jobs:
        extras = as_extras(job.packed_extras) or EMPTY_EXTRAS
        is_new = job.key in stepped and not extras.has_steps
        packed = pack_extras(replace(extras, has_steps=True)) if is_new else None
        if lease_ms or packed:
            rows.append((until_ms, packed, job.key))
    unit.sql.executemany(_sql["mark"], rows)


def sent_steps(unit: Unit, key: int) -> tuple[Step, ...] | None:
    """Return the steps that a lease carries; ``None`` if there are none, or too many."""
    rows = unit.sql.execute(_sql["of_job"], (key, SENT_STEPS + 1)).fetchall()
    return tuple(_steps(rows)) if 0 < len(rows) <= SENT_STEPS else None


def steps(view: View, id: str, *, names: Sequence[str] | None = None) -> list[Step]:
    """Return the recorded steps of a job, or those of ``names``, with their large results."""
    queue = view.queue.key
    try:
        if names is None:
            return list(_steps(view.sql.execute(_sql["all"], (queue, id))))
        found = list(_steps(view.sql.execute(_sql["named"], (_json.encode(names).decode(), queue, id))))
    except UNREADABLE:
        raise unreadable_step(view.name, id) from None
    if any(step.result is None for step in found):
        raise unreadable_step(view.name, id)
    return found


def _steps(rows: Iterable[tuple[Any, ...]]) -> Iterable[Step]:
    for name, number, status, at_ms, until_ms, body, *large in rows:
        if not name.isascii():
            name.encode()  # Raises for a name that was not UTF-8.
        yield unpack_body(body).step(
            name,
            status=status,
            number=number,
            at_ms=at_ms,
            until_ms=until_ms,
            large=large[0] if large else None,
        )


def reset_step(unit: Unit, id: str, name: str) -> ResetAnswer:
    """Forget a step of a job that is not active."""
    job = unit.find([id]).get(id)
    if job is None:
        return "not_found"
    if job.state == ACTIVE:
        return "active"
    if not unit.sql.execute(_sql["reset"], (job.key, name)).rowcount:
        return "unknown_step"
    unit.note(EventType.CHANGED, job, run=job.runs, data=step_data(name))
    unit.save([])
    return "reset"


def copy_steps(unit: Unit, id: str, to: str, *, before: str) -> CopyStepsAnswer:
    """Copy the steps that were recorded before another to a job that is not active."""
    jobs = unit.find([id, to])
    source, target = jobs.get(id), jobs.get(to)
    if source is None or target is None:
        return "not_found"
    if target.state == ACTIVE:
        return "active"
    (first,) = unit.sql.execute(_sql["first_of"], {"job": source.key, "name": before}).fetchone()
    if first is None:
        return "unknown_step"
    rows = unit.sql.execute(_sql["earlier"], (source.key, first)).fetchall()
    _check(unit.queue.name, id, rows)
    unit.sql.executemany(
        _sql["copy"],
        [
            (target.key, name, number, *rest)
            for number, (name, *rest) in zip(unit.draw_many(len(rows)), rows, strict=True)
        ],
    )
    if rows:
        target.extras = replace(target.extras, has_steps=True)
    data = _json.encode({"steps": len(rows), "of": id}).decode()
    unit.note(EventType.CHANGED, target, run=target.runs, data=data)
    unit.save([target])
    return "copied"


def _check(queue: str, id: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Raise ``StorageDamaged`` if a step that is to be copied cannot be read: without it, it would run again."""
    try:
        steps = list(_steps((name, 0, *rest) for name, *rest in rows))
    except UNREADABLE:
        raise unreadable_step(queue, id) from None
    if any(step.result is None for step in steps):
        raise unreadable_step(queue, id)


def step_data(name: str) -> str:
    """Return the data of an event about a step."""
    return _json.encode({"step": name}).decode()


def step_under_way(unit: Unit, job: Record) -> str:
    """Return the last step that the current run has started and not ended, if it has said so; "" otherwise."""
    if job.packed_extras is None or not job.extras.has_steps:
        return ""
    row = unit.sql.execute(_sql["under_way"], (job.key, job.claimed_at)).fetchone()
    return str(row[0]) if row else ""


def forgive(unit: Unit, job: Record) -> None:
    """Forget the steps that have not completed, because the job is retried."""
    if job.packed_extras is not None and job.extras.has_steps:
        unit.sql.execute(_sql["forgive"], (job.key,))
