"""Holds: named consumers that keep finished jobs until they have fetched them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from penstock.errors import InvalidOption
from penstock.storage.sqlite.queuerow import QueueRow, find_queue
from penstock.storage.sqlite.records import CANCELLED, COMPLETED, FAILED, Record, as_job
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.unit import Step
from penstock.storage.values import HoldAnswer, JobPage, ReleaseAnswer

_FINISHED: Final = (COMPLETED, FAILED, CANCELLED)

_sql = statements("holds")
_cursors = msgspec.json.Decoder(tuple[int, str])


def hold(step: Step, consumer: str, ids: Sequence[str], *, ttl_ms: int) -> list[HoldAnswer]:
    """Keep these jobs for a consumer, once they have ended."""
    known = step.find(ids)
    answers: list[HoldAnswer] = []
    for id_ in ids:
        record = known.get(id_)
        if record is None or step.is_over(record):
            answers.append("not_found")
            continue
        since_ms = step.now_ms - record.finished_at if record.state in _FINISHED else 0
        _set(record, {**(record.extras.holds or {}), consumer: ttl_ms + since_ms})
        step.touch(record)
        answers.append("held")
    step.save(())
    return answers


def release(step: Step, consumer: str, ids: Sequence[str]) -> list[ReleaseAnswer]:
    """Take back the holds of a consumer."""
    known = step.find(ids)
    answers: list[ReleaseAnswer] = []
    for id_ in ids:
        record = known.get(id_)
        if record is None or step.is_over(record):
            answers.append("not_found")
        elif consumer not in (record.extras.holds or {}):
            answers.append("not_held")
        else:
            _set(record, {name: ms for name, ms in (record.extras.holds or {}).items() if name != consumer})
            step.touch(record)
            answers.append("released")
    step.save(())
    return answers


def lapse(step: Step, *, limit: int) -> None:
    """Nobody fetched these jobs in time: ordinary retention applies."""
    abandoned = step.adopt(
        step.sql.execute(_sql["lapsed"], (step.queue.key, step.now_ms - step.moment.hole[0], limit))
    )
    for record in abandoned:
        _set(record, {})
    step.save(abandoned)


def _set(record: Record, holds: dict[str, int]) -> None:
    record.extras = replace(record.extras, holds=holds or None)
    if record.state in _FINISHED:
        record.keep()


def index(step: Step, record: Record) -> None:
    """Have the holds of a finished record, and no others, found by their consumers. For ``Step.save``."""
    holds = (record.extras.holds or {}) if record.binds and record.state in _FINISHED else {}
    if record.held_until:
        step.sql.execute(_sql["forget"], (record.key,))
        _count(step.queue, record.was, -1)
    if holds:
        rows = [(step.queue.key, name, record.finished_at, record.id, record.key) for name in holds]
        step.sql.executemany(_sql["add"], rows)
        _count(step.queue, record.state, 1)
    record.held_until = record.finished_at + max(holds.values()) if holds else 0


def _count(queue: QueueRow, state: str, by: int) -> None:
    if state == COMPLETED:
        queue.held_completed += by
    elif state == FAILED:
        queue.held_failed += by


def held(
    sql: sqlite3.Connection, namespace: str, queue: str, consumer: str, *, cursor: str, limit: int
) -> JobPage:
    """A page of the finished jobs that are held for a consumer."""
    row = find_queue(sql, namespace, queue)
    if row is None:
        return JobPage([])
    place = _place(cursor) if cursor else (-1, "")
    rows = sql.execute(_sql["held"], (row.key, consumer, *place, limit + 1)).fetchall()
    jobs = [as_job(Record(*rest), payload, queue=queue) for _, payload, *rest in rows[:limit]]
    if len(rows) <= limit:
        return JobPage(jobs)
    return JobPage(jobs, msgspec.json.encode((rows[limit - 1][0], jobs[-1].id)).decode())


def _place(cursor: str) -> tuple[int, str]:
    try:
        return _cursors.decode(cursor)
    except msgspec.DecodeError as error:
        raise InvalidOption(
            f"{cursor!r} is not a valid cursor: {error}. Use one that held returned."
        ) from error
