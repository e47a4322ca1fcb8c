"""What handlers say they used, and what a budget does to a worker."""

from __future__ import annotations

import pytest

from penstock import App, InvalidOption, JobContext, JobFailed, Snooze
from tests.worker import process_tasks
from tests.worker.conftest import until, working


async def test_what_handlers_use_is_summed(app: App) -> None:
    @app.task(queue="llm")
    async def ask(context: JobContext, n: int) -> None:
        context.use(tokens=n, usd=0.000_001)
        await context.use(tokens=1)

    @app.task(queue="llm")
    def ask_in_a_thread(context: JobContext) -> None:
        context.use(tokens=0.5)

    async with working(app):
        for job in (
            await ask.options(id="two").enqueue(2),
            await ask.enqueue(3),
            await ask_in_a_thread.enqueue(),
        ):
            await job.result(timeout="10s")
    usage = await app.queue("llm").usage()
    assert usage.total == {"tokens": 7.5, "usd": 0.000_002}
    assert usage.by_task == {"ask": {"tokens": 7, "usd": 0.000_002}, "ask_in_a_thread": {"tokens": 0.5}}
    two = await app.queue("llm").get("two")
    assert two.usage == {"tokens": 3, "usd": 0.000_001}


async def test_every_run_counts(memory_app: App) -> None:
    @memory_app.task
    async def again(context: JobContext) -> None:
        context.use(calls=1)
        if context.run == 1:
            raise Snooze(0)
        if context.run == 2:
            raise ValueError

    async with working(memory_app):
        await again.options(wait="10s").call()
    assert (await memory_app.queue("default").usage()).total == {"calls": 3}


async def test_a_handler_in_another_process_is_heard_too() -> None:
    async with working(process_tasks.app, queues=["usage"], child_processes=1):
        await process_tasks.use_tokens.options(wait="20s").call(5)
    assert (await process_tasks.app.queue("usage").usage()).total == {"tokens": 5}


@pytest.mark.parametrize("amount", [-1, float("nan"), float("inf"), 1e12, True, "1"])
async def test_an_invalid_amount_is_refused(memory_app: App, amount: float) -> None:
    @memory_app.task(attempts=1)
    async def use(context: JobContext) -> None:
        context.use(usd=amount)

    async with working(memory_app):
        with pytest.raises(JobFailed, match="usage usd="):
            await use.options(wait="10s").call()
    with pytest.raises(InvalidOption, match="usage usd="):
        await memory_app.queue("default").set_budget("usd", amount)


async def test_workers_stop_at_a_budget_and_go_on_when_it_is_raised(app: App) -> None:
    @app.task
    async def pay(context: JobContext) -> None:
        await context.use(usd=1)

    queue = app.queue("default")
    await queue.set_budget("usd", 3)
    await pay.enqueue_many([pay.job() for _ in range(10)])
    async with working(app, concurrency=1) as worker:
        await until(lambda: worker.stats.completed == 3)
        [budget] = await queue.budgets()
        assert (budget.amount, budget.spent, budget.is_spent) == (3, 3, True)
        assert (await queue.counts()).waiting == 7
        await queue.set_budget("usd", 6)
        await until(lambda: worker.stats.completed == 6)
        assert await queue.remove_budget("usd")
        await until(lambda: worker.stats.completed == 10)
