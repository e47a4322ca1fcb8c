"""What a job whose annex binds has to do with others. Each kind of tie has a module; this one asks them all."""

from __future__ import annotations

from typing import Final

from penstock.storage.sqlite import dedup, schedulers
from penstock.storage.sqlite.holds import index
from penstock.storage.sqlite.records import Record
from penstock.storage.sqlite.step import Step, Ties

__all__ = ["TIES"]


class _Ties:
    def hold_back(self, step: Step, record: Record) -> bool:
        """A job is to enter waiting. True if it is blocked instead; then it has its state."""
        return False

    def ended(self, step: Step, record: Record) -> None:
        """A job has ended, or is removed before its end."""
        annex = record.annex
        if annex.dedup:
            dedup.ended(step, annex.dedup, record)
        if annex.repeats:
            schedulers.ended(step, annex.scheduler, record)

    def saving(self, step: Step, record: Record) -> None:
        """A record is about to be written: what finds it by its ties is to agree."""
        index(step, record)


TIES: Final[Ties] = _Ties()
