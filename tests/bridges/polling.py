"""Waiting for something to be so, with a deadline."""

from __future__ import annotations

import asyncio

import redis

from penstock.bridges.redis_work_queue import Cleaned, WorkQueue

__all__ = ["clean_until_something", "until_blocked"]


async def until_blocked(db: redis.Redis, *, count: int = 1) -> None:
    """Until so many leases, of anybody, wait inside the server."""
    async with asyncio.timeout(20):
        while sum(client["cmd"] in ("blmove", "brpoplpush") for client in db.client_list()) < count:
            await asyncio.sleep(0.005)


async def clean_until_something(queue: WorkQueue, *, deep: bool = False) -> Cleaned:
    """What the first clean did that had something to do: leases have to be over first."""
    async with asyncio.timeout(20):
        while True:
            cleaned = await (queue.deep_clean if deep else queue.light_clean)(grace=0)
            if cleaned != Cleaned():
                return cleaned
            await asyncio.sleep(0.005)
