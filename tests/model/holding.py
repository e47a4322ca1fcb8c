"""Retention and holds in the model."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from penstock.core.job import EMPTY_EXTRAS
from penstock.core.lifecycle import TERMINAL, HoldAnswer, ReleaseAnswer, State
from tests.model.record import Record, by_time
from tests.model.suspending import Suspending

__all__ = ["Holding"]

S = State


class Holding(Suspending):
    """Who keeps finished jobs, and who takes them."""

    def hold(self, consumer: str, ids: Sequence[str], ttl_ms: int) -> list[HoldAnswer]:
        return [self._hold(self._kept(id), consumer, ttl_ms) for id in ids]

    def release(self, consumer: str, ids: Sequence[str]) -> list[ReleaseAnswer]:
        return [self._release(self._kept(id), consumer) for id in ids]

    def held(self, consumer: str) -> list[str]:
        found = [r for r in self.records.values() if r.state in TERMINAL and consumer in r.holds]
        return [record.id for record in sorted(found, key=by_time("finished_at"))]

    def _hold(self, record: Record | None, consumer: str, ttl_ms: int) -> HoldAnswer:
        if record is None:
            return "not_found"
        since = self.now - record.finished_at if record.state in TERMINAL else 0
        self._set_holds(record, {**record.holds, consumer: ttl_ms + since})
        return "held"

    def _release(self, record: Record | None, consumer: str) -> ReleaseAnswer:
        if record is None:
            return "not_found"
        if consumer not in record.holds:
            return "not_held"
        self._set_holds(record, {name: ms for name, ms in record.holds.items() if name != consumer})
        return "released"

    def _set_holds(self, record: Record, holds: dict[str, int]) -> None:
        extras = replace(record.extras or EMPTY_EXTRAS, holds=holds or None)
        record.extras = None if extras == EMPTY_EXTRAS else extras
        if record.state in TERMINAL:
            self._keep(record)

    def _is_held(self, record: Record) -> bool:
        return bool(record.holds) and record.finished_at + max(record.holds.values()) > self.now

    def _lapses(self) -> list[int]:
        ended = [r for r in self.records.values() if r.state in TERMINAL and r.holds]
        return [record.finished_at + max(record.holds.values()) for record in ended]

    def _prune(self) -> int:
        old = [r for state in TERMINAL for r in self.in_state(state) if r.kept_until <= self.now]
        for record in old:
            self.forget(record)
        for record in self.records.values():
            if record.state in TERMINAL and record.holds and not self._is_held(record):
                self._set_holds(record, {})
        return (
            len(old)
            + self._prune_surplus(S.COMPLETED, self.settings.keep_completed)
            + self._prune_surplus(S.FAILED, self.settings.keep_failed)
        )

    def _prune_surplus(self, state: State, keep: int | None) -> int:
        kept = self.in_state(state)
        if keep is None or len(kept) <= keep:
            return 0
        surplus = [record for record in kept if not self._is_held(record)][: len(kept) - keep]
        for record in surplus:
            self.forget(record)
        return len(surplus)
