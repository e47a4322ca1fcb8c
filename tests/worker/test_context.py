"""What handlers can know of their job, and say about it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import App, JobContext, JobFailed, LeaseLost, Retry
from penstock.errors import InvalidInput, SerializationError
from penstock.storage.values import Report
from tests.worker.conftest import recorded, working


async def test_the_context_knows_its_job(app: App) -> None:
    @app.task(queue="mail", attempts=7)
    async def look(context: JobContext) -> list[object]:
        assert abs(datetime.now(UTC) - context.enqueued_at) < timedelta(minutes=1)
        assert context.token > 0
        assert context.payload == b"{}"
        assert not context.cancelled
        assert "look" in repr(context)
        return [context.id, context.queue, context.task, context.run, context.failures, context.attempts]

    async with working(app):
        job = await look.options(id="x").enqueue()
        assert await job.result(timeout="10s") == ["x", "mail", "look", 1, 0, 7]


async def test_progress_can_be_awaited_and_is_kept_on_the_job(app: App) -> None:
    go_on, reported = asyncio.Event(), asyncio.Event()

    @app.task
    async def steps(context: JobContext) -> None:
        await context.progress({"done": 1, "of": 2})
        reported.set()
        await go_on.wait()

    async with working(app):
        job = await steps.enqueue()
        await asyncio.wait_for(reported.wait(), 10)
        info = await job.get()
        assert info.progress == {"done": 1, "of": 2}
        go_on.set()
        await job.result(timeout="10s")


async def test_what_a_thread_said_last_is_stored_before_its_job_ends(app: App) -> None:
    @app.task
    def talk(context: JobContext) -> None:
        for n in range(500):
            context.log(f"line {n}")
            context.progress(n)

    async with working(app):
        job = await talk.enqueue()
        await job.result(timeout="10s")
        info = await job.get()
        assert info.progress == 499
        assert await job.logs() == [f"line {n}" for n in range(500)]


async def test_an_updated_payload_is_what_the_next_run_gets(app: App) -> None:
    @app.task(attempts=2)
    async def crawl(context: JobContext, page: int) -> list[int]:
        if context.run == 1:
            context.update_payload(page=page + 41)
            raise Retry(delay="1ms")
        return [page, context.run]

    async with working(app):
        assert await crawl.call(1) == [42, 2]


async def test_an_update_the_task_does_not_take_is_refused(memory_app: App) -> None:
    @memory_app.task(attempts=1)
    async def crawl(context: JobContext, page: int) -> None:
        context.update_payload(nonsense=1)

    async with working(memory_app):
        with pytest.raises(JobFailed) as caught:
            await crawl.call(1)
    assert caught.value.error_type == InvalidInput.__name__


@pytest.mark.parametrize("runner", ["async", "thread"])
async def test_text_that_is_not_utf8_is_logged_escaped(app: App, runner: str) -> None:
    """``os.listdir`` returns such names. The job ends, and so does the next one that logs."""

    def talk(context: JobContext) -> None:
        context.log("name \udcff")
        context.progress({"file \udcff": ["\udcff"]})

    async def talk_async(context: JobContext) -> None:
        talk(context)

    task = app.task(name="talk")(talk if runner == "thread" else talk_async)
    async with working(app):
        for _ in range(2):
            job = await task.enqueue()
            await job.result(timeout="10s")
            assert await job.logs() == ["name \\udcff"]
            info = await job.get()
            assert info.progress == {"file \\udcff": ["\\udcff"]}


async def test_a_report_that_no_store_can_keep_does_not_hold_up_its_job_or_others(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever class of error it raises. The others of the same call are stored."""
    storage = await app.connect()
    report = storage.report

    async def picky(queue: str, reports: Sequence[Report]) -> Any:
        if any("odd" in report.log for report in reports):
            raise RecursionError("too deep")
        return await report(queue, reports)

    monkeypatch.setattr(storage, "report", picky)
    refused: list[BaseException] = []

    @app.task
    async def talk(context: JobContext, line: str) -> str:
        try:
            await context.log(line)
        except RecursionError as error:
            refused.append(error)
        context.log(line)
        return line

    async with working(app):
        jobs = await talk.enqueue_many([talk.job(line=line) for line in ("odd", "fine", "odd", "fine")])
        assert [await job.result(timeout="10s") for job in jobs] == ["odd", "fine", "odd", "fine"]
        assert [await job.logs() for job in jobs] == [[], ["fine"] * 2, [], ["fine"] * 2]
    assert len(refused) == 2


async def test_progress_that_json_cannot_say_is_refused(memory_app: App) -> None:
    @memory_app.task(attempts=1)
    async def odd(context: JobContext) -> None:
        context.progress(object())

    async with working(memory_app):
        with pytest.raises(JobFailed) as caught:
            await odd.call()
    assert caught.value.error_type == SerializationError.__name__


async def test_a_report_under_a_lost_lease_is_refused(memory_app: App) -> None:
    refused: list[BaseException] = []

    @memory_app.task
    async def fenced(context: JobContext) -> int:
        if context.run == 1:
            storage = await memory_app.connect()
            await storage.shift_clock("default", 3_600_000)
            await storage.sweep("default")
            try:
                await context.progress(1)
            except LeaseLost as error:
                refused.append(error)
        return context.run

    async with working(memory_app, concurrency=1) as worker:
        stalled = recorded(worker, "stalled")
        job = await fenced.enqueue()
        assert await job.result(timeout="10s") == 2
        assert [event.run for event in stalled] == [1]
    assert len(refused) == 1
