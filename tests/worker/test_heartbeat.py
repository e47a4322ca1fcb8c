"""Rule 4: a live worker keeps its jobs, however busy its loop; a lost lease ends the run."""

from __future__ import annotations

import asyncio
import os
import platform
import time

from penstock import App, JobContext, State
from penstock.storage.values import Held, Take
from tests.worker.conftest import recorded, until, working


async def test_a_handler_that_hogs_the_loop_keeps_its_lease(app: App) -> None:
    @app.task
    async def hog(context: JobContext) -> int:
        time.sleep(1.5)  # the whole loop stands still, five times as long as the lease
        return context.run

    async with working(app, lease="300ms", concurrency=4):
        job = await hog.enqueue()
        assert await job.result(timeout="20s") == 1
        info = await job.get()
        assert info is not None
        assert (info.runs, info.stalls) == (1, 0)


async def test_jobs_claimed_while_the_loop_stood_still_do_not_stall(app: App) -> None:
    @app.task
    async def hog(seconds: float) -> None:
        time.sleep(seconds)

    async with working(app, lease="300ms", concurrency=4) as worker:
        await hog.enqueue_many([{"seconds": 0.7} for _ in range(6)])
        await until(lambda: worker.stats.completed == 6)
        jobs = (await (await app.connect()).list_jobs("default", State.COMPLETED)).jobs
    assert [job.stalls for job in jobs] == [0] * 6


async def test_a_run_whose_lease_was_lost_is_stopped_and_settles_nothing(app: App) -> None:
    started, stopped = asyncio.Event(), asyncio.Event()

    @app.task
    async def endless() -> str:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.set()
        return "never"

    storage = await app.connect()
    async with working(app, lease="1s", heartbeat="100ms", sweep=False, concurrency=1) as worker:
        stalled = recorded(worker, "stalled")
        job = await endless.enqueue()
        await asyncio.wait_for(started.wait(), 10)
        worker.pause()
        # Its deadline passes without a heartbeat, as if this machine had been asleep; somebody else gets the job.
        await storage.shift_clock("default", 60_000)
        await storage.sweep("default")
        taken = await storage.claim("default", Take("other", 1, 60_000))
        if not taken.leases:  # a heartbeat came between the shift and the sweep: once more
            await storage.shift_clock("default", 60_000)
            await storage.sweep("default")
            taken = await storage.claim("default", Take("other", 1, 60_000))
        await asyncio.wait_for(stopped.wait(), 10)
        await until(lambda: [event.id for event in stalled] == [job.id])
        await until(lambda: not worker.health().active)
        assert [lease.id for lease in taken.leases] == [job.id]
        assert await storage.leases_of("default", "other") == [Held(job.id, taken.leases[0].token)]
        assert worker.stats.completed == 0


async def test_a_worker_describes_itself_in_every_queue(app: App) -> None:
    started = asyncio.Event()

    @app.task(queue="a")
    async def endless() -> None:
        started.set()
        await asyncio.sleep(3600)

    storage = await app.connect()
    async with working(app, queues=["a", "b"], id="me", concurrency=7, lease="1s", heartbeat="50ms"):
        job = await endless.enqueue()
        await asyncio.wait_for(started.wait(), 10)
        await until(lambda: _active(app))
        (record,) = await app.queue("a").workers()
        described = record.info
        assert record.id == "me"
        assert described["queues"] == ["a", "b"]
        assert described["concurrency"] == 7
        assert described["consuming"] is True
        assert [running["id"] for running in described["running"]] == [job.id]
        assert (record.host, record.pid, record.jobs) == (platform.node(), os.getpid(), [("a", job.id)])
        assert [other.id for other in await storage.workers("b")] == ["me"]
    assert await storage.workers("a") == []
    assert await storage.workers("b") == []


async def _active(app: App) -> bool:
    workers = await app.queue("a").workers()
    return bool(workers and workers[0].info.get("active"))
