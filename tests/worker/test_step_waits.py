"""Durable waits: sleep, wait_for, and what they do to the steps beside them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock import App, JobContext, JobFailed
from tests.worker.conftest import until, working


class Boom(Exception):
    pass


async def test_sleep_frees_the_worker_and_goes_on(app: App) -> None:
    seen: list[str] = []

    @app.task(attempts=1)
    async def remind(context: JobContext) -> int:
        await context.step("first", seen.append, "first")
        try:
            await context.sleep("300ms")
        except Exception:
            seen.append("swallowed")
        await context.step("second", seen.append, "second")
        await context.sleep(0, name="no-time")
        return context.run

    async with working(app, concurrency=1):
        assert await remind.options(wait="10s").call() == 2
    assert seen == ["first", "second"]


async def test_wait_for_returns_the_signal_in_every_run(app: App) -> None:
    @app.task(attempts=2)
    async def sell(context: JobContext) -> list[Any]:
        first = await context.wait_for("approved", timeout="1d")
        second = await context.wait_for("approved", key=2, type=int)
        if context.failures == 0:
            raise Boom
        return [first, second]

    async with working(app):
        job = await sell.enqueue()
        while not (await job.get()).awaits:
            await asyncio.sleep(0.01)
        assert await job.signal("approved", {"by": "ada"}) == "resumed"
        await job.signal("approved", 2)
        assert await job.result(timeout="10s") == [{"by": "ada"}, 2]


async def test_a_wait_times_out_in_every_run(app: App) -> None:
    @app.task(attempts=2)
    async def sell(context: JobContext) -> str:
        try:
            await context.wait_for("approved", timeout="200ms")
        except TimeoutError as error:
            if context.failures == 0:
                raise Boom from error
            return str(error)
        raise AssertionError

    async with working(app):
        assert await sell.options(wait="10s").call() == "the signal 'approved' did not come in time"


@pytest.mark.parametrize("how", ["gather", "group", "exceptions"])
async def test_a_suspension_first_records_the_steps_under_way(app: App, how: str) -> None:
    ran: list[str] = []

    async def two(context: JobContext) -> list[str]:
        async def slow(name: str) -> str:
            ran.append(name)
            await until(lambda: context.steps._waits)
            return name

        return [await context.step("a", slow, "a"), await context.step("b", slow, "b")]

    @app.task(attempts=1)
    async def work(context: JobContext) -> list[Any]:
        if how == "group":
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(two(context)), group.create_task(context.sleep("200ms"))]
            both: Any = [task.result() for task in tasks]
        else:
            both = await asyncio.gather(
                two(context), context.sleep("200ms"), return_exceptions=how == "exceptions"
            )
        return [both[0], context.run]

    async with working(app):
        assert await work.options(wait="10s").call() == [["a", "b"], 2]
    assert ran == ["a", "b"]


async def test_waits_of_a_sync_handler(app: App) -> None:
    @app.task(attempts=1)
    def sell(context: JobContext) -> list[Any]:
        context.sync.sleep("200ms")
        data = context.sync.wait_for("approved", timeout="1d")
        return [data, context.run]

    async with working(app):
        job = await sell.enqueue()
        await job.signal("approved", "yes")
        assert await job.result(timeout="10s") == ["yes", 3]


async def test_a_handler_in_a_process_has_steps_and_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_TASKS_URL", f"sqlite:///{tmp_path}/steps.db")
    from tests.worker import step_tasks

    journal = tmp_path / "journal"
    async with step_tasks.app, working(step_tasks.app, child_processes=1):
        job = await step_tasks.in_steps.enqueue(str(journal))
        await job.signal("approved", "yes")
        assert await job.result(timeout="40s") == ["yes", 32]
    assert journal.read_text() == "ran\n"


@pytest.mark.parametrize("mode", ["async", "thread", "worker's handler"])
@pytest.mark.parametrize("wait", ["sleep", "signal", "step"])
async def test_a_job_of_a_batch_cannot_wait_and_its_siblings_lose_no_attempt(
    memory_app: App, mode: str, wait: str
) -> None:
    def fail() -> None:
        raise Boom

    async def handle(numbers: list[int], jobs: list[JobContext]) -> list[int]:
        for job in jobs:
            await job.sleep("1ms")
            if job.id == "waits" and wait == "sleep":
                await job.sleep("1h", name="long")
            elif job.id == "waits" and wait == "signal":
                await job.wait_for("approved")
            elif job.id == "waits":
                await job.step("fail", fail, backoff="1h", attempts=2)
        return numbers

    def handle_in_thread(numbers: list[int], jobs: list[JobContext]) -> list[int]:
        for job in jobs:
            if job.id == "waits" and wait == "sleep":
                job.sync.sleep("1h", name="long")
            elif job.id == "waits" and wait == "signal":
                job.sync.wait_for("approved")
            elif job.id == "waits":
                job.sync.step("fail", fail, backoff="1h", attempts=2)
        return numbers

    async def handle_contexts(jobs: list[JobContext]) -> list[int]:
        return await handle([1] * len(jobs), jobs)

    queue = memory_app.queue("q")
    for id in ("a", "waits", "b"):
        await queue.enqueue(1, id=id, attempts=1)
    worker = memory_app.worker(queues=["q"])
    if mode == "worker's handler":
        worker.handler("q", batch=3, batch_wait="50ms")(handle_contexts)
    else:
        function: Any = handle if mode == "async" else handle_in_thread
        memory_app.handler("q", batch=3, batch_wait="50ms")(function)
    running = asyncio.create_task(worker.run())
    try:
        with pytest.raises(JobFailed, match=r"StepError: .*'waits'.* in a batch cannot wait"):
            await queue.job("waits").result(timeout="10s")
        for id in ("a", "b"):
            assert await queue.job(id).result(timeout="10s") == 1
            assert (await queue.job(id).get()).failures == 0
        storage = await memory_app.connect()
        records = {step.name: step.status for step in await storage.steps("q", "waits")}
        assert not {"long", "wait:approved"} & records.keys()
    finally:
        worker.stop()
        await running
