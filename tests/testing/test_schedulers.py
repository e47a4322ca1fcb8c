"""Schedulers under test: the slots of a day in a moment, by a clock moved by hand."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from penstock import App, Dedup, JobContext, PenstockError
from penstock.testing import Harness, harness


async def test_every_slot_of_the_time_that_passes_is_run(app: App, h: Harness) -> None:
    slots: list[datetime | None] = []

    @app.task
    async def tick(context: JobContext) -> None:
        slots.append(context.scheduled_for)

    info = await app.schedule("hourly", tick.job(), every="1h")
    await h.drain(until="6h")
    assert slots == info.slots(6)


async def test_a_decorated_task_comes_as_it_says(app: App, h: Harness) -> None:
    hours: list[int] = []

    @app.scheduled(cron="0 3,15 * * *")
    @app.task
    async def tidy(context: JobContext) -> None:
        assert context.scheduled_for is not None
        hours.append(context.scheduled_for.hour)

    await h.drain(until="1d")
    assert sorted(hours) == [3, 15]


async def test_a_rest_after_completion_counts_from_the_end(app: App, h: Harness) -> None:
    runs: list[datetime] = []

    @app.task
    async def poll() -> None:
        runs.append(h.clock.now())

    await app.schedule("poll", poll.job(), after_completion="90m", limit=3)
    await h.drain(until="1d")
    rests = [later - earlier for earlier, later in pairwise(runs)]
    assert [round(rest / timedelta(minutes=1)) for rest in rests] == [90, 90]


async def test_inline_a_due_job_runs_when_its_schedule_is_added(app: App) -> None:
    runs: list[Any] = []

    @app.task
    async def poll(n: int) -> None:
        runs.append(n)

    async with harness(app, mode="inline"):
        await app.schedule("poll", poll.job(1), after_completion="1h", limit=2)
        assert runs == [1]


async def test_of_debounced_jobs_the_last_runs_once_it_is_quiet(app: App, h: Harness) -> None:
    saved: list[int] = []

    @app.task
    async def save(version: int) -> None:
        saved.append(version)

    for version in range(3):
        await save.options(dedup=Dedup.debounce("page", "10s")).enqueue(version)
        await h.drain(until="5s")
    assert saved == []
    await h.drain(until="5s")
    assert saved == [2]


@pytest.mark.parametrize("of", ["drain", "harness"])
async def test_schedules_can_be_left_out_while_time_passes(app: App, of: str) -> None:
    ran: list[tuple[str, timedelta]] = []

    @app.scheduled(cron="* * * * *")
    @app.task
    async def tick() -> None:
        ran.append(("tick", h.clock.now() - began))

    @app.task
    async def remind() -> None:
        ran.append(("remind", h.clock.now() - began))

    async with harness(app, schedules=of != "harness") as h:
        began = h.clock.now()
        await remind.options(delay="3d").enqueue()
        await h.drain(until="2d", schedules=False if of == "drain" else None)
        assert ran == []
        await h.drain(until="2d", schedules=False if of == "drain" else None)
        [(name, after)] = ran
        assert (name, after // timedelta(days=1)) == ("remind", 3)
        # The slots stayed due, and the newest of them is made up for.
        await h.drain(schedules=True)
        assert [name for name, _ in ran] == ["remind", "tick"]


async def test_too_many_runs_of_a_schedule_are_told_by_its_name(app: App, h: Harness) -> None:
    @app.scheduled(cron="* * * * *", name="every-minute")
    @app.task
    async def tick() -> None: ...

    with pytest.raises(
        PenstockError, match=r"the schedule 'every-minute' made 20 of these jobs.*schedules=False"
    ):
        await h.drain(until="1d", max_runs=20)
    assert {run.scheduler for run in h.runs} == {"every-minute"}
