"""Dedup keys: which job stands for a key, and until when."""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

from penstock.core.dedup import Dedup
from penstock.core.lifecycle import EventType
from penstock.core.outcome import Failure
from penstock.storage.sqlite.queuerow import find_queue
from penstock.storage.sqlite.records import ACTIVE, CANCELLED, COMPLETED, FAILED, Record, pack_failure
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.transitions import finish
from penstock.storage.sqlite.unit import Step

_CANCELLED = EventType.CANCELLED.value
_FINISHED = (COMPLETED, FAILED, CANCELLED)

_sql = statements("dedup")


class Earlier(NamedTuple):
    """What stands for a key: a life of an id, and its record if that is still there."""

    id: str
    incarnation: int
    record: Record | None


def meet(step: Step, dedup: Dedup, *, id_: str) -> Earlier | None:
    """A job is about to be queued under a key: what it is a duplicate of, if anything.

    A debounced one ends the earlier one if that has not begun.
    """
    found = step.sql.execute(_sql["find"], (step.queue.key, dedup.key)).fetchone()
    if found is None or 0 < found[2] <= step.now_ms:
        return None
    earlier = _earlier(step, *found[:2])
    if dedup.mode == "throttle":
        return earlier
    if earlier.record is None or earlier.record.state in _FINISHED:
        return None
    if dedup.mode == "simple":
        return earlier
    if earlier.record.state != ACTIVE:
        _replace(step, earlier.record, id_)
    return None


def _earlier(step: Step, id_: str, incarnation: int) -> Earlier:
    record = step.find([id_]).get(id_)
    is_there = record and record.incarnation == incarnation and not step.is_over(record)
    return Earlier(id_, incarnation, record if is_there else None)


def _replace(step: Step, record: Record, id_: str) -> None:
    failure = Failure("Replaced", f"by job {id_}")
    record.failure = pack_failure(failure)
    finish(step, record, CANCELLED, _CANCELLED, run=record.runs, et=failure.type, em=failure.message)
    step.touch(record)


def note(step: Step, dedup: Dedup, record: Record) -> None:
    """The job was queued under the key."""
    lasts = dedup.mode != "debounce" and dedup.ttl_ms > 0
    expires_at = step.now_ms + dedup.ttl_ms if lasts else 0
    step.sql.execute(_sql["put"], (step.queue.key, dedup.key, record.id, record.incarnation, expires_at))


def ended(step: Step, key: str, record: Record) -> None:
    """The job has ended: the key is free, unless another job stands for it by now."""
    step.sql.execute(_sql["end"], (step.queue.key, key, record.incarnation))


def forget(step: Step, *, limit: int) -> int:
    """Forget records whose time has passed; how many there were, at most ``limit``."""
    return step.sql.execute(_sql["forget"], (step.queue.key, step.now_ms, limit)).rowcount


def clear_dedup(step: Step, key: str) -> bool:
    """Forget the record of a key."""
    found = step.sql.execute(_sql["find"], (step.queue.key, key)).fetchone()
    step.sql.execute(_sql["clear"], (step.queue.key, key))
    return found is not None and not 0 < found[2] <= step.now_ms


def dedup_of(sql: sqlite3.Connection, namespace: str, queue: str, key: str) -> str | None:
    """The id of the job that stands for a key."""
    row = find_queue(sql, namespace, queue)
    found = None if row is None else sql.execute(_sql["find"], (row.key, key)).fetchone()
    if row is None or found is None or 0 < found[2] <= row.clock():
        return None
    return str(found[0])
