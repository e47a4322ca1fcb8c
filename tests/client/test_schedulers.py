"""Schedulers from the client's side: putting them in, looking at them, operating them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import App, InvalidInput, InvalidName, InvalidOption, SchedulerInfo, State, chain
from penstock.client.firing import sweep

HOUR_MS = 3_600_000


async def jobs_of(app: App, queue: str = "default") -> list[str]:
    return [job.id async for job in app.queue(queue).list_jobs("waiting")]


async def pass_time(app: App, ms: int, queue: str = "default") -> None:
    """Move the clock, and do what a sweeper does."""
    storage = await app.connect()
    await storage.shift_clock(queue, ms)
    while (await sweep(storage, queue)).more:
        pass


@pytest.fixture
def report(app: App) -> Any:
    @app.task
    async def report(month: str = "all") -> None: ...

    return report


async def test_a_scheduler_shows_what_it_is(app: App, report: Any) -> None:
    end = datetime(2999, 1, 1, tzinfo=UTC)
    info = await app.schedule(
        "nightly",
        report.job("may"),
        cron="0  3 * * *",
        tz="Europe/Berlin",
        end=end,
        limit=5,
        missed="catch_up",
    )
    assert (info.name, info.queue, info.when) == ("nightly", "default", "cron 0 3 * * * Europe/Berlin")
    assert (info.task, info.end, info.limit, info.missed) == ("report", end, 5, "catch_up")
    assert (info.fired, info.paused, info.ended, info.last_job, info.start) == (0, False, False, "", None)
    assert info.next is not None
    assert info.next.astimezone(UTC).hour in (1, 2)
    assert info.slots(2)[0] == info.next
    assert "nightly" in repr(info)


async def test_schedulers_of_all_queues_are_listed(app: App, report: Any) -> None:
    await app.schedule("b", report.job(), every="1h")
    await app.schedule("a", report.options(queue="mail").job(), after_completion="5m")
    await app.queue("raw").schedule("c", {"n": 1}, every="10m")
    listed = {(info.queue, info.name): info.when for info in await app.schedulers()}
    assert listed == {
        ("default", "b"): "every 1h",
        ("mail", "a"): "5m after completion",
        ("raw", "c"): "every 10m",
    }
    assert [info.name for info in await app.queue("mail").schedulers()] == ["a"]
    assert await app.queue("mail").scheduler("b") is None


async def test_the_job_of_a_slot_has_what_its_template_has(app: App, report: Any) -> None:
    template = report.options(priority=-3, attempts=7, ttl="1h", headers={"a": "b"}, group="g", id="ignored")
    info = await app.schedule("hourly", template.job("may"), every="1h")
    assert info.next is not None
    await pass_time(app, HOUR_MS)
    [id] = await jobs_of(app)
    assert id == f"hourly:{info.next:%Y-%m-%dT%H:%M:%SZ}"
    job = await app.queue("default").get(id)
    assert (job.task, job.payload, job.priority, job.group) == ("report", {"month": "may"}, -3, "g")
    assert (job.headers, job.scheduler, job.scheduled_for) == ({"a": "b"}, "hourly", info.next)
    assert job.raw.options.attempts == 7
    assert job.expires_at is not None


async def test_a_start_is_what_an_interval_counts_from(app: App, report: Any) -> None:
    start = datetime.now(UTC).replace(microsecond=7000) + timedelta(hours=2)
    info = await app.schedule("later", report.job(), every="90m", start=start)
    assert info.start == start
    assert info.slots(2) == [start, start + timedelta(minutes=90)]


async def test_the_same_again_changes_nothing_and_another_job_keeps_the_slot(app: App, report: Any) -> None:
    storage = await app.connect()
    first = await app.schedule("hourly", report.job("may"), every="1h")
    await pass_time(app, HOUR_MS)
    same = await app.schedule("hourly", report.job("may"), every="1h")
    assert (same.raw.spec, same.fired) == (first.raw.spec, 1)
    await storage.shift_clock("default", HOUR_MS)
    changed = await app.schedule("hourly", report.job("june"), every="1h")
    assert (changed.next, changed.fired) == (same.next, 1)
    rescheduled = await app.schedule("hourly", report.job("june"), every="2h")
    assert rescheduled.next is not None
    assert changed.next is not None
    assert rescheduled.next > changed.next
    assert rescheduled.fired == 1


async def test_of_missed_slots_the_newest_is_fired_or_all(app: App, report: Any) -> None:
    await app.schedule("skip", report.job(), every="1h")
    await app.schedule("all", report.options(queue="mail").job(), every="1h", missed="catch_up")
    await pass_time(app, 250 * HOUR_MS)
    await pass_time(app, 250 * HOUR_MS, "mail")
    info = await app.queue("default").scheduler("skip")
    assert info is not None
    assert info.next is not None
    assert await jobs_of(app) == [f"skip:{info.next - timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}"]
    assert info.fired == 1
    caught_up = await jobs_of(app, "mail")
    assert len(caught_up) in (250, 251)
    assert caught_up == sorted(caught_up)


async def test_it_ends_at_its_limit_and_at_its_end(app: App, report: Any) -> None:
    await app.schedule("limited", report.job(), every="1h", limit=2, missed="catch_up")
    end = datetime.now(UTC) + timedelta(hours=3)
    await app.schedule("ending", report.options(queue="mail").job(), every="1h", end=end, missed="catch_up")
    await pass_time(app, 10 * HOUR_MS)
    await pass_time(app, 10 * HOUR_MS, "mail")
    assert len(await jobs_of(app)) == 2
    assert len(await jobs_of(app, "mail")) == 3
    assert [info.ended for info in await app.schedulers()] == [True, True]


async def test_after_completion_goes_on_from_the_end(app: App) -> None:
    queue = app.queue("default")
    await queue.schedule("poll", "payload", after_completion="1h", options={"ttl": "1d"})
    await pass_time(app, 1)
    for fired in (1, 2):
        info = await queue.scheduler("poll")
        assert info is not None
        assert (info.fired, info.next, info.ended) == (fired, None, False)
        await pass_time(app, 5 * HOUR_MS)
        async with queue.claim() as job:
            assert (job.payload, job.scheduler) == ("payload", "poll")
            assert job.scheduled_for is not None
        await pass_time(app, HOUR_MS - 60_000)
        assert await queue.waiting() == 0
        await pass_time(app, 61_000)
    assert await queue.waiting() == 1


async def test_a_pause_leaves_its_slots_out(app: App, report: Any) -> None:
    queue = app.queue("default")
    await app.schedule("hourly", report.job(), every="1h", missed="catch_up")
    assert await queue.pause_scheduler("hourly")
    await pass_time(app, 5 * HOUR_MS)
    assert await jobs_of(app) == []
    assert await queue.resume_scheduler("hourly")
    await pass_time(app, 1)
    assert await jobs_of(app) == []
    await pass_time(app, HOUR_MS)
    assert len(await jobs_of(app)) == 1


async def test_fire_now_puts_in_a_job_beside_the_slots(app: App, report: Any) -> None:
    queue = app.queue("default")
    before = await app.schedule("nightly", report.job("may"), cron="0 3 * * *", limit=1)
    await queue.pause_scheduler("nightly")
    job = await queue.fire_now("nightly")
    assert job.state is State.WAITING
    info = await queue.scheduler("nightly")
    assert info is not None
    assert (info.fired, info.next) == (0, before.next)
    found = await job.get()
    assert (found.payload, found.scheduler) == ({"month": "may"}, "nightly")
    with pytest.raises(InvalidOption, match="has no scheduler 'nobody'"):
        await queue.fire_now("nobody")


async def test_a_removed_scheduler_fires_no_more(app: App, report: Any) -> None:
    queue = app.queue("default")
    await app.schedule("hourly", report.job(), every="1h")
    assert await queue.remove_scheduler("hourly")
    assert not await queue.remove_scheduler("hourly")
    assert not await queue.pause_scheduler("hourly")
    assert not await queue.resume_scheduler("hourly")
    await pass_time(app, 5 * HOUR_MS)
    assert await jobs_of(app) == []


async def test_a_worker_adds_the_schedule_of_a_decorated_task(app: App) -> None:
    @app.scheduled(cron="0 3 * * *", tz="Europe/Berlin")
    @app.task(queue="reports")
    async def nightly() -> None: ...

    @app.scheduled(every="1h", name="hourly")
    @app.task
    async def elsewhere() -> None: ...

    await app.worker(queues=["reports"], burst=True).run()
    assert [(info.queue, info.name) for info in await app.schedulers()] == [("reports", "nightly")]
    await app.worker(queues=["default"], burst=True).run()
    assert [info.name for info in await app.schedulers()] == ["hourly", "nightly"]


async def test_a_decorated_task_must_need_no_arguments(app: App) -> None:
    with pytest.raises(
        InvalidInput, match=r"Use app\.schedule\(name, needs\.job\(\.\.\.\), \.\.\.\)"
    ) as refused:

        @app.scheduled(every="1h")  # type: ignore[type-var]
        @app.task
        async def needs(month: str) -> None: ...

    assert "flow" not in str(refused.value)

    @app.scheduled(every="1h")
    @app.task
    async def may_have(month: str = "May") -> None: ...


@pytest.mark.parametrize(
    ("when", "reason"),
    [
        ({}, "needs one of cron, every and after_completion, got none"),
        ({"cron": "0 3 * * *", "every": "1h"}, "got cron and every"),
        ({"cron": "0 25 * * *"}, "bad hour"),
        ({"cron": "0 3 * * *", "tz": "Berlin"}, "not a known time zone"),
        ({"every": "1h", "tz": "UTC"}, "tz applies only to cron"),
        ({"every": 0}, "longer than 0"),
        ({"every": "1h", "limit": 0}, "limit must be an integer from 1 to .*, got 0"),
        ({"every": "1h", "missed": "never"}, "missed must be .*, got 'never'"),
        ({"every": "1h", "start": datetime(2026, 1, 1)}, "has no time zone"),
        ({"every": "1h", "end": datetime(2020, 1, 1, tzinfo=UTC)}, "its end has passed"),
        ({"every": "1h", "end": datetime(2020, 1, 1, tzinfo=UTC), "start": datetime(2021, 1, 1, tzinfo=UTC)}, "before"),
        ({"evry": "1h"}, "Did you mean 'every'"),
    ],
)  # fmt: skip
async def test_an_invalid_schedule_is_refused_before_it_is_stored(
    app: App, report: Any, when: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidOption, match=reason):
        await app.schedule("name", report.job(), **when)
    assert await app.schedulers() == []


@pytest.mark.parametrize("name", ["", " x", "x" * 151, 3])
async def test_a_name_that_is_not_allowed_is_refused(app: App, report: Any, name: Any) -> None:
    with pytest.raises(InvalidName, match="scheduler name"):
        await app.schedule(name, report.job(), every="1h")


async def test_a_template_with_an_instant_is_refused(app: App, report: Any) -> None:
    job = report.options(run_at=datetime(2999, 1, 1, tzinfo=UTC)).job()
    with pytest.raises(InvalidOption, match="run_at is a single time"):
        await app.schedule("name", job, every="1h")


async def test_a_template_that_waits_for_others_is_refused(app: App, report: Any) -> None:
    before = await report.options(delay="1h").enqueue("first")
    with pytest.raises(InvalidOption, match="after names existing jobs"):
        await app.schedule("later", report.options(after=[before]).job("sales"), every="1m")
    assert await app.schedulers() == []


async def test_a_value_that_is_not_a_job_is_refused_with_a_remedy(app: App, report: Any) -> None:
    mistakes: list[Any] = [report, chain(report.job("a")), print]
    for what in mistakes:
        with pytest.raises(InvalidInput, match=r"cannot be scheduled. Give task.job"):
            await app.schedule("wrong", what, every="1m")
    with pytest.raises(InvalidInput, match=r"above @app.task"):

        @app.task  # type: ignore[type-var]
        @app.scheduled(every="1m")
        async def tick() -> None: ...


def test_the_sync_face_has_it_too() -> None:
    app = App("memory://")

    @app.task
    def report() -> None: ...

    assert isinstance(app.sync.schedule("hourly", report.job(), every="1h"), SchedulerInfo)
    queue = app.queue("default").sync
    queue.schedule("raw", {"n": 1}, every="1h")
    assert [info.name for info in app.sync.schedulers()] == ["hourly", "raw"]
    assert queue.pause_scheduler("hourly")
    assert queue.resume_scheduler("hourly")
    assert queue.fire_now("hourly").status == "queued"
    assert queue.remove_scheduler("raw")
    info = queue.scheduler("hourly")
    assert info is not None
    assert [one.name for one in queue.schedulers()] == [info.name]
    app.sync.close()


@pytest.mark.parametrize("ms", [3 * HOUR_MS, 10 * 365 * 24 * HOUR_MS])
@pytest.mark.parametrize("when", [{"cron": "* * * * *"}, {"every": "10m"}, {"after_completion": "10m"}])
async def test_a_clock_that_was_ahead_for_a_moment_does_not_silence_a_scheduler(
    app: App, report: Any, when: Any, ms: int
) -> None:
    queue, storage = app.queue("default"), await app.connect()
    await app.schedule("often", report.job(), **when)
    await storage.shift_clock("default", ms, jump=True)
    await pass_time(app, 0)
    for job in await jobs_of(app):
        await queue.remove(job)
    await storage.shift_clock("default", -ms, jump=True)
    await pass_time(app, 0)
    before = await jobs_of(app)
    await pass_time(app, HOUR_MS // 2)
    assert len(await jobs_of(app)) > len(before)
    info = await queue.scheduler("often")
    assert info is not None
    assert info.next is None or info.next < datetime.now(UTC) + timedelta(hours=2)


async def test_a_worker_logs_the_scheduler_that_its_code_replaces(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.scheduled(cron="0 3 * * *")
    @app.task(queue="mail")
    async def nightly() -> None: ...

    caplog.set_level("INFO", "penstock.worker")
    await app.schedule("nightly", nightly.job(), cron="0 3 * * *", tz="Europe/Berlin")
    await app.put_declared(await app.connect())
    assert [record.getMessage() for record in caplog.records] == [
        "the scheduler 'nightly' of queue 'mail' is replaced by that of the code: cron 0 3 * * * UTC, task nightly; "
        "it was: cron 0 3 * * * Europe/Berlin, task nightly"
    ]
    await app.put_declared(await app.connect())
    assert len(caplog.records) == 1
