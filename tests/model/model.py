"""The storage contract as plain dicts and lists: docs/verbs.md, read aloud.

One queue, no I/O, no cleverness: finding a job is scanning all of them. ``now`` is set by whoever drives it.
Answers are the contract's own types, so they can be compared with an engine's as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.core.lifecycle import (
    OPEN,
    TERMINAL,
    CancelAnswer,
    ChangeAnswer,
    EventType,
    PromoteAnswer,
    RemoveAnswer,
    RetryAnswer,
    State,
    UnchangedAnswer,
)
from penstock.storage.values import Change, Finished, QueueSettings, Unchanged
from tests.model.clockwork import Clockwork
from tests.model.record import Record, news_of

__all__ = ["Model"]

S, E = State, EventType


class Model(Clockwork):
    """The verbs on one queue: those of `Clockwork`, and those that operate on jobs and queues."""

    # Waiting

    def watch(self, ids: Sequence[str], listener: str) -> list[Finished | None] | None:
        """``None`` stands for ``JobNotFound``."""
        records = [self._kept(id) for id in ids]
        if not all(records):
            return None
        answers: list[Finished | None] = []
        for record in records:
            assert record is not None
            if record.state in TERMINAL:
                answers.append(news_of(record))
            else:
                record.waiters.add(listener)
                answers.append(None)
        return answers

    # Operating on jobs

    def cancel(self, ids: Sequence[str]) -> list[CancelAnswer]:
        return self._then_fill([self._cancel(self.records.get(id)) for id in ids])

    def cancel_rerun(self, ids: Sequence[str]) -> list[CancelAnswer]:
        return self._then_fill([self._cancel_rerun(self.records.get(id)) for id in ids])

    def retry(self, ids: Sequence[str]) -> list[RetryAnswer]:
        to_come, ahead = set(ids), set[str]()
        return self._then_fill([self._retry(self.records.get(id), to_come, ahead) for id in ids])

    def retry_all(self) -> int:
        return self.retry([r.id for r in self.in_state(S.FAILED)]).count("retried")

    def promote(self, ids: Sequence[str]) -> list[PromoteAnswer]:
        return self._then_fill([self._promote(self.records.get(id)) for id in ids])

    def change(self, id: str, change: Change) -> ChangeAnswer:
        record = self.records.get(id)
        if record is None:
            return "not_found"
        if change.payload is not None and record.state not in OPEN:
            return "wrong_state"
        if change.priority is not None and record.state not in OPEN - {S.ACTIVE}:
            return "wrong_state"
        if change.delay_ms is not None and (record.state not in (S.WAITING, S.SCHEDULED) or record.is_staged):
            return "wrong_state"
        self._change(record, change)
        self._append(E.CHANGED, record)
        return self._then_fill("changed")

    def remove(self, ids: Sequence[str]) -> list[RemoveAnswer]:
        return self._then_fill([self._remove(self.records.get(id)) for id in ids])

    def remove_unchanged(self, jobs: Sequence[Unchanged], consumer: str) -> list[UnchangedAnswer]:
        return self._then_fill([self._remove_unchanged(job, consumer) for job in jobs])

    def _remove_unchanged(self, job: Unchanged, consumer: str) -> UnchangedAnswer:
        record = self.records.get(job.id)
        if record is None:
            return "not_found"
        if record.state not in TERMINAL or (record.incarnation, record.finished_at) != job[1:]:
            return "changed"
        if any(record.finished_at + ms > self.now for name, ms in record.holds.items() if name != consumer):
            return "held"
        self._remove(record)
        return "removed"

    def unstage(self, write_id: str, *, discard: bool) -> int:
        staged = [r for r in self.in_state(S.SCHEDULED) if r.is_staged and r.write_id == write_id]
        for record in staged:
            if discard:
                self._remove(record)
            else:
                self._unstage(record)
        return self._then_fill(len(staged))

    def _unstage(self, record: Record) -> None:
        delay_ms = record.extras.staged_delay_ms if record.extras else 0
        record.expires_at = self.now + record.ttl_ms if record.ttl_ms else 0
        if delay_ms:
            self._schedule(record, self.now + delay_ms)
            self._append(E.CHANGED, record)
        else:
            record.run_at = self.now
            self._return_to_waiting(record)
            self._append(E.PROMOTED, record)

    # Operating on queues

    def pause(self) -> None:
        if not self.paused:
            self.paused = True
            self._append(E.PAUSED)

    def resume(self) -> None:
        queue = self._group("")
        if self.paused or queue.parked_until > self.now:
            self.paused = False
            queue.parked_until = min(queue.parked_until, self.now)
            self._append(E.RESUMED)

    def drain(self, *, scheduled: bool) -> int:
        doomed = [r for r in self.in_state(S.BLOCKED) if r.blocked_by == "group"] + self.in_state(S.WAITING)
        doomed += self.in_state(S.SCHEDULED) if scheduled else []
        return self.remove([r.id for r in doomed]).count("removed")

    def clean(self, state: State, older_than_ms: int) -> int:
        old = [r for r in self.in_state(state) if r.finished_at <= self.now - older_than_ms]
        return self.remove([r.id for r in old if not self._is_held(r)]).count("removed")

    def obliterate(self, *, force: bool) -> int | None:
        """``None`` stands for the refusal."""
        if self.in_state(S.ACTIVE) and not force:
            return None
        count = len(self.records)
        for record in list(self.records.values()):
            self._delete(record)
        self.keys.clear()
        for clock in self.clocks.values():
            if clock.awaits:
                clock.go_on(self.wall)
        self._touched = []
        self._forget_groups()
        self._append(E.OBLITERATED)
        return count

    def configure(self, settings: QueueSettings) -> None:
        self.settings = settings
        self._append(E.CONFIGURED)

    # Operating

    def _cancel(self, record: Record | None) -> CancelAnswer:
        if record is None:
            return "not_found"
        match record.state:
            case S.COMPLETED:
                return "completed"
            case S.FAILED:
                return "failed"
            case S.CANCELLED:
                return "already_cancelled"
            case S.ACTIVE:
                self._ask_to_stop(record)
                return "requested"
            case S.SCHEDULED | S.WAITING | S.BLOCKED:
                record.run_at = self.now if record.is_staged else record.run_at
                self._finish(record, S.CANCELLED, E.CANCELLED)
                return "cancelled"

    def _cancel_rerun(self, record: Record | None) -> CancelAnswer:
        if record is None:
            return "not_found"
        if record.slot is None:
            return "no_rerun"
        self._drop_slot(record)
        self._append(E.CHANGED, record)
        return "rerun_cancelled"

    def _drop_slot(self, record: Record) -> None:
        if record.slot is not None:
            record.waiters |= record.slot.waiters
            record.slot = None

    def _ask_to_stop(self, record: Record) -> None:
        self._drop_slot(record)
        if not record.cancelling:
            record.cancelling = True
            self._append(E.CANCELLING, record)

    def _retry(self, record: Record | None, to_come: set[str], ahead: set[str]) -> RetryAnswer:
        if record is None:
            return "not_found"
        if record.id in ahead:
            ahead.discard(record.id)
            return "retried"
        if record.state not in (S.FAILED, S.CANCELLED):
            return "not_failed"
        self._retry_in_order(record, to_come, ahead)
        ahead.discard(record.id)
        return "retried"

    def _retry_in_order(self, record: Record, to_come: set[str], ahead: set[str]) -> None:
        to_come.discard(record.id)
        for id in self.to_look_at_again(record):
            one = self.records.get(id)
            if one is not None and id in to_come and one.state in (S.FAILED, S.CANCELLED):
                self._retry_in_order(one, to_come, ahead)
        ahead.add(record.id)
        record.failures = record.stalls = record.finished_at = record.kept_until = record.token = 0
        record.failure = record.result = record.settled_as = None
        record.cancelling = False
        self._forgive(record)
        record.expires_at = self.now + record.ttl_ms if record.ttl_ms else 0
        self.look_again(record)
        self._enter_waiting(record)
        self._append(E.RETRIED, record)
        self.conclude(record)

    def _change(self, record: Record, change: Change) -> None:
        if change.payload is not None:
            record.payload = change.payload
        if change.priority is not None:
            record.priority = change.priority
            if self._group_role(record) in ("b", "k"):
                self._touch(record.group)
        if change.delay_ms:
            self._schedule(record, self.now + change.delay_ms)
        elif change.delay_ms == 0 and record.state is S.SCHEDULED:
            self._enter_waiting(record)
        for name in ("result_ttl_ms", "failure_ttl_ms"):
            if (ms := getattr(change, name)) is not None:
                record.options = msgspec.structs.replace(record.options, **{name: ms})
        if record.state in TERMINAL:
            self._keep(record)

    def _remove(self, record: Record | None) -> RemoveAnswer:
        if record is None:
            return "not_found"
        if record.state is S.ACTIVE:
            return "active"
        self._append(E.REMOVED, record, state="")
        was = record.state
        # Gone before its dependents hear of it: it may be one of theirs.
        self._delete(record)
        if was is not S.COMPLETED:
            self.tell_dependents(record, "removed")
        return "removed"
