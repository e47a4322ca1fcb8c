"""The steps that the verbs of the model are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.core.job import EMPTY_EXTRAS, Extras, NewJob
from penstock.core.lifecycle import OPEN, TERMINAL, EventType, PromoteAnswer, State
from penstock.core.outcome import FAILURE_TEXTS, Failure
from penstock.core.staging import staged_at_ms
from penstock.storage.values import Finished, QueueSettings
from tests.model.grouping import Grouping
from tests.model.links import Links
from tests.model.record import ORDER, Entry, Happened, Record, Slot, news_of, replaces

__all__ = ["EXPIRED", "Steps"]

S, E = State, EventType
EXPIRED = Failure("Expired", FAILURE_TEXTS["Expired"])
RECHECK_MS = 600_000


class Steps(Links, Grouping):
    """One queue: its jobs, its log, its counters."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.ahead = 0
        self.is_corrected = False
        self.recheck_until = 0
        self.seq = 0
        self.paused = False
        self.settings = QueueSettings()
        self.records: dict[str, Record] = {}
        self.events: list[Happened] = []
        self.news: dict[str, list[Finished]] = {}
        self.keys: dict[str, Any] = {}
        self.clocks: dict[str, Any] = {}
        self._last_calls: dict[str, tuple[int, Any]] = {}

    @property
    def wall(self) -> int:
        return self.now - self.ahead

    def set_clock(self, ahead: int) -> None:
        """Correct the wall clock: queue time is ahead of it by this much from now on."""
        if ahead > self.ahead:
            self.recheck_until = self.now + RECHECK_MS
        self.ahead = ahead
        self.is_corrected = True

    def when(self, instant: int) -> int:
        """Return the queue time at which the wall clock will show an instant."""
        left = instant - self.wall
        if not self.ahead or left <= 0:
            return min(instant, self.now) if self.ahead else instant
        return instant + max(self.ahead - left // 100, 0)

    def follow(self) -> None:
        """Let jobs that are due at an instant of the wall clock follow it, once after each correction."""
        for record in self.records.values():
            if self.is_corrected and record.follows_the_clock:
                record.run_at = record.wall_run_at = self.when(record.wall_at)
        self.is_corrected = False

    def forget_instants(self) -> None:
        """After a call: jobs that are not due any more, or at another time, do not follow the clock again."""
        for record in self.records.values():
            if not record.follows_the_clock:
                record.wall_at = 0

    def in_state(self, state: State) -> list[Record]:
        """The jobs of a state in the contract's order."""
        return sorted((r for r in self.records.values() if r.state is state), key=ORDER[state])

    def _queue_afresh(self, job: NewJob, own: Sequence[str] = (), slot: Slot | None = None) -> Record:
        old = self.records.get(job.id)
        if old is not None and (old.state in (S.FAILED, S.CANCELLED) or old.is_staged):
            self.tell_dependents(old, "removed")
        flow = job.extras.flow if job.extras else ""
        entries: dict[str, Entry] = {}
        self.depend(job.id, flow, entries, job.after, own)
        incarnation, run_at = self._draw(), self._due_of(slot) if slot else self._due(job)
        wall_at = slot.wall_at if slot else job.run_at_ms or 0
        replaced = self.records.get(job.id)
        if replaced is not None:
            self._left(replaced, self._group_role(replaced))
        record = Record(
            id=job.id,
            incarnation=incarnation,
            state=S.SCHEDULED if run_at > self.now else S.WAITING,
            payload=job.payload,
            options=job.options,
            priority=job.priority,
            lifo=job.lifo,
            ttl_ms=job.ttl_ms,
            run_id=job.run_id,
            write_id=job.write_id,
            number=incarnation,
            ready_at=self.now,
            run_at=run_at,
            wall_at=wall_at,
            wall_run_at=run_at,
            enqueued_at=self.now,
            expires_at=self.now + job.ttl_ms if job.ttl_ms and not job.staged else 0,
            extras=job.stored_extras,
        )
        if replaced is not None and replaced.is_staged:
            record.waiters = replaced.waiters
        record.flow, record.entries = flow, entries
        if record.awaits:
            record.state, record.blocked_by = S.BLOCKED, "children"
        record.dependents = [(one.id, one.flow) for one in (job.extras and job.extras.dependents) or ()]
        self.records[job.id] = record
        if record.state is S.WAITING:
            self._held_back(record, keeps_number=True, role="")
        self._append(E.ENQUEUED, record)
        return record

    def _due(self, job: NewJob) -> int:
        if job.staged:
            return staged_at_ms(job.write_id)
        return self.now + job.delay_ms if job.run_at_ms is None else self.when(job.run_at_ms)

    def _due_of(self, slot: Slot) -> int:
        return self.when(slot.wall_at) if slot.wall_at else slot.run_at

    def _update(self, record: Record, slot: Slot) -> None:
        record.run_id, record.write_id = slot.run_id, slot.write_id
        if slot.payload is not None:
            record.payload = slot.payload
        if slot.terms is not None:
            record.options, record.priority, record.lifo, record.ttl_ms = slot.terms
            record.expires_at = self.now + record.ttl_ms if record.ttl_ms else 0
            if self._group_role(record) in ("b", "k"):
                self._touch(record.group)
        if slot.reset_counts:
            record.failures = record.stalls = 0
        held = record.state is S.BLOCKED and record.blocked_by != "children"
        run_at = self._due_of(slot)
        if not held and replaces(slot.when, run_at, record.run_at):
            record.wall_at, record.wall_run_at = slot.wall_at, run_at
            if record.state is not S.BLOCKED and run_at > self.now:
                self._schedule(record, run_at)
                return
            record.run_at = run_at
            if record.state is S.SCHEDULED:
                self._enter_waiting(record)

    def _absorb(self, record: Record) -> None:
        if record.slot is not None:
            slot, record.slot = record.slot, None
            record.waiters |= slot.waiters
            self._update(record, slot)

    def _delete(self, record: Record) -> None:
        if record.state in OPEN:
            waiters = record.waiters | (record.slot.waiters if record.slot else set())
            self._tell(waiters, Finished(record.id, record.incarnation, S.CANCELLED))
            self._ended(record)
        role = self._group_role(record)
        del self.records[record.id]
        self._left(record, role)

    def _ended(self, record: Record) -> None:
        """What the end of a job means to others."""
        key = record.extras.dedup if record.extras else ""
        if key in self.keys and self.keys[key].incarnation == record.incarnation:
            del self.keys[key]
        clock = self.clocks.get(record.extras.scheduler) if record.extras and record.extras.repeats else None
        if clock and clock.awaits == record.incarnation:
            clock.go_on(self.wall)

    def _draw(self) -> int:
        self.seq += 1
        return self.seq

    def _kept(self, id: str) -> Record | None:
        record = self.records.get(id)
        return None if record and record.state in TERMINAL and record.kept_until <= self.now else record

    def _held(self, id: str, token: int) -> Record | None:
        record = self.records.get(id)
        return record if record and record.state is S.ACTIVE and record.token == token else None

    def _pending(self) -> list[Record]:
        return [r for r in self.records.values() if r.state in OPEN and r.state is not S.ACTIVE]

    def _is_expired(self, record: Record) -> bool:
        return 0 < record.expires_at <= self.now

    def _enter_waiting(self, record: Record) -> None:
        record.number = self._draw()
        self._return_to_waiting(record, keeps_number=False)

    def _return_to_waiting(self, record: Record, *, keeps_number: bool = True) -> None:
        role = self._group_role(record)
        if record.awaits:
            record.state, record.blocked_by = S.BLOCKED, "children"
            self._wait_elsewhere(record, role)
        elif not self._held_back(record, keeps_number=keeps_number, role=role):
            record.ready_at, record.state, record.blocked_by = self.now, S.WAITING, ""

    def _promote(self, record: Record | None) -> PromoteAnswer:
        if record is None:
            return "not_found"
        if record.state is not S.SCHEDULED or record.is_staged:
            return "not_scheduled"
        self._enter_waiting(record)
        self._append(E.PROMOTED, record)
        return "promoted"

    def _expire(self, record: Record, *, token: int = 0) -> State:
        record.failure = EXPIRED
        return self._finish(record, S.FAILED, E.EXPIRED, token=token)

    def _finish(self, record: Record, state: State, event: EventType, *, token: int = 0) -> State:
        role = self._group_role(record)
        record.state, record.finished_at = state, self.now
        self._keep(record)
        self._append(event, record, token=token)
        slot, record.slot = record.slot, None
        if slot and state is S.CANCELLED:
            record.waiters |= slot.waiters
            slot = None
        self._tell(record.waiters, news_of(record))
        record.waiters = set()
        self._left(record, role)
        self.tell_dependents(record)
        self._ended(record)
        record.blocked_by = ""
        if slot:
            self._queue_slot(record, slot)
        elif record.kept_until <= self.now:
            self.forget(record)
        return state

    def _keep(self, record: Record) -> None:
        options = record.options
        ttl_ms = options.failure_ttl_ms if record.state is S.FAILED else options.result_ttl_ms
        record.kept_until = record.finished_at + max(ttl_ms, *record.holds.values(), 0)

    def forget(self, record: Record) -> None:
        """Without an event."""
        if record.state is not S.COMPLETED:
            self.tell_dependents(record, "removed")
        del self.records[record.id]

    def _queue_slot(self, old: Record, slot: Slot) -> None:
        options, priority, lifo, ttl_ms = slot.terms or (old.options, old.priority, old.lifo, old.ttl_ms)
        new = self._queue_afresh(
            NewJob(
                old.id,
                old.payload if slot.payload is None else slot.payload,
                options,
                priority=priority,
                lifo=lifo,
                ttl_ms=ttl_ms,
                run_id=slot.run_id,
                write_id=slot.write_id,
                extras=_shed(old),
            ),
            slot=slot,
        )
        new.waiters = slot.waiters

    def _tell(self, waiters: set[str], news: Finished) -> None:
        for listener in waiters:
            self.news.setdefault(listener, []).append(news)

    def _append(
        self, event: EventType, record: Record | None = None, *, token: int = 0, state: str | None = None
    ) -> None:
        if record is None:
            self.events.append(Happened(event, "", 0, "", 0))
        else:
            shown = record.state if state is None else state
            self.events.append(Happened(event, record.id, record.incarnation, shown, token))


def _shed(record: Record) -> Extras | None:
    extras = record.extras.for_new_incarnation() if record.extras else EMPTY_EXTRAS
    return None if extras == EMPTY_EXTRAS else extras
