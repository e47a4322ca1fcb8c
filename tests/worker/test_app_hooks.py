"""Hooks and middleware that an app gives to all of its workers."""

from __future__ import annotations

from typing import Any

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
