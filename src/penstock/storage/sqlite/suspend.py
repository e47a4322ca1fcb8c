"""Steps and suspensions: where a job goes on, the signal it waits for, signals that came before it did."""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from penstock.core.lifecycle import EventType
from penstock.storage.sqlite.records import ACTIVE, BLOCKED, SCHEDULED, SIGNAL, WAITING, Record
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.transitions import enter_waiting
from penstock.storage.sqlite.unit import Step
from penstock.storage.values import SignalAnswer

_SIGNALLED = EventType.SIGNALLED.value
_UNBLOCKED = EventType.UNBLOCKED.value
_OPEN: Final = (SCHEDULED, WAITING, BLOCKED, ACTIVE)
_SIGNALS_KEPT: Final = 100

_sql = statements("signals")


def named(signal: str) -> dict[str, Any]:
    """The columns of an event that tell a signal's name, in which nothing needs an escape."""
    return {"data": f'{{"signal":"{signal}"}}'}


def go_to(record: Record, step: str | None) -> None:
    """The next run is to begin at this step; ``None``: where the job is."""
    if step is not None:
        record.extras = replace(record.extras, step=step)


def hand_back(record: Record) -> None:
    """Note that the worker of this run does not know the task."""
    record.extras = replace(record.extras, unknown_run=record.runs)


def suspend(step: Step, record: Record, name: str, *, timeout_ms: int) -> None:
    """Block the job until the signal comes; if it came early, let the job wait for a worker."""
    extras = record.extras
    if extras.received:
        step.sql.execute(_sql["forget"], (record.key, 0))
    early = step.sql.execute(_sql["oldest"], (record.key, name)).fetchone() if extras.kept else None
    record.extras = extras = replace(extras, received="", timed_out=False, awaits="", awaits_until_ms=0)
    if early is not None:
        number, data = early
        step.sql.execute(_sql["forget"], (record.key, number))
        record.extras = replace(extras, kept=extras.kept - 1)
        _receive(step, record, name, data)
        return
    until_ms = step.now_ms + timeout_ms if timeout_ms else 0
    record.extras = replace(extras, awaits=name, awaits_until_ms=until_ms)
    record.state = BLOCKED
    record.blocked_by = SIGNAL
    if record.part:
        step.links.scheduled(step, record)


def signal(step: Step, id_: str, name: str, data: bytes) -> SignalAnswer:
    """Resume the job that waits for it, or keep it for later."""
    record = step.find([id_]).get(id_)
    if record is None or step.is_over(record):
        return "not_found"
    if record.state not in _OPEN:
        return "ended"
    extras = record.extras
    answer: SignalAnswer = "kept"
    if record.state == BLOCKED and record.blocked_by == SIGNAL and extras.awaits == name:
        _receive(step, record, name, data)
        answer = "resumed"
    elif extras.kept >= _SIGNALS_KEPT:
        return "full"
    else:
        step.sql.execute(_sql["keep"], {"job": record.key, "name": name, "data": data})
        record.extras = replace(extras, kept=extras.kept + 1)
    step.note(_SIGNALLED, record, run=record.runs, **named(name))
    step.save([record])
    return answer


def time_out(step: Step, record: Record) -> None:
    """Nobody sent the signal in time."""
    record.extras = replace(record.extras, timed_out=True, awaits="", awaits_until_ms=0)
    enter_waiting(step, record)
    step.note(_UNBLOCKED, record, run=record.runs)


def received_data(step: Step, key: int) -> bytes | None:
    """The data of the signal that ended the last suspension of the job with this key."""
    row = step.sql.execute(_sql["received"], (key,)).fetchone()
    return None if row is None else bytes(row[0])


def _receive(step: Step, record: Record, name: str, data: bytes) -> None:
    step.sql.execute(_sql["receive"], (record.key, name, data))
    record.extras = replace(record.extras, received=name, awaits="", awaits_until_ms=0)
    enter_waiting(step, record)
