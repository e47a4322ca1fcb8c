"""Whether there is nothing left to do: what ends a burst worker, and the event ``drained``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from penstock.errors import StorageError
from penstock.storage.base import Storage
from penstock.worker.lane import Lane

__all__ = ["DrainWatch"]


class DrainWatch:
    """Asks the store for its counts when queues run dry; called on the worker's loop.

    ``drained(queue)`` is called once whenever a queue comes to have no open jobs; ``ended(message)`` when
    there is nothing more to wait for in any queue: drained, or paused and so not to be drained by anybody.
    """

    def __init__(
        self,
        storage: Storage,
        lanes: Sequence[Lane],
        *,
        drained: Callable[[str], None],
        ended: Callable[[str], None],
    ) -> None:
        self._storage = storage
        self._lanes = lanes
        self._drained = drained
        self._ended = ended
        self._told: dict[str, int] = {}
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
            if all(states):
                self._ended("; ".join(states))
        except StorageError:
            # The fetcher finds out by itself; the next dry claim asks again.
            pass
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
        return f"queue {lane.name!r} is paused with {counts.open} open jobs" if counts.paused else ""
