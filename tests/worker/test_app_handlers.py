"""Handlers of an app: functions for the payloads of a queue, which run as tasks do in any worker."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

import msgspec
import pytest

from penstock import App, InvalidInput, InvalidOption, JobContext, JobFailed, StepFailed, current_job
from penstock.testing import harness
from tests.worker.conftest import working


@dataclass
class Order:
    number: int
    due: date


DAY = date(2026, 5, 1)


async def test_a_handler_gets_the_payload_in_the_type_of_its_hint(app: App) -> None:
    @app.handler("orders")
    async def take(order: Order) -> str:
        return f"{order.number} {order.due.year}"

    @app.handler("lists")
    def add(context: JobContext, numbers: list[int]) -> int:
        assert context.queue == "lists"
        assert current_job() is context
        return sum(numbers)

    async with working(app):
        jobs = [
            await app.queue("orders").enqueue({"number": 7, "due": "2026-05-01"}),
            await take.enqueue(Order(8, DAY)),
            await app.queue("lists").enqueue([1, 2, 3]),
        ]
        assert [await job.result(timeout="10s") for job in jobs] == ["7 2026", "8 2026", 6]
        assert await add.call([4, 5]) == 9
        assert await take(Order(9, DAY)) == "9 2026"


async def test_a_payload_of_another_shape_fails_its_job_for_good(app: App) -> None:
    @app.handler("orders")
    async def take(order: Order) -> None: ...

    wrong: Any = {"number": "seven"}
    with pytest.raises(InvalidInput, match=r"argument 'order' of .*take does not fit its type"):
        await take.enqueue(wrong)
    async with working(app):
        job = await app.queue("orders").enqueue(wrong)
        with pytest.raises(JobFailed, match="cannot be decoded as"):
            await job.result(timeout="10s")
        assert (await job.get()).failures == 1


async def test_a_handler_has_retries_options_and_middleware(memory_app: App) -> None:
    seen: list[str] = []

    @memory_app.middleware
    async def note(context: JobContext, call_next: Callable[[], Any]) -> Any:
        seen.append(f"{context.queue} {context.failures}")
        return await call_next()

    @memory_app.handler(
        "mail", attempts=5, backoff="1h", priority=3, retry_on={OSError: "2h"}, give_up_on=KeyError
    )
    async def send(kind: str) -> None:
        raise {"os": OSError, "key": KeyError, "value": ValueError}[kind](kind)

    async with harness(memory_app) as h:
        queue = memory_app.queue("mail")
        jobs = [await queue.enqueue(kind) for kind in ("os", "key", "value")]
        other = await queue.enqueue("os", attempts=1)
        await h.drain()
        infos = [await job.get() for job in jobs]
        assert [(info.state, info.failures) for info in infos] == [
            ("scheduled", 1),
            ("failed", 1),
            ("failed", 1),
        ]
        assert infos[0].run_at is not None
        assert infos[0].claimed_at is not None
        assert 7000 < (infos[0].run_at - infos[0].claimed_at).total_seconds() < 7300
        assert (infos[0].attempts, infos[0].priority, infos[0].task) == (5, 3, "")
        assert (await other.get()).state == "failed"
    assert seen == ["mail 0"] * 4


async def test_steps_of_a_handler_follow_its_options(memory_app: App) -> None:
    tried: list[str] = []

    def fail(kind: str) -> None:
        tried.append(kind)
        raise {"os": OSError, "key": KeyError}[kind](kind)

    @memory_app.handler("mail", attempts=3, backoff="1ms", give_up_on=KeyError, result_serde="msgpack")
    async def send(context: JobContext, kinds: list[str]) -> list[str]:
        found: list[str] = [await context.step("serde", lambda: "in MessagePack")]
        for kind in kinds:
            try:
                await context.step("fail", fail, kind, key=kind)
            except StepFailed as error:
                found.append(error.step)
        return found

    async with working(memory_app):
        job = await memory_app.queue("mail").enqueue(["os", "key"])
        handle = memory_app.queue("mail", result_serde="msgpack").job(job.id)
        assert await handle.result(timeout="10s") == ["in MessagePack", "fail[os]", "fail[key]"]
        assert tried == ["os", "os", "os", "key"]
        storage = await memory_app.connect()
        [record] = await storage.steps("mail", job.id, names=["serde"])
        assert record.result == msgspec.msgpack.encode("in MessagePack")


@pytest.mark.parametrize("mode", ["worker", "harness"])
async def test_a_handler_may_take_batches(memory_app: App, mode: str) -> None:
    sizes: list[int] = []

    @memory_app.handler("texts", batch=3, batch_wait="1h")
    async def lengths(texts: list[str], contexts: list[JobContext]) -> list[int]:
        assert [context.queue for context in contexts] == ["texts"] * len(texts)
        sizes.append(len(texts))
        return [len(text) for text in texts]

    specs = [lengths.job(text) for text in ("a", "bb", "ccc")]
    if mode == "worker":
        jobs = await lengths.enqueue_many(specs)
        async with working(memory_app):
            assert [await job.result(timeout="10s") for job in jobs] == [1, 2, 3]
    else:
        async with harness(memory_app) as h:
            jobs = await lengths.enqueue_many(specs)
            await h.drain()
            assert [await job.result() for job in jobs] == [1, 2, 3]
    assert sizes == [3]


async def test_a_worker_serves_the_queues_of_handlers_and_one_of_its_own_wins(memory_app: App) -> None:
    @memory_app.handler("plain")
    async def of_app(payload: Any) -> str:
        return f"app {payload}"

    @memory_app.handler("own")
    async def hidden(payload: Any) -> str:
        return "never"

    worker = memory_app.worker()
    assert set(worker.options.queues) == {"plain", "own"}

    @worker.handler("own")
    async def own(job: JobContext) -> str:
        return "worker"

    running = asyncio.create_task(worker.run())
    jobs = [await memory_app.queue(name).enqueue(1) for name in ("plain", "own")]
    assert [await job.result(timeout="10s") for job in jobs] == ["app 1", "worker"]
    worker.stop()
    await running


async def test_jobs_wait_for_a_worker_that_has_the_handler(memory_app: App) -> None:
    job = await memory_app.queue("late").enqueue("x")

    @memory_app.task(queue="late")
    async def other() -> None: ...

    async with working(memory_app, unknown_after="1h"):
        async with asyncio.timeout(10):
            while await job.refresh() != "scheduled":
                await asyncio.sleep(0.002)
        reason = await job.why()
        assert '@app.handler("late")' in f"{reason}"

        @memory_app.handler("late")
        async def take(payload: str) -> str:
            return payload

        await job.promote()
        assert await job.result(timeout="10s") == "x"


async def test_raw_bytes_and_sync_code(memory_app: App) -> None:
    @memory_app.handler("raw", serde="raw", result_serde="json")
    def count(payload: bytes) -> int:
        return len(payload)

    job = await asyncio.to_thread(lambda: count.sync.options(priority=1).enqueue(b"abc"))
    await memory_app.worker(burst=True).run()
    assert await asyncio.to_thread(job.result) == 3


app: Any = App("memory://")


@pytest.mark.parametrize(
    ("define", "said"),
    [
        (
            lambda: app.handler("q")(_none),
            "_none cannot be a handler: it needs one parameter for the payload",
        ),
        (lambda: app.handler("q")(_two), "It has 2: a, b."),
        (lambda: app.handler("q")(_star), "cannot be a handler"),
        (lambda: app.handler(_one), '@app.handler needs the name of a queue: @app.handler("mail").'),
        (lambda: app.handler("q", group="x"), "a handler has no option 'group'"),
        (lambda: app.handler("q", id="x"), "a handler has no option 'id'. It belongs to single jobs"),
        (lambda: app.handler("q", name="x"), "a handler has no option 'name'"),
        (
            lambda: (app.handler("twice")(_one), app.handler("twice")(_one)),
            "queue 'twice' has a handler already",
        ),
    ],
)
def test_a_wrong_handler_is_refused_where_it_is_defined(define: Any, said: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(said)):
        define()


def _none() -> None: ...
def _one(payload: str) -> None: ...
def _two(a: int, b: int) -> None: ...
def _star(*payload: int) -> None: ...


async def test_a_result_cannot_be_passed_to_a_handler() -> None:
    take: Any = App("memory://").handler("q")(_one)
    with pytest.raises(InvalidInput, match="no first argument that a result can be passed as"):
        take.partial()
