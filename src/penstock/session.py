"""What one event loop has of an app: an open storage, the calls that travel together, the waits for results."""

from __future__ import annotations

import asyncio
import os
import platform
import re
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from penstock.core.ids import uuid7
from penstock.core.job import Enqueued, NewJob
from penstock.core.outcome import Complete
from penstock.storage.coalesce import Coalescer
from penstock.storage.values import Extended, Held, Settled, Settlement
from penstock.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from penstock.intake import Intake
    from penstock.storage.base import Storage

__all__ = ["Session"]

_SMALL: Final = 64
"""About what an item weighs on the wire besides its payload."""


class Session:
    """Belongs to one event loop, like the storage in it. Made and closed by ``App``."""

    __slots__ = (
        "_enqueues",
        "_extends",
        "_settles",
        "_sweeps_due",
        "_waiters",
        "intake",
        "storage",
        "worker",
    )
    remedy: ClassVar[str] = ""
    """The remedy for a job that does not run, if it differs from what ``why`` says."""

    def __init__(self, storage: Storage, intake: Intake) -> None:
        self.storage = storage
        self.intake = intake
        self.worker = _worker_name()
        """The name that claims outside any worker go by."""
        self._enqueues: dict[str, Callable[[NewJob], Awaitable[Enqueued]]] = {}
        self._settles: dict[str, Coalescer[Settlement, Settled]] = {}
        self._extends: dict[tuple[str, str, int], Coalescer[Held, Extended]] = {}
        self._waiters: dict[str, Waiter] = {}
        self._sweeps_due: dict[str, float] = {}

    def enqueue(self, queue: str, job: NewJob) -> Awaitable[Enqueued]:
        """Put one job in, together with all that other callers are putting in just now.

        One that waits for others goes alone: it may be refused, and would be refused for all.
        """
        call: Callable[[NewJob], Awaitable[Enqueued]] | None
        if job.after:
            call = partial(self._enqueue_alone, queue)
        elif (call := self._enqueues.get(queue)) is None:
            call = self._enqueues[queue] = self._enqueues_to(queue).call
        return self._enqueue_through(queue, job, call) if self.intake.layers else call(job)

    async def _enqueue_through(
        self, queue: str, job: NewJob, call: Callable[[NewJob], Awaitable[Enqueued]]
    ) -> Enqueued:
        async def send(jobs: Sequence[NewJob]) -> list[Enqueued]:
            return [await call(job) for job in jobs]

        [answer] = await self.intake.enqueue(queue, [job], send)
        return answer

    async def _enqueue_alone(self, queue: str, job: NewJob) -> Enqueued:
        [answer] = await self.storage.enqueue(queue, [job])
        return answer

    def _enqueues_to(self, queue: str) -> Coalescer[NewJob, Enqueued]:
        enqueue = self.storage.enqueue
        return Coalescer(lambda jobs: enqueue(queue, jobs), size=_weight_of_job)

    async def settle(self, queue: str, settlement: Settlement) -> Settled:
        """Apply one outcome, together with the others pending for this queue."""
        settles = self._settles.get(queue)
        if settles is None:

            async def send(settlements: list[Settlement]) -> list[Settled]:
                return (await self.storage.settle(queue, settlements)).answers

            settles = self._settles[queue] = Coalescer(send, size=_weight_of_settlement)
        return await settles.call(settlement)

    async def extend(self, queue: str, held: Held, *, worker: str, lease_ms: int) -> Extended:
        """Push one lease's deadline, together with the others of this queue, worker and length."""
        key = (queue, worker, lease_ms)
        extends = self._extends.get(key)
        if extends is None:
            extend = self.storage.extend
            extends = self._extends[key] = Coalescer(
                lambda all_held: extend(queue, all_held, worker=worker, lease_ms=lease_ms),
                size=lambda _: _SMALL,
            )
        return await extends.call(held)

    def waiter(self, queue: str) -> Waiter:
        """The one that waits for ends of jobs of this queue."""
        waiter = self._waiters.get(queue)
        if waiter is None:
            waiter = self._waiters[queue] = Waiter(self.storage, queue)
        return waiter

    def sweep_is_due(self, queue: str, every_ms: int) -> bool:
        """Whether nobody here swept the queue for ``every_ms``; if so, the caller is taken to do it now."""
        now = asyncio.get_running_loop().time()
        if now < self._sweeps_due.get(queue, 0.0):
            return False
        self._sweeps_due[queue] = now + every_ms / 1000
        return True

    async def close(self, *, storage_too: bool = True) -> None:
        """End the waits, then let go of the storage unless it is somebody else's."""
        for waiter in self._waiters.values():
            await waiter.close()
        if storage_too:
            await self.storage.close()


def _weight_of_job(job: NewJob) -> int:
    return len(job.payload) + _SMALL


def _weight_of_settlement(settlement: Settlement) -> int:
    outcome = settlement.outcome
    return _SMALL + len(outcome.result) if isinstance(outcome, Complete) else _SMALL


def _worker_name() -> str:
    host = re.sub(r"[^A-Za-z0-9_.\-]", "-", platform.node())[:100] or "host"
    return f"{host}:{os.getpid()}:{uuid7()[-8:]}"
