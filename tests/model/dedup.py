"""Dedup keys in the model: what stands for a key, and what a newcomer does about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.core.job import Enqueued, NewJob
from penstock.core.lifecycle import OPEN, EventType, State
from penstock.core.outcome import Failure
from tests.model.record import Record
from tests.model.steps import Steps

__all__ = ["Keys"]


class Keys(Steps):
    """The verbs on dedup keys, and what enqueue asks of them."""

    def dedup_of(self, key: str) -> str | None:
        standing = self._standing(key)
        return standing.id if standing else None

    def clear_dedup(self, key: str) -> bool:
        standing = self._standing(key)
        self.keys.pop(key, None)
        return standing is not None

    def _admit(self, job: NewJob, own: Sequence[str] = ()) -> Enqueued | Record:
        """The new record, or the answer to a duplicate by its key."""
        dedup = job.dedup
        if dedup is None:
            record = self._queue_afresh(job, own)
            self.conclude(record)
            return record
        standing = self._standing(dedup.key)
        earlier = self._kept(standing.id) if standing else None
        if standing and earlier and earlier.incarnation != standing.incarnation:
            earlier = None
        if standing and dedup.mode == "throttle":
            return self._elsewhere(standing, earlier, job)
        if standing and dedup.states:
            state = State.COMPLETED if earlier is None else earlier.state
            is_replaced = dedup.mode == "debounce" and state in OPEN and state is not State.ACTIVE
            if state in dedup.states and not is_replaced:
                return self._elsewhere(standing, earlier, job)
        if standing and earlier and earlier.state in OPEN:
            if dedup.mode == "simple" and not dedup.states:
                return self._elsewhere(standing, earlier, job)
            if earlier.state is not State.ACTIVE and dedup.mode == "debounce":
                earlier.failure = Failure("Replaced", f"by job {job.id}")
                self._finish(earlier, State.CANCELLED, EventType.CANCELLED)
        record = self._queue_afresh(job, own)
        until = self.now + dedup.ttl_ms if dedup.ttl_ms and dedup.mode != "debounce" else 0
        self.keys[dedup.key] = Standing(record.id, record.incarnation, until)
        self.conclude(record)
        return record

    def _standing(self, key: str) -> Standing | None:
        standing = self.keys.get(key)
        return standing if standing and (not standing.until or standing.until > self.now) else None

    def _elsewhere(self, standing: Standing, earlier: Record | None, job: NewJob) -> Enqueued:
        if earlier is None:
            return Enqueued(standing.id, "duplicate", None, standing.incarnation)
        if job.notify and earlier.state in OPEN:
            earlier.waiters.add(job.notify)
        return Enqueued(earlier.id, "duplicate", earlier.state, earlier.incarnation, earlier.result)


class Standing(NamedTuple):
    """The life of an id that stands for a key."""

    id: str
    incarnation: int
    until: int
