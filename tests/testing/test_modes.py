"""Inline and fake harnesses, stubs, and how a harness takes an app over and gives it back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock import App, InvalidOption, JobFailed, PenstockError, ResultTimeout, UnknownTask, chain
from penstock.testing import Harness, harness


@pytest.fixture
def app() -> App:
    return App("sqlite:////nowhere/at/all/penstock.db")


async def test_inline_runs_a_job_inside_its_enqueue(app: App) -> None:
    ran: list[str] = []

    @app.task(queue="mail")
    async def send(to: str) -> str:
        ran.append(to)
        return f"sent to {to}"

    async with harness(app, mode="inline") as h:
        job = await send.enqueue("ada")
        assert ran == ["ada"]
        assert await job.result(timeout="5s") == "sent to ada"
        assert await send.options(wait="5s").call("bob") == "sent to bob"
        await send.enqueue_many([send.job("cy"), send.job("dan")])
        assert ran == ["ada", "bob", "cy", "dan"]
        assert [run.outcome for run in h.runs] == ["completed"] * 4


async def test_inline_tasks_may_call_each_other(app: App) -> None:
    @app.task
    async def factorial(n: int) -> int:
        return n * await factorial.options(wait="5s").call(n - 1) if n else 1

    async with harness(app, mode="inline"):
        assert await factorial.options(wait="10s").call(5) == 120


def test_inline_works_from_synchronous_code_and_threads(app: App) -> None:
    @app.task
    def double(n: int) -> int:
        return 2 * n

    @app.task
    def quadruple(n: int) -> int:
        return 2 * double.sync.options(wait="5s").call(n)

    with harness(app, mode="inline") as h:
        job = quadruple.sync.enqueue(3)
        assert job.result(timeout="5s") == 12
        assert [(run.task, run.result) for run in h.runs] == [("double", 6), ("quadruple", 12)]


async def test_inline_runs_what_is_made_ready_by_other_verbs(app: App) -> None:
    @app.task(attempts=1)
    async def maybe() -> str:
        if broken:
            raise RuntimeError("not yet")
        return "done"

    broken = True
    async with harness(app, mode="inline") as h:
        later = await maybe.options(delay="1h").enqueue()
        assert h.runs == []
        await later.promote()
        assert [run.outcome for run in h.runs] == ["failed"]
        broken = False
        await later.retry()
        assert await later.result(timeout="5s") == "done"
        last = await maybe.options(delay="1h").enqueue()
        h.clock.advance("1h")
        await h.drain()
        assert await last.result(timeout="5s") == "done"


async def test_inline_failures_are_in_the_result_or_raised_immediately(app: App) -> None:
    @app.task(attempts=1)
    async def broken() -> None:
        raise ZeroDivisionError("by nothing")

    async with harness(app, mode="inline"):
        job = await broken.enqueue()
        with pytest.raises(JobFailed, match="by nothing"):
            await job.result(timeout="5s")
    async with harness(app, mode="inline", raise_failures=True):
        with pytest.raises(ZeroDivisionError, match="by nothing"):
            await broken.enqueue()


async def test_a_fake_runs_nothing_and_records_everything(app: App) -> None:
    @app.task
    async def send(to: str) -> None:
        raise AssertionError("nothing runs in a fake")

    async with harness(app, mode="fake") as h:
        job = await send.options(delay="1h").enqueue("ada")
        assert job.status == "queued"
        assert (await send.options(id=job.id).enqueue("ada")).status == "duplicate"
        await h.assert_enqueued(send, "ada", delay="1h", count=1)
        for impossible in (h.drain(), h.run_all(), job.result(), send.call("bob")):
            with pytest.raises(PenstockError, match="it runs no jobs"):
                await asyncio.wait_for(impossible, 10)
        assert [recorded.id for recorded in await h.enqueued(send)] == [job.id]


async def test_a_stub_stands_in_for_a_tasks_work(app: App) -> None:
    @app.task(attempts=2, backoff="1m")
    async def charge(amount: int, currency: str = "EUR") -> str:
        raise AssertionError("the real thing costs money")

    async with harness(app) as h:
        with h.stub(charge, returns="paid") as stub:
            assert await h.perform(charge, 5) == "paid"
        assert stub.calls == [{"amount": 5, "currency": "EUR"}]

        h.stub(charge, does=lambda amount, currency: f"{amount} {currency}")
        assert await h.perform(charge, 7, currency="SEK") == "7 SEK"

        failing = h.stub("charge", raises=ConnectionError("no line"))
        with pytest.raises(JobFailed, match="no line"):
            await h.perform(charge, 5)
        assert len(failing.calls) == 2
        stub.remove()
        assert len(failing.calls) == 2
        failing.remove()
        with pytest.raises(JobFailed, match="costs money"):
            await h.perform(charge, 5)
        with pytest.raises(UnknownTask, match="chrage"):
            h.stub("chrage")


async def test_performing_what_time_will_not_bring_is_an_error(app: App) -> None:
    @app.task
    async def noop() -> None: ...

    async with harness(app) as h:
        await app.queue("default").pause()
        with pytest.raises(PenstockError, match="waits for more than time"):
            await h.perform(noop)


async def test_the_apps_own_store_is_left_alone_and_comes_back(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    @app.task
    async def noop() -> None: ...

    await noop.options(id="real").enqueue()
    async with harness(app) as h:
        assert await app.queues() == []
        assert (await noop.options(id="real").enqueue()).status == "queued"
        await h.drain()
    assert (await noop.options(id="real").enqueue()).status == "duplicate"
    assert (await app.queue("default").counts()).waiting == 1
    await app.close()


async def test_every_harness_begins_with_an_empty_store_and_its_own_clock(app: App) -> None:
    @app.task
    async def noop() -> None: ...

    for _ in range(2):
        async with harness(app) as h:
            assert await app.queues() == []
            await noop.options(id="one", delay="1h").enqueue()
            assert not await h.drain()
            h.clock.advance("1h")
            await noop.options(queue="another", delay="1s").enqueue()
            drained = await h.drain()
            assert [run.id for run in drained.runs] == ["one"]
            assert "moved by 1:00:00" in repr(h.clock)


async def test_reset_forgets_jobs_and_keeps_the_time(app: App) -> None:
    @app.task
    async def noop() -> None: ...

    async with harness(app) as h:
        await h.perform(noop)
        await noop.options(delay="1h").enqueue()
        h.clock.advance("1d")
        await h.reset()

        assert (h.runs, await h.enqueued(), await h.left()) == ([], [], {})
        assert not await h.run_all()
        await noop.enqueue()
        assert len(await h.enqueued()) == 1


async def test_a_harness_may_stand_on_a_real_server(app: App, valkey_url: str) -> None:
    @app.task(attempts=2, backoff="1h")
    async def flaky() -> int:
        if h.runs == []:
            raise RuntimeError("once")
        return 1

    async with App(valkey_url) as server:
        before = await server.queues()
    for mode in ("manual", "inline"):
        async with harness(app, url=valkey_url, mode=mode) as h:
            job = await flaky.options(delay="1d").enqueue()
            assert [run.outcome for run in (await h.drain(until="24h30m")).runs] == ["retrying"]
            assert [run.outcome for run in (await h.run_all()).runs] == ["completed"]
            assert await job.result(timeout="5s") == 1
            await h.assert_enqueued(flaky, delay="1d", count=1)
    async with App(valkey_url) as server:
        assert await server.queues() == before


async def test_a_harness_that_is_not_active_raises(app: App) -> None:
    h = harness(app)
    with pytest.raises(PenstockError, match="harness is not active"):
        await h.drain()
    with pytest.raises(InvalidOption, match=r"mode must be .* got 'eager'"):
        harness(app, mode="eager")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="a harness does not take the worker option 'limit'"):
        harness(app, limit="10/s")
    with pytest.raises(InvalidOption, match="no option"):
        harness(app, colour="red")  # type: ignore[call-arg]


def test_the_harness_refuses_a_value_that_is_not_an_app() -> None:
    with pytest.raises(InvalidOption, match=r"harness needs the App .* got 'tasks'"):
        harness("tasks")  # type: ignore[arg-type]


async def test_an_app_is_in_one_harness_at_a_time(app: App) -> None:
    async with harness(app) as first:
        second = harness(app)
        with pytest.raises(InvalidOption, match="already in a harness"):
            second.begin()
        second.close()
        assert first.begin() is first
        await first.drain()
    async with second:
        await second.drain()


def test_the_sync_face_has_it_all(app: App) -> None:
    @app.task(attempts=2, backoff="1h")
    def flaky(n: int) -> int:
        from penstock import current_job

        if current_job().failures == 0:
            raise RuntimeError("once")
        return n

    with harness(app) as h:
        job = flaky.sync.enqueue(1)
        assert [run.outcome for run in h.sync.drain().runs] == ["retrying"]
        assert h.sync.left()["default"].scheduled == 1
        assert len(h.sync.drain(until="90m")) == 1
        assert job.result(timeout="5s") == 1
        assert h.sync.perform(flaky, 2) == 2
        assert len(h.sync.enqueued(flaky)) == 2
        assert h.sync.assert_enqueued(flaky, 1)[0].id == job.id
        h.sync.refute_enqueued(flaky, 3)
        h.sync.reset()
        assert h.sync.run_all().runs == []


def test_one_harness_serves_several_loops(app: App) -> None:
    @app.task
    async def double(n: int) -> int:
        return 2 * n

    with harness(app) as h:

        async def main(n: int) -> Any:
            return await h.perform(double, n)

        assert asyncio.run(main(1)) == 2
        assert h.sync.perform(double, 2) == 4
        assert asyncio.run(main(3)) == 6
        assert [run.result for run in h.runs] == [2, 4, 6]


async def test_with_and_async_with_are_both_fine_on_a_loop(app: App) -> None:
    @app.task
    async def noop() -> None: ...

    with harness(app) as h:
        await h.perform(noop)
        assert isinstance(h, Harness)
    async with harness(app) as again:
        assert await again.enqueued() == []


@pytest.mark.parametrize("way", ["result", "call", "flow"])
async def test_inline_a_wait_for_a_result_lets_the_backoff_pass(app: App, way: str) -> None:
    runs: list[int] = []

    @app.task(attempts=3, backoff="10m")
    async def flaky(n: int) -> int:
        runs.append(n)
        if len(runs) < 3:
            raise ConnectionError("not yet")
        return n

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    async with harness(app, mode="inline") as h, asyncio.timeout(20):
        match way:
            case "result":
                assert await (await flaky.enqueue(7)).result() == 7
            case "call":
                assert await flaky.options(wait=None).call(7) == 7
            case _:
                flow = await chain(flaky.job(7), double.partial()).enqueue()
                assert await flow.result() == 14
        assert h.clock.moved_ms > 19 * 60 * 1000  # a test takes its own milliseconds
        assert len(runs) == 3


async def test_inline_a_task_may_wait_for_another_that_is_retried(app: App) -> None:
    runs: list[str] = []

    @app.task(attempts=2, backoff="1h")
    async def flaky() -> str:
        runs.append("flaky")
        if runs.count("flaky") == 1:
            raise ConnectionError("not yet")
        return "fine"

    @app.task
    async def outer() -> str:
        runs.append("outer")
        return await flaky.options(wait=None).call()

    async with harness(app, mode="inline"), asyncio.timeout(20):
        assert await outer.call() == "fine"
    assert runs == ["outer", "flaky", "flaky"]


async def test_inline_a_wait_moves_the_clock_no_further_than_its_timeout(app: App) -> None:
    @app.task
    async def later() -> str:
        return "done"

    async with harness(app, mode="inline") as h:
        job = await later.options(delay="1h").enqueue()
        with pytest.raises(ResultTimeout, match="not due until"):
            await job.result(timeout="50ms")
        assert h.runs == []
        with pytest.raises(ResultTimeout, match=r"run jobs with h.drain\(\) or h.run_all\(\)"):
            await job.result(timeout="50ms")


async def test_manual_a_wait_that_is_over_says_how_jobs_are_run(app: App) -> None:
    @app.task
    async def send() -> None: ...

    async with harness(app):
        job = await send.enqueue()
        with pytest.raises(ResultTimeout, match=r"run jobs with h.drain\(\) or h.run_all\(\)") as raised:
            await job.result(timeout="50ms")
        assert "penstock worker" not in str(raised.value)
