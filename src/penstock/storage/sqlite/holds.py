"""Holds: named consumers that keep finished jobs until they have fetched them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from penstock.core.lifecycle import HoldAnswer, ReleaseAnswer
from penstock.storage.sqlite import statements
from penstock.storage.sqlite.job_verbs import each
from penstock.storage.sqlite.queries import read_cursor
from penstock.storage.sqlite.queuerow import QueueRow, View
from penstock.storage.sqlite.records import COMPLETED, FAILED, FINISHED, Record, as_job
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import JobPage

_sql = statements("holds")
_cursors = msgspec.json.Decoder(tuple[int, str])


def hold(unit: Unit, consumer: str, ids: Sequence[str], *, ttl_ms: int) -> list[HoldAnswer]:
    """Keep these jobs for a consumer after they have ended."""

    def act(unit: Unit, record: Record) -> HoldAnswer:
        if unit.is_over(record):
            return "not_found"
        since_ms = unit.now_ms - record.finished_at if record.state in FINISHED else 0
        _set(record, {**(record.extras.holds or {}), consumer: ttl_ms + since_ms})
        return "held"

    return each(unit, ids, act, "not_found", changed=("held",))


def release(unit: Unit, consumer: str, ids: Sequence[str]) -> list[ReleaseAnswer]:
    """End the holds of a consumer."""

    def act(unit: Unit, record: Record) -> ReleaseAnswer:
        if unit.is_over(record):
            return "not_found"
        holds = record.extras.holds or {}
        if consumer not in holds:
            return "not_held"
        _set(record, {name: ms for name, ms in holds.items() if name != consumer})
        return "released"

    return each(unit, ids, act, "not_found", changed=("released",))


def lapse(unit: Unit, *, limit: int) -> None:
    """End holds that were not released in time: normal retention applies."""
    expired = unit.adopt(
        unit.sql.execute(_sql["lapsed"], (unit.queue.key, unit.now_ms - unit.moment.lag[0], limit))
    )
    for record in expired:
        _set(record, {})
    unit.save(expired)


def _set(record: Record, holds: dict[str, int]) -> None:
    record.extras = replace(record.extras, holds=holds or None)
    if record.state in FINISHED:
        record.keep()


def index(unit: Unit, record: Record) -> None:
    """Update the index of holds by consumer for a record that ``Unit.save`` is about to write."""
    holds = (record.extras.holds or {}) if record.has_links and record.state in FINISHED else {}
    if record.held_until:
        unit.sql.execute(_sql["forget"], (record.key,))
        _count(unit.queue, record.was, -1)
    if holds:
        rows = [(unit.queue.key, name, record.finished_at, record.id, record.key) for name in holds]
        unit.sql.executemany(_sql["add"], rows)
        _count(unit.queue, record.state, 1)
    record.held_until = record.finished_at + max(holds.values()) if holds else 0


def _count(queue: QueueRow, state: str, by: int) -> None:
    if state == COMPLETED:
        queue.held_completed += by
    elif state == FAILED:
        queue.held_failed += by


def held(view: View, consumer: str, *, cursor: str = "", limit: int = 100) -> JobPage:
    """Return a page of the finished jobs that a consumer holds."""
    place = read_cursor(cursor, _cursors) if cursor else (-1, "")
    rows = view.sql.execute(_sql["held"], (view.queue.key, consumer, *place, limit + 1)).fetchall()
    jobs = [as_job(Record(*rest), payload, queue=view.name) for _, payload, *rest in rows[:limit]]
    if len(rows) <= limit:
        return JobPage(jobs)
    return JobPage(jobs, msgspec.json.encode((rows[limit - 1][0], jobs[-1].id)).decode())
