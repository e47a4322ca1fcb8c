"""Draining: what runs, in which order, with which outcome, and what is left."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from penstock import (
    App,
    InvalidName,
    JobCancelled,
    JobContext,
    JobExpired,
    JobFailed,
    PenstockError,
    Retry,
    Snooze,
    State,
    Unrecoverable,
    current_job,
)
from penstock.testing import Harness, harness


async def test_nothing_runs_until_the_test_says_so(app: App, h: Harness) -> None:
    ran: list[str] = []

    @app.task(queue="mail")
    async def send(to: str) -> str:
        ran.append(to)
        return f"sent to {to}"

    job = await send.enqueue("ada")
    assert (ran, job.status) == ([], "queued")

    drained = await h.drain()

    assert ran == ["ada"]
    assert await job.result(timeout="5s") == "sent to ada"
    [run] = drained.runs
    assert (run.queue, run.id, run.task, run.run) == ("mail", job.id, "send", 1)
    assert (run.outcome, run.state, run.result, run.error) == (
        "completed",
        State.COMPLETED,
        "sent to ada",
        None,
    )
    assert (drained.left, drained.advanced, len(drained)) == ({}, timedelta(), 1)
    assert h.runs == drained.runs
    assert not await h.drain()


async def test_the_order_is_always_the_same(app: App, h: Harness) -> None:
    ran: list[str] = []

    @app.task
    def note(name: str) -> None:
        ran.append(name)

    for name in ("b1", "b2"):
        await note.options(queue="b").enqueue(name)
    for name, priority in (("a1", 0), ("a2", 0), ("a0", -1)):
        await note.options(queue="a", priority=priority).enqueue(name)

    await h.drain()

    assert ran == ["a0", "a1", "a2", "b1", "b2"]


async def test_what_a_task_enqueues_runs_in_the_same_drain(app: App, h: Harness) -> None:
    ran: list[int] = []

    @app.task(queue="b")
    async def countdown(n: int) -> None:
        ran.append(n)
        if n:
            await countdown.options(queue="a" if n % 2 else "b").enqueue(n - 1)

    await countdown.enqueue(4)
    await h.drain()

    assert ran == [4, 3, 2, 1, 0]


async def test_only_the_queues_that_are_named_are_drained(app: App, h: Harness) -> None:
    @app.task
    async def noop() -> None: ...

    await noop.options(queue="a").enqueue()
    await noop.options(queue="b").enqueue()

    drained = await h.drain("a")

    assert [run.queue for run in drained.runs] == ["a"]
    assert {queue: counts.waiting for queue, counts in drained.left.items()} == {"b": 1}
    with pytest.raises(InvalidName):
        await h.drain("a/b")


async def test_failures_are_retried_when_their_time_comes(app: App, h: Harness) -> None:
    @app.task(attempts=3, backoff="10m")
    async def flaky() -> str:
        if current_job().failures < 2:
            raise ConnectionError("no line")
        return "at last"

    job = await flaky.enqueue()
    first = await h.drain()
    assert [run.outcome for run in first.runs] == ["retrying"]
    assert isinstance(first.runs[0].error, ConnectionError)
    assert first.runs[0].failure is not None
    assert first.runs[0].failure.message == "no line"
    assert first.left["default"].scheduled == 1
    assert not await h.drain()

    h.clock.advance("9m")
    assert not await h.drain()
    h.clock.advance("1m")
    assert [run.outcome for run in (await h.drain()).runs] == ["retrying"]

    rest = await h.run_all()
    assert [run.outcome for run in rest.runs] == ["completed"]
    assert timedelta(minutes=9, seconds=50) < rest.advanced <= timedelta(minutes=10)
    assert await job.result(timeout="5s") == "at last"


async def test_until_lets_time_pass_from_one_due_time_to_the_next(app: App, h: Harness) -> None:
    at: list[tuple[str, timedelta]] = []
    began = h.clock.now()

    @app.task
    async def note(name: str) -> None:
        at.append((name, h.clock.now() - began))
        if name == "first":
            await note.options(delay="10m").enqueue("child")

    await note.options(delay="2h").enqueue("last")
    await note.options(delay="30m").enqueue("second")
    await note.options(delay="5m").enqueue("first")

    drained = await h.drain(until="1h")

    assert [name for name, _ in at] == ["first", "child", "second"]
    assert [round(passed / timedelta(minutes=1)) for _, passed in at] == [5, 15, 30]
    assert drained.advanced == timedelta(hours=1)
    assert drained.left["default"].scheduled == 1
    assert [name for name, _ in at] == ["first", "child", "second"]
    assert [run.task for run in (await h.run_all()).runs] == ["note"]


async def test_run_all_keeps_results(app: App, h: Harness) -> None:
    @app.task(result_ttl="1m")
    async def quick() -> int:
        return 1

    first = await quick.enqueue()
    await quick.options(delay="30s").enqueue()
    drained = await h.run_all()

    assert len(drained.completed) == 2
    assert await first.result(timeout="5s") == 1


async def test_what_time_alone_will_not_bring_is_left(app: App, h: Harness) -> None:
    @app.task
    async def noop() -> None: ...

    await noop.enqueue()
    await app.queue("default").pause()

    drained = await asyncio.wait_for(h.run_all(), 30)

    assert (drained.runs, drained.left["default"].waiting) == ([], 1)


async def test_a_ttl_runs_out_on_the_manual_clock(app: App, h: Harness) -> None:
    @app.task
    async def noop() -> None: ...

    job = await noop.options(ttl="1h").enqueue()
    await app.queue("default").pause()
    await h.run_all()

    with pytest.raises(JobExpired):
        await job.result(timeout="5s")


async def test_a_lease_that_was_left_lying_is_rescued(app: App, h: Harness) -> None:
    job = await app.queue("raw").enqueue("x")
    claimed = await app.queue("raw").claim_one(lease="30s", wait="1s")
    assert claimed is not None

    @h.worker.handler("raw")
    async def handle(context: JobContext) -> str:
        return context.payload.decode()

    drained = await h.run_all()

    assert [(run.outcome, run.run) for run in drained.runs] == [("completed", 2)]
    assert await job.result(timeout="5s") == '"x"'
    assert not await claimed.complete()


async def test_verdicts_of_handlers_count(app: App, h: Harness) -> None:
    @app.task(attempts=2)
    async def judge(what: str) -> str:
        job = current_job()
        match what, job.run:
            case "snooze", 1:
                raise Snooze("1h")
            case "retry", 1:
                raise Retry(at=h.clock.now() + timedelta(hours=2))
            case "hopeless", _:
                raise Unrecoverable("never")
            case _:
                return what

    await judge.enqueue_many([judge.job("snooze"), judge.job("retry"), judge.job("hopeless")])
    h.clock.advance("1d")
    drained = await h.drain()
    assert [run.outcome for run in drained.runs] == ["snoozed", "retrying", "failed"]

    rest = await h.run_all()
    assert [(run.result, run.outcome) for run in rest.runs] == [
        ("snooze", "completed"),
        ("retry", "completed"),
    ]
    # Retry(at=...) is an instant of the manual clock.
    assert timedelta(hours=1, minutes=59) < rest.advanced <= timedelta(hours=2)


async def test_failures_can_be_raised(app: App, h: Harness) -> None:
    @app.task(attempts=2, backoff="1m")
    async def broken(verdict: bool = False) -> None:
        raise Retry("later", delay="1m") if verdict else ZeroDivisionError("by nothing")

    job = await broken.enqueue()
    with pytest.raises(ZeroDivisionError, match="by nothing") as raised:
        await h.drain(raise_failures=True)
    assert raised.value.__notes__ == [f"in run 1 of job {job.id!r} of queue 'default'"]
    assert [run.outcome for run in h.runs] == ["retrying"]

    await broken.enqueue(verdict=True)
    drained = await h.drain(raise_failures=True)
    assert [run.outcome for run in drained.runs] == ["retrying"]


async def test_a_task_that_enqueues_itself_for_ever_is_reported(app: App, h: Harness) -> None:
    @app.task
    async def again() -> None:
        await again.enqueue()

    await again.enqueue()
    with pytest.raises(PenstockError, match="stopped after 20 runs: does 'again'"):
        await h.drain(max_runs=20)


async def test_jitter_is_the_same_every_time(app: App) -> None:
    @app.task(attempts=5, backoff="exponential")
    async def broken() -> None:
        raise RuntimeError("again")

    async def rests(seed: int) -> list[int]:
        async with harness(app, seed=seed) as h:
            await broken.options(id="one").enqueue()
            rests = []
            for _ in range(4):
                await h.drain()
                job = await app.queue("default").get("one")
                retried = [e async for e in app.queue("default").events(follow=False, types="retrying")]
                rests.append(job.raw.run_at_ms - retried[-1].at_ms)
                h.clock.advance("1h")
            return rests

    first = await rests(1)
    assert first == await rests(1)
    assert first != await rests(2)
    assert first != [1000, 2000, 4000, 8000]


async def test_timeouts_cancels_and_contexts_are_a_workers(app: App, h: Harness) -> None:
    @app.task(timeout="30ms", attempts=1)
    async def slow() -> None:
        await asyncio.sleep(30)

    @app.task
    async def cancelled(context: JobContext) -> None:
        context.progress({"done": 1})
        context.log("about to be cancelled")
        await app.job(context.ref).cancel()
        await asyncio.sleep(30)

    late, asked = await slow.enqueue(), await cancelled.enqueue()
    drained = await h.drain()

    assert [run.outcome for run in drained.runs] == ["failed", "cancelled"]
    with pytest.raises(JobFailed, match="Timeout"):
        await late.result(timeout="5s")
    with pytest.raises(JobCancelled):
        await asked.result(timeout="5s")
    info = await asked.get()
    assert info.progress == {"done": 1}
    assert await asked.logs() == ["about to be cancelled"]


async def test_a_job_whose_worker_is_lost_is_reported_as_stalled(app: App, h: Harness) -> None:
    @app.task
    async def lost(context: JobContext) -> None:
        await app.queue(context.queue).obliterate(force=True)
        await asyncio.sleep(30)

    await lost.enqueue()
    drained = await h.drain()

    assert [run.outcome for run in drained.runs] == ["stalled"]
    assert h.worker.stats.stalled == 1


async def test_a_rerun_of_an_active_job_runs_after_it(app: App, h: Harness) -> None:
    ran: list[str] = []

    @app.task
    async def sync_up(what: str) -> None:
        ran.append(what)
        if what == "first":
            answer = await sync_up.options(id="one", on_conflict="redispatch").enqueue("second")
            assert answer.status == "rerun"

    await sync_up.options(id="one").enqueue("first")
    await h.drain()

    assert ran == ["first", "second"]


async def test_middleware_hooks_and_listeners_take_part(app: App) -> None:
    told: list[str] = []

    @app.on_start
    async def start() -> None:
        told.append("start")

    @app.on_stop
    def stop() -> None:
        told.append("stop")

    @app.middleware
    async def shout(context: JobContext, call_next: Any) -> Any:
        told.append(f"around {context.task}")
        return str(await call_next()).upper()

    @app.task
    async def hello() -> str:
        return "hello"

    async with harness(app) as h:
        h.worker.on("completed", lambda event: told.append(f"{event.type} {event.task}"))
        assert await h.perform(hello) == "HELLO"
        await h.perform(hello)
    async with harness(app, hooks=False) as h:
        await h.perform(hello)

    assert told == [
        *("start", "around hello", "completed hello", "around hello", "completed hello", "stop"),
        "around hello",
    ]


async def test_sync_handlers_may_use_the_sync_face(app: App, h: Harness) -> None:
    @app.task
    def parent() -> str:
        return child.sync.enqueue("x").status or ""

    @app.task
    def child(name: str) -> str:
        return name

    assert await h.perform(parent) == "queued"
    assert [(run.task, run.result) for run in h.runs] == [("parent", "queued"), ("child", "x")]


async def test_an_unknown_task_fails_as_it_does_in_a_worker(app: App, h: Harness) -> None:
    await app.queue("default").enqueue({}, task="elsewhere", attempts=1)
    drained = await h.drain()

    [run] = drained.failed
    assert run.failure is not None
    assert run.failure.type == "UnknownTask"
    await app.queue("default").enqueue({}, task="elsewhere", attempts=1)
    with pytest.raises(PenstockError, match="UnknownTask"):
        await h.drain(raise_failures=True)
