"""Subscriptions: handlers by type of event, positions that outlive a run, and what they report when events are gone."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import App, Event, EventsLost, InvalidName, InvalidOption, StorageUnavailable
from penstock.client.subscription import Subscription
from tests.client.conftest import until
from tests.client.test_events import finish, trim


@asynccontextmanager
async def running(subscription: Subscription, *queues: str) -> AsyncIterator[asyncio.Task[None]]:
    """Runs it in the background, from the moment it knows where it is; stops it in the end."""
    subscription.positions.clear()
    run = asyncio.create_task(subscription.run())
    await until(lambda: run.done() or set(subscription.positions) >= set(queues))
    try:
        yield run
    finally:
        subscription.stop()
        await asyncio.wait_for(asyncio.wait([run]), 10)


async def test_handlers_are_called_by_type_in_order(app: App) -> None:
    subscription = app.subscribe("mail")
    ends: list[tuple[int, str]] = []
    everything: list[str] = []

    @subscription.on("completed", "failed")
    async def ended(event: Event) -> None:
        ends.append((event.seq, event.id))

    @subscription.on()
    def note(event: Event) -> None:
        everything.append(str(event.type))

    await app.queue("mail").enqueue("x", id="before")
    async with running(subscription, "mail") as run:
        await finish(app, "mail")
        await app.queue("mail").enqueue("x", id="after")
        await finish(app, "mail", error="no luck")
        await until(lambda: len(everything) == 5)
    run.result()

    assert ends == [(3, "before"), (6, "after")]
    assert everything == ["claimed", "completed", "enqueued", "claimed", "failed"]
    assert subscription.positions == {"mail": 6}


async def test_one_job_of_a_queue_can_be_subscribed_to_before_it_is_there(app: App) -> None:
    subscription = app.subscribe("mail", id="mine")
    seen: list[str] = []
    subscription.on("completed", "failed", "retrying")(lambda event: seen.append(f"{event.id} {event.type}"))

    async with running(subscription, "mail"):
        await app.queue("mail").enqueue_many(["x", "y"], ids=["other", "mine"])
        await finish(app, "mail")
        await finish(app, "mail")
        await until(lambda: bool(seen))

    assert seen == ["mine completed"]


async def test_without_names_all_queues_are_subscribed_to(app: App) -> None:
    await app.queue("mail").enqueue("x")
    await app.queue("reports").enqueue("x")
    subscription = app.subscribe(after=0)
    seen: set[str] = set()
    subscription.on("enqueued")(lambda event: seen.add(event.queue))

    async with running(subscription):
        await until(lambda: len(seen) == 2)

    assert seen == {"mail", "reports"}


async def test_a_named_consumer_goes_on_where_it_was(app: App) -> None:
    queue = app.queue("mail")
    seen: list[str] = []

    async def work(**options: Any) -> None:
        subscription = app.subscribe("mail", consumer="billing", **options)
        subscription.on("enqueued")(lambda event: seen.append(event.id))
        async with running(subscription, "mail"):
            last = [event.id async for event in queue.events(follow=False)][-1]
            await until(lambda: bool(seen) and seen[-1] == last)

    await queue.enqueue_many(range(3), ids=["1", "2", "3"])
    await work(after=0)
    await queue.enqueue_many(range(2), ids=["4", "5"])
    await work()

    assert seen == ["1", "2", "3", "4", "5"]
    [consumer] = await queue.consumers()
    assert (consumer.name, consumer.offset) == ("billing", 5)


async def test_events_are_kept_for_a_consumer_from_its_first_run_on(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue("x")
    async with running(app.subscribe("mail", consumer="billing"), "mail"):
        pass
    for n in range(30):
        await queue.enqueue(n)
    await trim(app, "mail", keep=2)

    subscription = app.subscribe("mail", consumer="billing")
    seen: list[int] = []
    subscription.on("enqueued")(lambda event: seen.append(event.seq))
    async with running(subscription, "mail"):
        await until(lambda: len(seen) == 30)

    assert seen == list(range(2, 32))


async def test_an_event_whose_handler_failed_comes_again(app: App) -> None:
    await app.queue("mail").enqueue_many(range(4), ids=["1", "2", "3", "4"])
    seen: list[str] = []

    def work(*, broken: bool) -> Subscription:
        subscription = app.subscribe("mail", consumer="billing", after=0)

        @subscription.on("enqueued")
        async def note(event: Event) -> None:
            if broken and event.id == "3":
                raise RuntimeError("no ink")
            seen.append(event.id)

        return subscription

    with pytest.raises(RuntimeError, match="no ink") as failed:
        await asyncio.wait_for(work(broken=True).run(), 10)
    assert failed.value.__notes__ == ["while handling event 3 (enqueued) of queue 'mail'"]
    assert [consumer.offset for consumer in await app.queue("mail").consumers()] == [2]

    async with running(work(broken=False), "mail"):
        await until(lambda: len(seen) == 4)
    assert seen == ["1", "2", "3", "4"]


async def test_errors_may_be_logged_and_passed_over(app: App, caplog: pytest.LogCaptureFixture) -> None:
    await app.queue("mail").enqueue_many(range(2), ids=["1", "2"])
    subscription = app.subscribe("mail", after=0, on_error="log")
    seen: list[str] = []

    @subscription.on()
    def note(event: Event) -> None:
        seen.append(event.id)
        if event.id == "1":
            raise RuntimeError("no ink")

    with caplog.at_level(logging.ERROR):
        async with running(subscription, "mail"):
            await until(lambda: len(seen) == 2)

    assert seen == ["1", "2"]
    assert "the handler of event 1 (enqueued) of queue mail failed" in caplog.text


async def test_a_stop_lets_the_handler_finish_and_keeps_the_rest_for_later(app: App) -> None:
    await app.queue("mail").enqueue_many(range(3))
    subscription = app.subscribe("mail", consumer="billing", after=0)
    handled: list[int] = []

    @subscription.on()
    async def note(event: Event) -> None:
        handled.append(event.seq)
        subscription.stop()

    await asyncio.wait_for(subscription.run(), 10)

    assert handled == [1]
    assert [consumer.offset for consumer in await app.queue("mail").consumers()] == [1]


async def test_a_cancelled_run_keeps_its_place(app: App) -> None:
    await app.queue("mail").enqueue_many(range(3))
    subscription = app.subscribe("mail", consumer="billing", after=0)
    stuck = asyncio.Event()

    @subscription.on()
    async def note(event: Event) -> None:
        if event.seq == 3:
            stuck.set()
            await asyncio.sleep(60)

    run = asyncio.create_task(subscription.run())
    await asyncio.wait_for(stuck.wait(), 10)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run

    assert [consumer.offset for consumer in await app.queue("mail").consumers()] == [2]


async def test_the_place_is_kept_while_slow_handlers_are_at_a_page(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.client.subscription._LONGEST_UNSTORED_S", 0.0)
    queue = app.queue("mail")
    await queue.enqueue_many(range(5))
    subscription = app.subscribe("mail", consumer="billing", after=0)
    kept: list[int] = []

    @subscription.on("enqueued")
    async def slow(event: Event) -> None:
        kept.extend(consumer.offset for consumer in await queue.consumers())
        if event.seq == 5:
            subscription.stop()

    await subscription.run()
    assert kept == [0, 1, 2, 3, 4]


async def test_a_gap_ends_the_run_unless_a_handler_takes_it(app: App) -> None:
    for n in range(30):
        await app.queue("mail").enqueue(n)
    await trim(app, "mail", keep=5)
    with pytest.raises(EventsLost, match="no longer kept"):
        await asyncio.wait_for(app.subscribe("mail", after=0).run(), 10)

    subscription = app.subscribe("mail", after=0, consumer="billing")
    lost: list[tuple[str, int, int]] = []
    seen: list[int] = []
    subscription.on("enqueued")(lambda event: seen.append(event.seq))

    @subscription.on_lost
    async def note_loss(queue: str, error: EventsLost) -> None:
        lost.append((queue, error.first, error.last))

    async with running(subscription, "mail"):
        await until(lambda: bool(seen) and seen[-1] == 30)

    [(queue, first, last)] = lost
    assert (queue, first, seen[0]) == ("mail", 1, last + 1)
    assert [consumer.offset >= 30 for consumer in await app.queue("mail").consumers()] == [True]


async def test_a_consumer_from_another_log_begins_anew(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue("x")
    await queue.hold_events("billing", offset=1000)
    subscription = app.subscribe("mail", consumer="billing")
    lost: list[int] = []
    seen: list[int] = []
    subscription.on()(lambda event: seen.append(event.seq))
    subscription.on_lost(lambda _, error: lost.append(error.last))

    async with running(subscription, "mail"):
        await until(lambda: bool(seen))

    assert (lost, seen) == ([0], [1])
    assert [consumer.offset for consumer in await queue.consumers()] == [1]


async def test_a_store_that_goes_away_is_waited_for(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = await app.connect()
    away: dict[str, int] = {"read_events": 0, "hold_events": 0}

    def cut(name: str) -> None:
        verb = getattr(storage, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if away[name]:
                away[name] -= 1
                raise StorageUnavailable("no line")
            return await verb(*args, **kwargs)

        monkeypatch.setattr(storage, name, call)

    cut("read_events")
    cut("hold_events")
    subscription = app.subscribe("mail", consumer="billing")
    seen: list[str] = []
    subscription.on()(lambda event: seen.append(event.id))
    async with running(subscription, "mail"):
        away.update(read_events=2, hold_events=1)
        await app.queue("mail").enqueue("x", id="1")
        await until(lambda: seen == ["1"])
        await app.queue("mail").enqueue("x", id="2")
        await until(lambda: seen == ["1", "2"])

    assert away == {"read_events": 0, "hold_events": 0}
    assert [consumer.offset for consumer in await app.queue("mail").consumers()] == [2]
    assert "events cannot be read, trying again" in caplog.text
    assert "the position of consumer billing was not stored" in caplog.text


async def test_a_subscription_runs_once_at_a_time(memory_app: App) -> None:
    subscription = memory_app.subscribe("mail")
    async with running(subscription, "mail"):
        with pytest.raises(InvalidOption, match="already running"):
            await subscription.run()
    async with running(subscription, "mail") as again:
        assert not again.done()


@pytest.mark.parametrize(
    "options", [{"after": "latest"}, {"on_error": "ignore"}, {"hold": "1s"}, {"after": {"mail": -1}}]
)
async def test_options_that_cannot_be_are_refused(memory_app: App, options: Any) -> None:
    with pytest.raises(InvalidOption):
        memory_app.subscribe("mail", **options)
    with pytest.raises(InvalidOption, match="Types are"):
        memory_app.subscribe("mail").on("done")
    with pytest.raises(InvalidName):
        memory_app.subscribe("mail", consumer="a/b")


def test_synchronous_code_subscribes_too() -> None:
    app = App("memory://")
    mail = app.sync.queue("mail")
    subscription = app.sync.subscribe("mail", after=0, consumer="billing")
    seen: list[Any] = []

    @subscription.on("enqueued")
    def note(event: Event) -> None:
        # A handler that is no coroutine function may use the sync face.
        seen.append(mail.get(event.id).payload)
        if len(seen) == 2:
            subscription.stop()

    thread = threading.Thread(target=subscription.run)
    thread.start()
    mail.enqueue("x")
    mail.enqueue("y")
    thread.join(10)

    assert not thread.is_alive()
    assert seen == ["x", "y"]
    assert subscription.positions == {"mail": 2}
    app.sync.close()


KILLED = """
import asyncio, os, signal, sys
from penstock import App
app = App(sys.argv[1])
subscription = app.subscribe("mail", consumer="billing", after=0)

@subscription.on("enqueued")
async def note(event):
    print(event.id, flush=True)
    if event.id == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(subscription.run())
"""


async def test_a_killed_subscriber_goes_on_at_least_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with App(url) as app:
        queue = app.queue("mail")
        for n in range(6):
            await queue.enqueue(n, id=str(n))

        seen: list[list[str]] = []
        for victim in ("2", "5"):
            run = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-c", KILLED, url, victim],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert run.returncode == -9, run.stderr
            seen.append(run.stdout.split())

    assert [events[-1] for events in seen] == ["2", "5"]
    assert set(seen[0] + seen[1]) == {"0", "1", "2", "3", "4", "5"}
