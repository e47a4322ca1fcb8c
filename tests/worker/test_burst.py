"""When a burst worker ends, and when it waits, with jobs left that it cannot run now."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from penstock import App, Flow, JobContext, RateLimited, State, Suspend, current_job
from tests.worker.conftest import until, working


async def burst(app: App, *queues: str) -> None:
    await asyncio.wait_for(app.worker(queues=queues or None, burst=True).run(), 20)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", logger="penstock.worker")
    return caplog


async def test_members_of_a_paused_group_are_left(app: App, said: pytest.LogCaptureFixture) -> None:
    @app.task
    async def note() -> None: ...

    queue = app.queue("default")
    await queue.pause(group="held")
    held = [await note.options(group="held").enqueue() for _ in range(3)]
    free = await note.options(group="free").enqueue()
    await burst(app)
    assert await free.refresh() is State.COMPLETED
    assert [await job.refresh() for job in held] == [State.BLOCKED] * 3
    assert "3 blocked jobs that need an action" in said.text


async def test_a_group_that_is_parked_is_waited_for(app: App) -> None:
    starts: list[float] = []

    @app.task
    async def ask() -> None:
        starts.append(time.monotonic())
        if len(starts) == 1:
            raise RateLimited("300ms")

    for _ in range(2):
        await ask.options(group="api").enqueue()
    await burst(app)
    assert await app.queue("default").open() == 0
    assert starts[-1] - starts[0] >= 0.28


async def test_a_queue_over_its_budget_is_left(app: App, said: pytest.LogCaptureFixture) -> None:
    @app.task
    async def spend() -> None:
        await current_job().use(usd=2)

    await app.queue("default").set_budget("usd", 1)
    await spend.enqueue_many([spend.job(), spend.job(), spend.job()])
    await asyncio.wait_for(app.worker(concurrency=1, burst=True).run(), 20)
    assert await app.queue("default").open() > 0
    assert "has spent its budget" in said.text


async def test_a_budget_with_a_period_is_waited_for(app: App) -> None:
    @app.task
    async def spend() -> None:
        await current_job().use(usd=2)

    await app.queue("default").set_budget("usd", 1, per="300ms")
    await spend.enqueue_many([spend.job(), spend.job()])
    await asyncio.wait_for(app.worker(concurrency=1, burst=True).run(), 20)
    assert await app.queue("default").open() == 0


async def test_a_suspension_without_a_timeout_is_left_and_one_with_it_is_waited_for(
    app: App, said: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def ask(context: JobContext, timeout: str | None) -> None:
        if context.run == 1:
            raise Suspend("answer", timeout=timeout)

    timed, endless = await ask.enqueue("300ms"), await ask.enqueue(None)
    await burst(app)
    assert await timed.refresh() is State.COMPLETED
    assert await endless.refresh() is State.BLOCKED
    assert "1 blocked jobs" in said.text


async def test_what_waits_for_a_suspended_job_is_left_with_it(
    app: App, said: pytest.LogCaptureFixture
) -> None:
    @app.task(queue="a")
    async def ask() -> None:
        raise Suspend("answer")

    @app.task(queue="a")
    async def here() -> None: ...

    @app.task(queue="b")
    async def elsewhere() -> None: ...

    child = ask.job()
    await app.enqueue_flow(Flow(elsewhere.job(), [Flow(here.job(), [child])]))
    await burst(app, "a", "b")
    assert await app.queue("a").open() == 2
    assert await app.queue("b").open() == 1
    assert "'a' has 2 blocked jobs" in said.text
    assert "'b' has 1 blocked jobs" in said.text


async def test_a_flow_over_queues_is_run_to_its_end(app: App) -> None:
    @app.task(queue="a")
    async def child() -> int:
        await asyncio.sleep(0.01)
        return 1

    @app.task(queue="b")
    async def collect() -> None: ...

    for _ in range(5):
        await app.enqueue_flow(Flow(collect.job(), [child.job(), child.job()]))
    await burst(app, "b", "a")
    assert await app.queue("a").open() == await app.queue("b").open() == 0


async def test_a_long_wait_for_a_delayed_job_is_logged_once(app: App, said: pytest.LogCaptureFixture) -> None:
    @app.task
    async def note() -> None: ...

    def about_waiting() -> list[str]:
        return [text for text in said.messages if "this burst worker waits" in text]

    await note.options(delay="1d").enqueue()
    async with working(app, burst=True):
        [line] = await until(about_waiting)
        assert line.startswith("queue 'default': nothing is due for 23h59m")
        assert line.endswith("this burst worker waits, because 1 job is open")
        now = await note.enqueue()
        await now.result(timeout="10s")
        await until(lambda: len(about_waiting()) == 2)


async def test_a_job_of_a_queue_that_others_serve_is_waited_for(app: App) -> None:
    @app.task(queue="theirs")
    async def child() -> None: ...

    @app.task(queue="ours")
    async def collect() -> None: ...

    await app.enqueue_flow(Flow(collect.job(), [child.job()]))
    waiting = asyncio.create_task(burst(app, "ours"))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    async with working(app, queues=["theirs"]):
        await waiting
    assert await app.queue("ours").open() == 0


@pytest.mark.parametrize("why", ["group", "budget", "suspended", "parked"])
async def test_while_nothing_can_run_the_store_is_asked_a_few_times_a_second(
    app: App, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    async def ask() -> None:
        context = current_job()
        match why:
            case "budget":
                await context.use(usd=2)
            case "suspended" if context.run == 1:
                raise Suspend("answer", timeout="500ms")
            case "parked" if context.run == 1:
                raise RateLimited("500ms")

    queue = app.queue("default")
    if why == "budget":
        await queue.set_budget("usd", 1, per="500ms")
    if why == "group":
        await queue.limit(group="g", rate="1/500ms")
    for _ in range(2):
        await ask.options(group="g").enqueue()
    asked: dict[str, int] = {}
    storage: Any = (await app.session()).storage
    for name in ("claim", "counts"):
        monkeypatch.setattr(storage, name, counted(getattr(storage, name), name, asked))
    began = time.monotonic()
    await asyncio.wait_for(app.worker(concurrency=1, burst=True).run(), 20)
    assert time.monotonic() - began >= 0.45
    assert await queue.open() == 0
    assert all(calls < 14 for calls in asked.values()), asked


def counted(call: Any, name: str, asked: dict[str, int]) -> Any:
    async def ask(*args: Any, **kwargs: Any) -> Any:
        asked[name] = asked.get(name, 0) + 1
        return await call(*args, **kwargs)

    return ask
