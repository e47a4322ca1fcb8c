"""What a worker does when its event loop stands still."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from penstock import App, State
from penstock.worker import health
from penstock.worker.health import WARN_AFTER_S, Watchdog
from penstock.worker.slots import ServedQueue
from tests.worker.conftest import LEASE_S, Hog, until, working


class StandingLoop:
    """A loop that takes callbacks and calls them on demand."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self.waiting.append(callback)

    def turn(self) -> None:
        while self.waiting:
            self.waiting.pop()()


class Watched:
    """A watchdog whose clock and loop are moved by hand, a second at a time."""

    def __init__(self, *, stuck_after_s: float = 300, timeouts_ms: tuple[int, ...] = ()) -> None:
        served = ServedQueue("default")
        served.held = {n: _Run(timeout) for n, timeout in enumerate(timeouts_ms)}  # type: ignore[misc]
        self.dog = Watchdog([served], worker_id="w", stuck_after_s=stuck_after_s)
        self.loop = StandingLoop()
        self.dog._loop = self.loop  # type: ignore[assignment]
        self._now = time.monotonic()

    def look(self, seconds: float, *, step: float = 1.0) -> None:
        for _ in range(round(seconds / step)):
            self._now += step
            self.dog.look(self._now)


class _Run:
    def __init__(self, timeout_ms: int) -> None:
        self.lease = self.options = self
        self.timeout_ms = timeout_ms


async def test_a_loop_that_stands_still_is_reported_once_with_its_stack(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched()
    watched.look(WARN_AFTER_S)
    assert caplog.records == []
    watched.look(WARN_AFTER_S)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "has been blocked for 10 s" in record.getMessage()
    assert "in test_a_loop_that_stands_still" in caplog.text
    watched.loop.turn()
    assert "runs again after 19 s" in caplog.records[1].getMessage()
    watched.look(2 * WARN_AFTER_S)
    assert len(caplog.records) == 3


async def test_a_loop_that_turns_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for _ in range(100):
        watched.look(1)
        watched.loop.turn()
    assert caplog.records == []
    assert not watched.dog.stuck


async def test_a_machine_that_was_suspended_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(stuck_after_s=60)
    watched.look(1)
    watched.look(3600, step=3600)
    assert caplog.records == []
    assert not watched.dog.stuck


@pytest.mark.parametrize(("timeouts_ms", "after_s"), [((), 60), ((10_000, 0), 60), ((10_000, 90_000), 95)])
async def test_a_worker_is_stuck_after_its_time_and_that_of_its_jobs(
    timeouts_ms: tuple[int, ...], after_s: int
) -> None:
    watched = Watched(stuck_after_s=60, timeouts_ms=timeouts_ms)
    watched.look(after_s)
    assert not watched.dog.stuck
    watched.look(1)
    assert watched.dog.stuck
    watched.loop.turn()
    assert not watched.dog.stuck


async def test_a_stuck_worker_gives_its_jobs_up_and_a_blocking_one_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health, "WARN_AFTER_S", 0.1)
    monkeypatch.setattr(health, "PATIENCE_S", 0.0)
    monkeypatch.setattr(health, "_TICK_S", 0.05)
    rescued = threading.Event()
    async with App(f"sqlite:///{tmp_path}/s.db") as app:
        hogs: list[Hog] = []

        @app.task
        async def hog() -> None:
            hogs[0].hold_the_loop()

        @app.task
        async def block() -> None:
            rescued.wait(30)

        async with working(app, lease=LEASE_S, heartbeat="50ms", stuck_after="1h") as worker:
            hogs.append(Hog(app, worker))
            job = await hog.enqueue()
            await job.result(timeout="60s")
            info = await job.get()
            assert (info.runs, info.stalls) == (1, 0)
        assert "hogs[0].hold_the_loop()" in caplog.text
        async with working(app, lease="300ms", heartbeat="50ms", stuck_after="300ms") as worker:
            job = await block.enqueue()
            watching = asyncio.create_task(asyncio.to_thread(_set_when_stalled, app.url, job.id, rescued))
            await until(lambda: worker.stats.stalled == 1)
            await watching
            assert "stops renewing the leases of its 1 jobs" in caplog.text


def _set_when_stalled(url: str, id: str, rescued: threading.Event) -> None:
    """From another thread: the loop of the test is blocked, too."""

    async def watch() -> None:
        async with App(url) as app:
            await until(lambda: _has_stalled(app, id))
        rescued.set()

    asyncio.run(watch())


async def _has_stalled(app: App, id: str) -> bool:
    return (await app.queue("default").get(id)).stalls > 0


SCRIPT = """
import sys, time
from penstock import App

app = App(sys.argv[1])

@app.task(queue="q")
async def odd() -> None:
    from penstock import current_job
    current_job().log("name \\udcff")

app.worker(concurrency=1).run_sync()
"""


async def test_sigterm_ends_a_worker_whose_jobs_log_odd_text(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    async with App(f"sqlite:///{tmp_path}/s.db") as app:
        jobs = [await app.queue("q").enqueue({}, task="odd") for _ in range(3)]
        with subprocess.Popen([sys.executable, str(script), f"sqlite:///{tmp_path}/s.db"]) as process:
            for job in jobs:
                await job.result(timeout="20s")
            os.kill(process.pid, signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 20) == 0


BLOCKING = """
import sys, time
from penstock import App
from penstock.worker import health, worker

health.PATIENCE_S = worker.PATIENCE_S = 0.5
app = App(sys.argv[1])

@app.task(queue="q")
async def block(how: str) -> None:
    print("started", flush=True)
    while how == "spin":
        pass
    time.sleep(600)

@app.task(queue="q")
async def quick() -> str:
    return "done"

app.worker(concurrency=2, grace="500ms").run_sync()
print("ended", flush=True)
"""


@pytest.mark.parametrize("how", ["spin", "sleep"])
async def test_sigterm_ends_a_worker_whose_loop_is_blocked_and_its_jobs_are_handed_back(
    tmp_path: Path, how: str
) -> None:
    script, url = tmp_path / "worker.py", f"sqlite:///{tmp_path}/s.db"
    script.write_text(BLOCKING)
    async with App(url) as app:
        job = await app.queue("q").enqueue({"how": how}, task="block")
        command = [sys.executable, str(script), url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == "started\n"
            os.kill(process.pid, signal.SIGTERM)
            assert await asyncio.to_thread(process.stdout.readline) == "ended\n"
            assert await asyncio.to_thread(process.wait, 20) == 0
        info = await job.get()
        assert (info.state, info.failures, info.stalls) == (State.WAITING, 0, 0)


async def test_the_job_that_blocks_the_loop_is_named(
    memory_app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_BLOCKED_S", 0.0)
    seen: list[bytes] = []

    def look() -> None:
        """What the heartbeat does, from its thread, while the loop is blocked."""
        assert worker._session is not None
        seen.append(health.describe(worker._session))

    @memory_app.task
    async def idle() -> None:
        await asyncio.sleep(3600)

    @memory_app.task
    async def hog() -> None:
        looker = threading.Thread(target=look)
        looker.start()
        looker.join()

    async with working(memory_app) as worker:
        await idle.enqueue()
        await until(lambda: worker.stats.claimed == 1)
        await hog.options(id="greedy", wait="20s").call()
    said = msgspec.json.decode(seen[0])
    assert (said["consuming"], said["blocked_by"]) == (False, "default/greedy")
    assert said["reason"].startswith("job default/greedy has blocked the event loop for ")
