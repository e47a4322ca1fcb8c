"""A worker logs each failed run on ``penstock.worker``: a retry as a warning, the end of the job as an error."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import App, JobContext, Retry, Snooze, Unrecoverable
from penstock.core.command import COMMAND_TASK, CommandLine
from penstock.errors import RateLimited
from penstock.worker.middleware import Execution
from tests.worker import process_tasks as tasks
from tests.worker.conftest import until, working

Logged = list[logging.LogRecord]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Logged]:
    caplog.set_level(logging.INFO, logger="penstock.worker")
    records: Logged = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    logging.getLogger("penstock.worker").addHandler(handler)
    yield records
    logging.getLogger("penstock.worker").removeHandler(handler)


def about(records: Logged, id: str) -> Logged:
    return [record for record in records if getattr(record, "id", None) == id]


def error_of(record: logging.LogRecord) -> BaseException:
    assert record.exc_info is not None
    assert record.exc_info[1] is not None
    return record.exc_info[1]


def fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in ("queue", "id", "task", "run")}


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_retry_is_a_warning_and_the_end_an_error(app: App, logged: Logged, is_async: bool) -> None:
    raised: list[Exception] = []

    def fail() -> None:
        raised.append(ValueError("no such address"))
        raise raised[-1]

    if is_async:

        @app.task(queue="mail", attempts=2)
        async def send() -> None:
            fail()
    else:

        @app.task(queue="mail", attempts=2)
        def send() -> None:
            fail()

    async with working(app) as worker:
        await send.options(id="ada").enqueue()
        await until(lambda: worker.stats.failed == 1)
    retry, end = about(logged, "ada")
    assert (retry.levelname, end.levelname) == ("WARNING", "ERROR")
    assert [error_of(retry), error_of(end)] == raised
    assert "fail" in str(retry.exc_text or logging.Formatter().formatException(retry.exc_info))  # type: ignore[arg-type]
    assert fields(retry) == {"queue": "mail", "id": "ada", "task": "send", "run": 1}
    assert fields(end) == {"queue": "mail", "id": "ada", "task": "send", "run": 2}
    assert "ValueError: no such address" in end.getMessage()
    assert retry.name == end.name == "penstock.worker"


async def test_a_retry_that_wraps_an_error_is_a_warning_with_that_error(
    memory_app: App, logged: Logged
) -> None:
    @memory_app.task(attempts=2)
    async def impatient(job: JobContext) -> None:
        if job.run == 1:
            raise Retry(ConnectionError("down"), delay=0)

    async with working(memory_app) as worker:
        await impatient.options(id="x").enqueue()
        await until(lambda: worker.stats.completed == 1)
    [retry] = about(logged, "x")
    assert retry.levelname == "WARNING"
    assert "ConnectionError: down" in retry.getMessage()
    assert retry.exc_info is not None


async def test_verdicts_that_are_not_failures_are_not_logged_as_one(memory_app: App, logged: Logged) -> None:
    @memory_app.task(attempts=2)
    async def patient(job: JobContext) -> None:
        match job.run:
            case 1:
                raise Snooze(0)
            case 2:
                raise RateLimited(0.001)
            case 3:
                raise Retry("busy", delay=0)
            case _:
                pass

    async with working(memory_app) as worker:
        await patient.options(id="x").enqueue()
        await until(lambda: worker.stats.completed == 1)
    [asked] = about(logged, "x")
    assert asked.levelname == "INFO"
    assert asked.exc_info is None
    assert "busy" in asked.getMessage()


@pytest.mark.parametrize("verdict", [Unrecoverable("wrong address"), Retry("still busy", delay=0)])
async def test_a_verdict_that_ends_the_job_is_an_error(
    memory_app: App, logged: Logged, verdict: Exception
) -> None:
    @memory_app.task(attempts=1)
    async def final() -> None:
        raise verdict

    async with working(memory_app) as worker:
        await final.options(id="x").enqueue()
        await until(lambda: worker.stats.failed == 1)
    [end] = about(logged, "x")
    assert end.levelname == "ERROR"
    assert error_of(end) is verdict


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_timeout_is_logged_with_a_timeout_error(
    memory_app: App, logged: Logged, is_async: bool
) -> None:
    if is_async:

        @memory_app.task(name="slow", attempts=1, timeout="20ms")
        async def slow() -> None:
            await asyncio.sleep(60)
    else:

        @memory_app.task(name="slow", attempts=1, timeout="20ms")
        def slow(job: JobContext) -> None:
            while not job.cancelled:
                time.sleep(0.005)

    async with working(memory_app) as worker:
        await slow.options(id="x").enqueue()
        await until(lambda: worker.stats.failed == 1)
    [end] = [record for record in about(logged, "x") if record.levelname == "ERROR"]
    assert isinstance(error_of(end), TimeoutError)
    assert "20ms" in end.getMessage()
    if is_async:  # The traceback shows where the handler was.
        assert "sleep(60)" in logging.Formatter().formatException(end.exc_info)  # type: ignore[arg-type]


async def test_a_failure_in_another_process_comes_with_its_traceback(logged: Logged) -> None:
    async with tasks.app, working(tasks.app, child_processes=1) as worker:
        await tasks.fail.options(id="x").enqueue()
        await until(lambda: worker.stats.failed == 1, seconds=60)
    [end] = about(logged, "x")
    assert type(error_of(end)).__name__ == "ZeroDivisionError"
    assert "process_tasks.py" in logging.Formatter().formatException(end.exc_info)  # type: ignore[arg-type]


async def test_a_failed_command_is_logged_with_its_last_line(memory_app: App, logged: Logged) -> None:
    async with working(memory_app, queues=["shell"], commands=True) as worker:
        line = CommandLine("echo no space left >&2; exit 3")
        await memory_app.queue("shell").enqueue(line, task=COMMAND_TASK, id="x", attempts=1)
        await until(lambda: worker.stats.failed == 1)
    [end] = about(logged, "x")
    assert type(error_of(end)).__name__ == "CommandFailed"
    assert error_of(end).__traceback__ is None
    assert "no space left" in end.getMessage()


async def test_a_result_that_cannot_be_stored_is_logged(memory_app: App, logged: Logged) -> None:
    @memory_app.task
    async def odd() -> object:
        return object()

    async with working(memory_app) as worker:
        await odd.options(id="x").enqueue()
        await until(lambda: worker.stats.failed == 1)
    [end] = about(logged, "x")
    assert "object" in str(error_of(end))


async def test_what_a_hook_replaced_is_not_logged(memory_app: App, logged: Logged) -> None:
    @memory_app.task(attempts=1)
    async def leaky() -> None:
        raise ValueError("password 1234")

    @memory_app.after_execution
    def redact(execution: Execution) -> None:
        execution.error = ValueError("redacted")

    async with working(memory_app) as worker:
        await leaky.options(id="x").enqueue()
        await until(lambda: worker.stats.failed == 1)
    [end] = about(logged, "x")
    assert str(error_of(end)) == "redacted"
    assert "1234" not in end.getMessage()


async def test_a_job_that_expires_while_it_runs_is_an_error(memory_app: App, logged: Logged) -> None:
    @memory_app.task(ttl="1h")
    async def late() -> None:
        await asyncio.sleep(3600)

    async with working(memory_app, lease="2h", heartbeat="20ms") as worker:
        await late.options(id="x").enqueue()
        await until(lambda: worker.health().active)
        await (await memory_app.connect()).shift_clock("default", 3_601_000)
        await until(lambda: worker.stats.failed == 1)
    [end] = about(logged, "x")
    assert end.levelname == "ERROR"
    assert "ttl" in end.getMessage()


async def test_an_error_whose_traceback_cannot_be_formatted_is_logged_all_the_same(
    memory_app: App, logged: Logged
) -> None:
    class Hostile(Exception):
        @property
        def __notes__(self) -> list[str]:  # type: ignore[override]
            raise RuntimeError("not even notes")

    @memory_app.task(attempts=1)
    async def hostile() -> None:
        raise Hostile("boo")

    async with working(memory_app) as worker:
        await hostile.options(id="x").enqueue()
        await until(lambda: worker.stats.failed == 1)
    [end] = about(logged, "x")
    assert "Hostile: boo" in end.getMessage()


async def test_a_logged_exception_is_not_kept(memory_app: App) -> None:
    class Refused(Exception):
        pass

    seen: list[weakref.ref[Exception]] = []

    @memory_app.task(attempts=1)
    async def fail() -> None:
        error = Refused("x")
        seen.append(weakref.ref(error))
        raise error

    logging.getLogger("penstock.worker").disabled = True
    try:
        async with working(memory_app) as worker:
            await fail.enqueue()
            await until(lambda: worker.stats.failed == 1)
            gc.collect()
            assert seen[0]() is None
    finally:
        logging.getLogger("penstock.worker").disabled = False
