"""Reading event logs: filters, one job's life, several queues at once, the sync face, and what is told when events are
gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import pytest

from penstock import App, Event, EventsLost, InvalidName, InvalidOption, JobNotFound
from penstock.core.event import EventPage
from tests.client.conftest import until


async def listed(events: AsyncGenerator[Event, None]) -> list[tuple[str, str]]:
    return [(event.id, str(event.type)) async for event in events]


async def trim(app: App, queue: str, *, keep: int) -> None:
    await app.queue(queue).configure(events_count=keep)
    storage = await app.connect()
    while (await storage.sweep(queue)).more:
        pass


async def finish(app: App, queue: str, *, error: str = "") -> str:
    job = await app.queue(queue).claim_one(wait="10s")
    assert job is not None
    await (job.fail(error, final=True) if error else job.complete())
    return job.id


async def test_types_and_id_leave_other_events_out(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue_many(["x", "y"], ids=["a", "b"])
    await queue.pause()
    await queue.cancel("b")

    assert await listed(queue.events(follow=False, types="enqueued")) == [
        ("a", "enqueued"),
        ("b", "enqueued"),
    ]
    assert await listed(queue.events(follow=False, types=["paused", "cancelled"])) == [
        ("", "paused"),
        ("b", "cancelled"),
    ]
    assert await listed(queue.events(follow=False, id="b")) == [("b", "enqueued"), ("b", "cancelled")]
    assert await listed(queue.events(follow=False, id="a", types={"cancelled"})) == []


@pytest.mark.parametrize("types", ["compleded", ["completed", "done"], [], "completed,failed"])
async def test_a_type_that_there_is_not_is_refused_with_those_there_are(
    memory_app: App, types: Iterable[str]
) -> None:
    with pytest.raises(InvalidOption, match=r"Types are: enqueued, claimed"):
        memory_app.queue("mail").events(types=types)


@pytest.mark.parametrize("after", [-1, "latest", 1.5, True])
async def test_an_offset_that_cannot_be_is_refused(memory_app: App, after: Any) -> None:
    with pytest.raises(InvalidOption, match="after must be"):
        memory_app.queue("mail").events(after=after)
    with pytest.raises(InvalidOption, match="after must be"):
        memory_app.events("mail", after={"mail": after})
    with pytest.raises(InvalidName):
        memory_app.queue("mail").events(id="")


async def test_earliest_begins_with_what_is_kept(app: App) -> None:
    queue = app.queue("mail")
    for n in range(30):
        await queue.enqueue(n)
    await trim(app, "mail", keep=5)

    kept = [event.seq async for event in queue.events(after="earliest", follow=False, types="enqueued")]

    assert kept == list(range(kept[0], 31))
    assert 1 < kept[0] <= 27


async def test_an_offset_beyond_the_log_is_reported_not_waited_for(app: App) -> None:
    await app.queue("mail").enqueue("x")

    with pytest.raises(EventsLost, match="was replaced") as lost:
        await anext(app.queue("mail").events(after=1000))

    assert (lost.value.first, lost.value.last) == (0, 0)


async def test_a_job_tells_its_life_so_far(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue_many(range(20))
    await queue.drain()
    handle = await queue.enqueue("x", id="one", attempts=2, backoff="0s")
    await queue.enqueue("y", id="other")
    job = await queue.claim_one(wait="10s")
    assert job is not None
    await job.fail("no luck")

    life = await listed(handle.events(follow=False))

    assert life == [("one", "enqueued"), ("one", "claimed"), ("one", "retrying")]


async def test_a_job_is_followed_to_its_end(app: App) -> None:
    handle = await app.queue("mail").enqueue("x", id="one")
    seen: list[str] = []

    async def follow() -> None:
        async for event in handle.events():
            seen.append(str(event.type))

    following = asyncio.create_task(follow())
    await until(lambda: seen == ["enqueued"])
    await app.queue("mail").enqueue("y", id="other")
    await finish(app, "mail")
    await asyncio.wait_for(following, 10)

    assert seen == ["enqueued", "claimed", "completed"]


async def test_an_end_that_was_taken_back_is_not_the_end(app: App) -> None:
    handle = await app.queue("mail").enqueue("x", id="one")
    await finish(app, "mail", error="no luck")
    await handle.retry()
    await finish(app, "mail")

    life = await asyncio.wait_for(listed(handle.events()), 10)

    assert [kind for _, kind in life] == ["enqueued", "claimed", "failed", "retried", "claimed", "completed"]


async def test_only_the_present_life_of_an_id_is_shown(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue("x", id="one")
    await queue.cancel("one")
    handle = await queue.enqueue("x", id="one")

    assert await listed(handle.events(follow=False)) == [("one", "enqueued")]


@pytest.mark.parametrize("verb", ["remove", "obliterate"])
async def test_a_job_that_is_taken_away_has_ended(app: App, verb: str) -> None:
    queue = app.queue("mail")
    handle = await queue.enqueue("x", id="one")
    events = handle.events()
    assert (await anext(events)).type == "enqueued"

    await (queue.remove("one") if verb == "remove" else queue.obliterate())
    rest = await asyncio.wait_for(listed(events), 10)

    assert rest == ([("one", "removed")] if verb == "remove" else [])


async def test_a_job_that_only_the_log_knows_still_has_its_life(app: App) -> None:
    handle = await app.queue("mail").enqueue("x", id="one", result_ttl=0)
    await finish(app, "mail")
    assert await handle.get_or_none() is None

    assert [kind for _, kind in await listed(handle.events())] == ["enqueued", "claimed", "completed"]


async def test_an_unknown_id_is_not_waited_for(app: App) -> None:
    await app.queue("mail").enqueue("x")

    with pytest.raises(JobNotFound, match="neither the store nor the log"):
        await anext(app.job("mail/nobody").events())


async def test_events_of_an_unknown_job_in_an_empty_queue_are_not_waited_for(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = await app.connect()
    monkeypatch.setattr(storage, "tail", None)
    with pytest.raises(JobNotFound, match="neither the store nor the log"):
        await anext(app.job("mail/nobody").events())


async def test_a_timeline_whose_beginning_is_trimmed_says_so(app: App) -> None:
    queue = app.queue("mail")
    handle = await queue.enqueue("x", id="one", priority=-1)
    for n in range(30):
        await queue.enqueue(n)
    await trim(app, "mail", keep=5)
    with pytest.raises(EventsLost, match="no longer has the first events of job 'one'"):
        await anext(handle.events(follow=False))

    assert await finish(app, "mail") == "one"
    with pytest.raises(EventsLost) as lost:
        await anext(handle.events())

    rest = await listed(queue.events(id="one", after=lost.value.last, follow=False))
    assert [kind for _, kind in rest] == ["claimed", "completed"]


async def test_events_of_several_queues_come_together(app: App) -> None:
    mail, reports = app.queue("mail"), app.queue("reports")
    await mail.enqueue_many(["x", "y"], ids=["m1", "m2"])
    seen: list[tuple[str, str]] = []

    async def follow() -> None:
        async for event in app.events("mail", "reports", after={"mail": 1}, types="enqueued"):
            seen.append((event.queue, event.id))
            if event.id == "r2":
                return

    following = asyncio.create_task(follow())
    await until(lambda: len(seen) == 1)
    await reports.enqueue_many(["x", "y"], ids=["r1", "r2"])
    await asyncio.wait_for(following, 10)

    assert seen == [("mail", "m2"), ("reports", "r1"), ("reports", "r2")]


async def test_without_names_the_events_of_all_queues_are_read(app: App) -> None:
    await app.queue("mail").enqueue("x", id="m")
    await app.queue("reports").enqueue("x", id="r")

    events = [(event.queue, event.id) async for event in app.events(follow=False)]

    assert sorted(events) == [("mail", "m"), ("reports", "r")]


async def test_events_lost_in_one_of_several_queues_are_reported(app: App) -> None:
    await app.queue("mail").enqueue("x")
    for n in range(30):
        await app.queue("reports").enqueue(n)
    await trim(app, "reports", keep=5)

    with pytest.raises(EventsLost, match="'reports'"):
        await listed(app.events("mail", "reports", follow=False))


async def test_another_epoch_ends_the_reading(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    await app.queue("mail").enqueue("x")
    events = app.queue("mail").events()
    assert (await anext(events)).seq == 1
    storage = await app.connect()

    async def restored(*_: Any, **__: Any) -> EventPage:
        return EventPage([], 1, 1, "another epoch")

    monkeypatch.setattr(storage, "read_events", restored)
    monkeypatch.setattr(storage, "tail", restored)
    with pytest.raises(EventsLost, match="restored or failed over"):
        await anext(events)


def test_synchronous_code_follows_jobs_and_queues() -> None:
    app = App("memory://")
    mail = app.sync.queue("mail")
    handle = mail.enqueue("x", id="one")
    life = handle.events()
    assert next(life).type == "enqueued"
    with mail.claim() as job:
        job.result = 1

    assert [event.type for event in life] == ["claimed", "completed"]
    assert [event.seq for event in mail.events(follow=False, types="claimed", id="one")] == [2]
    assert [event.seq for event in app.sync.events(follow=False)] == [1, 2, 3]
    app.sync.close()
