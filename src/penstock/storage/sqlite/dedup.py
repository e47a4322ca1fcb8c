"""Dedup keys: which job holds a key, and until when."""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.job import Dedup
from penstock.core.lifecycle import OPEN, State
from penstock.core.outcome import Failure
from penstock.storage.sqlite import statements
from penstock.storage.sqlite.queuerow import View
from penstock.storage.sqlite.records import (
    ACTIVE,
    CANCELLED,
    FINISHED,
    STATES,
    Record,
)
from penstock.storage.sqlite.transitions import fail
from penstock.storage.sqlite.unit import Unit

_sql = statements("dedup")


class Earlier(NamedTuple):
    """The holder of a key: an incarnation of an id, and its record if that still exists."""

    id: str
    incarnation: int
    record: Record | None


def meet(unit: Unit, dedup: Dedup, *, id_: str) -> Earlier | None:
    """Return the job that a new job under this key duplicates, if any.

    With ``debounce``, cancel an earlier job that has not started.
    """
    holder = _holder(unit, dedup.key, unit.now_ms)
    if holder is None:
        return None
    earlier = _earlier(unit, *holder)
    if dedup.mode == "throttle":
        return earlier
    if dedup.states:
        return _meet_in_states(unit, dedup, earlier, id_=id_)
    if earlier.record is None or earlier.record.state in FINISHED:
        return None
    if dedup.mode == "simple":
        return earlier
    if earlier.record.state != ACTIVE:
        _replace(unit, earlier.record, id_)
    return None


def _meet_in_states(unit: Unit, dedup: Dedup, earlier: Earlier, *, id_: str) -> Earlier | None:
    """Return ``earlier`` if it is in a state that makes the new job a duplicate. A job that is gone has completed."""
    record = earlier.record
    state = State.COMPLETED if record is None else STATES[record.state]
    if dedup.mode == "debounce" and record is not None and state in OPEN and state is not State.ACTIVE:
        _replace(unit, record, id_)
        return None
    return earlier if state in dedup.states else None


def _holder(at: Unit | View, key: str, now_ms: int) -> tuple[str, int] | None:
    """Return the id and incarnation of the job that holds a key; ``None`` if the key is free."""
    row = at.sql.execute(_sql["find"], (at.queue.key, key)).fetchone()
    return None if row is None or 0 < row[2] <= now_ms else (row[0], row[1])


def _earlier(unit: Unit, id_: str, incarnation: int) -> Earlier:
    record = unit.find([id_]).get(id_)
    is_same_life = record and record.incarnation == incarnation and not unit.is_over(record)
    return Earlier(id_, incarnation, record if is_same_life else None)


def _replace(unit: Unit, record: Record, id_: str) -> None:
    fail(unit, record, Failure("Replaced", f"by job {id_}"), state=CANCELLED)
    unit.touch(record)


def note(unit: Unit, dedup: Dedup, record: Record) -> None:
    """Give the key to this job."""
    lasts = dedup.mode != "debounce" and dedup.ttl_ms > 0
    expires_at = unit.now_ms + dedup.ttl_ms if lasts else 0
    unit.sql.execute(_sql["put"], (unit.queue.key, dedup.key, record.id, record.incarnation, expires_at))


def ended(unit: Unit, key: str, record: Record) -> None:
    """Free the key of a job that has ended, unless another job holds it by now."""
    unit.sql.execute(_sql["end"], (unit.queue.key, key, record.incarnation))


def forget(unit: Unit, *, limit: int) -> int:
    """Forget up to ``limit`` expired keys. Return their number."""
    return unit.sql.execute(_sql["forget"], (unit.queue.key, unit.now_ms, limit)).rowcount


def clear_dedup(unit: Unit, key: str) -> bool:
    """Free a key. Return whether a job held it."""
    was_held = _holder(unit, key, unit.now_ms) is not None
    unit.sql.execute(_sql["clear"], (unit.queue.key, key))
    return was_held


def dedup_of(view: View, key: str) -> str | None:
    """Return the id of the job that holds a key."""
    holder = _holder(view, key, view.queue.clock())
    return None if holder is None else holder[0]
