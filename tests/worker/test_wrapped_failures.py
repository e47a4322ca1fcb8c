"""A failure wrapped in ``Unrecoverable`` or ``Retry`` keeps its class."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import App, JobFailed
from tests.worker import wrapping_tasks
from tests.worker.conftest import working
from tests.worker.wrapping_tasks import lookup

CASES = [
    ("from", "KeyError", "no such user: 'ada'"),
    ("from, same words", "KeyError", "'ada'"),
    ("from, without words", "KeyError", "'ada'"),
    ("argument", "KeyError", "'ada'"),
    ("argument, chained", "KeyError", "'ada'"),
    ("own class", "NoSuchUser", "ada"),
    ("unrelated", "Unrecoverable", "no such user"),
    ("retry, from", "KeyError", "try later: 'ada'"),
    ("retry, without words", "KeyError", "'ada'"),
    ("retry, argument", "KeyError", "'ada'"),
    ("retry, own class", "Busy", "ada"),
    ("retry, unrelated", "Retry", "try later"),
]


async def failure_of(task: Any, kind: str) -> JobFailed:
    job = await task.enqueue(kind)
    with pytest.raises(JobFailed) as caught:
        await job.result(timeout="30s")
    info = await job.get()
    assert info.failures == (3 if kind.startswith("retry") else 1)
    return caught.value


@pytest.mark.parametrize(("kind", "error_type", "message"), CASES)
async def test_a_wrapped_failure_keeps_its_class_and_both_messages(
    app: App, kind: str, error_type: str, message: str
) -> None:
    task = app.task(attempts=3, backoff="1h")(lookup)
    async with working(app):
        failure = await failure_of(task, kind)
    assert failure.error_type == error_type
    assert str(failure).endswith(f"{error_type}: {message}")
    assert "wrapping_tasks.py" in failure.traceback


@pytest.mark.parametrize("task", [wrapping_tasks.in_process, wrapping_tasks.in_sandbox])
async def test_it_keeps_its_class_in_other_processes(task: Any) -> None:
    async with wrapping_tasks.app, working(wrapping_tasks.app, child_processes=1):
        for kind, error_type, message in CASES:
            failure = await failure_of(task, kind)
            assert failure.error_type == error_type
            assert str(failure).endswith(f"{error_type}: {message}")
            assert "wrapping_tasks.py" in failure.traceback


@pytest.mark.parametrize("kind", ["from", "retry, from"])
async def test_it_keeps_its_class_in_your_own_loop(app: App, kind: str) -> None:
    queue = app.queue("own")
    await queue.enqueue({"kind": kind}, id="a", attempts=1)
    async with queue.claim() as job:
        lookup(job.payload["kind"])
    info = await queue.get("a")
    assert info is not None
    assert info.failure is not None
    assert info.failure.type == "KeyError"
    assert await queue.errors() == {"KeyError": 1}
