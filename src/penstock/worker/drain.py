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
from penstock.storage.base import Storage
from penstock.worker.slots import Lane

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
        lanes: Sequence[Lane],
        *,
        drained: Callable[[str], None],
        ended: Callable[[str], None] | None,
    ) -> None:
        self._storage = storage
        self._lanes = lanes
        self._drained = drained
        self._ended = ended
        self._told: dict[str, int] = {}
        # By queue, a job that waits for another queue: as long as it does, the others need not be looked at again.
        self._awaits: dict[str, str] = {}
        self._check: asyncio.Task[None] | None = None

    def dried(self, _: Lane) -> None:
        """A queue gave less than was asked for."""
        if self._check is None and not any(lane.held for lane in self._lanes if lane.dry):
            self._check = asyncio.get_running_loop().create_task(self._look())

    def close(self) -> None:
        """Ask no more."""
        if self._check is not None:
            self._check.cancel()

    async def _look(self) -> None:
        try:
            states = [await self._state(lane) for lane in self._lanes]
            # Twice: while one queue was looked at, a job may have gone from there to one that was looked at before.
            if all(states) and self._ended and states == [await self._state(lane) for lane in self._lanes]:
                self._ended("; ".join(states))
        except StorageError:
            # The fetcher finds out by itself; the next dry claim asks again.
            pass
        except Exception:
            logger.exception("The look for what is left to do failed and will be repeated")
        finally:
            self._check = None

    async def _state(self, lane: Lane) -> str:
        """Why there is nothing to wait for, in words; empty if there is."""
        claims = lane.claims
        counts = await self._storage.counts(lane.name)
        if lane.held or lane.claims != claims:
            return ""
        if counts.open == 0:
            if self._told.get(lane.name) != claims:
                self._told[lane.name] = claims
                self._drained(lane.name)
            return f"queue {lane.name!r} is drained"
        if self._ended is None:
            return ""
        if counts.paused:
            return f"queue {lane.name!r} is paused with {counts.open} open jobs"
        if await self._is_over_budget(lane):
            return f"queue {lane.name!r} has spent its budget, with {counts.open} open jobs"
        if counts.open == counts.blocked and counts.next_ms is None and not await self._awaits_others(lane):
            return (
                f"queue {lane.name!r} has {counts.blocked} blocked jobs that wait for somebody: "
                "to resume a group, to send a signal, to retry a job"
            )
        return ""

    async def _is_over_budget(self, lane: Lane) -> bool:
        """For good, that is: what is over with a period is waited for, as a delay is."""
        budgets = await self._storage.budgets(lane.name)
        return any(not one.flow and not one.per_ms and one.spent >= one.micros for one in budgets)

    async def _awaits_others(self, lane: Lane) -> bool:
        """Whether one of the blocked jobs waits for a job of another queue that may move, or for news of its end."""
        if known := self._awaits.pop(lane.name, ""):
            [job] = await self._storage.get(lane.name, [known])
            if job is not None and await self._awaits_another(lane, job):
                return True
        cursor = ""
        while True:
            page = await self._storage.list_jobs(lane.name, State.BLOCKED, cursor=cursor, limit=_AT_ONCE)
            for job in page.jobs:
                if await self._awaits_another(lane, job):
                    return True
            cursor = page.cursor
            if not cursor:
                return False

    async def _awaits_another(self, lane: Lane, job: Job) -> bool:
        if job.blocked_by != "children":
            return False
        start = 0
        while edges := await self._storage.dependencies(lane.name, job.id, start=start, limit=_AT_ONCE):
            for edge in edges:
                if edge.state == "pending" and edge.queue != lane.name and await self._may_end(edge):
                    self._awaits[lane.name] = job.id
                    return True
            start += len(edges)
        return False

    async def _may_end(self, edge: DependencyRecord) -> bool:
        """Not if it is open in a queue of ours: then the state of that queue tells."""
        if edge.queue not in {lane.name for lane in self._lanes}:
            return True
        [job] = await self._storage.get(edge.queue, [edge.id])
        return job is None or job.state not in OPEN
