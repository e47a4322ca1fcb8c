"""A scheduler under workers that are killed at random: a job for every slot, and one for each."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from penstock import App
from penstock.core.lifecycle import EventType
from tests.slow.fleet_names import TICKS
from tests.slow.local_processes import LocalProcesses, check_history, read_log

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]

SLOTS = 200
EVERY = timedelta(milliseconds=100)
KILLS = 50
WORKERS = [f"ticker-{number}" for number in range(5)]


@pytest.fixture(params=["sqlite", "valkey"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ticks.db"
    url: str = request.getfixturevalue("valkey_url")
    return f"{url}?namespace=ticks-{uuid4().hex}"


async def kill_until_all_is_done(app: App, processes: LocalProcesses) -> None:
    """Somebody is killed and started again about twice a second, until the last slot was fired and its job is done.

    Not for ever: where a start takes longer than they live, nobody would come to fire anything.
    """
    queue = app.queue(TICKS)
    while True:
        await asyncio.sleep(processes.chance.uniform(0.2, 0.8))
        processes.check()
        info = await queue.scheduler("clock")
        assert info is not None
        if info.ended and await queue.open() == 0:
            return
        if processes.kills < KILLS:
            processes.kill_one()


async def test_two_hundred_slots_make_two_hundred_jobs_while_workers_are_killed(
    store_url: str, tmp_path: Path
) -> None:
    async with App(store_url) as app:
        task = app.task(name="tick", queue=TICKS)(lambda: None)
        info = await app.schedule("clock", task.job(), every=EVERY, limit=SLOTS, missed="catch_up")
        slots = info.slots(SLOTS)
        with LocalProcesses(store_url, tmp_path, seed=3) as processes:
            for name in WORKERS:
                processes.launch("ticker", name)
            await kill_until_all_is_done(app, processes)
            assert processes.kills > 10
        storage = await app.connect()
        events = await read_log(storage, TICKS)
        made = [event.id for event in events if event.type is EventType.ENQUEUED]
        assert len(made) == len(set(made)) == SLOTS
        check_history(events, set(made))
        jobs = [job async for job in app.queue(TICKS).list_jobs("completed")]
        assert sorted(datetime.fromisoformat(job.result) for job in jobs) == slots
        assert (await storage.check(TICKS)).problems == {}
