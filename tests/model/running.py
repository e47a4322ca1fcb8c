"""The way of a job through the model: enqueue, claim, settle, extend, report, sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from penstock.core.flow import Node, link_nodes
from penstock.core.job import Dependency, Dependent, Enqueued, EnqueueStatus, Lease, NewJob
from penstock.core.lifecycle import OPEN, TERMINAL, EventType, State
from penstock.core.outcome import (
    FAILURE_TEXTS,
    Await,
    Cancel,
    Complete,
    Fail,
    Failure,
    Limited,
    Outcome,
    Release,
    Snooze,
    Suspend,
)
from penstock.storage.values import (
    Claimed,
    DueScheduler,
    Extended,
    Held,
    Report,
    Settled,
    SettledBatch,
    Settlement,
    Swept,
    Take,
    Ticket,
)
from tests.model.dedup import Keys
from tests.model.holding import Holding
from tests.model.links import BY_DEPENDENCY, NOTHING_TO_WAIT_FOR
from tests.model.record import Record, Slot, by_time, lease_of, replaces

__all__ = ["Running"]

S, E = State, EventType

A = TypeVar("A")


class Running(Keys, Holding):
    """The verbs that producers, workers and sweepers use."""

    # The way of a job

    def enqueue(self, jobs: Sequence[NewJob], ticket: Ticket | None = None) -> list[Enqueued] | None:
        """``None`` stands for ``JobNotFound``."""
        before: set[str] = set()
        for job in jobs:
            if not self.are_there(job.after, before) and not self._is_repeated(ticket):
                return None
            before.add(job.id)
        return self._once(ticket, lambda: self._then_fill([self._enqueue(job) for job in jobs]))

    def enqueue_flow(self, nodes: Sequence[NewJob]) -> list[Enqueued] | None:
        own = {job.id for job in nodes}
        if not all(self.are_there(job.after, own) for job in nodes):
            return None
        answer = self._enqueue(nodes[0], tuple(own))
        if answer.status == "queued":
            for job in nodes[1:]:
                self._enqueue(job, tuple(own))
        return self._then_fill([answer])

    def attach(self, id: str, after: Sequence[Dependency], nodes: Sequence[NewJob], flow: str) -> str | None:
        record = self._kept(id)
        if record is None or record.is_staged:
            return "not_found"
        if record.state in TERMINAL:
            return "ended"
        own = {job.id for job in nodes}
        if not self.are_there(after, own) or not all(self.are_there(job.after, own) for job in nodes):
            return None
        record.flow = record.flow or flow
        self.depend(id, record.flow, record.entries, after, tuple(own))
        is_movable = record.state in (S.SCHEDULED, S.WAITING) or record.blocked_by == "group"
        if record.awaits and is_movable:
            role = self._group_role(record)
            record.state, record.blocked_by = S.BLOCKED, "children"
            self._wait_elsewhere(record, role)
        self._append(E.CHANGED, record)
        self.conclude(record)
        for node in link_nodes(
            [Node("", job) for job in nodes],
            flow=record.flow,
            into=Dependent("", id, record.flow),
            after=after,
        ):
            self._enqueue(node.job, tuple(own))
        return self._then_fill("attached")

    def claim(self, take: Take, ticket: Ticket | None = None) -> Claimed:
        return self._still_held(self._once(ticket, lambda: self._claim(take)))

    def settle(
        self, settlements: Sequence[Settlement], take: Take | None = None, ticket: Ticket | None = None
    ) -> SettledBatch:
        def call() -> SettledBatch:
            answers = [self._settle(item) for item in settlements]
            self._settle_groups()
            return SettledBatch(answers, self._claim(take) if take else None)

        batch = self._once(ticket, call)
        claimed = batch.claimed and self._still_held(batch.claimed)
        return msgspec.structs.replace(batch, claimed=claimed)

    def extend(self, held: Sequence[Held], lease_ms: int) -> list[Extended]:
        return [self._extend(item, lease_ms) for item in held]

    def report(self, reports: Sequence[Report]) -> list[bool]:
        return [self._report(item) for item in reports]

    def sweep(self) -> Swept:
        promoted = self._promote_due()
        unblocked = self._time_out()
        overdue = [r for r in self.in_state(S.ACTIVE) if r.lease_until <= self.now]
        for record in overdue:
            self._rescue(record)
        expired = sorted((r for r in self._pending() if self._is_expired(r)), key=by_time("expires_at"))
        for record in expired:
            if record.state in OPEN:
                self._expire(record)
        self._sweep_groups()
        pruned = self._prune()
        slots = [clock.next - self.wall for clock in self.clocks.values() if not clock.paused]
        later = [wait_ms for wait_ms in slots if wait_ms > 0]
        return Swept(
            promoted,
            len(overdue),
            len(expired),
            pruned,
            unblocked=unblocked,
            wait_ms=min([*later, *self._next_thing()], default=None),
            due=self._due_schedulers(),
            slot_wait_ms=min(later, default=None),
            awaiting=any(clock.awaits and not clock.paused for clock in self.clocks.values()),
        )

    # enqueue

    def _enqueue(self, job: NewJob, own: Sequence[str] = ()) -> Enqueued:
        answer = self._enqueue_one(job, own)
        if answer.status != "queued" and job.extras and job.extras.dependents:
            self.link(self.records[job.id], [(one.id, one.flow) for one in job.extras.dependents])
        return answer

    def _enqueue_one(self, job: NewJob, own: Sequence[str]) -> Enqueued:
        record = None if job.unchecked else self._kept(job.id)
        if record is None or (record.is_staged and job.write_id != record.write_id):
            return self._let_in(job, own)
        finished = record.state in TERMINAL
        newest = record.slot or record
        if job.write_id and job.write_id == newest.write_id:
            return self._answer("duplicate", record, job, newest.waiters)
        match job.conflict.mode:
            case "absent":
                return self._answer("duplicate", record, job)
            case "default" if not finished:
                return self._answer("duplicate", record, job)
            case "default" if record.state is S.COMPLETED:
                return self._answer("completed", record, job)
            case "redispatch" if record.state is S.ACTIVE:
                return self._rerun(record, job)
            case "redispatch" if not finished:
                self._update(record, self._slot_of(job))
                self._append(E.CHANGED, record)
                return self._answer("updated", record, job)
        return self._let_in(job, own)

    def _let_in(self, job: NewJob, own: Sequence[str]) -> Enqueued:
        admitted = self._admit(job, own)
        return admitted if isinstance(admitted, Enqueued) else self._answer("queued", admitted, job)

    def _answer(
        self, status: EnqueueStatus, record: Record, job: NewJob, waiters: set[str] | None = None
    ) -> Enqueued:
        if job.notify and record.state in OPEN:
            (record.waiters if waiters is None else waiters).add(job.notify)
        return Enqueued(job.id, status, record.state, record.incarnation, record.result)

    def _slot_of(self, job: NewJob) -> Slot:
        how = job.conflict
        terms = (job.options, job.priority, job.lifo, job.ttl_ms)
        return Slot(
            payload=job.payload if how.payload == "replace" else None,
            terms=terms if how.options == "replace" else None,
            run_at=self._due(job),
            when=how.run_at,
            wall_at=job.run_at_ms or 0,
            reset_counts=how.reset_counts,
            run_id=job.run_id,
            write_id=job.write_id,
            waiters={job.notify} if job.notify else set(),
        )

    def _rerun(self, record: Record, job: NewJob) -> Enqueued:
        new, old = self._slot_of(job), record.slot
        if old is not None:
            new.payload = old.payload if new.payload is None else new.payload
            new.terms = new.terms or old.terms
            new.reset_counts |= old.reset_counts
            new.waiters |= old.waiters
            if not replaces(new.when, new.run_at, self._due_of(old)):
                new.run_at, new.wall_at, new.when = old.run_at, old.wall_at, old.when
            elif old.when == "always":
                new.when = "always"
        record.slot = new
        self._append(E.CHANGED, record)
        return Enqueued(job.id, "rerun", record.state, record.incarnation)

    # claim

    def _claim(self, take: Take) -> Claimed:
        if self.paused:
            return Claimed([], None, paused=True)
        self._promote_due()
        self._look_again()
        allowed, _ = self._allowance(take.count)
        leases: list[Lease] = []
        while len(leases) < allowed:
            # In rounds: an expiry may unblock a job that is to be claimed before those behind this round.
            head = self.in_state(S.WAITING)[: allowed - len(leases)]
            for record in head:
                if self._is_expired(record):
                    self._expire(record)
                elif self._started(record):
                    leases.append(self._lease(record, take))
            if not head:
                break
        if self._limit_of("").rate:
            self._group("").starts += [self.now] * len(leases)
        self._settle_groups()
        waiting, (room, later) = self.in_state(S.WAITING), self._allowance(1)
        if waiting and not room and len(leases) < take.count:
            return Claimed(leases, later, limited=True)
        times = [r.run_at for r in self.in_state(S.SCHEDULED) if not r.is_staged]
        times += [group.look for group in self.groups.values() if group.look]
        later = max(0, min(times) - self.now) if times else None
        return Claimed(leases, 0 if len(leases) == take.count or waiting else later)

    def _lease(self, record: Record, take: Take) -> Lease:
        record.state, record.token, record.settled_as = S.ACTIVE, self._draw(), None
        record.runs += 1
        record.claimed_at, record.lease_until = self.now, self.now + take.lease_ms
        record.worker = take.worker
        self._append(E.CLAIMED, record, token=record.token)
        return lease_of(record)

    # settle, extend, report

    def _settle(self, item: Settlement) -> Settled:
        record = self.records.get(item.id)
        if record is None or record.token != item.token:
            return Settled(False, record.state if record else None)
        if record.state is not S.ACTIVE:
            return Settled(record.settled_as is not None, record.settled_as or record.state)
        record.settled_as = self._apply(record, item.outcome)
        now_there = self.records.get(item.id)
        if now_there is not None and now_there is not record:  # its rerun slot was queued
            now_there.token, now_there.settled_as = record.token, record.settled_as
        return Settled(True, record.settled_as)

    def _apply(self, record: Record, outcome: Outcome) -> State:
        match outcome:
            case Complete(result, ttl_ms):
                record.result = result
                if ttl_ms is not None:
                    record.options = msgspec.structs.replace(record.options, result_ttl_ms=ttl_ms)
                return self._finish(record, S.COMPLETED, E.COMPLETED, token=record.token)
            case Fail(failure, retry_in_ms, final, ttl_ms):
                record.failures += 1
                record.failure = failure
                if final or record.failures >= record.options.attempts:
                    if ttl_ms is not None:
                        record.options = msgspec.structs.replace(record.options, failure_ttl_ms=ttl_ms)
                    return self._finish(record, S.FAILED, E.FAILED, token=record.token)
                return self._put_back(record, E.RETRYING, retry_in_ms)
            case Snooze() | Suspend():
                return self._put_off(record, outcome)
            case Release():
                return self._put_back(record, E.RELEASED, None)
            case Limited(delay_ms, scope):
                self._park(record, self.now + delay_ms, queue=scope == "queue")
                return self._put_back(record, E.LIMITED, None)
            case Await():
                return self._put_back(record, E.SUSPENDED, 0, awaits=True)
            case Cancel():
                return self._finish(record, S.CANCELLED, E.CANCELLED, token=record.token)

    def _put_off(self, record: Record, outcome: Snooze | Suspend) -> State:
        if not record.cancelling and not self._is_expired(record) and not self.is_failed(record):
            self._go_to(record, outcome.stage)
            if isinstance(outcome, Snooze) and outcome.unknown:
                self._hand_back(record)
        if isinstance(outcome, Snooze):
            return self._put_back(record, E.SNOOZED, outcome.delay_ms)
        return self._put_back(record, E.SUSPENDED, outcome.timeout_ms, signal=outcome.signal)

    def _put_back(
        self,
        record: Record,
        event: EventType,
        delay_ms: int | None,
        *,
        signal: str = "",
        awaits: bool = False,
    ) -> State:
        """``None`` keeps the number, and leaves the ttl to the next claim."""
        if record.cancelling:
            return self._finish(record, S.CANCELLED, E.CANCELLED, token=record.token)
        if delay_ms is not None and self._is_expired(record):
            return self._expire(record, token=record.token)
        if self.is_failed(record):
            record.failure = BY_DEPENDENCY
            return self._finish(record, S.FAILED, E.FAILED, token=record.token)
        if awaits:
            if not record.awaits and record.awaited == len(record.entries):
                record.failure = NOTHING_TO_WAIT_FOR
                return self._finish(record, S.FAILED, E.FAILED, token=record.token)
            record.awaited = len(record.entries)
        if delay_ms is None:
            self._return_to_waiting(record)
        elif signal:
            self._suspend(record, signal, delay_ms)
        elif delay_ms > 0:
            self._schedule(record, self.now + delay_ms)
        else:
            self._enter_waiting(record)
        self._absorb(record)
        self._append(event, record, token=record.token)
        return record.state

    def _extend(self, item: Held, lease_ms: int) -> Extended:
        record = self._held(item.id, item.token)
        if record is None:
            return "lost"
        record.lease_until = self.now + lease_ms
        if record.cancelling:
            return "cancel"
        return "expired" if self._is_expired(record) else "extended"

    def _report(self, item: Report) -> bool:
        record = self._held(item.id, item.token)
        if record is None:
            return False
        if item.progress is not None:
            record.progress = item.progress
            self._append(E.PROGRESSED, record)
        record.log = [*record.log, *item.log][-1000:]
        if item.payload is not None:
            record.payload = item.payload
        return True

    # What time brings

    def _promote_due(self) -> int:
        self.follow()
        due = [r for r in self.in_state(S.SCHEDULED) if r.run_at <= self.now]
        for record in due:
            self._promote(record)
        return len(due)

    def _rescue(self, record: Record) -> None:
        record.stalls += 1
        record.token = 0
        if record.cancelling:
            self._finish(record, S.CANCELLED, E.CANCELLED)
        elif self._is_expired(record):
            self._expire(record)
        elif self.is_failed(record):
            record.failure = BY_DEPENDENCY
            self._finish(record, S.FAILED, E.FAILED)
        elif record.stalls > record.options.max_stalls:
            message = FAILURE_TEXTS["Stalled"] % (record.stalls, record.worker)
            record.failure = Failure("Stalled", message)
            self._finish(record, S.FAILED, E.FAILED)
        else:
            self._return_to_waiting(record)
            self._absorb(record)
            self._append(E.STALLED, record)

    def _due_schedulers(self) -> tuple[DueScheduler, ...]:
        # After the clock was set back, those that are not due are named as well: their slots are to be computed again.
        until = 2**53 if self.now < self.recheck_until else self.wall
        due = sorted((clock.next, name) for name, clock in self.clocks.items() if clock.is_due(until))
        return tuple(DueScheduler(name, at, self.wall, self.clocks[name].new.spec) for at, name in due)

    def _next_thing(self) -> list[int]:
        times = [r.run_at for r in self.in_state(S.SCHEDULED) if not r.is_staged]
        times += self._timeouts() + self._lapses()
        times += [r.lease_until for r in self.in_state(S.ACTIVE)]
        times += [r.expires_at for r in self._pending() if r.expires_at]
        times += [r.kept_until for state in TERMINAL for r in self.in_state(state)]
        times += [at for group in self.groups.values() for at in (group.look, group.over) if at]
        return [max(0, at - self.now) for at in times]

    def _then_fill(self, answer: A) -> A:
        self._settle_groups()
        return answer

    # Repeated calls

    def _once(self, ticket: Ticket | None, call: Callable[[], A]) -> A:
        if ticket is None:
            return call()
        number, answer = self._last_calls.get(ticket.stream, (0, None))
        if number != ticket.number:
            answer = call()
            self._last_calls[ticket.stream] = (ticket.number, answer)
        return answer  # type: ignore[no-any-return]

    def _is_repeated(self, ticket: Ticket | None) -> bool:
        return ticket is not None and self._last_calls.get(ticket.stream, (0, None))[0] == ticket.number

    def _still_held(self, claimed: Claimed) -> Claimed:
        held = [self._held(lease.id, lease.token) for lease in claimed.leases]
        return msgspec.structs.replace(claimed, leases=[lease_of(record) for record in held if record])
