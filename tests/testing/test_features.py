"""The features of a worker in a harness: batches, hooks into what is enqueued and stored."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from penstock import App, Dedup, EnqueueCall, Execution, JobContext, JobFailed, Suspend
from penstock.storage.values import Report
from penstock.testing import Harness, harness


async def test_a_batch_is_what_is_due_up_to_its_size(app: App, h: Harness) -> None:
    batches: list[list[int]] = []
    ran: list[str] = []

    @app.task(batch=3, batch_wait="1h", queue="numbers")
    async def double(numbers: list[int], jobs: list[JobContext]) -> list[int]:
        batches.append(numbers)
        assert len(jobs) == len(numbers)
        return [2 * n for n in numbers]

    @app.task(queue="numbers")
    def alone(name: str) -> None:
        ran.append(f"{name} after {len(batches)}")

    await double.enqueue(1)
    await alone.enqueue("a")
    jobs = await double.enqueue_many([double.job(2), double.job(3), double.job(4)])
    await alone.enqueue("b")
    drained = await h.drain()

    assert batches == [[1, 2], [3, 4]]
    assert ran == ["a after 1", "b after 2"]
    assert [run.result for run in drained.runs] == [2, 4, None, 6, 8, None]
    assert [await job.result(timeout="5s") for job in jobs] == [4, 6, 8]
    await h.assert_enqueued(double, 3, count=1)
    assert (await h.enqueued(double))[0].arguments == {"numbers": 1}


async def test_jobs_of_a_batch_have_outcomes_of_their_own(app: App, h: Harness) -> None:
    @app.task(batch=10, attempts=1)
    def check(numbers: list[int]) -> list[Any]:
        return [n if n % 2 else ValueError(f"{n} is even") for n in numbers]

    await check.enqueue_many([check.job(1), check.job(2), check.job(3)])
    drained = await h.drain()

    assert [run.outcome for run in drained.runs] == ["completed", "failed", "completed"]
    assert isinstance(drained.failed[0].error, ValueError)
    await check.enqueue_many([check.job(1), check.job(2), check.job(3)])
    with pytest.raises(ValueError, match="2 is even"):
        await h.drain(raise_failures=True)
    assert len(h.runs) == 6


async def test_jobs_claimed_behind_one_that_raised_are_handed_back(app: App, h: Harness) -> None:
    @app.task(batch=10)
    async def batched(numbers: list[int]) -> None: ...

    @app.task(attempts=1)
    async def broken() -> None:
        raise ZeroDivisionError("by nothing")

    await broken.enqueue()
    await batched.enqueue(1)
    with pytest.raises(ZeroDivisionError):
        await h.drain(raise_failures=True)

    assert (await app.queue("default").counts()).waiting == 1
    assert [run.outcome for run in (await h.drain()).runs] == ["completed"]


async def test_a_batch_handler_of_a_queue_and_a_stubbed_batch_task(app: App, h: Harness) -> None:
    sizes: list[int] = []

    @h.worker.handler("raw", batch=4)
    async def handle(jobs: list[JobContext]) -> None:
        sizes.append(len(jobs))

    @app.task(batch=4)
    async def double(numbers: list[int]) -> list[int]:
        raise AssertionError("stubbed")

    await app.queue("raw").enqueue_many(range(6))
    stub = h.stub(double, does=lambda numbers: 2 * numbers)
    await double.enqueue_many([double.job(1), double.job(2)])
    drained = await h.drain()

    assert sizes == [4, 2]
    assert [run.result for run in drained.runs if run.task == "double"] == [2, 4]
    assert stub.calls == [{"numbers": 1}, {"numbers": 2}]


@pytest.mark.parametrize("mode", ["manual", "inline"])
async def test_hooks_around_enqueue_and_after_execution_take_part(app: App, mode: Any) -> None:
    @app.enqueue_middleware
    async def urgent(call: EnqueueCall, call_next: Any) -> Any:
        return await call_next(call.changed(priority=-7))

    @app.after_execution
    async def shout(execution: Execution) -> None:
        if execution.error is None:
            execution.result = f"{execution.result}!"

    @app.task(attempts=1)
    async def hello(name: str) -> str:
        if not name:
            raise ValueError("nobody")
        return f"hello {name}"

    async with harness(app, mode=mode) as h:
        assert await h.perform(hello, "ada") == "hello ada!"
        with pytest.raises(JobFailed, match="nobody"):
            await h.perform(hello, "")
        await h.assert_enqueued(hello, "ada", priority=-7, count=1)


async def test_dedup_windows_pass_on_the_manual_clock(app: App, h: Harness) -> None:
    @app.task
    async def reindex(city: str) -> None: ...

    hourly = reindex.options(dedup=Dedup.throttle("paris", "1h"))
    await hourly.enqueue("paris")
    await h.drain()
    await hourly.enqueue("paris")
    await h.assert_enqueued(reindex, count=1)
    h.clock.advance("1h")
    await hourly.enqueue("paris")
    await h.assert_enqueued(reindex, count=2)

    typing = reindex.options(dedup=Dedup.debounce("rome", "10m"))
    for letters in ("r", "ro", "rome"):
        await typing.enqueue(letters)
        assert not [run for run in (await h.drain()).runs if run.id in ("r", "ro")]
    await h.run_all()
    completed = [event.id async for event in app.queue("default").events(follow=False, types="completed")]
    ran = [job.arguments["city"] for job in await h.enqueued(reindex) if job.id in completed]
    assert ran == ["paris", "paris", "rome"]


async def test_a_budget_that_renews_lets_the_next_run_when_time_has_passed(app: App, h: Harness) -> None:
    @app.task(queue="llm")
    async def ask(context: JobContext) -> None:
        used = Report(context.id, context.token, usage={"tokens": 60_000_000})
        await (await app.connect()).report(context.queue, [used])

    await app.queue("llm").set_budget("tokens", 100, per="1d")
    for _ in range(4):
        await ask.enqueue()

    assert len(await h.drain()) == 2
    assert len(await h.drain(until="1d")) == 2
    assert await h.left() == {}

    await app.queue("llm").set_budget("tokens", 100)
    await ask.enqueue_many([ask.job(), ask.job(), ask.job(), ask.job()])
    stuck = await h.run_all()
    assert stuck.left["llm"].waiting > 0


async def test_a_suspended_job_waits_for_its_signal_and_time_brings_its_timeout(app: App, h: Harness) -> None:
    @app.task
    async def ask(context: JobContext, timeout: str | None) -> object:
        if context.stage == "":
            raise Suspend("answer", timeout=timeout, stage="asked")
        return context.signal.data if context.signal else "nobody answered"

    answered, unanswered = await ask.enqueue(None), await ask.enqueue("30d")
    await h.drain()
    assert await answered.signal("answer", 42) == "resumed"
    drained = await h.drain()

    assert [run.result for run in drained.runs] == [42]
    began = h.clock.now()
    await h.run_all()
    assert await unanswered.result(timeout="5s") == "nobody answered"
    assert timedelta(days=29) < h.clock.now() - began < timedelta(days=31)
