"""Workers fire schedulers: on time, once, and whatever a single one of them is like."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest

from penstock import App, EnqueueCall, JobContext, current_job
from penstock.client.firing import fire_due, sweep
from penstock.core.job import Extras
from penstock.core.schedule import Every, Schedule, ScheduleSpec, pack_spec
from penstock.errors import StorageFull
from penstock.storage.values import Fired, NewScheduler, Swept
from penstock.worker.sweeper import Sweeper
from tests.worker.conftest import until, working


async def test_a_handler_knows_the_slot_it_runs_for(app: App) -> None:
    slots: list[datetime | None] = []

    @app.task
    async def tick(context: JobContext) -> None:
        assert context.id.startswith("ticker:")
        assert current_job().scheduler == "ticker"
        slots.append(context.scheduled_for)

    await app.schedule("ticker", tick.job(), every="200ms", limit=3, missed="catch_up")
    async with working(app):
        await until(lambda: len(slots) == 3)
    assert all(slot is not None and slot <= datetime.now(UTC) for slot in slots)
    times = sorted(slot.timestamp() for slot in slots if slot)
    assert [later - earlier for earlier, later in pairwise(times)] == pytest.approx([0.2, 0.2])


async def test_two_workers_fire_a_slot_once(app: App) -> None:
    @app.task
    async def tick() -> None: ...

    await app.schedule("ticker", tick.job(), every="100ms", limit=10, missed="catch_up")
    async with working(app), working(app):
        await until(lambda: _completed(app, 10))
    [info] = await app.schedulers()
    assert (info.fired, info.ended) == (10, True)


async def test_a_job_comes_again_after_its_end_even_if_it_fails(app: App) -> None:
    runs: list[str] = []

    @app.task(attempts=1)
    async def poll() -> None:
        runs.append(current_job().id)
        raise RuntimeError("every time")

    await app.schedule("poll", poll.job(), after_completion=0)
    async with working(app):
        await until(lambda: len(runs) >= 3)
    assert len(set(runs)) == len(runs)


async def test_a_sweeper_fires_for_queues_that_have_no_jobs_yet(app: App) -> None:
    await app.queue("quiet").schedule("ticker", "payload", every="1h")
    storage = await app.connect()
    await storage.shift_clock("quiet", 3_600_000)
    swept = await Sweeper(storage).run_once()
    assert (await storage.counts("quiet")).waiting == 1
    wait_ms = swept["quiet"].slot_wait_ms
    assert wait_ms is not None
    assert 0 < wait_ms <= 3_600_000


async def test_a_loop_of_ones_own_fires_what_is_due(app: App) -> None:
    queue = app.queue("quiet")
    await queue.schedule("ticker", "payload", every="1h")
    await (await app.connect()).shift_clock("quiet", 3_600_000)
    job = await queue.claim_one(wait="10s")
    assert job is not None
    assert job.payload == "payload"


async def test_a_slots_job_goes_through_the_enqueue_middleware_of_the_app_that_fires_it(app: App) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    @app.enqueue_middleware
    async def marked(call: EnqueueCall, call_next: Any) -> Any:
        loops.append(asyncio.get_running_loop())
        answers = await call_next(call.changed(priority=-7, extras=Extras(headers={"by": "us"})))
        assert [answer.status for answer in answers] == ["queued"]
        return answers

    @app.task
    async def tick() -> None: ...

    await app.schedule("ticker", tick.job(), every="1h")
    storage = await app.connect()
    await storage.shift_clock("default", 3_600_000)
    async with working(app):
        await until(lambda: _completed(app, 1))
    assert loops == [asyncio.get_running_loop()]
    info = await app.queue("default").scheduler("ticker")
    assert info is not None
    [job] = await storage.get("default", [info.last_job or ""])
    assert job is not None
    assert (job.priority, job.extras and job.extras.headers) == (-7, {"by": "us"})
    assert job.extras is not None
    assert job.extras.scheduler == "ticker"


async def test_a_loop_of_ones_own_fires_through_the_middleware_too(app: App) -> None:
    @app.enqueue_middleware
    async def marked(call: EnqueueCall, call_next: Any) -> Any:
        return await call_next(call.changed(payload=b'"changed"'))

    queue = app.queue("quiet")
    await queue.schedule("ticker", "payload", every="1h")
    await (await app.connect()).shift_clock("quiet", 3_600_000)
    job = await queue.claim_one(wait="10s")
    assert job is not None
    assert job.payload == "changed"


async def test_a_layer_that_raises_leaves_the_slot_due_and_other_slots_alone(
    memory_app: App, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = True

    @memory_app.enqueue_middleware
    async def refuse(call: EnqueueCall, call_next: Any) -> Any:
        if refusing and call.jobs[0].payload == b'"bad"':
            raise ValueError("not now")
        return await call_next(call)

    storage, queue = await memory_app.connect(), memory_app.queue("q")
    await queue.schedule("a", "bad", every="1h")
    await queue.schedule("b", "good", every="1h")
    await storage.shift_clock("q", 3_600_000)
    await sweep(storage, "q", enqueue_chain=memory_app.enqueue_chain)
    assert await queue.waiting() == 1
    assert "delays scheduler 'a'" in caplog.text
    refusing = False
    await sweep(storage, "q", enqueue_chain=memory_app.enqueue_chain)
    assert await queue.waiting() == 2


async def test_a_slot_that_somebody_else_fired_is_a_duplicate_to_the_middleware(memory_app: App) -> None:
    seen: list[str] = []

    @memory_app.enqueue_middleware
    async def note(call: EnqueueCall, call_next: Any) -> Any:
        answers = await call_next(call)
        seen.extend(answer.status for answer in answers)
        return answers

    storage = await memory_app.connect()
    await memory_app.queue("q").schedule("a", "payload", every="1h")
    await storage.shift_clock("q", 3_600_000)
    [due] = (await storage.sweep("q")).due
    for _ in range(2):
        await fire_due(storage, "q", due, memory_app.enqueue_chain)
    assert seen == ["queued", "duplicate"]
    assert await memory_app.queue("q").waiting() == 1


async def test_a_scheduler_that_cannot_be_read_does_not_keep_others_from_their_slots(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    storage = await app.connect()
    await app.queue("q").schedule("good", "payload", every="1h")
    await storage.put_scheduler("q", NewScheduler("bad", b"of a newer version", 1))
    await storage.shift_clock("q", 3_600_000)
    with caplog.at_level(logging.WARNING):
        await sweep(storage, "q")
    assert (await storage.counts("q")).waiting == 1
    assert "scheduler 'bad' cannot be read" in caplog.text


async def test_a_full_store_makes_a_slot_late_and_no_more(
    memory_app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = await memory_app.connect()
    await memory_app.queue("q").schedule("ticker", "payload", every="1h")
    await storage.shift_clock("q", 3_600_000)
    fire = storage.fire

    async def full(*args: Any, **kwargs: Any) -> Fired:
        raise StorageFull("no room")

    monkeypatch.setattr(storage, "fire", full)
    with caplog.at_level(logging.WARNING):
        await sweep(storage, "q")
    assert "will be late" in caplog.text
    monkeypatch.setattr(storage, "fire", fire)
    await sweep(storage, "q")
    assert (await storage.counts("q")).waiting == 1


async def test_missed_slots_are_made_up_for_a_bounded_number_at_a_time(app: App) -> None:
    storage = await app.connect()
    now_ms = (await storage.schedulers("q")).now_ms
    spec = ScheduleSpec(Schedule(Every(1000), missed="catch_up"), (await _template(app)))
    await storage.put_scheduler("q", NewScheduler("ticker", pack_spec(spec), now_ms // 1000 * 1000 - 249_000))
    swept = [await sweep(storage, "q") for _ in range(3)]
    assert [one.more for one in swept] == [True, True, False]
    assert 250 <= (await storage.counts("q")).waiting < 300


def test_the_sweeper_wakes_for_a_slot_and_looks_often_for_the_end_of_a_job() -> None:
    sweeper = Sweeper(None, [], interval="5s")  # type: ignore[arg-type]
    assert 4 <= sweeper._sleep_s({"a": Swept()}) <= 6
    assert 0.3 <= sweeper._sleep_s({"a": Swept(slot_wait_ms=300), "b": Swept()}) <= 0.33
    assert 0.05 <= sweeper._sleep_s({"a": Swept(slot_wait_ms=1)}) <= 0.08
    assert sweeper._sleep_s({"a": Swept(slot_wait_ms=60_000)}) <= 6
    assert sweeper._sleep_s({"a": Swept(awaiting=True)}) <= 1.03


async def _completed(app: App, count: int) -> bool:
    return (await app.queue("default").counts()).completed == count


async def _template(app: App) -> Any:
    queue = app.queue("q")
    info = await queue.schedule("template", "payload", every="1h")
    await queue.remove_scheduler("template")
    await asyncio.sleep(0)
    return info.spec.job


async def test_a_slot_that_the_store_refuses_holds_up_no_other(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def tick(n: int) -> None: ...

    queue = app.queue("default")
    await app.schedule("a-costly", tick.options(group="g", cost=500).job(1), every="100ms")
    await app.schedule("b-good", tick.job(2), every="100ms")
    await queue.limit(group="g", bucket=(100, "10/s"))
    with caplog.at_level(logging.WARNING):
        async with working(app):
            await until(lambda: _fired(app, "b-good", 5))


async def _fired(app: App, name: str, count: int) -> bool:
    info = await app.queue("default").scheduler(name)
    return info is not None and info.fired >= count


async def test_a_sweeper_goes_on_whatever_a_sweep_raises(
    memory_app: App, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await memory_app.queue("mail").enqueue("later", delay="1ms")
    storage, calls = await memory_app.connect(), list[str]()
    real = storage.sweep

    async def broken_at_first(queue: str, **options: Any) -> Swept:
        calls.append(queue)
        if len(calls) == 1:
            raise LookupError("unheard of")
        return await real(queue, **options)

    monkeypatch.setattr(storage, "sweep", broken_at_first)
    sweeping = asyncio.create_task(Sweeper(storage, ["mail"], interval="20ms").run())
    try:
        await until(lambda: _promoted(memory_app))
    finally:
        sweeping.cancel()
    assert "unheard of" in caplog.text


async def _promoted(app: App) -> bool:
    return (await app.queue("mail").counts()).waiting == 1
