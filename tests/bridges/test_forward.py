"""Work moves over into a queue of Penstock: nothing is lost, nothing is doubled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock import App, InvalidName, SerializationError, uuid7
from penstock.bridges.redis_work_queue import Forwarded, Item, WorkQueue, forward
from penstock.errors import StorageUnavailable
from tests.bridges.peers import Peer
from tests.bridges.polling import clean_until_something


@pytest.fixture(params=["memory", "valkey"])
async def app(request: pytest.FixtureRequest, valkey_url: str) -> AsyncIterator[App]:
    url = "memory://" if request.param == "memory" else valkey_url
    async with App(url, namespace=f"bridge-{uuid7()}") as app:
        yield app


async def test_an_item_added_by_their_client_is_a_job_here(ours: WorkQueue, theirs: Peer, app: App) -> None:
    queue = app.queue("mail")
    theirs.ask("add", "a", '{"to": "ada"}')
    theirs.ask("add", "b", '{"to": "bob"}')

    assert await forward(ours, queue, wait=0, task="send", priority=3) == Forwarded(queued=2)

    job = await queue.get("a")
    assert (job.payload, job.task, job.priority) == ({"to": "ada"}, "send", 3)
    assert await queue.waiting() == 2
    assert theirs.ask("lengths") == [0, 0]


async def test_a_task_of_this_app_runs_it(ours: WorkQueue, app: App) -> None:
    @app.task(queue="mail")
    async def send(to: str) -> str:
        return f"sent to {to}"

    await ours.add_item(Item.from_json({"to": "ada"}, "a"))
    await forward(ours, app.queue("mail"), wait=0, task="send")
    await app.worker(queues=["mail"], burst=True).run()

    assert await app.queue("mail").job("a").result() == "sent to ada"


async def test_raw_data_go_over_as_they_are(ours: WorkQueue, app: App) -> None:
    queue = app.queue("raw", serde="raw")
    await ours.add_item(Item(b"\x00\xff", "a"))

    await forward(ours, queue, payload=lambda item: item.data, wait=0)

    job = await queue.get("a")
    assert job.payload == b"\x00\xff"


@pytest.mark.parametrize("ended", ["waiting", "completed", "failed"])
async def test_an_item_whose_forwarder_died_before_completing_it_is_not_doubled(
    ours: WorkQueue, app: App, ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = app.queue("mail")
    await ours.add_item(Item.from_json(1, "a"))

    async def die(item: Item) -> bool:
        raise ConnectionAbortedError

    with monkeypatch.context() as patch:
        patch.setattr(ours, "complete", die)
        with pytest.raises(ConnectionAbortedError):
            await forward(ours, queue, wait=0, lease="1ms")
    await _end(queue, ended)
    await clean_until_something(ours)

    assert await forward(ours, queue, wait=0) == Forwarded(known=1)
    counts = await queue.counts()
    assert counts.waiting + counts.completed + counts.failed == 1
    assert await ours.lengths() == (0, 0)


async def test_a_completion_that_cannot_be_reported_does_not_stop_the_forwarder(
    ours: WorkQueue, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = app.queue("mail")
    await ours.add_items([Item.from_json(1, "a"), Item.from_json(2, "b")])

    async def lose(item: Item) -> bool:
        raise StorageUnavailable("nobody can tell")

    with monkeypatch.context() as patch:
        patch.setattr(ours, "complete", lose)
        assert await forward(ours, queue, wait=0, lease="1ms") == Forwarded(queued=2)
    await clean_until_something(ours)

    async with asyncio.timeout(20):
        while (await ours.lengths()) != (0, 0):
            await ours.light_clean(grace=0)
            assert (await forward(ours, queue, wait=0)).queued == 0
    assert await queue.waiting() == 2


async def test_many_forwarders_and_many_items_make_a_job_each(ours: WorkQueue, app: App) -> None:
    queue = app.queue("mail")
    await ours.add_items(Item.from_json(number, str(number)) for number in range(200))

    forwarded = await asyncio.gather(*(forward(ours, queue, wait=0) for _ in range(8)))

    assert sum(each.queued for each in forwarded) == 200
    assert await queue.waiting() == 200
    assert await ours.lengths() == (0, 0)


async def test_a_forwarder_goes_on_until_it_is_cancelled(ours: WorkQueue, app: App) -> None:
    queue = app.queue("mail")
    forwarding = asyncio.create_task(forward(ours, queue))
    for number in range(3):
        await ours.add_item(Item.from_json(number, str(number)))
        async with asyncio.timeout(20):
            while await queue.waiting() <= number:
                await asyncio.sleep(0.005)

    forwarding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forwarding


@pytest.mark.parametrize(
    ("item", "error"), [(Item("{", "a"), SerializationError), (Item("1", " a"), InvalidName)]
)
async def test_an_item_that_cannot_be_a_job_stays(
    ours: WorkQueue, app: App, item: Item, error: type[Exception]
) -> None:
    await ours.add_item(item)

    with pytest.raises(error) as raised:
        await forward(ours, app.queue("mail"), wait=0, lease="1ms")

    assert repr(item.id) in raised.value.__notes__[0]
    assert (await clean_until_something(ours)).returned == 1
    assert await app.queue("mail").waiting() == 0


def test_the_sync_face_forwards_too(valkey_url: str, prefix: str) -> None:
    app = App("memory://")
    queue = WorkQueue(valkey_url, prefix).sync
    queue.add_item(Item.from_json({"to": "ada"}, "a"))

    assert queue.forward(app.queue("mail"), wait=0) == Forwarded(queued=1)
    assert app.queue("mail").sync.waiting() == 1
    app.sync.close()
    queue.close()


async def _end(queue: Any, state: str) -> None:
    if state != "waiting":
        job = await queue.claim_one(wait=0)
        await (job.complete() if state == "completed" else job.fail("no", final=True))
