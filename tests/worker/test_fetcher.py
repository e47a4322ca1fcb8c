"""How slots are filled: no hoarding, fair shares, few round trips, and quick awakenings."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from penstock import App
from penstock.storage.values import Take
from penstock.worker import fetcher, slots
from penstock.worker.slots import ServedQueue, apportion
from tests.worker.conftest import Clock, running, until, working


def test_slots_are_shared_by_weight() -> None:
    heavy, light = ServedQueue("heavy", 3), ServedQueue("light", 1)
    assert apportion(100, [heavy, light]) == {heavy: 75, light: 25}


def test_a_queue_alone_gets_everything() -> None:
    served = ServedQueue("only")
    assert apportion(7, [served]) == {served: 7}


def test_one_slot_at_a_time_is_shared_by_weight_and_starves_no_queue() -> None:
    heavy, light = ServedQueue("heavy", 3), ServedQueue("light", 1)
    turns: Counter[str] = Counter()
    for _ in range(400):
        (served,) = [queue for queue, count in apportion(1, [heavy, light]).items() if count]
        served.progress += 1 / served.weight
        turns[served.name] += 1
    assert turns == {"heavy": 300, "light": 100}


def test_a_queue_that_was_away_does_not_claim_the_time_it_missed() -> None:
    busy, returning = ServedQueue("busy", 1), ServedQueue("returning", 1)
    busy.progress = 1_000_000
    assert apportion(10, [busy, returning]) == {busy: 0, returning: 10}
    returning.progress += 11
    assert apportion(10, [busy, returning]) == {busy: 5, returning: 5}


async def test_no_more_jobs_are_claimed_than_there_are_slots(app: App) -> None:
    finish = asyncio.Event()

    @app.task
    async def wait() -> None:
        await finish.wait()

    await wait.enqueue_many([wait.job() for _ in range(20)])
    storage = await app.connect()
    async with working(app, concurrency=5) as worker:
        await until(lambda: len(worker.health().active) == 5)
        counts = await storage.counts("default")
        assert (counts.active, counts.waiting) == (5, 15)
        finish.set()
        await until(lambda: worker.stats.completed == 20)


async def test_an_outcome_and_the_next_claim_travel_together(
    memory_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    @memory_app.task
    async def echo(n: int) -> int:
        return n

    storage = await memory_app.connect()
    calls: Counter[str] = Counter()
    for name in ("claim", "settle"):
        monkeypatch.setattr(storage, name, _counted(name, getattr(storage, name), calls))
    await echo.enqueue_many([echo.job(n=n) for n in range(1000)])
    async with working(memory_app, concurrency=100) as worker:
        await until(lambda: worker.stats.completed == 1000)
    assert calls["settle"] <= 40
    assert calls["claim"] <= 5


async def test_two_queues_share_the_slots_by_weight(memory_app: App) -> None:
    order: list[str] = []

    @memory_app.task
    async def note(queue: str) -> None:
        order.append(queue)

    for queue in ("heavy", "light"):
        await note.options(queue=queue).enqueue_many([note.job(queue) for _ in range(400)])
    async with working(memory_app, queues={"heavy": 3, "light": 1}, concurrency=4) as worker:
        await until(lambda: worker.stats.completed == 800)
    heavy = Counter(order[:400])["heavy"]
    assert 240 <= heavy <= 360, heavy


async def test_a_quiet_queue_beside_a_busy_one_is_served(memory_app: App) -> None:
    stop = asyncio.Event()

    @memory_app.task(queue="busy")
    async def again(n: int) -> None:
        await asyncio.sleep(0.002)
        if not stop.is_set():
            await memory_app.tasks["again"].enqueue(n + 1)

    @memory_app.task(queue="quiet")
    async def echo(n: int) -> int:
        return n

    for n in range(20):
        await again.enqueue(n)
    async with working(memory_app, concurrency=1):
        for n in range(3):
            assert await echo.options(wait="5s").call(n) == n
        stop.set()


async def test_an_idle_worker_is_woken_by_a_job(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "LONGEST_WAIT_MS", 60_000)

    @app.task
    async def echo(n: int) -> int:
        return n

    async with working(app, lease="3m") as worker:
        for n in range(10):
            await until(lambda: worker._session.fetcher.served_queues[0].waiter is not None)  # type: ignore[union-attr]
            job = await echo.enqueue(n)
            assert await job.result(timeout="20s") == n


async def test_a_delayed_job_runs_when_it_falls_due(app: App) -> None:
    @app.task
    async def when() -> float:
        return time.time()

    async with working(app, sweep=False):
        began = time.time()
        job = await when.options(delay="200ms").enqueue()
        ran = await job.result(timeout="10s")
    assert 0.19 <= ran - began < 4


async def test_a_full_worker_does_not_wait_for_jobs_another_could_take(memory_app: App) -> None:
    finish = asyncio.Event()

    @memory_app.task
    async def wait() -> None:
        await finish.wait()

    async with working(memory_app, concurrency=1) as full:
        await wait.enqueue()
        await until(lambda: len(full.health().active) == 1)
        assert full._session is not None
        await until(lambda: full._session.fetcher.served_queues[0].waiter is None)  # type: ignore[union-attr]
        finish.set()
        await until(lambda: full.stats.completed == 1)


@pytest.mark.parametrize("while_it_waits", [False, True])
async def test_an_answer_that_comes_after_the_lease_is_not_run(
    memory_app: App, monkeypatch: pytest.MonkeyPatch, while_it_waits: bool
) -> None:
    """The loop, or the machine, stood still between claim and answer; the jobs may be somebody else's by now."""
    ran: list[int] = []
    clock = Clock()
    monkeypatch.setattr(fetcher, "time", clock)
    monkeypatch.setattr(slots, "time", clock)

    @memory_app.task
    async def note(context_run: int) -> None:
        ran.append(context_run)

    storage = await memory_app.connect()
    claim = storage.claim
    late = True

    async def slow(queue: str, take: Take, **kwargs: Any) -> Any:
        nonlocal late
        claimed = await claim(queue, take, **kwargs)
        if claimed.leases and late:
            late = False
            clock.ahead_s += 60
        return claimed

    monkeypatch.setattr(storage, "claim", slow)
    if not while_it_waits:
        job = await note.enqueue(1)
    async with working(memory_app, lease="60s") as worker:
        if while_it_waits:
            await until(lambda: worker.health().consuming)
            job = await note.enqueue(1)
        await job.result(timeout="10s")
        info = await job.get()
    assert info.runs == 2
    assert ran == [1]


def _counted(name: str, call: Any, calls: Counter[str]) -> Any:
    async def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return await call(*args, **kwargs)

    return counted


async def test_a_delayed_job_starts_when_it_is_due_though_the_worker_sleeps(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "LONGEST_WAIT_MS", 60_000)
    dry = asyncio.Event()

    @app.task(queue="later")
    async def work() -> str:
        return "done"

    worker = app.worker(queues=["later"], grace=0)
    worker.on("drained", lambda _: dry.set())
    async with running(worker):
        await asyncio.wait_for(dry.wait(), 10)
        job = await work.options(delay="50ms").enqueue()

        assert await job.result(timeout="10s") == "done"
