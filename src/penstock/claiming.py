"""Claiming outside any worker.

Jobs whose owner vanished come back by themselves: whoever claims also sweeps, a bounded amount, when it finds
nothing and once per lease. What schedulers have due is fired then, too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from penstock.claimed import ClaimedJob
from penstock.core.display import get_logger
from penstock.core.outcome import Release
from penstock.errors import StorageError
from penstock.firing import sweep
from penstock.storage.values import Settlement, Take

if TYPE_CHECKING:
    from penstock.session import Session
    from penstock.source import Source
    from penstock.storage.base import Storage
    from penstock.storage.values import Claimed

__all__ = ["Claiming"]

_log = get_logger(__name__)

_SWEEP_AT_ONCE: Final = 100
_LONGEST_WAIT_MS: Final = 5_000


class Claiming:
    """What a claim asks for: whose jobs, for how long, how long to wait (``None``: until there is one)."""

    __slots__ = ("lease_ms", "source", "wait_ms", "worker")

    def __init__(self, source: Source, *, lease_ms: int, wait_ms: int | None, worker: str | None) -> None:
        self.source = source
        self.lease_ms = lease_ms
        self.wait_ms = wait_ms
        self.worker = worker

    async def claim(self, count: int) -> list[ClaimedJob]:
        """Up to ``count`` jobs; none if the wait is over. A caller that gives up leaves nothing leased."""
        source, session = self.source, await self.source.app.session()
        worker = self.worker or session.worker
        take = Take(worker, count, self.lease_ms)
        claimed = await self._claimed(session, take)
        return [
            ClaimedJob(source, session, lease, lease_ms=self.lease_ms, worker=worker)
            for lease in claimed.leases
        ]

    async def _claimed(self, session: Session, take: Take) -> Claimed:
        loop, storage, queue = asyncio.get_running_loop(), session.storage, self.source.queue
        deadline = None if self.wait_ms is None else loop.time() + self.wait_ms / 1000
        if session.sweep_is_due(queue, self.lease_ms):
            await sweep(storage, queue, limit=_SWEEP_AT_ONCE, intake=session.intake)
        claimed = await _take(storage, queue, take)
        if claimed.leases:
            return claimed
        await sweep(storage, queue, limit=_SWEEP_AT_ONCE, intake=session.intake)
        while not (claimed := await _take(storage, queue, take)).leases:
            due_ms = _LONGEST_WAIT_MS if claimed.wait_ms is None else max(claimed.wait_ms, 1)
            wait_ms = min(_LONGEST_WAIT_MS, self.lease_ms, due_ms)
            if deadline is not None:
                wait_ms = min(wait_ms, int((deadline - loop.time()) * 1000))
                if wait_ms <= 0:
                    break
            await storage.wait(queue, timeout_ms=wait_ms)
            if session.sweep_is_due(queue, min(self.lease_ms, _LONGEST_WAIT_MS)):
                await sweep(storage, queue, limit=_SWEEP_AT_ONCE, intake=session.intake)
        return claimed


async def _take(storage: Storage, queue: str, take: Take) -> Claimed:
    """A claim that a caller may be cancelled in: what it got is handed back, not leased to nobody."""
    claiming = asyncio.ensure_future(storage.claim(queue, take))
    try:
        return await asyncio.shield(claiming)
    except asyncio.CancelledError:
        _keep(asyncio.create_task(_hand_back(storage, queue, claiming)))
        raise


async def _hand_back(storage: Storage, queue: str, claiming: asyncio.Future[Claimed]) -> None:
    try:
        leases = (await claiming).leases
        if leases:
            await storage.settle(queue, [Settlement(lease.id, lease.token, Release()) for lease in leases])
    except StorageError as error:
        _log.warning(
            "queue %s: jobs of a cancelled claim come back when their lease expires: %s", queue, error
        )


_kept: set[asyncio.Task[None]] = set()


def _keep(task: asyncio.Task[None]) -> None:
    _kept.add(task)
    task.add_done_callback(_kept.discard)
