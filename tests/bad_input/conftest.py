"""Apps on every engine, and a picture of a queue that shows whether anything was written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import App, PenstockError, uuid7

QUEUE = "orders"


@pytest.fixture(params=["memory", "sqlite", "valkey"])
async def app(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[App]:
    """An app with a small limit on payloads and a job of each kind in its queue."""
    match request.param:
        case "memory":
            url = "memory://"
        case "sqlite":
            url = f"sqlite:///{tmp_path}/jobs.db"
        case _:
            url = request.getfixturevalue("valkey_url")
    async with App(url, namespace=f"bad-{uuid7()}", max_payload="1KiB", backoff="10ms") as app:
        queue = app.queue(QUEUE)
        await queue.enqueue("known", id="known")
        await queue.enqueue("later", id="later", delay="1h")
        yield app


async def picture(app: App, queue: str = QUEUE) -> object:
    """All that a write would change: two pictures that are equal mean that nothing was written in between."""
    seen = app.queue(queue)
    jobs = await seen.get_many(["known", "later"])
    settings, consumers = await seen.settings(), await seen.consumers()
    events = [event async for event in seen.events(follow=False)]
    counts = await seen.counts()
    return (
        [job and job.raw for job in jobs],
        (counts.open, counts.waiting, counts.scheduled, counts.active, counts.failed, counts.completed),
        len(events),
        await app.queues(),
        settings,
        consumers,
    )


@asynccontextmanager
async def refused(app: App, kind: type[PenstockError], *words: str) -> AsyncIterator[Any]:
    """The block raises exactly ``kind``, its message has all ``words``, and nothing was written."""
    before = await picture(app)
    with pytest.raises(kind) as caught:
        yield caught
    assert type(caught.value) is kind
    assert_says(caught.value, *words)
    assert await picture(app) == before


def assert_says(error: BaseException, *words: str) -> None:
    """The message has all ``words``: those that name the problem, the cause and the remedy."""
    for word in words:
        assert word in str(error), f"{word!r} is not in {error}"
