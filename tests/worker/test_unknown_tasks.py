"""Jobs whose task a worker does not know: a rolling deploy brings them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import App, JobFailed, State
from penstock.cli.workerview import _OneView
from penstock.core.job import Lease, Options
from penstock.core.lifecycle import OPEN
from penstock.errors import Snooze, UnknownTask
from penstock.worker import handlers
from penstock.worker.handlers import UnknownTasks
from penstock.worker.run import Handler, Run
from penstock.worker.slots import ServedQueue
from tests.worker.conftest import until, working


@pytest.fixture(params=["sqlite", "valkey"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/unknown.db"
    return f"{request.getfixturevalue('valkey_url')}?namespace=unknown-{tmp_path.name}"


async def test_an_unknown_task_is_handed_back_until_a_worker_knows_it(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with App(url) as old, App(url) as new:

        @new.task(name="fresh", attempts=1)
        async def fresh(n: int) -> int:
            return n

        jobs = await fresh.enqueue_many([fresh.job(n=n) for n in range(3)])
        async with working(old, queues=["default"]) as worker:
            await until(lambda: worker.stats.snoozed >= 6)
            info = await jobs[0].get()
            assert (info.failures, info.stalls, info.state in OPEN) == (0, 0, True)
        async with working(new):
            assert [await job.result(timeout="30s") for job in jobs] == [0, 1, 2]
    warnings = [record for record in caplog.records if "'fresh'" in record.getMessage()]
    assert len(warnings) == 1, "one warning for all jobs of a task"


async def test_the_warning_about_an_unknown_task_names_one_that_is_spelt_alike(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def send() -> None: ...

    async with working(app, queues=["default"]) as worker:
        await app.queue("default").enqueue({}, task="sendd")
        await app.queue("default").enqueue({}, task="other")
        await until(lambda: worker.stats.snoozed >= 2)
    warnings = [
        record.getMessage() for record in caplog.records if "Jobs of this task" in record.getMessage()
    ]
    assert _OneView(worker)._counts()["released"] == worker.stats.snoozed
    assert sorted("Did you mean 'send'?" in warning for warning in warnings) == [False, True]


async def test_an_unknown_task_keeps_its_place_in_a_strict_group(url: str) -> None:
    ran: list[str] = []
    async with App(url) as old, App(url) as new:
        await old.queue("default").limit(group="g", concurrency=1)
        for app in (old, new):

            @app.task(name="known")
            async def known() -> None:
                ran.append("known")

        @new.task(name="fresh")
        async def fresh() -> None:
            ran.append("fresh")

        first = await fresh.options(group="g").enqueue()
        second = await old.tasks["known"].options(group="g").enqueue()
        async with working(old) as worker:
            await until(lambda: worker.stats.snoozed >= 3)
            assert ran == []
            assert await second.refresh() is State.BLOCKED
        async with working(new):
            await second.result(timeout="30s")
    assert ran == ["fresh", "known"]
    assert first.id != second.id


async def test_an_unknown_task_fails_for_good_after_its_time(app: App) -> None:
    async with working(app, queues=["default"], unknown_after="300ms"):
        job = await app.queue("default").enqueue({}, task="nowhere", attempts=5)
        with pytest.raises(JobFailed, match="'nowhere'") as caught:
            await job.result(timeout="20s")
        info = await job.get()
    assert caught.value.error_type == "UnknownTask"
    assert (info.failures, info.runs > 1) == (1, True)


async def test_without_a_time_to_wait_an_unknown_task_fails_and_is_retried(app: App) -> None:
    job = await app.queue("default").enqueue({}, task="nowhere", attempts=2, backoff="1ms")
    app.task(name="known")(lambda: None)
    await app.worker(queues=["default"], burst=True).run()
    info = await job.get()
    assert (info.state, info.failures) == (State.FAILED, 2)


async def test_a_worker_lists_the_tasks_it_does_not_know(app: App) -> None:
    queue = app.queue("default")
    await queue.enqueue({}, task="nowhere")
    await queue.enqueue({}, task="elsewhere")

    async def listed() -> bool:
        workers = await queue.workers()
        return bool(workers) and workers[0].info["unknown"] == ["elsewhere", "nowhere"]

    async with working(app, queues=["default"], heartbeat="50ms"):
        await until(listed)


def _run(served: ServedQueue, *, id: str = "a", run: int = 1) -> Run:
    lease = Lease(id, 1, 1, run, 0, 0, b"", Options(task="nowhere"), 0, 0, 0)
    handler: Any = Handler("nowhere", "async", None, bytes, None)  # type: ignore[arg-type]
    return Run(lease, served, handler, 0.0, 0.0)


def test_the_delay_grows_to_ten_seconds() -> None:
    unknown, served = UnknownTasks(3_600_000), ServedQueue("default")
    answers = [unknown.hand_back(_run(served, run=run), UnknownTask("x")) for run in (1, 2, 3, 6, 7, 1000)]
    assert [answer.delay for answer in answers if isinstance(answer, Snooze)] == [0.25, 0.5, 1, 8, 10, 10]


def test_of_many_jobs_only_the_newest_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_MOST_WATCHED", 10)
    unknown, served = UnknownTasks(3_600_000), ServedQueue("default")
    for n in range(100):
        assert isinstance(unknown.hand_back(_run(served, id=str(n)), UnknownTask("x")), Snooze)
    assert len(unknown._seen_at) == 10
    assert unknown.names() == ("nowhere",)
