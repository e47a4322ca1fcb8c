"""The verbs of durable steps: a part of the storage contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.core.lifecycle import CopyStepsAnswer, ResetAnswer, StepAnswer
from penstock.core.step import NewStep, Step
from penstock.errors import StorageDamaged


class StepVerbs(Protocol):
    """The part of ``Storage`` that records the steps of jobs. docs/verbs.md describes it under *Steps*."""

    async def record_steps(
        self, queue: str, steps: Sequence[NewStep], *, lease_ms: int = 0
    ) -> list[StepAnswer]:
        """Record steps of running jobs, and extend their leases to at least ``lease_ms`` from now (0: as they are).

        The first final record of a step stays: a later one changes nothing (``known``). ``lost``: the lease is. The
        caller keeps the limits on the number and size of steps.
        """

    async def steps(self, queue: str, id: str, *, names: Sequence[str] | None = None) -> list[Step]:
        """Return the recorded steps of a job in their order, or those of ``names``, which then have large results
        too. Raise ``StorageDamaged`` if one cannot be read."""

    async def reset_step(self, queue: str, id: str, name: str) -> ResetAnswer:
        """Forget a step of a job that is not active, so that the next run runs it again."""

    async def copy_steps(self, queue: str, id: str, to: str, *, before: str) -> CopyStepsAnswer:
        """Copy the steps that a job recorded before the first one with a name, whatever its key, to another job.

        The other job must not be active. Steps that it has already stay as they are.
        """


def unreadable_step(queue: str, id: str) -> StorageDamaged:
    """Return the error to raise for a job with a step that cannot be read."""
    return StorageDamaged(
        f"queue {queue!r}: a step of job {id!r} cannot be read. Run `penstock doctor --repair`, which puts the job "
        "aside as failed (Damaged)"
    )
