"""Schedulers in the model."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.job import NewJob
from penstock.core.lifecycle import SchedulerAnswer
from penstock.storage.values import Fired, NewScheduler, Scheduler, Schedulers
from tests.model.running import Running

__all__ = ["Clock", "Clockwork"]


@dataclass
class Clock:
    """A scheduler. ``awaits`` is the incarnation of the job whose end it waits for."""

    new: NewScheduler
    next: int
    awaits: int = 0
    paused: bool = False
    fired: int = 0
    last_id: str = ""

    def is_due(self, now: int) -> bool:
        return not self.paused and 0 < self.next <= now

    def go_on(self, now: int) -> None:
        """The job it waited for has ended."""
        assert self.new.repeat_ms is not None
        self.awaits, self.next = 0, now + self.new.repeat_ms
        if 0 < self.new.end_ms < self.next:
            self.next = 0


class Clockwork(Running):
    """The verbs on schedulers."""

    def put_scheduler(self, new: NewScheduler) -> SchedulerAnswer:
        clock = self.clocks.get(new.name)
        if clock is None:
            self.clocks[new.name] = Clock(new, new.next_ms)
            return "created"
        if clock.new.spec == new.spec:
            return "unchanged"
        if not new.keep_next:
            clock.next, clock.awaits = new.next_ms, 0
        clock.new = new
        return "updated"

    def pause_scheduler(self, name: str) -> bool:
        if name in self.clocks:
            self.clocks[name].paused = True
        return name in self.clocks

    def resume_scheduler(self, name: str, next_ms: int | None) -> bool:
        if name not in self.clocks:
            return False
        clock = self.clocks[name]
        clock.paused = False
        if next_ms is not None and clock.is_due(self.wall):
            clock.next = next_ms
        return True

    def remove_scheduler(self, name: str) -> bool:
        return self.clocks.pop(name, None) is not None

    def fire(self, name: str, slot_ms: int, next_ms: int, job: NewJob) -> Fired:
        clock = self.clocks.get(name)
        if clock is None or not clock.is_due(self.wall) or clock.next != slot_ms:
            return Fired(False)
        answer = self._enqueue(job)
        clock.fired, clock.last_id, clock.next = clock.fired + 1, answer.id, next_ms
        if clock.new.repeat_ms is not None:
            clock.next, clock.awaits = 0, answer.incarnation
            if answer.status != "queued":
                clock.go_on(self.wall)
        if clock.new.limit and clock.fired >= clock.new.limit:
            clock.next = clock.awaits = 0
        self._settle_groups()
        return Fired(True, answer)

    def all_schedulers(self) -> Schedulers:
        return Schedulers(self.wall, [_shown(self.clocks[name]) for name in sorted(self.clocks)])


def _shown(clock: Clock) -> Scheduler:
    new = clock.new
    return Scheduler(
        new.name, new.spec, clock.next, clock.paused, clock.fired, new.limit, new.end_ms, new.repeat_ms,
        clock.last_id, clock.awaits > 0,
    )  # fmt: skip
