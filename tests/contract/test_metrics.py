"""metrics: what happened in each minute, for a day."""

from __future__ import annotations

from itertools import pairwise

from penstock.core.outcome import Complete, Fail, Outcome, Snooze
from penstock.storage.metrics import Minute
from penstock.storage.values import Settlement
from tests.contract.factories import BOOM, MINUTE_MS, Bench

HOUR_MS = 60 * MINUTE_MS


async def metrics(bench: Bench, last_ms: int = 24 * HOUR_MS) -> list[Minute]:
    return await bench.storage.metrics(bench.queue, last_ms=last_ms)


async def to_the_next_minute(bench: Bench) -> None:
    """Far enough from its end for the calls of a test."""
    await bench.storage.pause(bench.queue)
    page = await bench.storage.read_events(bench.queue, after=0)
    await bench.storage.resume(bench.queue)
    await bench.shift(MINUTE_MS - page.events[-1].at_ms % MINUTE_MS)


async def test_a_queue_in_which_nothing_happened_has_no_minutes(bench: Bench) -> None:
    assert await metrics(bench) == []
    await bench.storage.pause(bench.queue)
    assert await metrics(bench) == []


async def test_the_events_of_a_minute_are_counted_with_their_times(bench: Bench) -> None:
    await to_the_next_minute(bench)
    await bench.put_all([bench.new(f"job {number}") for number in range(3)])
    await bench.put("alone")
    await bench.shift(2000)
    leases = await bench.claim_all()
    await bench.shift(1000)
    retry, end = Fail(BOOM, retry_in_ms=MINUTE_MS), Fail(BOOM, final=True)
    outcomes: list[Outcome] = [Complete(b""), retry, end, Snooze(MINUTE_MS)]
    settlements = [
        Settlement(lease.id, lease.token, outcome) for lease, outcome in zip(leases, outcomes, strict=True)
    ]
    await bench.storage.settle(bench.queue, settlements)

    [minute] = await metrics(bench)

    assert minute.at_ms % MINUTE_MS == 0
    counts = (minute.enqueued, minute.claimed, minute.completed, minute.failed, minute.retried)
    assert counts == (4, 4, 1, 1, 1)
    assert 2000 <= minute.longest_wait_ms < 10_000
    assert 4 * 2000 <= minute.wait_ms <= 4 * minute.longest_wait_ms
    assert 1000 <= minute.longest_run_ms < 10_000
    assert 3 * 1000 <= minute.run_ms <= 3 * minute.longest_run_ms
    assert minute.mean_wait_ms == minute.wait_ms / 4
    assert minute.mean_run_ms == minute.run_ms / 3


async def test_the_counts_are_those_of_the_event_log(bench: Bench) -> None:
    await to_the_next_minute(bench)
    await bench.put_all([bench.new(f"job {number}", priority=number % 2) for number in range(50)])
    leases = await bench.claim_all()
    settlements = [Settlement(lease.id, lease.token, Complete(b"")) for lease in leases]
    await bench.storage.settle(bench.queue, settlements)

    [minute] = await metrics(bench)

    events = await bench.events()
    assert minute.enqueued == minute.claimed == minute.completed == 50
    assert minute.wait_ms == sum(event.wait_ms for event in events)
    assert minute.run_ms == sum(event.run_ms for event in events)


async def test_a_job_past_its_ttl_counts_as_failed(bench: Bench) -> None:
    await bench.put(ttl_ms=1)
    await bench.shift(2 * MINUTE_MS)
    await bench.storage.sweep(bench.queue)
    minutes = await metrics(bench)
    assert [(minute.enqueued, minute.failed) for minute in minutes] == [(1, 0), (0, 1)]


async def test_minutes_come_in_order_and_those_without_anything_are_left_out(bench: Bench) -> None:
    for number in range(3):
        await bench.put(f"job {number}")
        await bench.shift(5 * MINUTE_MS)

    minutes = await metrics(bench)

    assert [minute.enqueued for minute in minutes] == [1, 1, 1]
    gaps = [later.at_ms - earlier.at_ms for earlier, later in pairwise(minutes)]
    assert all(gap in (5 * MINUTE_MS, 6 * MINUTE_MS) for gap in gaps)
    assert await metrics(bench, last_ms=7 * MINUTE_MS) == minutes[2:]


async def test_a_day_is_kept_and_no_more(bench: Bench) -> None:
    await bench.put("old")
    await bench.shift(12 * HOUR_MS)
    await bench.put("young")
    await bench.shift(12 * HOUR_MS - 2 * MINUTE_MS)
    assert [minute.enqueued for minute in await metrics(bench)] == [1, 1]
    await bench.shift(3 * MINUTE_MS)
    assert [minute.enqueued for minute in await metrics(bench)] == [1]
    await bench.put("new")
    assert [minute.enqueued for minute in await metrics(bench)] == [1, 1]


async def test_metrics_outlive_the_jobs(bench: Bench) -> None:
    await bench.put()
    await bench.storage.obliterate(bench.queue)
    [minute] = await metrics(bench)
    assert minute.enqueued == 1
