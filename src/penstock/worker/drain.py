"""The drain watch: notices that nothing is left to do, for the event ``drained`` and to stop burst workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from penstock.core.flow import DependencyRecord
from penstock.core.job import Job
from penstock.core.lifecycle import OPEN, State
from penstock.core.text import get_logger
from penstock.errors import StorageError
from penstock.storage.contract import Storage
from penstock.worker.slots import ServedQueue

logger = get_logger("penstock.worker")

_AT_ONCE: Final = 200


class DrainWatch:
    """Reads the store's counts when queues run dry; called on the worker's loop.

    ``drained(queue)`` is called each time a queue runs out of open jobs. ``ended(message)``, if given, is called when
    no queue has anything to wait for: it is drained, or neither time nor a worker can move its remaining jobs.
    """

    def __init__(
        self,
        storage: Storage,
        served_queues: Sequence[ServedQueue],
        *,
        drained: Callable[[str], None],
        ended: Callable[[str], None] | None,
    ) -> None:
        self._storage = storage
        self._served_queues = served_queues
        self._drained = drained
        self._ended = ended
        # By queue, the number of claims when it was last reported as drained.
        self._reported: dict[str, int] = {}
        # By queue, a job that waits for another queue: while it does, the other jobs need no check.
        self._awaits: dict[str, str] = {}
        self._check: asyncio.Task[None] | None = None

    def dried(self, _: ServedQueue) -> None:
        """Check the queues, because one returned less than requested."""
        if self._check is None and not any(served.held for served in self._served_queues if served.dry):
            self._check = asyncio.get_running_loop().create_task(self._look())

    def close(self) -> None:
        """Cancel a check under way."""
        if self._check is not None:
            self._check.cancel()

    async def _look(self) -> None:
        try:
            states = [await self._state(served) for served in self._served_queues]
            # Check twice: during the first check a job may move to a queue that was checked before.
            if (
                all(states)
                and self._ended
                and states == [await self._state(served) for served in self._served_queues]
            ):
                self._ended("; ".join(states))
        except StorageError:
            # The fetcher notices by itself, and the next dry claim checks again.
            pass
        except Exception:
            logger.exception("checking for remaining jobs failed and will be repeated")
        finally:
            self._check = None

    async def _state(self, served: ServedQueue) -> str:
        """Return why there is nothing to wait for in this queue; empty if there is something."""
        claims = served.claims
        counts = await self._storage.counts(served.name)
        if served.held or served.claims != claims:
            return ""
        if counts.open == 0:
            if self._reported.get(served.name) != claims:
                self._reported[served.name] = claims
                self._drained(served.name)
            return f"queue {served.name!r} is drained"
        if self._ended is None:
            return ""
        if counts.paused:
            return f"queue {served.name!r} is paused with {counts.open} open jobs"
        if await self._is_over_budget(served):
            return f"queue {served.name!r} has spent its budget, with {counts.open} open jobs"
        if counts.open == counts.blocked and counts.next_ms is None and not await self._awaits_others(served):
            return (
                f"queue {served.name!r} has {counts.blocked} blocked jobs that need an action: "
                "resume a group, send a signal or retry a job"
            )
        return ""

    async def _is_over_budget(self, served: ServedQueue) -> bool:
        """Return whether a budget without a period is spent. A budget with a period is worth waiting for."""
        budgets = await self._storage.budgets(served.name)
        return any(not b.flow and not b.per_ms and b.spent >= b.micros for b in budgets)

    async def _awaits_others(self, served: ServedQueue) -> bool:
        """Return whether a blocked job waits for a job of another queue that may still end."""
        if known := self._awaits.pop(served.name, ""):
            [job] = await self._storage.get(served.name, [known])
            if job is not None and await self._awaits_another(served, job):
                return True
        cursor = ""
        while True:
            page = await self._storage.list_jobs(served.name, State.BLOCKED, cursor=cursor, limit=_AT_ONCE)
            for job in page.jobs:
                if await self._awaits_another(served, job):
                    return True
            cursor = page.cursor
            if not cursor:
                return False

    async def _awaits_another(self, served: ServedQueue, job: Job) -> bool:
        if job.blocked_by != "children":
            return False
        start = 0
        while edges := await self._storage.dependencies(served.name, job.id, start=start, limit=_AT_ONCE):
            for edge in edges:
                if edge.state == "pending" and edge.queue != served.name and await self._may_end(edge):
                    self._awaits[served.name] = job.id
                    return True
            start += len(edges)
        return False

    async def _may_end(self, edge: DependencyRecord) -> bool:
        """Return whether the dependency may end, apart from open jobs in this worker's queues: those are counted."""
        if edge.queue not in {served.name for served in self._served_queues}:
            return True
        [job] = await self._storage.get(edge.queue, [edge.id])
        return job is None or job.state not in OPEN
