"""The log: dense, in pages, followed, trimmed, held back by consumers."""

from __future__ import annotations

import asyncio

import pytest

from penstock.core.event import Gap
from penstock.core.lifecycle import EventType, State
from penstock.storage.values import Consumer, QueueSettings
from tests.contract.factories import MINUTE_MS, Bench

E, S = EventType, State

HOUR_MS = 60 * MINUTE_MS


async def put_one_by_one(bench: Bench, count: int) -> None:
    """So many entries of one event each."""
    for i in range(count):
        await bench.put(f"job-{i}")


async def keep(bench: Bench, **settings: int | None) -> None:
    await bench.storage.configure(bench.queue, QueueSettings(**settings))  # type: ignore[arg-type]


async def first_kept(bench: Bench) -> int:
    """The oldest event there is, after making sure that the gap before it is told."""
    page = await bench.storage.read_events(bench.queue, after=0)
    first = page.events[0].seq if page.events else page.last + 1
    assert page.gap == (Gap(1, first - 1) if first > 1 else None)
    return first


async def test_an_unused_queue_has_an_empty_log(bench: Bench) -> None:
    page = await bench.storage.read_events(bench.queue, after=0)

    assert (page.events, page.next, page.last, page.gap) == ([], 0, 0, None)


async def test_the_sequence_is_dense_over_calls_and_batches(bench: Bench) -> None:
    await bench.put_all([bench.new(str(i)) for i in range(10)])
    await bench.put("single")
    await bench.claim_all(4)
    await bench.storage.cancel(bench.queue, ["9", "single"])

    page = await bench.storage.read_events(bench.queue, after=0)

    assert [event.seq for event in page.events] == list(range(1, 18))
    types = [E.ENQUEUED] * 11 + [E.CLAIMED] * 4 + [E.CANCELLED] * 2
    assert [event.type for event in page.events] == types
    assert (page.next, page.last, page.gap) == (17, 17, None)


async def test_reading_goes_on_after_any_offset_even_within_an_entry(bench: Bench) -> None:
    await bench.put_all([bench.new(str(i)) for i in range(10)])

    page = await bench.storage.read_events(bench.queue, after=4)

    assert [event.seq for event in page.events] == list(range(5, 11))
    assert [event.id for event in page.events] == [str(i) for i in range(4, 10)]


async def test_pages_join_without_a_hole_or_an_overlap(bench: Bench) -> None:
    await put_one_by_one(bench, 7)
    await bench.put_all([bench.new(f"many-{i}") for i in range(5)])
    read: list[int] = []
    sizes: list[int] = []
    while len(read) < 12:
        page = await bench.storage.read_events(bench.queue, after=len(read), limit=3)
        read += [event.seq for event in page.events]
        sizes.append(len(page.events))
        assert (page.next, page.last) == (len(read), 12)

    assert read == list(range(1, 13))
    assert sizes[:2] == [3, 3]


async def test_reading_from_the_end_gives_nothing(bench: Bench) -> None:
    await put_one_by_one(bench, 3)

    page = await bench.storage.read_events(bench.queue, after=3)

    assert (page.events, page.next, page.last, page.gap) == ([], 3, 3, None)


async def test_time_does_not_go_back_in_the_log(bench: Bench) -> None:
    await put_one_by_one(bench, 3)
    await bench.shift(MINUTE_MS)
    await bench.claim_all()

    times = [event.at_ms for event in await bench.events()]

    assert times == sorted(times)
    assert times[-1] - times[0] >= MINUTE_MS


async def test_the_epoch_stays_the_same_and_is_not_empty(bench: Bench) -> None:
    before = (await bench.storage.read_events(bench.queue, after=0)).epoch
    await put_one_by_one(bench, 2)
    await bench.storage.obliterate(bench.queue)

    after = await bench.storage.read_events(bench.queue, after=0)

    assert after.epoch
    assert before in ("", after.epoch)
    assert (await bench.storage.read_events(bench.queue, after=1)).epoch == after.epoch


# tail


async def test_tail_gives_what_is_there_immediately(bench: Bench) -> None:
    await put_one_by_one(bench, 3)

    page = await bench.storage.tail(bench.queue, after=1, timeout_ms=30_000)

    assert [event.seq for event in page.events] == [2, 3]
    assert (page.next, page.last) == (3, 3)


@pytest.mark.parametrize("before", [0, 2])
async def test_tail_waits_for_the_next_event(bench: Bench, before: int) -> None:
    await put_one_by_one(bench, before)
    tailing = asyncio.create_task(bench.storage.tail(bench.queue, after=before, timeout_ms=30_000))
    await bench.storage.counts(bench.queue)  # a round trip: the reader has gone to sleep

    await bench.put("new")

    async with asyncio.timeout(10):
        page = await tailing
    assert [(event.seq, event.id) for event in page.events] == [(before + 1, "new")]


async def test_tail_ends_empty_when_its_time_is_over(bench: Bench) -> None:
    await put_one_by_one(bench, 2)

    page = await bench.storage.tail(bench.queue, after=2, timeout_ms=20)

    assert (page.events, page.next, page.last) == ([], 2, 2)


# Trimming


async def test_nothing_is_trimmed_but_by_a_sweep(bench: Bench) -> None:
    await keep(bench, events_count=10)
    await put_one_by_one(bench, 29)
    assert await first_kept(bench) == 1

    swept = await bench.storage.sweep(bench.queue)

    assert await first_kept(bench) == 21
    assert swept.trimmed == 20


async def test_a_reader_that_fell_behind_is_notified_of_the_gap(bench: Bench) -> None:
    await keep(bench, events_count=10)
    await put_one_by_one(bench, 29)
    await bench.storage.sweep(bench.queue)

    behind = await bench.storage.read_events(bench.queue, after=5)
    ahead = await bench.storage.read_events(bench.queue, after=20)

    assert behind.gap == Gap(6, 20)
    assert [event.seq for event in behind.events] == list(range(21, 31))
    assert behind.next == 30
    assert ahead.gap is None
    assert len(ahead.events) == 10


async def test_a_log_trimmed_to_nothing_still_reports_the_gap(bench: Bench) -> None:
    await keep(bench, events_count=0)
    await put_one_by_one(bench, 5)
    await bench.storage.sweep(bench.queue)

    page = await bench.storage.read_events(bench.queue, after=2)

    assert (page.events, page.next, page.last, page.gap) == ([], 6, 6, Gap(3, 6))
    await bench.put("next")
    [event] = (await bench.storage.read_events(bench.queue, after=6)).events
    assert event.seq == 7


async def test_an_entry_of_many_events_is_kept_whole(bench: Bench) -> None:
    await keep(bench, events_count=10)
    await bench.put_all([bench.new(f"old-{i}") for i in range(20)])
    await bench.put_all([bench.new(f"new-{i}") for i in range(15)])

    await bench.storage.sweep(bench.queue)

    first = await first_kept(bench)
    page = await bench.storage.read_events(bench.queue, after=first - 1)
    assert len(page.events) >= 10
    assert first > 1
    assert page.last == 36


async def test_old_events_are_trimmed_by_age(bench: Bench) -> None:
    await keep(bench, events_age_ms=HOUR_MS)
    await put_one_by_one(bench, 4)
    await bench.shift(HOUR_MS)
    await bench.put("young")

    await bench.storage.sweep(bench.queue)

    assert await first_kept(bench) == 6


async def test_events_are_trimmed_by_bytes(bench: Bench) -> None:
    await put_one_by_one(bench, 100)
    await keep(bench, events_bytes=2000)

    await bench.storage.sweep(bench.queue)

    assert 1 < await first_kept(bench) <= 101


# Consumers


async def test_a_named_consumer_holds_events_back(bench: Bench) -> None:
    await keep(bench, events_count=10)
    await put_one_by_one(bench, 29)
    await bench.storage.hold_events(bench.queue, "reader", offset=5, ttl_ms=HOUR_MS)
    await bench.storage.hold_events(bench.queue, "faster", offset=15, ttl_ms=HOUR_MS)

    await bench.storage.sweep(bench.queue)
    assert await first_kept(bench) == 6

    await bench.storage.hold_events(bench.queue, "reader", offset=12, ttl_ms=HOUR_MS)
    await bench.storage.sweep(bench.queue)
    assert await first_kept(bench) == 13

    await bench.storage.release_events(bench.queue, "reader")
    await bench.storage.sweep(bench.queue)
    assert await first_kept(bench) == 16


async def test_a_consumer_that_is_ahead_does_not_make_more_be_trimmed(bench: Bench) -> None:
    await keep(bench, events_count=10)
    await put_one_by_one(bench, 29)
    await bench.storage.hold_events(bench.queue, "reader", offset=30, ttl_ms=HOUR_MS)

    await bench.storage.sweep(bench.queue)

    assert await first_kept(bench) == 21


async def test_an_offset_never_goes_back(bench: Bench) -> None:
    await put_one_by_one(bench, 10)
    await bench.storage.hold_events(bench.queue, "reader", offset=7, ttl_ms=HOUR_MS)
    [before] = await bench.storage.consumers(bench.queue)
    await bench.shift(MINUTE_MS)

    await bench.storage.hold_events(bench.queue, "reader", offset=3, ttl_ms=HOUR_MS)

    [after] = await bench.storage.consumers(bench.queue)
    assert isinstance(after, Consumer)
    assert (after.name, after.offset) == ("reader", 7)
    assert after.expires_at_ms >= before.expires_at_ms + MINUTE_MS


async def test_an_abandoned_consumer_is_forgotten(bench: Bench) -> None:
    await keep(bench, events_count=10)
    await put_one_by_one(bench, 29)
    await bench.storage.hold_events(bench.queue, "gone", offset=0, ttl_ms=MINUTE_MS)
    await bench.shift(MINUTE_MS)

    await bench.storage.sweep(bench.queue)  # trims first, then forgets
    await bench.storage.sweep(bench.queue)

    assert await bench.storage.consumers(bench.queue) == []
    assert await first_kept(bench) == 21


async def test_a_consumer_holds_nothing_back_beyond_the_hard_cap(bench: Bench) -> None:
    await keep(bench, events_count=10, events_hard_cap=20)
    await put_one_by_one(bench, 49)
    await bench.storage.hold_events(bench.queue, "slow", offset=5, ttl_ms=HOUR_MS)

    await bench.storage.sweep(bench.queue)

    assert await first_kept(bench) == 31
    page = await bench.storage.read_events(bench.queue, after=5)
    assert page.gap == Gap(6, 30)


async def test_releasing_an_unknown_consumer_does_nothing(bench: Bench) -> None:
    await bench.storage.release_events(bench.queue, "nobody")

    assert await bench.storage.consumers(bench.queue) == []
