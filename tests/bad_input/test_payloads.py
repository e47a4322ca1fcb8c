"""Payloads and results that cannot be written or read: that call, or that job, fails alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock import App, PayloadTooLarge, Queue, SerializationError, Task
from tests.bad_input.conftest import QUEUE, assert_says, refused

LARGE = "x" * 2_000


def make_task(app: App) -> Task:
    @app.task(queue=QUEUE)
    async def pack(item: Any) -> None: ...

    return pack


WAYS_IN = [
    lambda task, queue, value: task.enqueue(value),
    lambda task, queue, value: task.call(value),
    lambda task, queue, value: task.enqueue_many([task.job("fine"), task.job(value), task.job("fine")]),
    lambda task, queue, value: queue.enqueue(value),
    lambda task, queue, value: queue.enqueue_many(["fine", value]),
    lambda task, queue, value: queue.change("known", payload=value, priority=5),
]
NAMES = ["enqueue", "call", "enqueue_many", "queue", "queue_many", "change"]


@pytest.mark.parametrize("call", WAYS_IN, ids=NAMES)
async def test_a_payload_over_the_limit_is_refused_with_both_sizes(
    app: App, call: Callable[[Task, Queue, Any], Any]
) -> None:
    task = make_task(app)
    async with refused(app, PayloadTooLarge, "bytes)", "limit of 1.0 KiB", "reference", "max_payload"):
        await call(task, app.queue(QUEUE), LARGE)


@pytest.mark.parametrize("call", WAYS_IN, ids=NAMES)
@pytest.mark.parametrize(
    "value",
    [object(), {"deep": [print]}, float("nan"), "\ud800", {(1, 2): 3}],
    ids=lambda value: repr(value)[:12],
)
async def test_a_payload_that_cannot_be_encoded_is_refused_with_where_it_is(
    app: App, call: Callable[[Task, Queue, Any], Any], value: Any
) -> None:
    task = make_task(app)
    async with refused(app, SerializationError, "cannot be encoded as json", "$", "Use "):
        await call(task, app.queue(QUEUE), value)


async def test_a_payload_that_contains_itself_is_refused(app: App) -> None:
    ring: list[Any] = []
    ring.append(ring)
    async with refused(app, SerializationError, "contains itself", "Use plain values"):
        await app.queue(QUEUE).enqueue(ring)


async def test_a_payload_that_cannot_be_decoded_fails_that_job_alone(app: App) -> None:
    @app.task(queue="parcels", attempts=3)
    async def weigh(grams: int) -> int:
        return grams

    raw = app.queue("parcels", serde="raw")
    good = await weigh.enqueue_many([weigh.job(grams) for grams in range(10)])
    for id, data in {"torn": b'{"grams": 1', "wrong": b'{"grams": "x"}', "other": b'{"kilos": 1}'}.items():
        await raw.enqueue(data, id=id, task="weigh")
    good += await weigh.enqueue_many([weigh.job(grams) for grams in range(10, 20)])

    await app.worker(queues=["parcels"], burst=True).run()

    assert [await job.result() for job in good] == list(range(20))
    for info in await raw.get_many(["torn", "wrong", "other"]):
        assert info is not None
        assert (info.state, info.runs) == ("failed", 1), "another run would end the same way"
        assert info.failure is not None
        assert info.failure.type == "SerializationError"
        assert_says(SerializationError(info.failure.message), "cannot be decoded", "type hints")


async def test_a_task_that_no_worker_has_fails_after_its_attempts_and_the_others_complete(app: App) -> None:
    @app.task(queue="parcels")
    async def weigh(grams: int) -> int:
        return grams

    queue = app.queue("parcels")
    await queue.enqueue({"grams": 1}, id="unknown", task="wiegh", attempts=2)
    good = await weigh.enqueue_many([weigh.job(grams) for grams in range(10)])

    await app.worker(queues=["parcels"], burst=True).run()

    assert [await job.result() for job in good] == list(range(10))
    info = await queue.get("unknown")
    assert (info.state, info.failures) == ("failed", 2), "another worker may have it, so it is tried again"
    assert info.failure is not None
    assert info.failure.type == "UnknownTask"
    assert_says(LookupError(info.failure.message), "no task 'wiegh' is registered", "Import the module")


@pytest.mark.parametrize(
    ("result", "kind", "word"),
    [(object(), "SerializationError", "cannot be encoded"), (LARGE, "PayloadTooLarge", "max_payload")],
    ids=["unserialisable", "oversized"],
)
async def test_a_result_that_cannot_be_kept_fails_its_job_once_with_the_reason(
    app: App, result: Any, kind: str, word: str
) -> None:
    @app.task(queue="parcels")
    async def wrap() -> Any:
        return result

    job = await wrap.enqueue()
    await app.worker(queues=["parcels"], burst=True).run()

    info = await job.get()
    assert (info.state, info.runs) == ("failed", 1)
    assert info.failure is not None
    assert info.failure.type == kind
    assert word in info.failure.message


@pytest.mark.parametrize(
    ("result", "kind"), [(object(), SerializationError), (LARGE, PayloadTooLarge)], ids=["object", "large"]
)
async def test_outside_a_worker_such_a_result_is_refused_and_the_job_is_still_held(
    app: App, result: Any, kind: type[Exception]
) -> None:
    queue = app.queue(QUEUE)
    job = await queue.claim_one(wait=0)
    assert job is not None
    with pytest.raises(kind):
        await job.complete(result)
    assert (await queue.counts()).active == 1
    assert await job.complete("small")
