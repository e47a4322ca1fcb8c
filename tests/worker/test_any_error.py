"""No exception of any class keeps a run from being settled or the worker from going on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock import App, JobFailed, State
from penstock.storage.values import Settlement, Take
from penstock.worker import health
from penstock.worker.context import JobContext
from penstock.worker.middleware import Execution
from tests.worker.conftest import running, until, working


class Odd(BaseException):
    """Neither an ``Exception`` nor one of Python's own."""


class Mute(Exception):
    def __str__(self) -> str:
        raise RecursionError("no words")

    __repr__ = __str__


ERRORS: list[Callable[[], BaseException]] = [
    lambda: UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"),
    lambda: RecursionError("too deep \udcff"),
    lambda: StopIteration(1),
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
    Odd,
    Mute,
]
NAMES = [
    "unicode",
    "recursion",
    "stop-iteration",
    "exit",
    "interrupt",
    "generator-exit",
    "cancelled",
    "odd",
    "mute",
]
any_error = pytest.mark.parametrize("error", ERRORS, ids=NAMES)


async def _completes(app: App) -> None:
    if "plain" not in app.tasks:

        @app.task(name="plain")
        async def plain() -> str:
            return "done"

    assert await app.tasks["plain"].options(wait="10s").call() == "done"


@any_error
@pytest.mark.parametrize("runner", ["async", "thread"])
async def test_whatever_a_handler_raises_fails_its_job(
    memory_app: App, runner: str, error: Callable[[], BaseException]
) -> None:
    def fail() -> None:
        raise error()

    async def fail_async() -> None:
        raise error()

    task = memory_app.task(name="fail", attempts=1)(fail if runner == "thread" else fail_async)
    async with working(memory_app, concurrency=1) as worker:
        with pytest.raises(JobFailed):
            await task.options(wait="10s").call()
        await _completes(memory_app)
        await until(lambda: not worker.health().active)


@any_error
async def test_whatever_a_listener_raises_changes_nothing(
    memory_app: App, error: Callable[[], BaseException]
) -> None:
    def fail(_: Any) -> None:
        raise error()

    worker = memory_app.worker(grace=0)
    for name in ("ready", "started", "completed"):
        worker.on(name, fail)
    async with running(worker):
        await _completes(memory_app)
        await _completes(memory_app)


@any_error
async def test_whatever_middleware_raises_fails_its_job(
    memory_app: App, error: Callable[[], BaseException]
) -> None:
    @memory_app.task(attempts=1)
    async def work() -> None: ...

    async def fail(context: JobContext, call_next: Any) -> Any:
        if context.task != "plain":
            raise error()
        return await call_next()

    async with working(memory_app, middleware=[fail], concurrency=1):
        with pytest.raises(JobFailed):
            await work.options(wait="10s").call()
        await _completes(memory_app)


@any_error
@pytest.mark.parametrize("fails", [False, True])
async def test_whatever_a_hook_raises_the_run_is_settled(
    memory_app: App, error: Callable[[], BaseException], fails: bool
) -> None:
    @memory_app.task(attempts=1)
    async def work() -> None:
        if fails:
            raise ValueError

    def fail(_: Execution) -> None:
        raise error()

    async with working(memory_app, after_execution=[fail], concurrency=1):
        job = await work.enqueue()
        await until(lambda: _ended(job))
        job = await work.enqueue()
        await until(lambda: _ended(job))


async def _ended(job: Any) -> bool:
    return await job.refresh() in (State.COMPLETED, State.FAILED)


@pytest.mark.parametrize("runner", ["async", "thread"])
async def test_a_backoff_that_fails_does_not_keep_a_timeout_from_being_settled(
    memory_app: App, runner: str
) -> None:
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def broken(failures: int, error: BaseException | None) -> int:
        raise RecursionError("no backoff")

    def block() -> None:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20)

    async def sleep() -> None:
        await asyncio.sleep(3600)

    slow = memory_app.task(name="slow", attempts=1, timeout="50ms", backoff=broken)(
        block if runner == "thread" else sleep
    )
    try:
        async with working(memory_app):
            with pytest.raises(JobFailed, match="its backoff failed: no backoff"):
                await slow.options(wait="10s").call()
    finally:
        release.set()


async def test_an_outcome_that_no_store_can_take_fails_its_job(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(attempts=1)
    async def work(text: str) -> str:
        return text

    storage = await app.connect()
    settle = storage.settle

    async def picky(queue: str, settlements: Sequence[Settlement], *, take: Take | None = None) -> Any:
        if any(getattr(one.outcome, "result", b"") == b'"odd"' for one in settlements):
            raise OverflowError("too odd")
        return await settle(queue, settlements, take=take)

    monkeypatch.setattr(storage, "settle", picky)
    odd, fine = await work.enqueue_many([work.job(text="odd"), work.job(text="fine")])
    async with working(app):
        assert await fine.result(timeout="10s") == "fine"
        with pytest.raises(JobFailed, match="too odd"):
            await odd.result(timeout="10s")


async def test_a_result_that_is_not_utf8_fails_its_job_with_the_reason(app: App) -> None:
    """A result is the user's own value: it is refused, not changed."""

    @app.task
    async def work() -> dict[str, str]:
        return {"name": "\udcff"}

    async with working(app):
        with pytest.raises(JobFailed, match="surrogates not allowed") as caught:
            await work.options(wait="10s").call()
    assert caught.value.error_type == "SerializationError"


@any_error
async def test_whatever_a_handler_raises_every_engine_stores(
    app: App, error: Callable[[], BaseException]
) -> None:
    @app.task(attempts=1)
    async def fail() -> None:
        raise error()

    async with working(app):
        with pytest.raises(JobFailed):
            await fail.options(wait="10s").call()


async def test_a_heartbeat_that_cannot_describe_its_worker_is_repeated(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the jobs of a healthy worker would be taken for those of a dead one."""
    failed, mended = threading.Event(), threading.Event()

    def version() -> str:
        if not mended.is_set():
            failed.set()
            raise RecursionError("too deep")
        return "1"

    monkeypatch.setattr(health, "_version", version)
    storage = await app.connect()

    @app.task
    async def work() -> str:
        await until(failed.is_set)
        mended.set()
        await until(lambda: storage.workers("default"))
        return "kept"

    async with working(app, heartbeat="50ms") as worker:
        job = await work.enqueue()
        assert await job.result(timeout="20s") == "kept"
        assert worker.stats.stalled == 0
