"""Rule 14: what a timeout does to a coroutine and to a thread (test_process_runner.py has processes)."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from penstock import App, JobContext, JobFailed
from penstock.worker import run as run_module
from tests.worker.conftest import exceed_timeouts, recorded, until, working


async def test_an_async_handler_is_aborted_at_its_timeout(app: App) -> None:
    cleaned = asyncio.Event()

    @app.task(timeout="50ms", attempts=1)
    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.set()

    async with working(app) as worker:
        with pytest.raises(JobFailed, match="50ms") as caught:
            await slow.call()
        assert caught.value.error_type == "Timeout"
        assert cleaned.is_set()
        await until(lambda: not worker.health().active)


async def test_a_timeout_is_retried_like_any_failure(app: App) -> None:
    @app.task(timeout="50ms", attempts=2)
    async def slow_once(context: JobContext) -> int:
        if context.run == 1:
            await asyncio.sleep(60)
        return context.failures

    async with working(app):
        assert await slow_once.call() == 1


async def test_a_job_in_time_is_left_alone(app: App) -> None:
    @app.task(timeout="10s")
    async def quick(n: int) -> int:
        await asyncio.sleep(0)
        return n

    async with working(app, concurrency=10):
        assert await asyncio.gather(*(quick.call(n) for n in range(50))) == list(range(50))


async def test_a_thread_is_settled_at_the_deadline_and_its_slot_stays_busy(app: App) -> None:
    release = threading.Event()
    seen: list[bool] = []

    @app.task(timeout="50ms", attempts=1)
    def deaf(context: JobContext) -> str:
        release.wait(30)
        seen.append(context.cancelled)
        return "too late"

    @app.task
    async def other() -> str:
        return "done"

    async with working(app, concurrency=2) as worker:
        stuck = recorded(worker, "stuck")
        job = await deaf.enqueue()
        with pytest.raises(JobFailed) as caught:
            await job.result(timeout="10s")
        assert caught.value.error_type == "Timeout"
        health = worker.health()
        assert health.stuck == 1
        assert [(active.id, active.stuck) for active in health.active] == [(job.id, True)]
        assert [event.id for event in stuck] == [job.id]
        assert await other.call() == "done"
        release.set()
        await until(lambda: worker.health().stuck == 0)
        assert seen == [True]
        with pytest.raises(JobFailed):
            await job.result(timeout="10s")


async def test_a_worker_whose_threads_all_hang_says_that_it_does_not_consume(memory_app: App) -> None:
    release = threading.Event()

    @memory_app.task(timeout="20ms", attempts=1)
    def deaf() -> None:
        release.wait(30)

    async with working(memory_app, concurrency=1) as worker:
        with pytest.raises(JobFailed):
            await deaf.call()
        assert not worker.health().consuming
        assert "hang" in worker.health().reason
        release.set()
        await until(lambda: worker.health().consuming)


async def test_a_coroutine_that_ignores_its_abort_is_settled_without_it(
    memory_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "PATIENCE_S", 0.05)
    leave = asyncio.Event()

    @memory_app.task(timeout="50ms", attempts=1)
    async def stubborn() -> None:
        while not leave.is_set():
            try:
                await leave.wait()
            except asyncio.CancelledError:
                pass

    async with working(memory_app) as worker:
        with pytest.raises(JobFailed) as caught:
            await stubborn.call()
        assert caught.value.error_type == "Timeout"
        assert worker.health().stuck == 1
        leave.set()
        await until(lambda: worker.health().stuck == 0)


async def test_time_spent_waiting_for_a_thread_does_not_count(memory_app: App) -> None:
    release = threading.Event()

    @memory_app.task
    def holds_the_thread() -> None:
        release.wait(30)

    @memory_app.task(timeout="10m", attempts=1)
    def quick() -> int:
        return 1

    async with working(memory_app, concurrency=4, threads=1) as worker:
        await holds_the_thread.enqueue()
        await until(lambda: len(worker.health().active) == 1)
        job = await quick.enqueue()
        await until(lambda: len(worker.health().active) == 2)
        exceed_timeouts(worker)
        release.set()
        assert await job.result(timeout="10s") == 1


async def test_a_function_that_blocks_the_loop_beyond_its_timeout_is_logged(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    """The timer cannot fire while the loop is blocked, so the job completes."""

    @app.task(timeout="50ms")
    async def hog() -> str:
        time.sleep(0.1)
        return "done"

    async with working(app):
        job = await hog.enqueue()
        assert await job.result(timeout="10s") == "done"
    (record,) = [record for record in caplog.records if "blocked" in record.getMessage()]
    assert record.levelname == "WARNING"
    assert record.id == job.id  # type: ignore[attr-defined]
    assert "timeout 50ms: the function blocked the event loop; use a plain def" in record.getMessage()


async def test_a_function_that_ends_within_its_timeout_is_not_logged_as_blocking(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(timeout="10s")
    async def quick() -> None: ...

    async with working(app):
        await quick.call()
    assert "blocked" not in caplog.text
