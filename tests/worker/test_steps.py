"""Durable steps, as handlers and callers see them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from penstock import (
    App,
    InvalidName,
    InvalidOption,
    JobContext,
    JobFailed,
    JobHandle,
    JobNotFound,
    StepError,
    StepFailed,
    Unrecoverable,
)
from penstock.core.names import step_name
from penstock.core.outcome import Release
from penstock.core.step import NewStep
from penstock.storage.values import Settlement, Take
from tests.worker.conftest import working


class Boom(Exception):
    pass


@dataclass
class Order:
    id: int
    total: float


async def steps_of(app: App, job: Any) -> list[tuple[str, str]]:
    storage = await app.connect()
    return [(step.name, step.status) for step in await storage.steps(job.queue, job.id)]


async def test_a_recorded_step_is_not_run_again(app: App) -> None:
    ran: list[str] = []

    async def pay(order: int) -> str:
        ran.append(f"pay {order}")
        return f"charge-{order}"

    def ship(charge: str) -> list[str]:
        ran.append(f"ship {charge}")
        return [charge]

    @app.task(attempts=2)
    async def sell(context: JobContext, order: int) -> list[Any]:
        charge = await context.step("charge", pay, order)
        parcel = await context.step("ship", ship, charge)
        if context.run == 1:
            raise Boom
        return [charge, parcel]

    async with working(app):
        job = await sell.enqueue(7)
        assert await job.result(timeout="10s") == ["charge-7", ["charge-7"]]

    assert ran == ["pay 7", "ship charge-7"]
    assert await steps_of(app, job) == [("charge", "completed"), ("ship", "completed")]


async def test_a_step_in_a_loop_needs_a_key(app: App) -> None:
    ran: list[int] = []

    async def send(n: int) -> int:
        ran.append(n)
        return n

    @app.task(attempts=2)
    async def send_all(context: JobContext) -> list[int]:
        sent = await asyncio.gather(*(context.step("send", send, n, key=n) for n in range(3)))
        if context.run == 1:
            raise Boom
        return list(sent)

    @app.task(attempts=5)
    async def send_twice(context: JobContext) -> None:
        await context.step("send", send, 1)
        await context.step("send", send, 2)

    async with working(app):
        assert await send_all.options(wait="10s").call() == [0, 1, 2]
        assert sorted(ran) == [0, 1, 2]
        with pytest.raises(JobFailed, match=r"step 'send' was called twice in one run.*key="):
            await send_twice.options(wait="10s").call()


@pytest.mark.parametrize("mode", ["async", "sync"])
async def test_retry_on_of_a_step_takes_what_that_of_a_task_takes(memory_app: App, mode: str) -> None:
    tried: list[str] = []

    def fail(kind: str) -> None:
        tried.append(kind)
        raise {"os": OSError, "key": KeyError, "value": ValueError}[kind](kind)

    rules: list[Any] = [
        OSError,
        (OSError, KeyError),
        [OSError, lambda error: isinstance(error, KeyError)],
        lambda error: isinstance(error, OSError),
        {OSError: "2ms", (KeyError,): None},
    ]

    @memory_app.task(attempts=2, backoff="1ms", runner="async" if mode == "async" else "auto")
    async def work(context: JobContext, number: int) -> None:
        for kind in ("os", "key", "value"):
            with suppress(StepFailed):
                await context.step("fail", fail, kind, key=kind, retry_on=rules[number])

    @memory_app.task(attempts=2, backoff="1ms")
    def work_in_thread(context: JobContext, number: int) -> None:
        for kind in ("os", "key", "value"):
            with suppress(StepFailed):
                context.sync.step("fail", fail, kind, key=kind, retry_on=rules[number])

    task: Any = work if mode == "async" else work_in_thread
    async with working(memory_app):
        for number, times in enumerate([(2, 1, 1), (2, 2, 1), (2, 2, 1), (2, 1, 1), (2, 2, 1)]):
            tried.clear()
            await task.options(wait="10s").call(number)
            assert tuple(tried.count(kind) for kind in ("os", "key", "value")) == times


async def test_a_wrong_retry_on_of_a_step_is_refused_before_it_runs(memory_app: App) -> None:
    ran: list[int] = []

    @memory_app.task
    async def work(context: JobContext) -> None:
        wrong: Any = "OSError"
        await context.step("work", ran.append, 1, retry_on=wrong)

    async with working(memory_app):
        with pytest.raises(JobFailed, match=r"retry_on of step 'work' must be a list of exception classes"):
            await work.options(wait="10s", attempts=1).call()
    assert not ran


async def test_a_step_is_retried_by_its_own_policy(app: App) -> None:
    tried: list[int] = []

    async def pay() -> str:
        tried.append(1)
        if len(tried) < 4:
            raise Boom("busy")
        return "paid"

    @app.task(attempts=1)
    async def sell(context: JobContext) -> list[Any]:
        return [await context.step("charge", pay, attempts=4, backoff="1ms"), context.failures]

    async with working(app):
        job = await sell.enqueue()
        assert await job.result(timeout="10s") == ["paid", 0]

    storage = await app.connect()
    [step] = await storage.steps(job.queue, job.id)
    assert (step.status, step.failures, len(tried)) == ("completed", 3, 4)


async def test_a_long_backoff_frees_the_worker(app: App) -> None:
    tried: list[int] = []

    async def pay() -> str:
        tried.append(1)
        if len(tried) == 1:
            raise Boom("busy")
        return "paid"

    @app.task(attempts=1)
    async def sell(context: JobContext) -> list[Any]:
        return [await context.step("charge", pay, attempts=2, backoff="200ms"), context.run, context.failures]

    async with working(app):
        assert await sell.options(wait="10s").call() == ["paid", 2, 0]


async def test_a_step_that_failed_for_good_fails_the_job_and_can_be_caught(app: App) -> None:
    ran: list[str] = []

    async def pay() -> None:
        ran.append("pay")
        raise Boom("declined")

    async def refund() -> str:
        ran.append("refund")
        return "refunded"

    @app.task(attempts=3)
    async def sell(context: JobContext) -> None:
        await context.step("charge", pay, attempts=2, backoff=0)

    @app.task(attempts=3)
    async def sell_or_refund(context: JobContext) -> list[Any]:
        try:
            await context.step("charge", pay, attempts=1)
        except StepFailed as error:
            answer = await context.step("refund", refund)
            if context.run == 1:
                raise Boom from error
            return [answer, error.step, error.error_type, error.failures]
        raise AssertionError

    async with working(app):
        with pytest.raises(
            JobFailed, match="step 'charge' failed after 2 attempts: Boom: declined"
        ) as caught:
            await sell.options(wait="10s").call()
        assert caught.value.error_type == "Boom"
        assert ran == ["pay", "pay"]
        ran.clear()
        answer = await sell_or_refund.options(wait="10s").call()
        assert (answer, ran) == (["refunded", "charge", "Boom", 1], ["pay", "refund"])


async def test_retry_runs_failed_steps_again_and_no_others(app: App) -> None:
    ran: list[str] = []
    is_down = True

    async def load() -> int:
        ran.append("load")
        return 1

    async def pay() -> str:
        ran.append("pay")
        if is_down:
            raise Unrecoverable("down")
        return "paid"

    @app.task
    async def sell(context: JobContext) -> str:
        await context.step("load", load)
        return await context.step("charge", pay, attempts=5)

    async with working(app):
        job = await sell.enqueue()
        with pytest.raises(JobFailed, match="after 1 attempt"):
            await job.result(timeout="10s")
        is_down = False
        await job.retry()
        assert await job.result(timeout="10s") == "paid"
    assert ran == ["load", "pay", "pay"]


async def test_results_have_the_annotated_type_in_every_run(app: App) -> None:
    seen: list[Any] = []

    async def load(id: int) -> Order:
        return Order(id, 9.5)

    def tags() -> set[str]:
        return {"b", "a"}

    @app.task(attempts=2)
    async def sell(context: JobContext) -> None:
        order = await context.step("load", load, 3)
        seen.append((order, await context.step("tags", tags), await context.step("pair", lambda: (1, 2))))
        await context.step("use", Order.__repr__, order)
        if context.run == 1:
            raise Boom

    async with working(app):
        await sell.options(wait="10s").call()
    assert seen == [(Order(3, 9.5), {"a", "b"}, [1, 2])] * 2


async def test_step_key_is_the_same_in_every_attempt(app: App) -> None:
    keys: list[str] = []

    async def pay(context: JobContext) -> None:
        keys.append(context.step_key)
        if len(keys) == 1:
            raise Boom

    @app.task
    async def sell(context: JobContext) -> None:
        await context.step("charge", pay, context, backoff=0)
        await context.step("other", pay, context)
        with pytest.raises(LookupError, match="no step is running"):
            _ = context.step_key

    async with working(app):
        await sell.options(wait="10s").call()
        await sell.options(wait="10s").call()
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4


@pytest.mark.parametrize("choice", ["fail", "warn", "rerun"])
async def test_changed_arguments_of_a_recorded_step(
    app: App, choice: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    async def pay(amount: int) -> int:
        ran.append(amount)
        return amount

    @app.task(attempts=3)
    async def sell(context: JobContext) -> int:
        amount = await context.step("charge", pay, context.run, on_divergence=choice)
        if context.run == 1:
            raise Boom
        return amount

    async with working(app):
        if choice == "fail":
            with pytest.raises(JobFailed, match=r"other arguments.*on_divergence") as caught:
                await sell.options(wait="10s").call()
            assert caught.value.error_type == "StepError"
        else:
            with caplog.at_level(logging.WARNING):
                amount = await sell.options(wait="10s").call()
            assert amount == {"warn": 1, "rerun": 2}[choice]
            assert "other arguments" in caplog.text
    assert ran == ([1, 2] if choice == "rerun" else [1])


async def test_arguments_that_cannot_be_encoded_count_by_their_type(app: App) -> None:
    async def pay(connection: object, amount: int) -> int:
        return amount

    @app.task(attempts=2)
    async def sell(context: JobContext) -> int:
        amount = await context.step("charge", pay, object(), 5)
        if context.run == 1:
            raise Boom
        return amount

    async with working(app):
        assert await sell.options(wait="10s").call() == 5


async def test_a_step_that_a_job_no_longer_asks_for_is_an_event(app: App) -> None:
    @app.task(attempts=2)
    async def sell(context: JobContext) -> None:
        if context.run == 1:
            await context.step("old", lambda: 1)
            raise Boom
        await context.step("new", lambda: 2)

    async with working(app):
        job = await sell.enqueue()
        await job.result(timeout="10s")

    storage = await app.connect()
    page = await storage.read_events(job.queue, after=0)
    data = [event.data for event in page.events if event.type == "recorded"]
    assert data == [
        '{"step":"old","status":"completed"}',
        '{"step":"new","status":"completed"}',
        '{"step":"old","status":"unused"}',
    ]


async def test_misuse_has_clear_errors(app: App) -> None:
    async def nothing() -> None: ...

    @app.task(attempts=5)
    async def sell(context: JobContext, how: str) -> None:
        match how:
            case "name":
                await context.step("a b", nothing)
            case "key":
                await context.step("a", nothing, key="")
            case "attempts":
                await context.step("a", nothing, attempts=0)
            case "large":
                await context.step("a", lambda: "x" * 2**20)
            case "nested":
                await context.step("a", lambda: context.sync.step("b", lambda: 1))
            case _:
                await context.step("a", object)

    async with working(app):
        for how, message in {
            "name": "'a b' is not allowed as step name",
            "key": "key='' is not allowed for a step",
            "attempts": "attempts must be an integer >= 1, got 0",
            "large": "the result of step 'a' has 1,048,578 bytes; the limit is 1,048,576",
            "nested": "step 'b' was called inside step 'a'",
            "result": "step 'a' ran, but its result cannot be recorded",
        }.items():
            with pytest.raises(JobFailed, match=message):
                await sell.options(wait="10s").call(how)


async def bring_recorded(
    app: App, job: JobHandle[Any], results: dict[str, bytes], *, arguments: bytes = b""
) -> None:
    """Let an earlier run of a job have recorded these steps."""
    storage = await app.connect()
    [lease] = (await storage.claim(job.queue, Take("earlier", 1, 60_000))).leases
    steps = [
        NewStep(lease.id, lease.token, name, arguments=arguments, result=result)
        for name, result in results.items()
    ]
    for first in range(0, len(steps), 1000):
        await storage.record_steps(job.queue, steps[first : first + 1000])
    await storage.settle(job.queue, [Settlement(lease.id, lease.token, Release())])


async def test_the_number_of_steps_has_a_limit(app: App) -> None:
    @app.task(attempts=1)
    async def count(context: JobContext) -> int:
        assert await context.step("s", lambda: -1, key=9999) == 9999
        return await context.step("more", lambda: -1)

    job = await count.enqueue()
    await bring_recorded(app, job, {f"s[{n}]": b"%d" % n for n in range(10_000)})
    async with working(app):
        with pytest.raises(JobFailed, match=r"step 'more' would be number 10,001 of job .* limit is 10,000"):
            await job.result(timeout="20s")


async def test_the_results_of_all_steps_have_a_limit(app: App) -> None:
    mega = 1024 * 1024

    @app.task(attempts=1)
    async def collect(context: JobContext) -> None:
        assert len(await context.step("s", lambda: "", key=0)) == mega - 2
        await context.step("s", lambda: "x" * (mega - 2), key=15)
        await context.step("more", lambda: 1)

    job = await collect.enqueue()
    await bring_recorded(app, job, {f"s[{n}]": b'"%b"' % (b"x" * (mega - 2)) for n in range(15)})
    async with working(app):
        message = r"with step 'more', the results of job .* have 16,777,217 bytes; the limit is 16,777,216"
        with pytest.raises(JobFailed, match=message):
            await job.result(timeout="20s")


async def test_a_result_that_is_replaced_no_longer_counts_towards_the_limit(app: App) -> None:
    mega = 1024 * 1024

    @app.task(attempts=1)
    async def collect(context: JobContext) -> int:
        again = await context.step("s", lambda n: "y" * (mega - 2), 2, key=0, on_divergence="rerun")
        return len(again)

    job = await collect.enqueue()
    results = {f"s[{n}]": b'"%b"' % (b"x" * (mega - 2)) for n in range(16)}
    await bring_recorded(app, job, results, arguments=b"other")
    async with working(app):
        assert await job.result(timeout="20s") == mega - 2


async def test_steps_of_a_sync_handler(app: App) -> None:
    ran: list[str] = []

    def pay(order: int) -> str:
        ran.append(f"pay {order}")
        if len(ran) == 1:
            raise Boom
        return f"charge-{order}"

    @app.task(attempts=2)
    def sell(context: JobContext, order: int) -> list[Any]:
        charge = context.sync.step("charge", pay, order, backoff="1ms")
        if context.run == 1:
            raise Boom
        return [charge, context.run]

    async with working(app):
        assert await sell.options(wait="10s").call(5) == ["charge-5", 2]
    assert ran == ["pay 5", "pay 5"]


async def test_large_results_and_many_steps_are_read_on_demand(app: App) -> None:
    ran: list[str] = []

    def read() -> str:
        ran.append("read")
        return "x" * 100_000

    @app.task(attempts=2)
    async def load(context: JobContext, count: int) -> int:
        text = await context.step("read", read)
        for n in range(count):
            await context.step("one", lambda: 1, key=n)
        if context.run == 1:
            raise Boom
        return len(text)

    async with working(app):
        assert await load.options(wait="10s").call(0) == 100_000
        assert ran == ["read"]


async def test_the_start_of_a_step_is_recorded_once_a_worker_has_died(memory_app: App) -> None:
    app = memory_app
    queue = app.queue("default")

    @app.task
    async def sell(context: JobContext) -> None:
        await context.step("transcode", lambda: 1)

    job = await sell.enqueue()
    claimed = await queue.claim_one()
    assert claimed
    assert await queue.end_leases(job.id) == {job.id: "ended"}
    async with working(app):
        await job.result(timeout="10s")

    data = [event.data async for event in job.events(types="recorded")]
    assert data == ['{"step":"transcode","status":"started"}', '{"step":"transcode","status":"completed"}']


async def test_a_fork_keeps_the_steps_before_one(app: App) -> None:
    ran: list[str] = []

    def note(what: str) -> str:
        ran.append(what)
        return what

    @app.task(queue="sales")
    async def sell(context: JobContext, order: int) -> list[str]:
        return [await context.step(name, note, f"{name} {order}") for name in ("load", "charge", "ship")]

    async with working(app, queues=["sales"]):
        job = await sell.options(priority=3).enqueue(7)
        await job.result(timeout="10s")
        ran.clear()
        queue = app.queue("sales")
        fork = await queue.fork(job.id, before="ship", new_id="again")
        assert await app.job(fork.ref).result(timeout="10s") == ["load 7", "charge 7", "ship 7"]
        assert ran == ["ship 7"]
        assert (await fork.get()).priority == 3
        with pytest.raises(InvalidOption, match="new_id='again' is taken"):
            await job.fork(before="ship", new_id="again")
        with pytest.raises(InvalidOption, match="Its steps are: load, charge, ship"):
            await job.fork(before="sip")
        with pytest.raises(JobNotFound):
            await queue.fork("nobody", before="ship")
        assert (await queue.counts()).staged == 0
        assert [step.name for step in await job.steps()] == ["load", "charge", "ship"]


async def test_names_are_checked_before_anything_runs() -> None:
    assert step_name("charge", 7) == "charge[7]"
    for name, key in [("", None), ("a[1]", None), ("a", "\n"), ("a", 1.5), ("a", "x" * 300)]:
        with pytest.raises((InvalidName, InvalidOption)):
            step_name(name, key)  # type: ignore[arg-type]


def test_step_errors_are_unrecoverable() -> None:
    assert issubclass(StepError, Unrecoverable)
    assert issubclass(StepFailed, Unrecoverable)
