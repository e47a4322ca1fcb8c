"""Jobs that go on later: steps, suspensions and signals, as handlers and callers see them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from penstock import App, InvalidName, JobContext, JobFailed, Snooze, State, Suspend
from tests.worker.conftest import recorded, until, working


async def test_a_snoozed_job_goes_on_at_its_stage(app: App) -> None:
    seen: list[str] = []

    @app.task(attempts=1)
    async def walk(context: JobContext) -> int:
        seen.append(context.stage)
        match context.stage:
            case "":
                raise Snooze("1ms", stage="second")
            case "second":
                raise Snooze("1ms", stage="third")
            case _:
                return context.run

    async with working(app):
        assert await walk.options(wait="10s").call() == 3
    assert seen == ["", "second", "third"]


async def test_a_suspended_job_holds_no_slot_and_goes_on_with_the_signal(app: App) -> None:
    @app.task(attempts=1)
    async def ship(context: JobContext) -> object:
        if context.stage == "":
            raise Suspend("approved", timeout="1d", stage="ship")
        assert context.signal
        return [context.stage, context.signal.name, context.signal.data, context.timed_out]

    async with working(app, concurrency=1) as worker:
        events = recorded(worker, "suspended")
        job = await ship.enqueue()
        await until(lambda: events)
        info = await job.get()
        assert (info.state, info.blocked_by, info.awaits, info.stage) == (
            State.BLOCKED,
            "signal",
            "approved",
            "ship",
        )
        assert info.awaits_until
        assert info.awaits_until - datetime.now(UTC) > timedelta(hours=23)
        assert await job.signal("approved", {"by": "ada"}) == "resumed"
        assert await job.result(timeout="10s") == ["ship", "approved", {"by": "ada"}, False]
        assert await job.signal("approved") == "ended"


async def test_a_signal_sent_before_the_job_asks_is_there_when_it_does(app: App) -> None:
    @app.task
    async def ship(context: JobContext) -> object:
        if context.signal is None:
            raise Suspend("approved")
        return context.signal.data

    job = await ship.enqueue()
    assert await app.queue(job.queue).signal(job.id, "approved", "early") == "kept"
    async with working(app):
        assert await job.result(timeout="10s") == "early"


async def test_a_timeout_brings_the_job_back_without_a_signal(app: App) -> None:
    @app.task
    async def ship(context: JobContext) -> object:
        if not context.timed_out:
            raise Suspend("approved", timeout="20ms")
        return [context.signal, context.timed_out]

    async with working(app):
        assert await ship.options(wait="20s").call() == [None, True]


async def test_a_thread_may_suspend_its_job_too(app: App) -> None:
    @app.task
    def ship(context: JobContext) -> object:
        if context.signal is None:
            raise Suspend("approved")
        return context.signal.data

    async with working(app):
        job = await ship.enqueue()
        await job.signal("approved", [1, 2])
        assert await job.result(timeout="10s") == [1, 2]


async def test_a_signal_s_name_that_cannot_be_is_the_handler_s_failure(memory_app: App) -> None:
    @memory_app.task(attempts=1)
    async def ship() -> None:
        raise Suspend("no spaces, please")

    async with working(memory_app):
        with pytest.raises(JobFailed, match="signal name") as caught:
            await ship.options(wait="10s").call()
    assert caught.value.error_type == "InvalidName"


async def test_names_are_checked_at_the_door(memory_app: App) -> None:
    job = await memory_app.queue("mail").enqueue({})
    with pytest.raises(InvalidName, match="signal name"):
        await job.signal("not this")
    claimed = await memory_app.queue("mail").claim_one()
    assert claimed
    with pytest.raises(InvalidName, match="stage"):
        await claimed.snooze("1s", stage="\n")


async def test_a_custom_worker_loop_suspends_and_resumes_jobs(app: App) -> None:
    queue = app.queue("orders")
    handle = await queue.enqueue({"id": 7})
    async with queue.claim() as job:
        raise Suspend("paid", stage="ship")
    claimed = await queue.claim_one(wait="0s")
    assert claimed is None
    await handle.signal("paid", 100)

    claimed = await queue.claim_one()
    assert claimed
    assert claimed.signal
    assert (claimed.stage, claimed.signal.data) == ("ship", 100)
    assert await claimed.suspend("delivered", timeout="1h", stage="close")
    info = await queue.get(job.id)
    assert (info.awaits, info.stage) == ("delivered", "close")


def test_synchronous_code_signals_and_suspends() -> None:
    app = App("memory://")
    with app.sync:
        queue = app.sync.queue("orders")
        handle = queue.enqueue({})
        claimed = queue.claim_one()
        assert claimed
        assert claimed.suspend("paid", stage="ship")
        assert queue.signal(handle.id, "other") == "kept"
        assert handle.signal("paid", 5) == "resumed"
        claimed = queue.claim_one()
        assert claimed
        assert claimed.signal
        assert (claimed.stage, claimed.signal.data, claimed.timed_out) == ("ship", 5, False)
        claimed.complete()
