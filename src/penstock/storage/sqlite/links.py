"""What a job whose annex binds has to do with others. Each kind of tie has a module; this one asks them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.core.deadletter import dead_letter_job
from penstock.storage.sqlite import admission, dedup, flows, groups, schedules
from penstock.storage.sqlite.holds import index
from penstock.storage.sqlite.messages import Put
from penstock.storage.sqlite.records import Record, unpack_failure
from penstock.storage.sqlite.statements import statements
from penstock.storage.sqlite.unit import Links, Step


class _Links:
    def hold_back(self, step: Step, record: Record, *, keeps_number: bool) -> bool:
        """A job is to enter waiting. True if it is blocked instead; then it has its state."""
        return self.awaits_children(step, record) or groups.hold_back(step, record, keeps_number=keeps_number)

    def ended(self, step: Step, record: Record) -> None:
        """A job has ended, or is removed before its end."""
        groups.leave(step, record)
        flows.ended(step, record)
        extras = record.extras
        if extras.dedup:
            dedup.ended(step, extras.dedup, record)
        if extras.repeats:
            schedules.ended(step, extras.scheduler, record)

    def saving(self, step: Step, record: Record) -> None:
        """A record is about to be written: what finds it by its ties is to agree."""
        index(step, record)

    def scheduled(self, step: Step, record: Record) -> None:
        """A member of a group waits for a time to come, or for a signal."""
        groups.scheduled(step, record)

    def reordered(self, step: Step, record: Record) -> None:
        """The priority of a member of a group has changed."""
        groups.line_up_again(step, record)

    def settle(self, step: Step) -> None:
        """The verb has done all else."""
        admission.settle(step)

    def failed(self, step: Step, record: Record) -> None:
        """A job, of whatever kind, has failed for good."""
        bury(step, record)

    def removed(self, step: Step, record: Record) -> None:
        """The record of a job that failed or was cancelled goes."""
        flows.removed(step, record)

    def forget(self, step: Step, ids: Sequence[str]) -> None:
        """The records of these ids go, and with them what hangs on them."""
        flows.forget(step, ids)

    def awaits_children(self, step: Step, record: Record) -> bool:
        """Whether jobs it depends on block it, whatever its time. It is not in its group's line meanwhile."""
        is_blocked = flows.hold_back(step, record)
        if is_blocked:
            groups.wait_elsewhere(step, record)
        return is_blocked


TIES: Final[Links] = _Links()


# The ``dead_letter`` queue: a job that has failed for good is put into it as well.


_UNSET = '"dead_letter":null'
_sql = statements("records")


def bury(step: Step, record: Record) -> None:
    """The job has failed: send its letter, if the queue has where to."""
    if step.queue.settings_json == "{}" or _UNSET in step.queue.settings_json:
        return
    settings = step.queue.settings
    if settings.dead_letter is None:
        return
    payload = record.payload
    if payload is None:
        payload = step.sql.execute(_sql["payload"], (record.key,)).fetchone()[0]
    letter = dead_letter_job(
        queue=step.queue.name,
        id=record.id,
        incarnation=record.incarnation,
        task=record.options.task,
        payload=payload,
        failure=unpack_failure(record.failure),
        failures=record.failures,
        failed_at_ms=step.now_ms,
        handled_by=settings.dead_letter_options or settings.dead_letter_task,
    )
    step.outbox.append((settings.dead_letter, Put(letter)))
