"""The recorded steps of a job, as callers see them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

import msgspec

from penstock.client.job_verbs import QueuePart
from penstock.client.situation import instant
from penstock.core.job import Conflict, NewJob
from penstock.core.lifecycle import ResetAnswer
from penstock.core.names import check_id, step_name, uuid7
from penstock.core.step import Step, StepStatus
from penstock.core.text import shown
from penstock.errors import InvalidOption, JobNotFound

if TYPE_CHECKING:
    from penstock.client.codec import JobCodec
    from penstock.client.handle import JobHandle


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


def _whole(name: str, key: str | int | None) -> str:
    """Return the name of a step with its key. ``name`` may include the key, as in ``StepInfo``."""
    return name if key is None and name.endswith("]") else step_name(name, key)


class JobSteps:
    """The steps of one job, which ``JobHandle`` inherits."""

    __slots__ = ()

    if TYPE_CHECKING:
        id: str
        _source: JobCodec

        def __init__(self, source: JobCodec, id: str) -> None: ...

    async def steps(self) -> list[StepInfo]:
        """Return the recorded steps, in the order in which they were first recorded."""
        storage = await self._source.app.connect()
        return [_info(step) for step in await storage.steps(self._source.queue, self.id)]

    async def reset_step(self, name: str, *, key: str | int | None = None) -> ResetAnswer:
        """Forget a step of the job, unless it is active, so that the next run runs the step again.

        ``name`` may include the key, as in ``StepInfo``. The answer is ``reset``; ``active`` if the job is running;
        ``unknown_step`` or ``not_found`` if there is no such step or job.
        """
        storage = await self._source.app.connect()
        return await storage.reset_step(self._source.queue, self.id, _whole(name, key))

    async def fork(self, *, before: str, key: str | int | None = None, new_id: str | None = None) -> Self:
        """Enqueue a new job with the payload and options of this one and the steps that it recorded before ``before``.

        Without a ``key``, ``before`` is the first step of that name. This job stays as it is, and may have finished.
        Raise ``JobNotFound``, or ``InvalidOption`` if it has no such step or ``new_id`` is taken.
        """
        source, storage, queue = self._source, await self._source.app.connect(), self._source.queue
        [job] = await storage.get(queue, [self.id])
        if job is None:
            raise JobNotFound.in_queue(queue, self.id)
        # Staged, so that no worker takes it before it has its steps.
        new = NewJob(
            uuid7() if new_id is None else check_id(new_id),
            job.payload,
            job.options,
            priority=job.priority,
            lifo=job.lifo,
            conflict=Conflict("absent"),
            write_id=f"fork-{uuid7()}",
            extras=job.extras.for_new_incarnation() if job.extras else None,
            staged=True,
        )
        [answer] = await storage.enqueue(queue, [new])
        if answer.status != "queued":
            raise InvalidOption(
                f"new_id={shown(new.id)} is taken by a job of queue {shown(queue)}. Give another id."
            )
        copied = "not_found"
        try:
            copied = await storage.copy_steps(queue, self.id, new.id, before=_whole(before, key))
        finally:
            await storage.unstage(queue, new.write_id, discard=copied != "copied")
        if copied != "copied":
            names = ", ".join(step.name for step in await storage.steps(queue, self.id)) or "none"
            raise InvalidOption(
                f"job {shown(self.id)} has no recorded step {shown(before)} to fork before. Its steps are: {names}."
            )
        return type(self)(source, new.id)


class QueueSteps(QueuePart):
    """The steps of the jobs of a queue."""

    async def steps(self, id: str) -> list[StepInfo]:
        """Return the recorded steps of a job; see ``JobHandle.steps``."""
        return await self.job(id).steps()

    async def reset_step(self, id: str, name: str, *, key: str | int | None = None) -> ResetAnswer:
        """Forget a step of a job that is not active; see ``JobHandle.reset_step``."""
        return await self.job(id).reset_step(name, key=key)

    async def fork(
        self, id: str, *, before: str, key: str | int | None = None, new_id: str | None = None
    ) -> JobHandle[Any]:
        """Enqueue a new job that keeps the steps of a job before one of them; see ``JobHandle.fork``."""
        return await self.job(id).fork(before=before, key=key, new_id=new_id)
