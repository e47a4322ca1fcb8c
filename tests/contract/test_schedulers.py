"""Schedulers: a slot makes exactly one job, whoever fires it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.core.job import Dedup, Extras, NewJob
from penstock.core.lifecycle import State
from penstock.core.limits import Bucket, Limit
from penstock.core.outcome import Cancel, Complete, Fail, Outcome
from penstock.errors import CostTooHigh
from penstock.storage import open_storage
from penstock.storage.values import Fired, NewScheduler, Scheduler
from tests.contract.factories import BOOM, MINUTE_MS, Bench, redispatch

HOUR_MS = 60 * MINUTE_MS


class Clockwork:
    """A scheduler named ``tick`` on a bench."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.storage = bench.storage
        self.queue = bench.queue

    async def now(self) -> int:
        return (await self.storage.schedulers(self.queue)).now_ms

    async def put(
        self, *, next_in_ms: int = -1, name: str = "tick", spec: bytes = b"spec", **fields: Any
    ) -> int:
        """Its first slot: a millisecond ago unless said otherwise."""
        next_ms = await self.now() + next_in_ms
        await self.storage.put_scheduler(self.queue, NewScheduler(name, spec, next_ms, **fields))
        return next_ms

    async def look(self, name: str = "tick") -> Scheduler:
        [found] = (await self.storage.schedulers(self.queue, [name])).schedulers
        return found

    async def fire(self, slot_ms: int, next_ms: int = 0, *, id: str = "job", **fields: Any) -> Fired:
        job = self.bench.new(id, **fields)
        return await self.storage.fire(self.queue, "tick", slot_ms=slot_ms, next_ms=next_ms, job=job)

    async def fire_repeating(self, slot_ms: int, id: str = "job", **fields: Any) -> Fired:
        extras = Extras(scheduler="tick", slot_ms=slot_ms, repeats=True)
        return await self.fire(slot_ms, id=id, extras=extras, **fields)


@pytest.fixture
def clockwork(bench: Bench) -> Clockwork:
    return Clockwork(bench)


# put, list, remove


async def test_a_scheduler_is_kept_as_it_was_put(clockwork: Clockwork) -> None:
    put = NewScheduler("näm e", b"\x00\xff", 1234, limit=5, end_ms=10**13, repeat_ms=0)
    assert await clockwork.storage.put_scheduler(clockwork.queue, put) == "created"
    found = await clockwork.look("näm e")
    assert found == Scheduler("näm e", b"\x00\xff", 1234, False, 0, 5, 10**13, 0, "", False)
    assert clockwork.queue in await clockwork.storage.queues()


async def test_schedulers_are_listed_by_name(clockwork: Clockwork) -> None:
    for name in ("b", "a", "c"):
        await clockwork.put(name=name)
    listed = await clockwork.storage.schedulers(clockwork.queue)
    assert [one.name for one in listed.schedulers] == ["a", "b", "c"]
    asked = await clockwork.storage.schedulers(clockwork.queue, ["c", "nobody", "a"])
    assert [one.name for one in asked.schedulers] == ["a", "c"]
    assert (await clockwork.storage.schedulers("elsewhere")).schedulers == []


async def test_the_same_spec_changes_nothing(clockwork: Clockwork) -> None:
    await clockwork.put(next_in_ms=HOUR_MS)
    before = await clockwork.look()
    again = NewScheduler("tick", b"spec", 99, limit=9)
    assert await clockwork.storage.put_scheduler(clockwork.queue, again) == "unchanged"
    assert await clockwork.look() == before


async def test_another_spec_keeps_the_count_and_the_pause(clockwork: Clockwork) -> None:
    slot = await clockwork.put()
    await clockwork.fire(slot, slot + HOUR_MS)
    await clockwork.storage.pause_scheduler(clockwork.queue, "tick")
    changed = NewScheduler("tick", b"other", 4321, limit=7, end_ms=10**13)
    assert await clockwork.storage.put_scheduler(clockwork.queue, changed) == "updated"
    assert await clockwork.look() == Scheduler("tick", b"other", 4321, True, 1, 7, 10**13, None, "job", False)


async def test_another_spec_may_keep_the_next_slot(clockwork: Clockwork) -> None:
    next_ms = await clockwork.put(next_in_ms=HOUR_MS)
    await clockwork.put(next_in_ms=5, spec=b"other", keep_next=True)
    found = await clockwork.look()
    assert (found.spec, found.next_ms) == (b"other", next_ms)


async def test_a_removed_scheduler_is_gone_and_its_jobs_stay(clockwork: Clockwork) -> None:
    slot = await clockwork.put()
    await clockwork.fire(slot, slot + 1)
    assert await clockwork.storage.remove_scheduler(clockwork.queue, "tick")
    assert not await clockwork.storage.remove_scheduler(clockwork.queue, "tick")
    assert not (await clockwork.fire(slot + 1)).fired
    assert (await clockwork.storage.sweep(clockwork.queue)).due == ()
    assert await clockwork.bench.ids(State.WAITING) == ["job"]


# due and fire


async def test_a_sweep_names_what_is_due_and_when_the_next_slot_comes(clockwork: Clockwork) -> None:
    now = await clockwork.now()
    for name, next_ms in {"late": now - 5, "later": now - 9, "soon": now + HOUR_MS, "none": 0}.items():
        spec = name.encode()
        await clockwork.storage.put_scheduler(clockwork.queue, NewScheduler(name, spec, next_ms))
    swept = await clockwork.storage.sweep(clockwork.queue)
    assert [(due.name, due.slot_ms, due.spec) for due in swept.due] == [
        ("later", now - 9, b"later"),
        ("late", now - 5, b"late"),
    ]
    assert all(due.now_ms >= now for due in swept.due)
    assert swept.slot_wait_ms is not None
    assert HOUR_MS - 30_000 < swept.slot_wait_ms <= HOUR_MS
    assert swept.wait_ms == swept.slot_wait_ms
    assert len((await clockwork.storage.sweep(clockwork.queue, limit=1)).due) == 1


async def test_a_fire_puts_in_the_job_and_moves_on(clockwork: Clockwork) -> None:
    slot = await clockwork.put()
    fired = await clockwork.fire(
        slot, slot + HOUR_MS, payload=b"payload", extras=Extras(slot_ms=slot, scheduler="tick")
    )
    assert fired.fired
    assert fired.enqueued is not None
    assert (fired.enqueued.id, fired.enqueued.status) == ("job", "queued")
    found = await clockwork.look()
    assert (found.next_ms, found.fired, found.last_id, found.awaiting) == (slot + HOUR_MS, 1, "job", False)
    lease = await clockwork.bench.claim()
    assert (lease.payload, lease.extras) == (b"payload", Extras(slot_ms=slot, scheduler="tick"))


async def test_a_slot_is_fired_once(clockwork: Clockwork) -> None:
    slot = await clockwork.put()
    answers = await asyncio.gather(*(clockwork.fire(slot, slot + HOUR_MS, id=f"job {i}") for i in range(5)))
    assert [answer.fired for answer in answers].count(True) == 1
    assert sum((await clockwork.bench.counts()).values()) == 1
    assert (await clockwork.look()).fired == 1


async def test_a_slot_that_has_not_come_is_not_fired(clockwork: Clockwork) -> None:
    slot = await clockwork.put(next_in_ms=HOUR_MS)
    assert await clockwork.fire(slot) == Fired(False)
    await clockwork.bench.shift(HOUR_MS + 1000)
    assert (await clockwork.fire(slot)).fired


async def test_another_slot_than_the_next_is_not_fired(clockwork: Clockwork) -> None:
    slot = await clockwork.put()
    before = await clockwork.bench.picture()
    assert await clockwork.fire(slot - 1) == Fired(False)
    unknown = await clockwork.storage.fire(clockwork.queue, "nobody", slot_ms=1, next_ms=2, job=NewJob("job"))
    assert unknown == Fired(False)
    assert await clockwork.bench.picture() == before


async def test_the_job_of_a_slot_follows_the_rules_of_enqueue(clockwork: Clockwork) -> None:
    await clockwork.bench.put("earlier", dedup=Dedup("key"))
    slot = await clockwork.put()
    fired = await clockwork.fire(slot, slot + 1, dedup=Dedup("key"), delay_ms=MINUTE_MS)
    assert fired.enqueued is not None
    assert (fired.enqueued.id, fired.enqueued.status) == ("earlier", "duplicate")
    again = await clockwork.fire(slot + 1, slot + 2, delay_ms=MINUTE_MS, priority=3, ttl_ms=HOUR_MS)
    assert again.enqueued is not None
    assert again.enqueued.state is State.SCHEDULED
    assert (await clockwork.look()).fired == 2


async def test_a_slot_whose_job_costs_too_much_is_refused_and_stays_due(clockwork: Clockwork) -> None:
    await clockwork.storage.limit(clockwork.queue, "narrow", Limit(bucket=Bucket(10, 1, 1000)))
    slot = await clockwork.put()
    before = await clockwork.bench.picture()
    with pytest.raises(CostTooHigh, match=r"costs 11.*holds 10"):
        await clockwork.fire(slot, slot + 1, extras=Extras(group="narrow", cost=11))
    assert await clockwork.bench.picture() == before
    assert ((await clockwork.look()).next_ms, (await clockwork.look()).fired) == (slot, 0)
    assert (await clockwork.fire(slot, slot + 1, extras=Extras(group="narrow", cost=10))).fired


async def test_no_slot_comes_after_the_limit(clockwork: Clockwork) -> None:
    slot = await clockwork.put(limit=2, next_in_ms=-10)
    await clockwork.fire(slot, slot + 1, id="one")
    await clockwork.fire(slot + 1, slot + 2, id="two")
    found = await clockwork.look()
    assert (found.fired, found.next_ms) == (2, 0)
    assert (await clockwork.storage.sweep(clockwork.queue)).due == ()


async def test_a_paused_scheduler_is_not_due(clockwork: Clockwork) -> None:
    slot = await clockwork.put()
    assert await clockwork.storage.pause_scheduler(clockwork.queue, "tick")
    swept = await clockwork.storage.sweep(clockwork.queue)
    assert (swept.due, swept.slot_wait_ms) == ((), None)
    assert not (await clockwork.fire(slot)).fired
    assert await clockwork.storage.resume_scheduler(clockwork.queue, "tick")
    assert (await clockwork.fire(slot)).fired


async def test_a_slot_that_passed_in_a_pause_gives_way_to_the_one_given(clockwork: Clockwork) -> None:
    slot = await clockwork.put()
    await clockwork.storage.pause_scheduler(clockwork.queue, "tick")
    await clockwork.storage.resume_scheduler(clockwork.queue, "tick", next_ms=slot + HOUR_MS)
    assert (await clockwork.look()).next_ms == slot + HOUR_MS
    await clockwork.storage.resume_scheduler(clockwork.queue, "tick", next_ms=slot + 2 * HOUR_MS)
    assert (await clockwork.look()).next_ms == slot + HOUR_MS


@pytest.mark.parametrize("verb", ["pause_scheduler", "resume_scheduler", "remove_scheduler"])
async def test_an_unknown_name_is_reported(clockwork: Clockwork, verb: str) -> None:
    assert not await getattr(clockwork.storage, verb)(clockwork.queue, "nobody")


async def test_another_client_fires_a_schedule_added_here(clockwork: Clockwork, store_url: str) -> None:
    if "processes" not in clockwork.storage.capabilities:
        pytest.skip("the engine's data is seen by one storage only")
    slot = await clockwork.put()
    other = open_storage(store_url)
    await other.open()
    try:
        fired = await other.fire(clockwork.queue, "tick", slot_ms=slot, next_ms=0, job=NewJob("job"))
    finally:
        await other.close()
    assert fired.fired


# After completion


@pytest.mark.parametrize(
    "outcome", [Complete(b""), Fail(BOOM, final=True), Cancel("asked")], ids=["complete", "fail", "cancel"]
)
async def test_every_settle_that_ends_the_job_sets_the_next_slot(
    clockwork: Clockwork, outcome: Outcome
) -> None:
    slot = await clockwork.put(repeat_ms=HOUR_MS)
    await clockwork.fire_repeating(slot)
    found = await clockwork.look()
    assert (found.next_ms, found.awaiting) == (0, True)
    swept = await clockwork.storage.sweep(clockwork.queue)
    assert (swept.due, swept.slot_wait_ms, swept.awaiting) == ((), None, True)
    await clockwork.bench.shift(MINUTE_MS - 1000)
    before = await clockwork.now()
    await clockwork.bench.settle(await clockwork.bench.claim(), outcome)
    found = await clockwork.look()
    assert before + HOUR_MS <= found.next_ms <= await clockwork.now() + HOUR_MS
    assert not found.awaiting
    assert not (await clockwork.storage.sweep(clockwork.queue)).awaiting


async def test_a_retry_does_not_set_the_next_slot(clockwork: Clockwork) -> None:
    slot = await clockwork.put(repeat_ms=0)
    await clockwork.fire_repeating(slot)
    await clockwork.bench.settle(await clockwork.bench.claim(), Fail(BOOM, retry_in_ms=0))
    assert (await clockwork.look()).awaiting
    await clockwork.bench.settle(await clockwork.bench.claim(), Complete(b""))
    assert (await clockwork.storage.sweep(clockwork.queue)).due != ()


async def test_cancel_removal_expiry_and_the_end_of_all_jobs_set_the_next_slot(clockwork: Clockwork) -> None:
    storage, queue = clockwork.storage, clockwork.queue
    slot = await clockwork.put(repeat_ms=0)

    async def next_slot() -> int:
        [due] = (await storage.sweep(queue)).due
        return due.slot_ms

    await clockwork.fire_repeating(slot, "cancelled")
    await storage.cancel(queue, ["cancelled"])
    await clockwork.fire_repeating(await next_slot(), "removed")
    await storage.remove(queue, ["removed"])
    await clockwork.fire_repeating(await next_slot(), "drained", delay_ms=MINUTE_MS)
    await storage.drain(queue, scheduled=True)
    await clockwork.fire_repeating(await next_slot(), "expired", ttl_ms=1000)
    await clockwork.bench.shift(2000)
    await storage.sweep(queue)
    await clockwork.fire_repeating(await next_slot(), "stalled", max_stalls=0)
    await clockwork.bench.claim(lease_ms=1000)
    await clockwork.bench.shift(2000)
    await storage.sweep(queue)
    await clockwork.fire_repeating(await next_slot(), "obliterated")
    await storage.obliterate(queue)
    await clockwork.fire_repeating(await next_slot(), "last")
    assert (await clockwork.look()).fired == 7


async def test_a_job_that_was_not_queued_counts_as_ended(clockwork: Clockwork) -> None:
    await clockwork.bench.put("job")
    slot = await clockwork.put(repeat_ms=HOUR_MS)
    fired = await clockwork.fire_repeating(slot)
    assert fired.enqueued is not None
    assert fired.enqueued.status == "duplicate"
    found = await clockwork.look()
    assert found.next_ms >= slot + HOUR_MS
    assert not found.awaiting


async def test_only_the_awaited_life_of_the_job_counts(clockwork: Clockwork) -> None:
    slot = await clockwork.put(repeat_ms=HOUR_MS)
    await clockwork.fire_repeating(slot)
    lease = await clockwork.bench.claim()
    await clockwork.bench.put("job", conflict=redispatch())
    await clockwork.bench.settle(lease, Complete(b""))
    next_ms = (await clockwork.look()).next_ms
    await clockwork.bench.shift(MINUTE_MS)
    await clockwork.bench.settle(await clockwork.bench.claim(), Complete(b""))  # the rerun
    assert (await clockwork.look()).next_ms == next_ms


async def test_no_slot_follows_a_completion_after_the_end_or_the_limit(clockwork: Clockwork) -> None:
    slot = await clockwork.put(repeat_ms=HOUR_MS, end_ms=await clockwork.now() + MINUTE_MS)
    await clockwork.fire_repeating(slot)
    await clockwork.bench.settle(await clockwork.bench.claim(), Complete(b""))
    assert (await clockwork.look()).next_ms == 0
    slot = await clockwork.put(repeat_ms=0, limit=2, spec=b"limited")
    await clockwork.fire_repeating(slot, "second")
    await clockwork.bench.settle(await clockwork.bench.claim(), Complete(b""))
    found = await clockwork.look()
    assert (found.fired, found.next_ms, found.awaiting) == (2, 0, False)


async def test_a_changed_scheduler_does_not_wait_for_the_job_of_its_old_spec(clockwork: Clockwork) -> None:
    slot = await clockwork.put(repeat_ms=0)
    await clockwork.fire_repeating(slot)
    next_ms = await clockwork.put(next_in_ms=HOUR_MS, spec=b"other", repeat_ms=0)
    await clockwork.bench.settle(await clockwork.bench.claim(), Complete(b""))
    assert (await clockwork.look()).next_ms == next_ms


async def test_check_mends_a_scheduler_that_waits_for_a_job_that_is_gone(clockwork: Clockwork) -> None:
    slot = await clockwork.put(repeat_ms=0)
    await clockwork.fire_repeating(slot)
    assert (await clockwork.storage.check(clockwork.queue)).problems == {}
    await clockwork.bench.put("job", unchecked=True)  # a broken promise
    assert sum((await clockwork.storage.check(clockwork.queue)).problems.values()) == 1
    await clockwork.storage.check(clockwork.queue, repair=True)
    assert (await clockwork.storage.check(clockwork.queue)).problems == {}
    assert len((await clockwork.storage.sweep(clockwork.queue)).due) == 1
