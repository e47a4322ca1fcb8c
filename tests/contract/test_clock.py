"""Queue time: it goes on at the clock's pace, whatever the wall clock says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.core.job import DAY_MS, HOUR_MS, Dependency, Extras, NewJob
from penstock.core.lifecycle import State
from penstock.core.outcome import Complete
from penstock.storage.sqlite import queuerow
from penstock.storage.sqlite.clock import Reading, read_clocks
from penstock.storage.values import Change, Held, NewScheduler, QueueSettings
from tests.contract.factories import LEASE_MS, MINUTE_MS, Bench, redispatch

YEAR_MS = 365 * DAY_MS
JUMPS = [5_000, 3 * HOUR_MS, 10 * YEAR_MS]
BOTH_WAYS = [*JUMPS, *(-ms for ms in JUMPS)]
SHORT_LEASE_MS = 30_000

Outage = Callable[[int], Awaitable[None]]


@pytest.fixture
def outage(bench: Bench, engine: str, monkeypatch: pytest.MonkeyPatch) -> Outage:
    """The machine of the store is off for a while. Nobody can prove that: only the wall clock has gone on."""
    off_ms = 0

    async def pass_unseen(ms: int) -> None:
        nonlocal off_ms
        if engine not in ("memory", "sqlite"):
            await bench.jump(ms)
            return
        off_ms += ms
        clocks = read_clocks()
        started = Reading(clocks.wall_ms + off_ms, 1_000, clocks.boot + off_ms)

        def reading() -> Reading:
            now = read_clocks()
            return Reading(now.wall_ms + off_ms, 1_000 + now.boot_ms - clocks.boot_ms, started.boot)

        monkeypatch.setattr(queuerow, "read_clocks", reading)

    return pass_unseen


async def wrong_for_a_moment(bench: Bench, ms: int) -> None:
    """The clock jumps, calls are made, and it is set right again."""
    await bench.jump(ms)
    await bench.put("in between")
    await bench.storage.sweep(bench.queue)
    await bench.jump(-ms)
    await bench.storage.remove(bench.queue, ["in between"])


async def until_later(bench: Bench, than_ms: int) -> int:
    """Wait until real time has moved the queue's clock."""
    async with asyncio.timeout(30):
        while (now := await bench.now()) <= than_ms:
            await asyncio.sleep(0.001)
    return now


# Going on


@pytest.mark.parametrize("ms", BOTH_WAYS)
async def test_queue_time_goes_on_when_the_clock_was_wrong_for_a_moment(bench: Bench, ms: int) -> None:
    await bench.put()
    before = await bench.now()
    await bench.jump(ms)
    await bench.put("1")
    between = await until_later(bench, before)
    await bench.jump(-ms)
    await bench.put("2")
    after = await until_later(bench, between)
    assert before < between < after
    assert after - before < max(ms, 0) + 30_000


@pytest.mark.parametrize("ms", BOTH_WAYS)
async def test_a_delay_that_begins_while_the_clock_is_wrong_has_its_length(bench: Bench, ms: int) -> None:
    await bench.put("first")
    await bench.jump(ms)
    await bench.put(delay_ms=MINUTE_MS)
    await bench.jump(-ms)
    await bench.storage.remove(bench.queue, ["first"])
    assert (await bench.storage.sweep(bench.queue)).promoted == 0
    await bench.shift(MINUTE_MS)
    await bench.storage.sweep(bench.queue)
    assert [lease.id for lease in await bench.claim_all()] == ["job"]


@pytest.mark.parametrize("ms", BOTH_WAYS)
async def test_a_delay_that_begins_after_a_wrong_clock_has_its_length(bench: Bench, ms: int) -> None:
    await bench.put("first")
    await wrong_for_a_moment(bench, ms)
    await bench.storage.remove(bench.queue, ["first"])
    await bench.put(delay_ms=MINUTE_MS)
    await bench.shift(MINUTE_MS // 2)
    assert await bench.claim_all() == []
    await bench.shift(MINUTE_MS // 2)
    assert [lease.id for lease in await bench.claim_all()] == ["job"]


async def test_queue_time_converges_slowly_to_the_clock(bench: Bench) -> None:
    await bench.put()
    await bench.jump(-HOUR_MS)
    await bench.put("1")
    first = await bench.storage.clock(bench.queue)
    await until_later(bench, first.now_ms + 500)
    await bench.put("2")
    second = await bench.storage.clock(bench.queue)
    assert HOUR_MS - 5_000 < second.ahead_ms < first.ahead_ms < HOUR_MS + 10
    passed_ms = second.now_ms - first.now_ms
    assert first.ahead_ms - second.ahead_ms <= passed_ms / 50 + 2


# Instants


@pytest.mark.parametrize("ms", BOTH_WAYS)
async def test_run_at_means_the_clock_on_the_wall(bench: Bench, ms: int) -> None:
    await bench.put("first")
    await wrong_for_a_moment(bench, ms)
    await bench.storage.remove(bench.queue, ["first"])
    wall = (await bench.storage.clock(bench.queue)).wall_ms
    await bench.put(run_at_ms=wall + HOUR_MS)
    await bench.put("past", run_at_ms=wall - 1)
    assert [lease.id for lease in await bench.claim_all()] == ["past"]
    await bench.shift(HOUR_MS // 2)
    assert await bench.claim_all() == []
    await bench.shift(HOUR_MS // 2)
    assert [lease.id for lease in await bench.claim_all()] == ["job"]


@pytest.mark.parametrize("ms", [3 * HOUR_MS, 10 * YEAR_MS])
async def test_run_at_means_the_clock_on_the_wall_after_it_was_set_back(bench: Bench, ms: int) -> None:
    await bench.put("first")
    await bench.jump(-ms)
    await bench.storage.remove(bench.queue, ["first"])
    wall = (await bench.storage.clock(bench.queue)).wall_ms
    await bench.put(run_at_ms=wall + MINUTE_MS)
    await bench.shift(MINUTE_MS // 2)
    assert await bench.claim_all() == []
    await bench.shift(MINUTE_MS // 2)
    assert [lease.id for lease in await bench.claim_all()] == ["job"]


@pytest.mark.parametrize("ms", [3 * HOUR_MS, 10 * YEAR_MS])
async def test_run_at_of_a_scheduled_job_follows_the_clock_when_it_is_set_back(bench: Bench, ms: int) -> None:
    await bench.put("first")
    wall = (await bench.storage.clock(bench.queue)).wall_ms
    await bench.put(run_at_ms=wall + 2 * MINUTE_MS)
    await bench.put("delayed", delay_ms=2 * MINUTE_MS)
    await bench.jump(-ms)
    await bench.storage.remove(bench.queue, ["first"])
    await bench.shift(3 * MINUTE_MS)
    assert [lease.id for lease in await bench.claim_all()] == ["delayed"]
    await bench.shift(ms - 2 * MINUTE_MS)
    assert [lease.id for lease in await bench.claim_all()] == ["job"]


@pytest.mark.parametrize("ms", [3 * HOUR_MS, 10 * YEAR_MS])
async def test_run_at_of_a_scheduled_job_follows_the_clock_when_it_is_put_right(
    bench: Bench, ms: int
) -> None:
    await bench.put("first")
    await bench.jump(-ms)
    await bench.storage.remove(bench.queue, ["first"])
    wall = (await bench.storage.clock(bench.queue)).wall_ms
    await bench.put("soon", run_at_ms=wall + ms // 2)
    await bench.put("later", run_at_ms=wall + ms + 2 * MINUTE_MS)
    await bench.put("delayed", delay_ms=2 * MINUTE_MS)
    await bench.jump(ms)
    await bench.storage.sweep(bench.queue)
    assert [lease.id for lease in await bench.claim_all()] == ["soon"]
    await bench.shift(MINUTE_MS)
    assert await bench.claim_all() == []
    await bench.shift(MINUTE_MS)
    assert {lease.id for lease in await bench.claim_all()} == {"later", "delayed"}


async def test_many_scheduled_jobs_follow_the_clock_over_several_sweeps(bench: Bench) -> None:
    await bench.put("first")
    wall = (await bench.storage.clock(bench.queue)).wall_ms
    await bench.put_all([bench.new(str(n), run_at_ms=wall + MINUTE_MS + n // 5 * 1_000) for n in range(25)])
    await bench.jump(-HOUR_MS)
    swept = await bench.storage.sweep(bench.queue, limit=10)
    while swept.more:
        swept = await bench.storage.sweep(bench.queue, limit=10)
    await bench.shift(2 * MINUTE_MS)
    assert [lease.id for lease in await bench.claim_all()] == ["first"]
    await bench.shift(HOUR_MS)
    assert len(await bench.claim_all(count=100)) == 25


async def test_a_scheduled_job_that_got_a_delay_keeps_it_when_the_clock_is_set_back(bench: Bench) -> None:
    await bench.put("first")
    wall = (await bench.storage.clock(bench.queue)).wall_ms
    await bench.put(run_at_ms=wall + MINUTE_MS)
    await bench.storage.change(bench.queue, "job", Change(delay_ms=2 * MINUTE_MS))
    await bench.put("again", run_at_ms=wall + MINUTE_MS)
    await bench.put("again", delay_ms=2 * MINUTE_MS, conflict=redispatch())
    await bench.jump(-HOUR_MS)
    await bench.storage.remove(bench.queue, ["first"])
    await bench.shift(2 * MINUTE_MS)
    assert {lease.id for lease in await bench.claim_all()} == {"job", "again"}


async def test_a_job_that_waits_for_others_keeps_to_the_clock(bench: Bench) -> None:
    await bench.put("child")
    wall = (await bench.storage.clock(bench.queue)).wall_ms
    after = (Dependency(bench.queue, "child"),)
    await bench.put(run_at_ms=wall + MINUTE_MS, after=after, extras=Extras(flow="f", has_dependencies=True))
    assert await bench.state("job") is State.BLOCKED
    await bench.jump(-HOUR_MS)
    await bench.storage.sweep(bench.queue)
    await bench.settle(await bench.claim(), Complete(b""))
    await bench.shift(2 * MINUTE_MS)
    assert await bench.claim_all() == []
    await bench.shift(HOUR_MS)
    assert [lease.id for lease in await bench.claim_all()] == ["job"]


async def test_a_rerun_keeps_to_the_clock(bench: Bench) -> None:
    await bench.put()
    lease = await bench.claim()
    wall = (await bench.storage.clock(bench.queue)).wall_ms
    await bench.put(run_at_ms=wall + MINUTE_MS, conflict=redispatch())
    await bench.jump(-HOUR_MS)
    await bench.settle(lease, Complete(b""))
    await bench.shift(2 * MINUTE_MS)
    assert await bench.claim_all() == []
    await bench.jump(HOUR_MS)
    await bench.storage.sweep(bench.queue)
    assert [lease.id for lease in await bench.claim_all()] == ["job"]


# Leases


@pytest.mark.parametrize("ms", [*BOTH_WAYS, 45_000])
async def test_a_jump_takes_no_lease_from_its_holder(bench: Bench, ms: int) -> None:
    await bench.put()
    lease = await bench.claim(lease_ms=SHORT_LEASE_MS)
    await bench.jump(ms)
    assert (await bench.storage.sweep(bench.queue)).rescued == 0
    await bench.jump(-ms)
    assert (await bench.storage.sweep(bench.queue)).rescued == 0
    held = [Held(lease.id, lease.token)]
    [answer] = await bench.storage.extend(bench.queue, held, worker="worker", lease_ms=SHORT_LEASE_MS)
    assert answer == "extended"
    assert (await bench.settle(lease, Complete(b"1"))).applied


@pytest.mark.parametrize("ms", [45_000, 3 * HOUR_MS])
async def test_after_an_outage_a_lease_has_one_more_term_and_no_second_one(
    bench: Bench, outage: Outage, ms: int
) -> None:
    await bench.put()
    await bench.claim(lease_ms=SHORT_LEASE_MS)
    await outage(ms)
    assert (await bench.storage.sweep(bench.queue)).rescued == 0
    await bench.shift(SHORT_LEASE_MS - 5_000)
    assert (await bench.storage.sweep(bench.queue)).rescued == 0
    await bench.shift(5_000)
    assert (await bench.storage.sweep(bench.queue)).rescued == 1


async def test_a_rare_sweep_still_rescues(bench: Bench, outage: Outage) -> None:
    await bench.put()
    await bench.claim(lease_ms=SHORT_LEASE_MS)
    await outage(MINUTE_MS)
    assert (await bench.storage.sweep(bench.queue)).rescued == 0
    await outage(MINUTE_MS)
    assert (await bench.storage.sweep(bench.queue)).rescued == 1


async def test_a_lease_made_after_an_outage_has_its_own_term(bench: Bench, outage: Outage) -> None:
    await bench.put()
    await outage(31 * DAY_MS)
    await bench.claim(lease_ms=SHORT_LEASE_MS)
    await bench.shift(SHORT_LEASE_MS)
    assert (await bench.storage.sweep(bench.queue)).rescued == 1


async def test_a_long_lease_keeps_what_was_left_of_it(bench: Bench, outage: Outage) -> None:
    await bench.put()
    await bench.claim(lease_ms=20 * MINUTE_MS)
    await bench.shift(5 * MINUTE_MS)
    await outage(HOUR_MS)
    await bench.storage.sweep(bench.queue)
    left_ms = (await bench.job()).lease_until_ms - await bench.now()
    assert 14 * MINUTE_MS < left_ms <= 15 * MINUTE_MS


# What an outage makes due


async def test_after_an_outage_due_jobs_are_due_immediately(bench: Bench, outage: Outage) -> None:
    await bench.put(delay_ms=HOUR_MS)
    await outage(31 * DAY_MS)
    assert [lease.id for lease in await bench.claim_all()] == ["job"]


async def test_after_an_outage_old_records_go_a_while_later(bench: Bench, outage: Outage) -> None:
    await bench.bring(State.FAILED)
    await outage(31 * DAY_MS)
    assert (await bench.storage.sweep(bench.queue)).pruned == 0
    await bench.shift(15 * MINUTE_MS)
    assert (await bench.storage.sweep(bench.queue)).pruned == 1


async def test_a_queue_that_is_used_once_a_month_is_pruned(bench: Bench, outage: Outage) -> None:
    await bench.bring(State.FAILED)
    for _ in range(2):
        await outage(31 * DAY_MS)
        await bench.storage.sweep(bench.queue)
    assert await bench.ids(State.FAILED) == []


# Nothing is deleted on the strength of one reading


@pytest.mark.parametrize("ms", [31 * DAY_MS, 10 * YEAR_MS])
async def test_a_jump_deletes_nothing(bench: Bench, ms: int) -> None:
    await bench.storage.configure(bench.queue, QueueSettings(events_age_ms=DAY_MS))
    await bench.bring(State.FAILED, "failed")
    await bench.bring(State.COMPLETED, "completed")
    await bench.storage.hold_events(bench.queue, "reader", offset=0, ttl_ms=DAY_MS)
    await bench.jump(ms)
    for _ in range(2):
        swept = await bench.storage.sweep(bench.queue)
        assert (swept.pruned, swept.trimmed) == (0, 0)
    assert (await bench.put("completed")).status == "completed"
    await bench.jump(-ms)
    await bench.shift(20 * MINUTE_MS)
    swept = await bench.storage.sweep(bench.queue)
    assert (swept.pruned, swept.trimmed) == (0, 0)
    assert [one.name for one in await bench.storage.consumers(bench.queue)] == ["reader"]
    assert await bench.ids(State.FAILED) == ["failed"]


async def test_what_a_wrong_clock_spared_lives_out_its_time_and_no_longer(
    bench: Bench, outage: Outage
) -> None:
    await bench.bring(State.FAILED, "before")
    await outage(10 * YEAR_MS)
    await bench.storage.sweep(bench.queue)
    await bench.jump(-10 * YEAR_MS)
    await bench.put("x")
    await bench.storage.remove(bench.queue, ["x"])
    await bench.bring(State.COMPLETED, "after", result_ttl_ms=HOUR_MS)
    await bench.shift(29 * DAY_MS)
    await bench.storage.sweep(bench.queue)
    assert await bench.ids(State.FAILED) == ["before"]
    assert await bench.ids(State.COMPLETED) == []
    await bench.shift(2 * DAY_MS)
    await bench.storage.sweep(bench.queue)
    assert await bench.ids(State.FAILED) == []


# Schedulers go by the wall clock


@pytest.mark.parametrize("ms", BOTH_WAYS)
async def test_a_slot_compares_with_the_wall_clock(bench: Bench, ms: int) -> None:
    await bench.put()
    await wrong_for_a_moment(bench, ms)
    now = (await bench.storage.schedulers(bench.queue)).now_ms
    assert abs(now - (await bench.storage.clock(bench.queue)).wall_ms) < 30_000
    await bench.storage.put_scheduler(bench.queue, NewScheduler("tick", b"", now + MINUTE_MS))
    late = now + MINUTE_MS
    fired = await bench.storage.fire(bench.queue, "tick", slot_ms=late, next_ms=0, job=NewJob("job"))
    assert not fired.fired
    await bench.shift(MINUTE_MS)
    fired = await bench.storage.fire(bench.queue, "tick", slot_ms=late, next_ms=0, job=NewJob("job"))
    assert fired.fired


@pytest.mark.parametrize("ms", [3 * HOUR_MS, 10 * YEAR_MS])
async def test_after_the_clock_was_set_back_a_sweep_names_slots_that_lie_ahead(bench: Bench, ms: int) -> None:
    await bench.put()
    now = (await bench.storage.schedulers(bench.queue)).now_ms
    slot = now + ms + MINUTE_MS
    await bench.jump(ms)
    await bench.storage.put_scheduler(bench.queue, NewScheduler("tick", b"", slot))
    assert (await bench.storage.sweep(bench.queue)).due == ()
    await bench.jump(-ms)
    [due] = (await bench.storage.sweep(bench.queue)).due
    assert (due.name, due.slot_ms) == ("tick", slot)
    assert abs(due.now_ms - now) < 30_000
    assert not await bench.storage.move_slot(bench.queue, "tick", slot_ms=slot + 1, next_ms=now + 1)
    assert await bench.storage.move_slot(bench.queue, "tick", slot_ms=slot, next_ms=now + MINUTE_MS)
    [moved] = (await bench.storage.schedulers(bench.queue)).schedulers
    assert moved.next_ms == now + MINUTE_MS
    await bench.shift(11 * MINUTE_MS)
    assert [due.slot_ms for due in (await bench.storage.sweep(bench.queue)).due] == [now + MINUTE_MS]


# An old lease is still rescued


async def test_a_steady_clock_gives_no_lease_a_second_term(bench: Bench) -> None:
    await bench.put()
    await bench.claim()
    await bench.shift(LEASE_MS)
    assert (await bench.storage.sweep(bench.queue)).rescued == 1
