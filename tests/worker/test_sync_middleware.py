"""Middleware that runs where a function that is not async runs: in its thread, or in its process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock import App, InvalidOption, JobContext, current_job
from tests.worker.sync_middleware_tasks import app as process_app
from tests.worker.sync_middleware_tasks import seen


async def test_it_runs_in_the_thread_of_the_function_and_knows_its_job() -> None:
    app = App("memory://", attempts=1)
    happened: list[tuple[str, int, str]] = []

    def note(what: str) -> None:
        happened.append((what, threading.get_ident(), current_job().task))

    @app.sync_middleware
    def outer(call_next: Callable[[], Any]) -> Any:
        note("outer")
        return f"<{call_next()}>"

    @app.sync_middleware
    def inner(call_next: Callable[[], Any]) -> Any:
        note("inner")
        try:
            return call_next()
        finally:
            note("left")

    @app.task
    def work() -> str:
        note("work")
        return "done"

    job = await work.enqueue()
    await app.worker(burst=True).run()

    assert await job.result() == "<done>"
    assert [what for what, _, _ in happened] == ["outer", "inner", "work", "left"]
    assert {task for _, _, task in happened} == {"work"}
    [thread] = {thread for _, thread, _ in happened}
    assert thread != threading.get_ident()
    await app.close()


async def test_it_surrounds_batches_and_steps_in_threads_but_no_coroutine_function() -> None:
    app = App("memory://", attempts=1)
    calls: list[int] = []

    @app.sync_middleware
    def count(call_next: Callable[[], Any]) -> Any:
        calls.append(threading.get_ident())
        return call_next()

    @app.task(queue="batches", batch=2)
    def lengths(words: list[str]) -> list[int]:
        return [len(word) for word in words]

    @app.task(queue="loop")
    async def on_loop() -> None: ...

    @app.task(queue="steps")
    async def with_step(context: JobContext) -> int:
        return await context.step("measure", len, "four")

    await lengths.enqueue_many([lengths.job("a"), lengths.job("ab")])
    await on_loop.enqueue()
    await app.worker(queues=["batches", "loop"], burst=True).run()
    assert len(calls) == 1
    job = await with_step.enqueue()
    await app.worker(queues=["steps"], burst=True).run()
    assert await job.result() == 4
    assert len(calls) == 2
    assert threading.get_ident() not in calls
    await app.close()


async def test_it_runs_in_the_process_of_the_function_after_the_preloaded_modules() -> None:
    async with process_app:
        job = await seen.enqueue()
        await process_app.worker(burst=True).run()
        assert await job.result() == ["before", "preloaded first: True"]


async def test_a_worker_serves_the_queues_that_the_app_names_besides_those_of_its_tasks() -> None:
    app = App("memory://")

    @app.task(queue="mail")
    async def send() -> None: ...

    app.served.add("reports")
    assert set(app.worker().options.queues) == {"mail", "reports"}
    assert set(app.worker(queues=["mail"]).options.queues) == {"mail"}


@pytest.mark.parametrize("layer", [3, lambda: None])
def test_what_is_not_a_function_of_one_argument_is_refused(layer: Any) -> None:
    with pytest.raises(InvalidOption, match=r"sync_middleware=.*Give def f\(call_next\)"):
        App("memory://").sync_middleware(layer)


def test_a_coroutine_function_is_refused() -> None:
    async def layer(call_next: Any) -> Any: ...

    with pytest.raises(
        InvalidOption, match=r"is a coroutine function, and it runs in threads.*or use middleware"
    ):
        App("memory://").sync_middleware(layer)
