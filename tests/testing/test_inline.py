"""Inline harnesses: start hooks, limits, and failures that are raised only if they end a job."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock import App, InvalidOption, Retry
from penstock.testing import harness


async def test_start_hooks_finish_before_a_job_runs(app: App) -> None:
    told: list[str] = []

    @app.task
    async def tick() -> None:
        told.append("run")

    @app.on_start
    async def first() -> None:
        await app.schedule("tick", tick.job(), every="1m")
        await tick.enqueue()
        told.append("first")

    @app.on_start
    def second() -> None:
        told.append("second")

    async with harness(app, mode="inline", schedules=False):
        await tick.enqueue()
        assert told == ["first", "second", "run", "run"]
        await tick.enqueue()
        assert told[4:] == ["run"]


async def test_jobs_run_inline_after_a_start_hook_that_raised(app: App) -> None:
    ran: list[int] = []

    @app.task
    async def tick(n: int) -> None:
        ran.append(n)

    @app.on_start
    async def broken() -> None:
        raise ConnectionError("no database")

    async with harness(app, mode="inline"):
        with pytest.raises(ConnectionError, match="no database"):
            await tick.enqueue(1)
        await tick.enqueue(2)
        assert ran == [1, 2]


@pytest.mark.parametrize("limit", [{"rate": "2/m"}, {"group": "*", "rate": "2/m"}])
@pytest.mark.parametrize("way", ["result", "call"])
async def test_a_wait_for_a_result_lets_a_rate_limit_pass(app: App, limit: Any, way: str) -> None:
    @app.task(queue="mail")
    async def send(n: int) -> int:
        return n

    @app.on_start
    async def limits() -> None:
        await app.queue("mail").limit(**limit)

    grouped = send.options(group="ada", wait=None)
    async with harness(app, mode="inline") as h, asyncio.timeout(20):
        if way == "call":
            assert [await grouped.call(n) for n in range(6)] == list(range(6))
        else:
            jobs = [await grouped.enqueue(n) for n in range(6)]
            assert len(h.runs) == 2
            assert [await job.result() for job in jobs] == list(range(6))
        assert h.clock.moved_ms > 100_000


async def test_a_wait_for_a_job_of_a_paused_queue_does_not_move_the_clock(app: App) -> None:
    @app.task
    async def noop() -> None: ...

    async with harness(app, mode="inline") as h:
        await app.queue("default").pause()
        await noop.options(delay="1h").enqueue()
        job = await noop.enqueue()
        with pytest.raises(TimeoutError):
            await job.result(timeout="50ms")
        assert h.clock.moved_ms == 0


async def test_final_failures_are_raised_and_retries_are_not(app: App) -> None:
    runs: list[str] = []

    @app.task(attempts=3, retry_on=(ConnectionError,), backoff="10m")
    async def send(to: str, good_run: int) -> str:
        runs.append(to)
        if to == "nobody":
            raise ValueError("no such address")
        if runs.count(to) < good_run:
            raise ConnectionError("no line")
        return f"sent to {to}"

    async with harness(app, mode="inline", raise_failures="final"), asyncio.timeout(20):
        assert await (await send.enqueue("ada", 3)).result() == "sent to ada"
        assert runs == ["ada"] * 3
        with pytest.raises(ValueError, match="no such address"):
            await send.enqueue("nobody", 1)
        job = await send.enqueue("bob", 4)
        with pytest.raises(ConnectionError, match="no line"):
            await job.result()


async def test_a_retry_of_the_last_run_is_a_final_failure(app: App) -> None:
    @app.task(attempts=1)
    async def later() -> None:
        raise Retry("busy", delay="1m")

    async with harness(app, mode="inline", raise_failures="final"):
        with pytest.raises(Retry, match="busy"):
            await later.enqueue()


async def test_another_value_of_raise_failures_is_refused(app: App) -> None:
    with pytest.raises(InvalidOption, match="raise_failures must be True, False or 'final', got 'last'"):
        harness(app, raise_failures="last")  # type: ignore[arg-type]
