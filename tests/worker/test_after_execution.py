"""After-execution hooks: what they see, what they may change, what happens when they fail."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

from penstock import (
    App,
    Execution,
    InvalidOption,
    JobCancelled,
    JobExpired,
    JobFailed,
    Snooze,
    Unrecoverable,
)
from tests.worker.conftest import recorded, running, until, working
from tests.worker.process_tasks import app as process_app
from tests.worker.process_tasks import square


async def test_a_hook_changes_the_result_and_how_long_it_is_kept(app: App) -> None:
    @app.after_execution
    async def cached(execution: Execution) -> None:
        assert (execution.status, execution.error, execution.ttl) == ("completed", None, None)
        execution.ttl = execution.result["max_age"]
        execution.result = {"body": execution.result["body"].upper(), "job": execution.job.id}

    @app.task(result_ttl="1h")
    async def fetch(url: str) -> dict[str, str]:
        return {"body": url, "max_age": "5m"}

    job = await fetch.options(id="a").enqueue("here")
    async with working(app):
        assert await job.result(timeout="20s") == {"body": "HERE", "job": "a"}
    info = await job.get()
    assert info.finished_at is not None
    assert info.kept_until == info.finished_at + timedelta(minutes=5)


async def test_a_hook_changes_the_error_of_a_failure_and_how_long_it_is_kept(app: App) -> None:
    @app.after_execution
    def scrubbed(execution: Execution) -> None:
        assert (execution.status, execution.result) == ("failed", None)
        assert isinstance(execution.error, ValueError)
        execution.error = PermissionError(str(execution.error).replace("s3cret", "***"))
        execution.ttl = timedelta(minutes=2)

    @app.task(attempts=1)
    async def login() -> None:
        raise ValueError("password s3cret is wrong")

    job = await login.enqueue()
    async with working(app):
        with pytest.raises(JobFailed, match=r"PermissionError: password \*\*\* is wrong") as failed:
            await job.result(timeout="20s")
    assert "s3cret" not in failed.value.traceback
    info = await job.get()
    assert info.finished_at is not None
    assert info.kept_until == info.finished_at + timedelta(minutes=2)


async def test_a_failure_with_attempts_left_is_shown_as_such(memory_app: App) -> None:
    seen: list[tuple[str, str]] = []

    @memory_app.after_execution
    async def note(execution: Execution) -> None:
        seen.append((execution.status, str(execution.error)))
        execution.ttl = "1ms"
        if execution.error is not None:
            execution.error = Unrecoverable("only in name")  # the class is shown, it decides nothing

    @memory_app.task(attempts=3, backoff="1ms")
    async def flaky() -> None:
        raise ValueError("no")

    job = await flaky.enqueue()
    async with working(memory_app) as worker:
        await until(lambda: worker.stats.failed == 1)
    assert seen == [("retrying", "no"), ("retrying", "no"), ("failed", "no")]
    assert job.id


async def test_runs_that_neither_completed_nor_failed_are_not_shown(memory_app: App) -> None:
    seen: list[str] = []
    began = asyncio.Event()

    @memory_app.after_execution
    async def note(execution: Execution) -> None:
        seen.append(execution.job.task)

    @memory_app.task
    async def snoozing() -> None:
        raise Snooze("1h")

    @memory_app.task
    async def endless() -> None:
        began.set()
        await asyncio.sleep(3600)

    await snoozing.enqueue()
    job = await endless.enqueue()
    async with working(memory_app, heartbeat="20ms") as worker:
        await began.wait()
        await job.cancel()
        with pytest.raises(JobCancelled):
            await job.result(timeout="10s")
        await until(lambda: worker.stats.snoozed == 1)
    assert seen == []


async def test_a_hook_that_raises_changes_nothing_and_is_logged(memory_app: App) -> None:
    @memory_app.after_execution
    async def fine(execution: Execution) -> None:
        execution.result = f"<{execution.result}>"

    @memory_app.after_execution
    async def broken(execution: Execution) -> None:
        execution.result = "half done"
        raise LookupError("broken hook")

    @memory_app.after_execution
    async def wrong_ttl(execution: Execution) -> None:
        execution.ttl = "soon"

    @memory_app.task
    async def hello() -> str:
        return "hello"

    async with working(memory_app) as worker:
        errors = recorded(worker, "error")
        assert await hello.options(wait="10s").call() == "<hello>"
        assert [type(event.error) for event in errors] == [LookupError, InvalidOption]
    assert worker.stats.completed == 1


async def test_a_worker_may_have_hooks_of_its_own_which_come_last(memory_app: App) -> None:
    async def shout(execution: Execution) -> None:
        execution.result += "!"

    @memory_app.after_execution
    def upper(execution: Execution) -> None:
        execution.result = execution.result.upper()

    @memory_app.task
    async def hello() -> str:
        return "hello"

    async with working(memory_app, after_execution=[shout]):
        assert await hello.options(wait="10s").call() == "HELLO!"
    with pytest.raises(InvalidOption, match="after_execution must contain functions, got 'hook'"):
        memory_app.worker(after_execution=["hook"])  # type: ignore[list-item]


async def test_a_result_has_no_error_and_a_failure_no_result(memory_app: App) -> None:
    refused: list[str] = []

    @memory_app.after_execution
    def wrong(execution: Execution) -> None:
        try:
            if execution.status == "completed":
                execution.error = ValueError()
            else:
                execution.result = 1
        except InvalidOption as error:
            refused.append(str(error))

    @memory_app.task(attempts=1)
    async def even(n: int) -> None:
        if n % 2:
            raise ValueError("odd")

    good, bad = await even.enqueue_many([even.job(2), even.job(1)])
    async with working(memory_app):
        await good.result(timeout="10s")
        with pytest.raises(JobFailed, match="odd"):
            await bad.result(timeout="10s")
    assert len(refused) == 2
    with pytest.raises(InvalidOption, match="error must be an exception"):
        Execution(None, "failed").error = "text"  # type: ignore[arg-type, assignment]


async def test_a_hook_sees_a_timeout(memory_app: App) -> None:
    seen: list[object] = []

    @memory_app.after_execution
    def note(execution: Execution) -> None:
        seen.append((execution.status, type(execution.error)))

    @memory_app.task(attempts=1, timeout="30ms")
    async def slow() -> None:
        await asyncio.sleep(60)

    job = await slow.enqueue()
    async with working(memory_app):
        with pytest.raises(JobFailed, match="Timeout: the run took longer"):
            await job.result(timeout="10s")
    assert seen == [("failed", TimeoutError)]


async def test_a_hook_sees_a_timeout_of_a_thread_that_goes_on(memory_app: App) -> None:
    go_on = threading.Event()

    @memory_app.after_execution
    async def note(execution: Execution) -> None:
        await asyncio.sleep(0)
        execution.error = TimeoutError("too slow for us")

    @memory_app.task(attempts=1, timeout="30ms")
    def stubborn() -> None:
        go_on.wait(20)

    job = await stubborn.enqueue()
    async with working(memory_app):
        try:
            with pytest.raises(JobFailed, match="too slow for us"):
                await job.result(timeout="10s")
        finally:
            go_on.set()


async def test_a_run_that_is_cancelled_while_its_hook_waits_is_cancelled(memory_app: App) -> None:
    waits = asyncio.Event()

    @memory_app.after_execution
    async def slow(execution: Execution) -> None:
        waits.set()
        await asyncio.sleep(3600)

    @memory_app.task
    async def hello() -> str:
        return "hello"

    @memory_app.task(attempts=1)
    async def broken() -> str:
        raise ValueError("broken")

    jobs = [await hello.enqueue(), await broken.enqueue()]
    async with working(memory_app, heartbeat="20ms") as worker:
        await until(lambda: worker.stats.claimed == 2)
        await waits.wait()
        for job in jobs:
            await job.cancel()
        with pytest.raises(JobCancelled):
            await jobs[0].result(timeout="10s")
        with pytest.raises(JobFailed, match="broken"):
            await jobs[1].result(timeout="10s")


async def test_a_hook_sees_the_result_of_a_process() -> None:
    def note(execution: Execution) -> None:
        execution.result = execution.result + 1

    async with process_app, working(process_app, after_execution=[note]):
        assert await square.options(wait="30s").call(4) == 17


async def test_jobs_of_a_batch_are_shown_one_by_one(memory_app: App) -> None:
    seen: list[tuple[str, object]] = []

    @memory_app.after_execution
    def note(execution: Execution) -> None:
        seen.append((execution.status, execution.result))

    @memory_app.task(batch=2, attempts=1)
    async def halve(numbers: list[int]) -> list[object]:
        return [ValueError("odd") if n % 2 else n // 2 for n in numbers]

    jobs = await halve.enqueue_many([halve.job(4), halve.job(3)])
    async with working(memory_app):
        assert await jobs[0].result(timeout="10s") == 2
        with pytest.raises(JobFailed):
            await jobs[1].result(timeout="10s")
    assert sorted(seen, key=str) == [("completed", 2), ("failed", None)]


@pytest.mark.parametrize("ending", ["returns", "raises"])
async def test_a_hook_is_called_once_for_a_thread_that_ends_after_its_timeout(
    memory_app: App, ending: str
) -> None:
    seen: list[tuple[str, str]] = []
    go_on = threading.Event()

    @memory_app.after_execution
    def note(execution: Execution) -> None:
        seen.append((execution.status, type(execution.error).__name__))

    @memory_app.task(attempts=1, timeout="30ms")
    def stubborn() -> None:
        go_on.wait(20)
        if ending == "raises":
            raise ValueError("too late")

    job = await stubborn.enqueue()
    async with working(memory_app) as worker:
        try:
            with pytest.raises(JobFailed, match="Timeout"):
                await job.result(timeout="10s")
        finally:
            go_on.set()
        await until(lambda: worker.health().stuck == 0)
    assert seen == [("failed", "TimeoutError")]


async def test_a_hook_is_not_called_for_a_thread_that_ends_after_its_cancel(memory_app: App) -> None:
    seen: list[str] = []
    began, go_on = threading.Event(), threading.Event()

    @memory_app.after_execution
    def note(execution: Execution) -> None:
        seen.append(execution.status)

    @memory_app.task(attempts=1)
    def stubborn() -> None:
        began.set()
        go_on.wait(20)

    job = await stubborn.enqueue()
    worker = memory_app.worker(grace=0)
    async with running(worker):
        await until(began.is_set)
        await job.cancel()
        worker.stop(0)
        with pytest.raises(JobCancelled):
            await job.result(timeout="10s")
        go_on.set()
    assert seen == []


@pytest.mark.parametrize("runner", ["async", "thread"])
async def test_a_run_whose_ttl_passes_is_reported_as_failed(app: App, runner: str) -> None:
    seen: list[tuple[str, str]] = []
    go_on = threading.Event()

    @app.after_execution
    def note(execution: Execution) -> None:
        seen.append((execution.status, type(execution.error).__name__))

    @app.task(name="slow", ttl="100ms")
    async def waits() -> None:
        await asyncio.sleep(60)

    @app.task(name="stubborn", ttl="100ms")
    def blocks() -> None:
        go_on.wait(20)

    async with working(app, heartbeat="20ms") as worker:
        failed = recorded(worker, "failed")
        job = await (waits if runner == "async" else blocks).enqueue()
        try:
            with pytest.raises(JobExpired):
                await job.result(timeout="10s")
            await until(lambda: failed)
        finally:
            go_on.set()
    assert seen == [("failed", "JobExpired")]
    assert [event.failure and event.failure.type for event in failed] == ["Expired"]
