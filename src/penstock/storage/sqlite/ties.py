"""What a job whose annex binds has to do with others. Each kind of tie has a module; this one asks them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.storage.sqlite import admission, deadletters, dedup, flows, groups, schedulers
from penstock.storage.sqlite.holds import index
from penstock.storage.sqlite.records import Record
from penstock.storage.sqlite.step import Step, Ties

__all__ = ["TIES"]


class _Ties:
    def hold_back(self, step: Step, record: Record, *, keeps_number: bool) -> bool:
        """A job is to enter waiting. True if it is blocked instead; then it has its state."""
        return self.awaits_children(step, record) or groups.hold_back(step, record, keeps_number=keeps_number)

    def ended(self, step: Step, record: Record) -> None:
        """A job has ended, or is removed before its end."""
        groups.leave(step, record)
        flows.ended(step, record)
        annex = record.annex
        if annex.dedup:
            dedup.ended(step, annex.dedup, record)
        if annex.repeats:
            schedulers.ended(step, annex.scheduler, record)

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
        deadletters.bury(step, record)

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


TIES: Final[Ties] = _Ties()
