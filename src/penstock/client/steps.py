"""The recorded steps of a job, as callers see them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from penstock.client.situation import instant
from penstock.core.lifecycle import ResetAnswer
from penstock.core.names import check_id, step_name
from penstock.core.step import Step, StepStatus

if TYPE_CHECKING:
    from penstock.client.codec import JobCodec


class StepInfo(msgspec.Struct, frozen=True):
    """A recorded step.

    ``name`` includes the key: ``reserve[sku-7]``. ``failures`` is the number of failed attempts, ``error_type`` and
    ``error`` are the last failure. ``until`` is the end of a wait (``None``: no limit). ``size`` is the size of the
    result in bytes.
    """

    name: str
    status: StepStatus
    recorded_at: datetime
    until: datetime | None = None
    failures: int = 0
    error_type: str = ""
    error: str = ""
    size: int = 0


def _info(step: Step) -> StepInfo:
    failure = step.failure
    return StepInfo(
        step.name,
        step.status,
        instant(step.at_ms),
        instant(step.until_ms) if step.until_ms else None,
        step.failures,
        failure.type if failure else "",
        failure.message if failure else "",
        step.size,
    )


async def _read(source: JobCodec, id: str) -> list[StepInfo]:
    storage = await source.app.connect()
    return [_info(step) for step in await storage.steps(source.queue, check_id(id))]


async def _reset(source: JobCodec, id: str, name: str, key: str | int | None) -> ResetAnswer:
    whole = name if key is None and name.endswith("]") else step_name(name, key)
    return await (await source.app.connect()).reset_step(source.queue, check_id(id), whole)


class JobSteps:
    """The steps of one job, which ``JobHandle`` inherits."""

    __slots__ = ()

    if TYPE_CHECKING:
        id: str
        _source: JobCodec

    async def steps(self) -> list[StepInfo]:
        """Return the recorded steps, in the order in which they were first recorded."""
        return await _read(self._source, self.id)

    async def reset_step(self, name: str, *, key: str | int | None = None) -> ResetAnswer:
        """Forget a step, so that the next run of the job runs it again; see ``Queue.reset_step``."""
        return await _reset(self._source, self.id, name, key)


class QueueSteps:
    """The steps of the jobs of a queue, which ``Queue`` inherits."""

    _source: JobCodec

    async def steps(self, id: str) -> list[StepInfo]:
        """Return the recorded steps of a job, in the order in which they were first recorded."""
        return await _read(self._source, id)

    async def reset_step(self, id: str, name: str, *, key: str | int | None = None) -> ResetAnswer:
        """Forget a step of a job that is not active, so that the next run runs it again.

        ``name`` may include the key, as in ``StepInfo``. The answer is ``reset``; ``active`` if the job is running;
        ``unknown_step`` or ``not_found`` if there is no such step or job.
        """
        return await _reset(self._source, id, name, key)
