"""Apps on the embedded engines; a worker of a few lines, so that these tests need no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import App, ClaimedJob, Queue, uuid7
from penstock.storage import open_storage
from tests.client.spy import Spy, spy_on


@pytest.fixture(params=["memory", "sqlite", "valkey"])
async def app(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[App]:
    urls: dict[str, Callable[[], str]] = {
        "memory": lambda: "memory://",
        "sqlite": lambda: f"sqlite:///{tmp_path}/jobs.db",
        "valkey": lambda: request.getfixturevalue("valkey_url"),
    }
    async with App(urls[request.param](), namespace=f"client-{uuid7()}") as app:
        yield app


@pytest.fixture
async def memory_app() -> AsyncIterator[App]:
    async with App("memory://") as app:
        yield app


@asynccontextmanager
async def working(queue: Queue, handler: Callable[[ClaimedJob], Awaitable[Any]]) -> AsyncIterator[None]:
    """Work the queue off in the background: complete with what ``handler`` gives, fail with what it raises."""

    async def work() -> None:
        while True:
            job = await queue.claim_one()
            assert job is not None
            try:
                await job.complete(await handler(job))
            except Exception as error:
                await job.fail(error)

    worker = asyncio.create_task(work())
    try:
        yield
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


async def until(condition: Callable[[], bool], *, seconds: float = 10) -> None:
    """Wait for ``condition``, looking often."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
async def spy() -> AsyncIterator[Spy]:
    storage = open_storage("memory://")
    await storage.open()
    yield spy_on(storage)
    await storage.close()
