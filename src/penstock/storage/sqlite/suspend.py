"""Stages and suspensions: where a job continues, the signal it waits for, and signals that came early."""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from penstock.core.lifecycle import EventType
from penstock.storage.bounds import SIGNALS_KEPT
from penstock.storage.sqlite.records import ACTIVE, BLOCKED, SCHEDULED, SIGNAL, WAITING, Record
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.transitions import enter_waiting
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import SignalAnswer

_SIGNALLED = EventType.SIGNALLED.value
_UNBLOCKED = EventType.UNBLOCKED.value
_OPEN: Final = (SCHEDULED, WAITING, BLOCKED, ACTIVE)

_sql = statements("signals")


def named(signal: str) -> dict[str, Any]:
    """Return the event columns for a signal's name. Such names need no JSON escapes."""
    return {"data": f'{{"signal":"{signal}"}}'}


def go_to(record: Record, stage: str | None) -> None:
    """Start the next run at this stage; ``None`` keeps the present one."""
    if stage is not None:
        record.extras = replace(record.extras, stage=stage)


def hand_back(record: Record) -> None:
    """Record that the worker of this run does not know the task."""
    record.extras = replace(record.extras, unknown_run=record.runs)


def suspend(unit: Unit, record: Record, name: str, *, timeout_ms: int) -> None:
    """Block the job until the signal comes. If it came early, the job waits for a worker instead."""
    extras = record.extras
    if extras.received:
        unit.sql.execute(_sql["forget"], (record.key, 0))
    early = unit.sql.execute(_sql["oldest"], (record.key, name)).fetchone() if extras.kept else None
    record.extras = extras = replace(extras, received="", timed_out=False, awaits="", awaits_until_ms=0)
    if early is not None:
        number, data = early
        unit.sql.execute(_sql["forget"], (record.key, number))
        record.extras = replace(extras, kept=extras.kept - 1)
        _receive(unit, record, name, data)
        return
    until_ms = unit.now_ms + timeout_ms if timeout_ms else 0
    record.extras = replace(extras, awaits=name, awaits_until_ms=until_ms)
    record.state = BLOCKED
    record.blocked_by = SIGNAL
    if record.group_role:
        unit.links.scheduled(unit, record)


def signal(unit: Unit, id: str, name: str, data: bytes) -> SignalAnswer:
    """Resume the job that waits for the signal, or keep the signal for later."""
    record = unit.find([id]).get(id)
    if record is None or unit.is_over(record):
        return "not_found"
    if record.state not in _OPEN:
        return "ended"
    extras = record.extras
    answer: SignalAnswer = "kept"
    if record.state == BLOCKED and record.blocked_by == SIGNAL and extras.awaits == name:
        _receive(unit, record, name, data)
        answer = "resumed"
    elif extras.kept >= SIGNALS_KEPT:
        return "full"
    else:
        unit.sql.execute(_sql["keep"], {"job": record.key, "name": name, "data": data})
        record.extras = replace(extras, kept=extras.kept + 1)
    unit.note(_SIGNALLED, record, run=record.runs, **named(name))
    unit.save([record])
    return answer


def time_out(unit: Unit, record: Record) -> None:
    """Resume a job whose signal did not come in time."""
    record.extras = replace(record.extras, timed_out=True, awaits="", awaits_until_ms=0)
    enter_waiting(unit, record)
    unit.note(_UNBLOCKED, record, run=record.runs)


def received_data(unit: Unit, key: int) -> bytes | None:
    """Return the data of the signal that ended the last suspension of the job with this key."""
    row = unit.sql.execute(_sql["received"], (key,)).fetchone()
    return None if row is None else bytes(row[0])


def _receive(unit: Unit, record: Record, name: str, data: bytes) -> None:
    unit.sql.execute(_sql["receive"], (record.key, name, data))
    record.extras = replace(record.extras, received=name, awaits="", awaits_until_ms=0)
    enter_waiting(unit, record)
