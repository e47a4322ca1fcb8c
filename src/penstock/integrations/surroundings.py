"""Run the handlers of an app in the surroundings that a framework needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

from penstock.client.app import App
from penstock.worker.context import JobContext
from penstock.worker.middleware import CallNext


def surround(
    app: App,
    *,
    in_thread: Callable[[], AbstractContextManager[Any]],
    on_loop: Callable[[], AbstractAsyncContextManager[Any]],
) -> None:
    """Run functions that are not async inside ``in_thread()``, in their thread, and others inside ``on_loop()``."""

    @app.sync_middleware
    def within_thread(call_next: Callable[[], Any]) -> Any:
        with in_thread():
            return call_next()

    @app.middleware
    async def within_loop(context: JobContext, call_next: CallNext) -> Any:
        if not _runs_on_loop(app, context):
            return await call_next()
        async with on_loop():
            return await call_next()


def _runs_on_loop(app: App, context: JobContext) -> bool:
    task = app.tasks.get(context.task) if context.task else app.handlers.get(context.queue)
    return task is not None and task.runner == "async"
