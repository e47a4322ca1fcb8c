"""Hooks and middleware that an app gives to all of its workers."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import App
from penstock.worker.context import JobContext
from penstock.worker.middleware import CallNext
from penstock.worker.worker import Worker


async def test_an_apps_hooks_and_middleware_are_those_of_its_workers() -> None:
    app = App("memory://")
    happened: list[str] = []

    @app.on_start
    async def start(worker: Worker) -> None:
        happened.append(f"start {worker.name}")

    @app.on_stop
    def stop() -> None:
        happened.append("stop")

    @app.middleware
    async def outer(context: JobContext, call_next: CallNext) -> Any:
        happened.append("outer")
        return await call_next()

    async def inner(context: JobContext, call_next: CallNext) -> Any:
        happened.append("inner")
        return await call_next()

    @app.task(queue="hooks")
    async def work() -> None:
        happened.append("work")

    await work.enqueue()
    await app.worker(queues=["hooks"], name="one", middleware=[inner], burst=True).run()
    await app.close()

    assert happened == ["start one", "outer", "inner", "work", "stop"]


async def test_a_middleware_that_does_not_call_the_task_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = App("memory://")

    @app.middleware
    async def forgetful(context: JobContext, call_next: CallNext) -> Any:
        return None

    @app.task
    async def work() -> None:
        raise AssertionError("not reached")

    await work.enqueue_many([work.job(), work.job()])
    await app.worker(burst=True).run()
    await app.close()

    assert caplog.text.count("without calling call_next: the task did not run") == 1
    assert "forgetful" in caplog.text
