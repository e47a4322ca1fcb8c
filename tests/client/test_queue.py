"""Queues: payloads without a task, looking, operating, following the log."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import App, EventsLost, InvalidInput, InvalidOption, LeaseLost, State, StorageError
from penstock.storage.values import Held


@dataclass
class Order:
    number: int
    due: datetime


async def test_payloads_are_decoded_to_the_queue_s_types(app: App) -> None:
    queue = app.queue("orders", payload_type=Order, result_type=set[int])
    order = Order(7, datetime(2026, 1, 2, tzinfo=UTC))
    handle = await queue.enqueue(order)

    async with queue.claim() as job:
        assert job.payload == order
        job.result = {1, 2}

    assert await handle.result() == {1, 2}


@pytest.mark.parametrize(
    ("serde", "payload"), [("json", {"a": [1]}), ("msgpack", b"\x00"), ("raw", b"\xff\x00")]
)
async def test_serdes_are_chosen_per_queue(app: App, serde: str, payload: object) -> None:
    queue = app.queue("mail", serde=serde, result_serde="json")
    handle = await queue.enqueue(payload)

    async with queue.claim() as job:
        assert job.payload == payload
        job.result = "text"

    assert await handle.result() == "text"


async def test_a_raw_job_may_have_no_result(app: App) -> None:
    queue = app.queue("mail", serde="raw", result_serde="raw")
    handle = await queue.enqueue(b"x")
    async with queue.claim():
        pass

    assert await handle.result() == b""


async def test_a_payload_may_name_its_task_and_its_policy(app: App) -> None:
    handle = await app.queue("mail").enqueue({"to": "ada"}, task="send", attempts=9, id="x", priority=3)

    info = await handle.get()
    assert (info.id, info.task, info.priority, info.raw.options.attempts) == ("x", "send", 3, 9)


async def test_many_payloads_get_their_ids_or_new_ones(app: App) -> None:
    queue = app.queue("mail")

    named = await queue.enqueue_many(["a", "b"], ids=["1", "2"], priority=-1)
    unnamed = await queue.enqueue_many(str(n) for n in range(3))

    assert [handle.id for handle in named] == ["1", "2"]
    assert len({handle.id for handle in unnamed}) == 3
    with pytest.raises(InvalidInput, match="2 payloads but 1 ids"):
        await queue.enqueue_many(["a", "b"], ids=["1"])
    with pytest.raises(InvalidOption, match="ids="):
        await queue.enqueue_many(["a"], id="x")
    with pytest.raises(InvalidOption, match="Did you mean 'delay'"):
        await queue.enqueue("a", dealy="1s")  # type: ignore[call-arg]
    assert await queue.open() == 5


async def test_lengths_are_there_for_autoscaling(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue_many(range(3))
    await queue.enqueue("later", delay="1h")
    await queue.claim_one()

    assert [await queue.waiting(), await queue.active(), await queue.open()] == [2, 1, 4]
    assert (await queue.counts()).scheduled == 1


async def test_jobs_are_listed_page_by_page(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue_many(range(250))

    assert [info.payload async for info in queue.list_jobs("waiting")] == list(range(250))
    assert [info.payload async for info in queue.list_jobs(State.WAITING, limit=120)] == list(range(120))
    assert [info.payload async for info in queue.list_jobs("waiting", limit=2, reverse=True)] == [249, 248]
    assert [info async for info in queue.list_jobs("failed")] == []
    with pytest.raises(InvalidOption, match="waiting"):
        _ = [info async for info in queue.list_jobs("queued")]


async def test_a_job_is_shown_with_times_and_decoded_values(app: App) -> None:
    queue = app.queue("mail")
    before = datetime.now(UTC) - timedelta(seconds=1)
    await queue.enqueue({"to": "ada"}, id="a", ttl="1h", attempts=7, group="tenant", cost=5)
    async with queue.claim(worker="me") as job:
        assert (job.attempts, job.group, job.cost) == (7, "tenant", 5)
        job.result = 42
        running = await queue.get("a")
    info = await queue.get("a")

    assert (running.state, running.worker, running.result, running.finished_at) == (
        "active",
        "me",
        None,
        None,
    )
    assert info.enqueued_at is not None
    assert info.claimed_at is not None
    assert info.finished_at is not None
    assert info.kept_until is not None
    assert before < info.enqueued_at <= info.claimed_at <= info.finished_at < info.kept_until
    assert (info.payload, info.result, info.runs, info.failure) == ({"to": "ada"}, 42, 1, None)
    assert (info.attempts, info.group, info.cost) == (7, "tenant", 5)
    assert "mail/a" in repr(info)
    assert await queue.get_or_none("nobody") is None
    assert [job and job.id for job in await queue.get_many(["nobody", "a"])] == [None, "a"]


async def test_verbs_on_jobs_answer_by_id(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue_many(["x", "y"], ids=["a", "b"])
    await queue.enqueue("z", id="c", delay="1h")

    assert await queue.promote("c", "a", "nobody") == {
        "c": "promoted",
        "a": "not_scheduled",
        "nobody": "not_found",
    }
    assert await queue.cancel("a", "nobody") == {"a": "cancelled", "nobody": "not_found"}
    assert await queue.retry("a", "b") == {"a": "retried", "b": "not_failed"}
    assert await queue.remove("b") == {"b": "removed"}
    assert await queue.change("a", payload="new", priority=-4, delay="1h") == "changed"
    info = await queue.get("a")
    assert (info.payload, info.priority, info.state) == ("new", -4, State.SCHEDULED)
    assert await queue.change("nobody", result_ttl="1h") == "not_found"
    assert await queue.cancel() == {}


async def test_the_rerun_of_an_active_job_is_seen_and_cancelled_alone(app: App) -> None:
    queue = app.queue("mail")
    handle = await queue.enqueue("x", id="a")
    job = await queue.claim_one(wait=0)
    assert job is not None
    assert (await queue.enqueue("y", id="a", on_conflict="redispatch")).status == "rerun"
    info = await handle.get()
    assert info.has_rerun

    assert await handle.cancel(rerun_only=True) == "rerun_cancelled"
    assert await queue.cancel("a", "nobody", rerun_only=True) == {"a": "no_rerun", "nobody": "not_found"}

    assert await job.complete()
    assert await handle.refresh() is State.COMPLETED


async def test_a_handle_operates_on_its_job(app: App) -> None:
    queue = app.queue("mail")
    handle = await queue.enqueue("x", delay="1h")

    assert await handle.promote() == "promoted"
    assert await handle.cancel() == "cancelled"
    assert await handle.retry() == "retried"
    async with queue.claim():
        pass
    assert await handle.keep_result("5h")
    info = await handle.get()
    assert info.kept_until is not None
    assert info.finished_at is not None
    assert info.kept_until - info.finished_at == timedelta(hours=5)
    assert await handle.remove() == "removed"


async def test_bulk_verbs_go_on_until_they_are_through(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue_many(range(2_500), attempts=1)
    for job in await queue.claim_many(1_200):
        await job.fail("no", final=True)
    await queue.enqueue("later", delay="1h")

    assert await queue.retry_all() == 1_200
    assert await queue.drain() == 2_500
    assert await queue.open() == 1
    assert await queue.drain(scheduled=True) == 1
    await queue.enqueue_many(range(3))
    for job in await queue.claim_many(3):
        await job.complete()
    assert await queue.clean("completed", older_than="1h") == 0
    assert await queue.clean("completed") == 3
    with pytest.raises(InvalidOption, match="not a final state"):
        await queue.clean("waiting")


async def test_bulk_verbs_stop_at_their_limit(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue_many(range(2_500), attempts=1)
    for job in await queue.claim_many(2_500):
        await (job.complete() if job.payload < 1_200 else job.fail("no", final=True))

    assert await queue.clean("completed", limit=1_100) == 1_100
    assert await queue.retry_all(limit=1) == 1
    counts = await queue.counts()
    assert (counts.completed, counts.failed, counts.waiting) == (100, 1_299, 1)
    assert await queue.clean("completed", limit=1_100) == 100
    for limit in (0, -1, True):
        with pytest.raises(InvalidOption, match="limit"):
            await queue.retry_all(limit=limit)


@pytest.mark.parametrize("limit", [0, -1, 2.5, True])
async def test_a_listing_with_an_invalid_limit_is_refused(app: App, limit: Any) -> None:
    queue = app.queue("mail")
    job = await queue.enqueue(1)
    with pytest.raises(InvalidOption, match="limit"):
        await anext(queue.list_jobs("waiting", limit=limit))
    with pytest.raises(InvalidOption, match="limit"):
        await anext(queue.held("ledger", limit=limit))
    with pytest.raises(InvalidOption, match="limit"):
        await queue.logs(job.id, limit=limit)
    with pytest.raises(InvalidOption, match="limit"):
        await job.logs(limit=limit)
    with pytest.raises(InvalidOption, match="limit"):
        await queue.search("waiting", limit=limit)
    with pytest.raises(InvalidOption, match="start"):
        await job.logs(start=-1)


async def test_an_operator_can_end_the_lease_of_an_active_job(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue_many(range(3), ids=["a", "b", "c"])
    first = await queue.claim_one(lease="1h")
    assert first is not None

    assert await queue.end_leases("a", "b", "nobody") == {
        "a": "ended",
        "b": "not_active",
        "nobody": "not_found",
    }

    with pytest.raises(LeaseLost):
        await first.extend()
    assert not await first.complete()
    again = await queue.claim_one()
    assert again is not None
    assert (again.id, again.run, again.failures) == ("a", 2, 0)
    assert await again.complete()
    info = await queue.get("a")
    assert info.stalls == 1


async def test_a_holder_that_renews_its_lease_meanwhile_loses_it_all_the_same(memory_app: App) -> None:
    queue = memory_app.queue("mail")
    await queue.enqueue("x", id="a")
    job = await queue.claim_one(lease="1h")
    assert job is not None
    storage = await memory_app.connect()
    extend, renewals = storage.extend, 0

    async def renewed_once(*args: Any, **options: Any) -> Any:
        nonlocal renewals
        answer = await extend(*args, **options)
        renewals += 1
        if renewals == 1:
            await extend("mail", [Held("a", job.token)], worker="w", lease_ms=60_000)
        return answer

    storage.extend = renewed_once  # type: ignore[method-assign]
    assert await queue.end_leases("a") == {"a": "ended"}
    assert renewals == 2
    assert await queue.waiting() == 1


async def test_a_paused_queue_gives_nothing(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue("x")

    await queue.pause()
    assert await queue.claim_one(wait=0) is None
    assert (await queue.counts()).paused
    claiming = asyncio.create_task(queue.claim_one(wait="20s"))
    await asyncio.sleep(0.01)
    await queue.resume()

    assert await asyncio.wait_for(claiming, 10) is not None


async def test_obliterate_is_refused_while_jobs_run(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue_many(range(3))
    await queue.claim_one()

    with pytest.raises(StorageError):
        await queue.obliterate()
    assert await queue.obliterate(force=True) == 3
    checked = await queue.check(repair=True)
    assert (checked.records, dict(checked.problems)) == (0, {})


async def test_settings_change_one_by_one(app: App) -> None:
    queue = app.queue("mail")

    await queue.configure(keep_completed=10)
    await queue.configure(events_age="2d")

    settings = await queue.settings()
    assert (settings.keep_completed, settings.events_age_ms) == (10, 172_800_000)
    assert (await queue.configure(events_age=None)).events_age_ms is None
    with pytest.raises(InvalidOption, match="Did you mean 'keep_failed'"):
        await queue.configure(keep_faild=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidOption, match="keep_failed"):
        await queue.configure(keep_failed=-1)


async def test_workers_describe_themselves(app: App) -> None:
    storage = await app.connect()
    await storage.extend("mail", [], worker="w1", lease_ms=1000, info=b'{"host":"here"}')

    [worker] = await app.queue("mail").workers()

    assert (worker.id, worker.info) == ("w1", {"host": "here"})
    assert worker.seen_at.tzinfo is UTC
    assert worker.age < timedelta(seconds=10)


async def test_events_are_replayed_then_followed(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue_many(range(3))
    seen: list[tuple[int, str]] = []

    async def follow() -> None:
        async for event in queue.events(after=1):
            seen.append((event.seq, event.type))
            if event.type == "completed":
                return

    following = asyncio.create_task(follow())
    async with queue.claim():
        pass
    await asyncio.wait_for(following, 10)

    assert seen == [(2, "enqueued"), (3, "enqueued"), (4, "claimed"), (5, "completed")]
    assert [event.seq async for event in queue.events(follow=False)] == [1, 2, 3, 4, 5]
    assert [event.seq async for event in queue.events(after=None, follow=False)] == []


async def test_missing_events_are_reported_not_skipped(app: App) -> None:
    queue = app.queue("mail")
    await queue.hold_events("reader", offset=0)
    assert [consumer.name for consumer in await queue.consumers()] == ["reader"]
    await queue.release_events("reader")
    for n in range(30):
        await queue.enqueue(n)
    await queue.configure(events_count=5)
    storage = await app.connect()
    while (await storage.sweep("mail")).more:
        pass

    with pytest.raises(EventsLost, match="no longer kept") as lost:
        _ = [event async for event in queue.events(follow=False)]

    assert lost.value.first == 1
    rest = [event.seq async for event in queue.events(after=lost.value.last, follow=False)]
    assert rest[0] == lost.value.last + 1
