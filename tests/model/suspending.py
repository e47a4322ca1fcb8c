"""Stages, suspensions and signals in the model."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from penstock.core.job import EMPTY_EXTRAS, Extras
from penstock.core.lifecycle import OPEN, EventType, SignalAnswer, State
from tests.model.record import Record
from tests.model.stepping import Stepping

__all__ = ["Suspending"]

S, E = State, EventType
_MOST_KEPT = 100


class Suspending(Stepping):
    """What a job that goes on later does, and what wakes it."""

    def signal(self, id: str, name: str, data: bytes) -> SignalAnswer:
        record = self._kept(id)
        if record is None:
            return "not_found"
        if record.state not in OPEN:
            return "ended"
        if self._is_suspended(record) and _extras(record).awaits == name:
            self._receive(record, name, data)
            answer: SignalAnswer = "resumed"
        elif len(record.early) == _MOST_KEPT:
            return "full"
        else:
            record.early.append((name, data))
            _say(record, kept=len(record.early))
            answer = "kept"
        self._append(E.SIGNALLED, record)
        self._settle_groups()
        return answer

    def _go_to(self, record: Record, stage: str | None) -> None:
        if stage is not None:
            _say(record, stage=stage)

    def _hand_back(self, record: Record) -> None:
        _say(record, unknown_run=record.runs)

    def _suspend(self, record: Record, name: str, timeout_ms: int) -> None:
        record.signal = None
        _say(record, received="", timed_out=False, awaits="", awaits_until_ms=0)
        early = next((item for item in record.early if item[0] == name), None)
        if early is not None:
            record.early.remove(early)
            _say(record, kept=len(record.early))
            self._receive(record, *early)
            return
        _say(record, awaits=name, awaits_until_ms=self.now + timeout_ms if timeout_ms else 0)
        role = self._group_role(record)
        record.state, record.blocked_by = S.BLOCKED, "signal"
        self._set_aside(record, role)

    def _time_out(self) -> int:
        due = [r for r in self._suspended() if _extras(r).awaits_until_ms <= self.now]
        for record in sorted(due, key=lambda r: (_extras(r).awaits_until_ms, r.id.encode())):
            _say(record, timed_out=True, awaits="", awaits_until_ms=0)
            self._enter_waiting(record)
            self._append(E.UNBLOCKED, record)
        return len(due)

    def _timeouts(self) -> list[int]:
        return [_extras(record).awaits_until_ms for record in self._suspended()]

    def _suspended(self) -> list[Record]:
        """Those with a timeout."""
        return [r for r in self.records.values() if self._is_suspended(r) and _extras(r).awaits_until_ms]

    def _is_suspended(self, record: Record) -> bool:
        return record.state is S.BLOCKED and record.blocked_by == "signal"

    def _receive(self, record: Record, name: str, data: bytes) -> None:
        record.signal = data
        _say(record, received=name, awaits="", awaits_until_ms=0)
        self._enter_waiting(record)


def _extras(record: Record) -> Extras:
    return record.extras or EMPTY_EXTRAS


def _say(record: Record, **fields: Any) -> None:
    extras = replace(_extras(record), **fields)
    record.extras = None if extras == EMPTY_EXTRAS else extras
