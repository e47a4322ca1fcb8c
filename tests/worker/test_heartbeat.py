"""Rule 4: a live worker keeps its jobs, however busy its loop; a lost lease ends the run."""

from __future__ import annotations

import asyncio
import os
import platform
import threading

import pytest

from penstock import App, JobContext
from penstock.storage.values import Claimed, Held, Take
from penstock.worker.heartbeat import Heartbeat
from tests.worker.conftest import LEASE_S, Hog, recorded, running, until, working


async def test_a_handler_that_hogs_the_loop_keeps_its_lease(app: App) -> None:
    hogs: list[Hog] = []

    @app.task
    async def hog(context: JobContext) -> int:
        hogs[0].hold_the_loop()
        return context.run

    async with working(app, lease=LEASE_S, heartbeat="50ms", concurrency=4) as worker:
        hogs.append(Hog(app, worker))
        jobs = await hog.enqueue_many([hog.job() for _ in range(3)])
        assert [await job.result(timeout="60s") for job in jobs] == [1, 1, 1]
        infos = [await job.get() for job in jobs]
    assert [(info.runs, info.stalls) for info in infos] == [(1, 0)] * 3


@pytest.mark.parametrize("idle", [True, False], ids=["by a claim that waited", "by a claim that found them"])
async def test_jobs_claimed_while_the_loop_stood_still_do_not_stall(
    app: App, idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has leased them to us, and the loop does not come to read its answer."""
    storage = await app.connect()
    claim = storage.claim
    hogs: list[Hog] = []

    async def read_late(queue: str, take: Take, *, wait_ms: int = 0) -> Claimed:
        claimed = await claim(queue, take, wait_ms=wait_ms)
        if claimed.leases and bool(wait_ms) is idle and hogs:
            hogs.pop().hold_the_loop()
        return claimed

    @app.task
    async def runs(context: JobContext) -> int:
        return context.run

    monkeypatch.setattr(storage, "claim", read_late)
    worker = app.worker(lease=LEASE_S, heartbeat="50ms", concurrency=4, grace=0)
    hogs.append(Hog(app, worker))
    jobs = [] if idle else await runs.enqueue_many([runs.job() for _ in range(4)])
    async with running(worker):
        if idle:
            await until(
                lambda: (
                    worker._session and any(served.spare for served in worker._session.fetcher.served_queues)
                )
            )
            jobs = await runs.enqueue_many([runs.job() for _ in range(4)])
        assert [await job.result(timeout="60s") for job in jobs] == [1] * 4
        infos = [await job.get() for job in jobs]
    assert not hogs, "the loop was never held up"
    assert [info.stalls for info in infos] == [0] * 4


async def test_a_run_whose_lease_was_lost_is_stopped_and_settles_nothing(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    beating = threading.Lock()
    beat = Heartbeat.run_once

    async def beat_if_allowed(heartbeat: Heartbeat) -> None:
        with beating:
            await beat(heartbeat)

    monkeypatch.setattr(Heartbeat, "run_once", beat_if_allowed)
    async with working(app, heartbeat="100ms", sweep=False, concurrency=1) as worker:
        stalled = recorded(worker, "stalled")
        job = await endless.enqueue()
        await asyncio.wait_for(started.wait(), 10)
        worker.pause()
        # Its deadline passes without a heartbeat, as if this machine had been asleep; somebody else gets the job.
        await asyncio.to_thread(beating.acquire)
        try:
            await storage.shift_clock("default", 60_000)
            await storage.sweep("default")
            taken = await storage.claim("default", Take("other", 1, 60_000))
        finally:
            beating.release()
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
    async with working(
        app, queues=["a", "b"], name="me", concurrency=7, lease="1s", heartbeat="50ms"
    ) as worker:
        job = await endless.enqueue()
        await asyncio.wait_for(started.wait(), 10)
        await until(lambda: _active(app))
        (record,) = await app.queue("a").workers()
        described = record.info
        assert record.id == worker.id
        assert described["queues"] == ["a", "b"]
        assert described["concurrency"] == 7
        assert described["consuming"] is True
        assert [running["id"] for running in described["running"]] == [job.id]
        assert (record.host, record.pid, record.jobs) == (platform.node(), os.getpid(), [("a", job.id)])
        await until(lambda: storage.workers("b"))
        assert [other.id for other in await storage.workers("b")] == [worker.id]
    assert await storage.workers("a") == []
    assert await storage.workers("b") == []


async def _active(app: App) -> bool:
    workers = await app.queue("a").workers()
    return bool(workers and workers[0].info.get("active"))


async def test_a_worker_is_shown_as_running_as_soon_as_it_is(app: App) -> None:
    app.task(name="known")(lambda: None)
    async with working(app, lease="3h", heartbeat="1h"), asyncio.timeout(20):
        while [worker.info["state"] for worker in await app.queue("default").workers()] != ["running"]:
            await asyncio.sleep(0.01)


async def test_a_heartbeat_that_is_cancelled_just_as_it_is_hurried_ends() -> None:
    heartbeat = Heartbeat(
        await App("memory://").connect(),
        [],
        worker_id="w",
        lease_ms=30_000,
        interval_s=60.0,
        info=lambda: b"",
        notify=lambda notices: None,
    )
    beating = asyncio.create_task(heartbeat.run())
    before = heartbeat.last_at
    while heartbeat.last_at == before:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    heartbeat._hurried.set()
    await asyncio.sleep(0)
    beating.cancel()
    done, _ = await asyncio.wait([beating], timeout=5)
    beating.cancel()
    assert done == {beating}
