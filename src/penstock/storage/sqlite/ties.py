"""What a job whose annex binds has to do with others. Each kind of tie has a module; this one asks them all."""

from __future__ import annotations

from typing import Final

from penstock.storage.sqlite import admission, dedup, groups, schedulers
from penstock.storage.sqlite.holds import index
from penstock.storage.sqlite.records import Record
from penstock.storage.sqlite.step import Step, Ties

__all__ = ["TIES"]


class _Ties:
    def hold_back(self, step: Step, record: Record, *, keeps_number: bool) -> bool:
        """A job is to enter waiting. True if it is blocked instead; then it has its state."""
        return groups.hold_back(step, record, keeps_number=keeps_number)

    def ended(self, step: Step, record: Record) -> None:
        """A job has ended, or is removed before its end."""
        groups.leave(step, record)
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


TIES: Final[Ties] = _Ties()
