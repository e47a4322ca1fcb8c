"""Whether there is nothing left to do: what ends a burst worker, and the event ``drained``."""

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
    """Asks the store for its counts when queues run dry; called on the worker's loop.

    ``drained(queue)`` is called once whenever a queue comes to have no open jobs; ``ended(message)``, if it is given,
    when there is nothing more to wait for in any queue: it is drained, or neither time nor a worker moves what is left.
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
        self._told: dict[str, int] = {}
        # By queue, a job that waits for another queue: as long as it does, the others need not be looked at again.
        self._awaits: dict[str, str] = {}
        self._check: asyncio.Task[None] | None = None

    def dried(self, _: ServedQueue) -> None:
        """A queue gave less than was asked for."""
        if self._check is None and not any(served.held for served in self._served_queues if served.dry):
            self._check = asyncio.get_running_loop().create_task(self._look())

    def close(self) -> None:
        """Ask no more."""
        if self._check is not None:
            self._check.cancel()

    async def _look(self) -> None:
        try:
            states = [await self._state(served) for served in self._served_queues]
            # Twice: while one queue was looked at, a job may have gone from there to one that was looked at before.
            if (
                all(states)
                and self._ended
                and states == [await self._state(served) for served in self._served_queues]
            ):
                self._ended("; ".join(states))
        except StorageError:
            # The fetcher finds out by itself; the next dry claim asks again.
            pass
        except Exception:
            logger.exception("The look for what is left to do failed and will be repeated")
        finally:
            self._check = None

    async def _state(self, served: ServedQueue) -> str:
        """Why there is nothing to wait for, in words; empty if there is."""
        claims = served.claims
        counts = await self._storage.counts(served.name)
        if served.held or served.claims != claims:
            return ""
        if counts.open == 0:
            if self._told.get(served.name) != claims:
                self._told[served.name] = claims
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
                f"queue {served.name!r} has {counts.blocked} blocked jobs that wait for somebody: "
                "to resume a group, to send a signal, to retry a job"
            )
        return ""

    async def _is_over_budget(self, served: ServedQueue) -> bool:
        """For good, that is: what is over with a period is waited for, as a delay is."""
        budgets = await self._storage.budgets(served.name)
        return any(not one.flow and not one.per_ms and one.spent >= one.micros for one in budgets)

    async def _awaits_others(self, served: ServedQueue) -> bool:
        """Whether one of the blocked jobs waits for a job of another queue that may move, or for news of its end."""
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
        """Not if it is open in a queue of ours: then the state of that queue tells."""
        if edge.queue not in {served.name for served in self._served_queues}:
            return True
        [job] = await self._storage.get(edge.queue, [edge.id])
        return job is None or job.state not in OPEN
