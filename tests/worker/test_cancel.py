"""Rule 17: a running job is asked to stop, from another process, by the next heartbeat."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock import App, JobCancelled, JobContext, State
from tests.worker.conftest import recorded, until, working

CANCEL = """
import sys
from penstock import App
print(App(sys.argv[1]).queue(sys.argv[2]).sync.cancel(sys.argv[3]))
"""


async def test_an_async_handler_is_cancelled_and_can_clean_up(app: App) -> None:
    started, cleaned = asyncio.Event(), asyncio.Event()

    @app.task
    async def endless() -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.set()

    async with working(app, heartbeat="100ms") as worker:
        cancelled = recorded(worker, "cancelled")
        job = await endless.enqueue()
        await asyncio.wait_for(started.wait(), 10)
        assert await job.cancel() == "requested"
        with pytest.raises(JobCancelled):
            await job.result(timeout="10s")
        assert cleaned.is_set()
        await until(lambda: [event.id for event in cancelled] == [job.id])


async def test_a_thread_that_looks_stops_and_the_job_is_cancelled(app: App) -> None:
    started = threading.Event()

    @app.task
    def patient(context: JobContext) -> str:
        started.set()
        while not context.cancelled:
            threading.Event().wait(0.005)
        return "stopped halfway"

    async with working(app, heartbeat="100ms"):
        job = await patient.enqueue()
        await until(started.is_set)
        await job.cancel()
        with pytest.raises(JobCancelled):
            await job.result(timeout="10s")


async def test_a_thread_that_does_not_look_completes(app: App) -> None:
    started, finish = threading.Event(), threading.Event()

    @app.task
    def deaf() -> str:
        started.set()
        finish.wait(20)
        return "done"

    async with working(app, heartbeat="100ms") as worker:
        job = await deaf.enqueue()
        await until(started.is_set)
        await job.cancel()
        await until(lambda: any(run.abort for run in worker._session.executor.running))  # type: ignore[union-attr]
        finish.set()
        assert await job.result(timeout="10s") == "done"


async def test_a_handler_that_swallows_its_cancellation_and_returns_has_completed(app: App) -> None:
    started = asyncio.Event()

    @app.task
    async def saves_what_it_has() -> str:
        started.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return "half of it"
        return "all of it"

    async with working(app, heartbeat="100ms"):
        job = await saves_what_it_has.enqueue()
        await asyncio.wait_for(started.wait(), 10)
        await job.cancel()
        assert await job.result(timeout="10s") == "half of it"


async def test_a_job_cancelled_before_its_retry_does_not_run_again(app: App) -> None:
    runs: list[int] = []

    @app.task(attempts=5, backoff="1h")
    async def broken(context: JobContext) -> None:
        runs.append(context.run)
        raise ValueError

    async with working(app):
        job = await broken.enqueue()
        await until(lambda: _is(job, State.SCHEDULED))
        assert await job.cancel() == "cancelled"
    assert runs == [1]


@pytest.mark.parametrize("engine", ["sqlite", "valkey"])
async def test_a_cancel_from_another_process_arrives_within_a_heartbeat(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/c.db" if engine == "sqlite" else request.getfixturevalue("valkey_url")
    queue = f"cancel-{engine}"
    async with App(url) as app:
        started = asyncio.Event()

        @app.task(queue=queue)
        async def endless() -> None:
            started.set()
            await asyncio.sleep(3600)

        async with working(app, heartbeat="300ms"):
            job = await endless.enqueue()
            await asyncio.wait_for(started.wait(), 10)
            run = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-c", CANCEL, url, queue, job.id],
                capture_output=True,
                text=True,
                check=True,
            )
            assert "requested" in run.stdout
            with pytest.raises(JobCancelled):
                await job.result(timeout="10s")  # before the lease runs out


async def test_a_job_past_its_ttl_is_stopped_and_expires(app: App) -> None:
    from penstock import JobExpired

    started = asyncio.Event()

    @app.task(ttl="1h")
    async def endless() -> None:
        started.set()
        await asyncio.sleep(3600)

    async with working(app, lease="2h", heartbeat="100ms", sweep=False):
        job = await endless.enqueue()
        await asyncio.wait_for(started.wait(), 10)
        await (await app.connect()).shift_clock("default", 3_601_000)
        with pytest.raises(JobExpired):
            await job.result(timeout="10s")


async def _is(job: object, state: State) -> bool:
    return await job.refresh() is state  # type: ignore[attr-defined]
