"""Middleware around runs, events in the process, hooks around the worker's life."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock import App, JobContext, JobFailed, Worker
from penstock.errors import InvalidOption
from penstock.worker.events import WorkerEvent
from penstock.worker.middleware import CallNext
from tests.worker.conftest import recorded, running, until, working


async def test_the_first_middleware_is_the_outermost(app: App) -> None:
    steps: list[str] = []

    def layer(name: str) -> Any:
        async def middleware(context: JobContext, call_next: CallNext) -> Any:
            steps.append(f"{name} in")
            result = await call_next()
            steps.append(f"{name} out")
            return result + 1

        return middleware

    @app.task
    async def on_loop() -> int:
        steps.append("handler")
        return 1

    @app.task
    def in_thread() -> int:
        steps.append("handler")
        return 1

    for task in (on_loop, in_thread):
        steps.clear()
        async with working(app, middleware=[layer("a"), layer("b")]):
            assert await task.call() == 3
        assert steps == ["a in", "b in", "handler", "b out", "a out"]


async def test_what_middleware_raises_decides_the_jobs_fate(app: App) -> None:
    async def refuse(context: JobContext, call_next: CallNext) -> Any:
        raise PermissionError(f"not {context.task}")

    @app.task(attempts=1)
    async def task() -> None: ...

    async with working(app, middleware=[refuse]):
        with pytest.raises(JobFailed, match="not task") as caught:
            await task.call()
    assert caught.value.error_type == "PermissionError"


async def test_events_tell_the_life_of_a_job(app: App) -> None:
    @app.task(attempts=2)
    async def flaky(context: JobContext) -> None:
        if context.run == 1:
            raise ValueError("once")

    async with working(app) as worker:
        events = recorded(worker, "started", "completed", "retrying", "failed")
        job = await flaky.enqueue()
        await until(lambda: worker.stats.completed == 1)
    assert [(event.type, event.run) for event in events] == [
        ("started", 1),
        ("retrying", 1),
        ("started", 2),
        ("completed", 2),
    ]
    assert {(event.id, event.queue, event.task, event.worker) for event in events} == {
        (job.id, "default", "flaky", worker.id)
    }


async def test_a_final_failure_is_reported_with_its_error(app: App) -> None:
    @app.task(attempts=1)
    async def broken() -> None:
        raise ValueError("never")

    async with working(app) as worker:
        events = recorded(worker, "retrying", "failed")
        job = await broken.enqueue()
        await until(lambda: worker.stats.failed == 1)
    assert [(event.type, event.id, event.failure and event.failure.type) for event in events] == [
        ("failed", job.id, "ValueError")
    ]


async def test_a_worker_logs_its_start_and_its_end(memory_app: App) -> None:
    worker = memory_app.worker(queues=["mail"])
    events = recorded(worker, "ready", "stopping", "stopped")
    async with running(worker):
        assert [event.type for event in events] == ["ready"]
    assert [event.type for event in events] == ["ready", "stopping", "stopped"]
    assert worker.state == "stopped"


async def test_drained_fires_once_each_time_a_queue_empties(app: App) -> None:
    @app.task
    async def echo(n: int) -> int:
        return n

    worker = app.worker(grace=0)
    drained = recorded(worker, "drained")
    async with running(worker):
        await until(lambda: len(drained) == 1)
        await echo.call(1)
        await until(lambda: len(drained) == 2)
    assert {event.queue for event in drained} == {"default"}


async def test_a_failing_listener_does_not_disturb_the_others(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[WorkerEvent] = []

    @app.task
    async def echo(n: int) -> int:
        return n

    def broken(_: WorkerEvent) -> None:
        raise RuntimeError("listener")

    async def later(event: WorkerEvent) -> None:
        await asyncio.sleep(0)
        heard.append(event)

    async with working(app) as worker:
        worker.on("completed", broken)
        worker.on("completed", later)
        assert await echo.call(1) == 1
        assert await echo.call(2) == 2
        await until(lambda: len(heard) == 2)
    assert "a listener of 'completed' failed" in caplog.text


async def test_an_unknown_event_is_refused(memory_app: App) -> None:
    with pytest.raises(InvalidOption, match="completed"):
        memory_app.worker().on("complete", print)


async def test_hooks_run_around_the_work_in_order(app: App) -> None:
    steps: list[object] = []

    @app.task
    async def note() -> None:
        steps.append("job")

    worker = app.worker(burst=True)

    @worker.on_start
    async def connect(given: Worker) -> None:
        steps.append(given.state)

    @worker.on_start
    def second() -> None:
        steps.append("second")

    @worker.on_stop
    def last() -> None:
        steps.append("last")

    @worker.on_stop
    async def fails() -> None:
        steps.append("fails")
        raise RuntimeError("in a stop hook")

    await note.enqueue()
    await asyncio.wait_for(worker.run(), 20)
    assert steps == ["starting", "second", "job", "fails", "last"]


async def test_a_start_hook_that_fails_keeps_the_worker_from_starting(app: App) -> None:
    @app.task
    async def note() -> None: ...

    job = await note.enqueue()
    worker = app.worker()

    @worker.on_start
    def broken() -> None:
        raise RuntimeError("no database")

    with pytest.raises(RuntimeError, match="no database"):
        await asyncio.wait_for(worker.run(), 10)
    assert worker.state == "stopped"
    assert await job.refresh() == "waiting"


async def test_health_tells_what_a_worker_is_doing(app: App) -> None:
    started, finish = asyncio.Event(), asyncio.Event()

    @app.task
    async def wait() -> None:
        started.set()
        await finish.wait()

    worker = app.worker(grace=0, concurrency=3)
    assert worker.health().state == "new"
    assert not worker.health().consuming
    async with running(worker):
        job = await wait.enqueue()
        await asyncio.wait_for(started.wait(), 10)
        health = worker.health()
        assert (health.state, health.consuming, health.reason, health.connected) == (
            "running",
            True,
            "",
            True,
        )
        assert [(active.id, active.task, active.queue) for active in health.active] == [
            (job.id, "wait", "default")
        ]
        assert health.active[0].age_s < 10
        finish.set()
    assert worker.health().state == "stopped"


async def test_listeners_may_be_added_by_a_decorator(memory_app: App) -> None:
    seen: list[str] = []

    @memory_app.task
    async def greet(name: str) -> None: ...

    worker = memory_app.worker(burst=True)

    @worker.on("completed")
    def note(event: WorkerEvent) -> None:
        seen.append(event.task)

    await greet.enqueue("ada")
    await worker.run()
    assert seen == ["greet"]
    with pytest.raises(InvalidOption, match="unknown worker event 'finished'"):
        worker.on("finished")
