"""The death watch: takes jobs back from workers whose processes have died, without waiting for their leases.

It acts on proof only (``Storage.lives``). Every worker that sweeps watches its own queues. Together they look about
four times a second at most, however many they are: each rests the longer, the more workers there are.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final

from penstock.core.display import get_logger
from penstock.errors import StorageError
from penstock.leases import take_back
from penstock.storage.base import Storage

__all__ = ["DeathWatch"]

logger = get_logger("penstock.worker")

_LOOK_EVERY_S: Final = 1.0
_LOOKS_PER_SECOND: Final = 4


class DeathWatch:
    """Watches the workers of ``queues``, or of all there are."""

    def __init__(self, storage: Storage, queues: Sequence[str] | None = None) -> None:
        self._storage = storage
        self._queues = queues
        self._buried: set[tuple[str, str]] = set()
        self._known = 0

    async def run(self) -> None:
        """Watch for ever; cancel to stop. What fails is tried again the next time."""
        failing = False
        while True:
            await asyncio.sleep(self._rest_s() * random.uniform(0.8, 1.2))
            try:
                await self.run_once()
                failing = False
            except StorageError as error:
                log = logger.debug if failing else logger.warning
                log("looking for dead workers failed and will be repeated: %s", error)
                failing = True
            except Exception:  # nobody else would notice that nobody looks any more
                logger.exception("looking for dead workers failed and will be repeated")

    async def run_once(self) -> int:
        """Look at each queue; return how many jobs were taken from dead workers."""
        queues = await self._storage.queues() if self._queues is None else self._queues
        found = await asyncio.gather(*(self._storage.lives(queue) for queue in queues))
        self._known = max(map(len, found), default=0)
        dead = {
            (queue, worker)
            for queue, lives in zip(queues, found, strict=True)
            for worker, is_alive in lives.items()
            if not is_alive
        }
        self._buried &= dead
        return sum([await self._rescue(queue, worker) for queue, worker in sorted(dead - self._buried)])

    async def _rescue(self, queue: str, worker: str) -> int:
        held = await self._storage.leases_of(queue, worker)
        if not held:
            # A second look has found nothing new: it will not claim any more.
            self._buried.add((queue, worker))
            return 0
        await take_back(self._storage, queue, held)
        logger.warning(
            "queue %s: worker %s has died; %d of its jobs %s again",
            *(queue, worker, len(held), "waits" if len(held) == 1 else "wait"),
        )
        return len(held)

    def _rest_s(self) -> float:
        return _LOOK_EVERY_S * max(1.0, self._known / _LOOKS_PER_SECOND)
