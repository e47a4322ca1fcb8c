"""Pause and resume of one worker."""

from __future__ import annotations

import asyncio

import pytest

from penstock import App, InvalidOption
from tests.worker.conftest import until, working
from tests.worker.pool_tasks import app as pool_app


async def test_a_paused_worker_finishes_what_it_has_and_claims_nothing(app: App) -> None:
    go_on = asyncio.Event()

    @app.task
    async def wait(n: int) -> int:
        await go_on.wait()
        return n

    queue = app.queue("default")
    async with working(app, concurrency=2, heartbeat="20ms") as worker:
        running = await wait.enqueue_many([wait.job(1), wait.job(2)])
        await until(lambda: len(worker.health().active) == 2)
        worker.pause()
        assert worker.health().state == "paused"
        assert not await worker.idle(timeout="30ms")  # two are running
        later = await wait.enqueue(3)
        go_on.set()
        assert await worker.idle(timeout="10s")
        assert [await job.result(timeout="10s") for job in running] == [1, 2]
        assert (await queue.waiting(), await queue.active()) == (1, 0)

        async def shown() -> bool:
            return [one.info["state"] for one in await queue.workers()] == ["paused"]

        await until(shown)
        worker.resume()
        assert worker.health().state == "running"
        assert await later.result(timeout="10s") == 3


async def test_a_worker_may_begin_paused(memory_app: App) -> None:
    @memory_app.task
    async def hello() -> str:
        return "hello"

    worker = memory_app.worker(grace=0)
    worker.pause()
    assert await worker.idle()  # it has not begun
    running = asyncio.create_task(worker.run())
    job = await hello.enqueue()
    await worker.ready()
    assert (worker.state, worker.stats.claimed) == ("paused", 0)
    worker.resume()
    assert await job.result(timeout="10s") == "hello"
    worker.stop(0)
    await running


def test_a_pool_of_processes_cannot_be_paused_from_here() -> None:
    with pytest.raises(InvalidOption, match="Pause the queue instead"):
        pool_app.worker(processes=2).pause()
