"""Apps on the embedded engines, and a worker in the background."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import App, Worker, uuid7
from penstock.worker import run as run_module
from penstock.worker.events import WorkerEvent


@pytest.fixture(params=["memory", "sqlite", "valkey"])
async def app(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[App]:
    match request.param:
        case "memory":
            url = "memory://"
        case "sqlite":
            url = f"sqlite:///{tmp_path}/jobs.db"
        case _:
            url = f"{request.getfixturevalue('valkey_url')}?namespace=worker-{uuid7()}"
    async with App(url, backoff="10ms") as app:
        yield app


@pytest.fixture
async def memory_app() -> AsyncIterator[App]:
    async with App("memory://", backoff="10ms") as app:
        yield app


@asynccontextmanager
async def working(app: App, **options: Any) -> AsyncIterator[Worker]:
    """A worker that runs in the background and is stopped at the end, at once unless ``grace`` is given."""
    worker = app.worker(**{"grace": 0, **options})
    async with running(worker):
        yield worker


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[Worker]:
    if not worker.app.tasks and not worker.handlers.by_queue:
        # A worker that has nothing to run does not start; what it has does not matter here.
        worker.handlers.add("unused", lambda job: None)
    run = asyncio.create_task(worker.run())
    ready = asyncio.create_task(worker.ready())
    await asyncio.wait([run, ready], return_when=asyncio.FIRST_COMPLETED, timeout=20)
    if run.done():
        ready.cancel()
        run.result()
    try:
        yield worker
    finally:
        worker.stop(0)
        await asyncio.wait_for(run, 20)


async def until(condition: Callable[[], Any], *, seconds: float = 15) -> Any:
    """Wait for ``condition`` (or what it returns, if that is awaitable) to be true, looking often."""
    async with asyncio.timeout(seconds):
        while True:
            answer = condition()
            if isinstance(answer, Awaitable):
                answer = await answer
            if answer:
                return answer
            await asyncio.sleep(0.005)


def recorded(worker: Worker, *names: str) -> list[WorkerEvent]:
    """The events of these names, as they come."""
    events: list[WorkerEvent] = []
    for name in names:
        worker.on(name, events.append)
    return events


LEASE_S = 60


class Hog:
    """Block the loop for longer than a lease by the store's clock, which moves on after every few heartbeats.

    The machine's speed does not matter: only a lease that no heartbeat extends runs out.
    """

    def __init__(self, app: App, worker: Worker) -> None:
        self._app = app
        self._worker = worker

    def hold_the_loop(self) -> None:
        for _ in range(4):
            self.await_beats(3)
            thread = threading.Thread(target=lambda: asyncio.run(self._let_time_pass()))
            thread.start()
            thread.join()

    def await_beats(self, count: int) -> None:
        """Block until the worker has sent ``count`` heartbeats."""
        session = self._worker._session
        assert session is not None
        assert session.heartbeat is not None
        deadline = time.monotonic() + 30
        for _ in range(count):
            last_at = session.heartbeat.last_at
            while session.heartbeat.last_at == last_at:
                assert time.monotonic() < deadline, "the heart has stopped"
                time.sleep(0.002)

    async def _let_time_pass(self) -> None:
        storage = await self._app.connect()
        await storage.shift_clock("default", LEASE_S * 600)
        await storage.sweep("default")


def exceed_timeouts(worker: Worker) -> None:
    """Have the worker look at its runs as if an hour had passed for those that have begun."""
    assert worker._session is not None
    clock = Clock()
    clock.ahead_s = 3600
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "time", clock)
        worker._session.executor._deadlines._look()


class Clock:
    """Stand in for the ``time`` module where a worker compares times. It runs ``ahead_s`` seconds fast."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s
