"""Groups: jobs that share a key, a cap, an order, a rate or a bucket; and how they go on whatever happens to one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.core.job import Extras, Lease
from penstock.core.lifecycle import EventType, State
from penstock.core.limits import Bucket, GroupState, Limit, Rate
from penstock.core.outcome import Complete, Fail, Limited, Release, Snooze, Suspend
from penstock.errors import CostTooHigh
from penstock.storage.values import Change, Report, Settlement, Take
from tests.contract.factories import BOOM, LEASE_MS, MINUTE_MS, Bench, redispatch

S, E = State, EventType
STRICT = Limit(concurrency=1)
CAPPED = Limit(concurrency=3)
TWO_A_MINUTE = Limit(rate=Rate(2, MINUTE_MS))
LONG_MS = 100 * MINUTE_MS


async def put(bench: Bench, *ids: str, key: str = "key", cost: int = 1, **fields: Any) -> None:
    extras = Extras(group=key, cost=cost)
    await bench.put_all([bench.new(id, extras=extras, **fields) for id in ids])


async def claim(bench: Bench, count: int = 100) -> list[Lease]:
    return await bench.claim_all(count, lease_ms=LONG_MS)


async def ids(bench: Bench, count: int = 100) -> list[str]:
    return [lease.id for lease in await claim(bench, count)]


async def limit(bench: Bench, limit: Limit | None, key: str = "key") -> None:
    await bench.storage.limit(bench.queue, key, limit)


async def group(bench: Bench, key: str = "key") -> GroupState | None:
    page = await bench.storage.groups(bench.queue)
    return {state.key: state for state in page.groups}.get(key)


async def sound(bench: Bench) -> bool:
    return not any((await bench.storage.check(bench.queue)).problems.values())


# A cap


async def test_every_event_of_a_member_names_its_group(bench: Bench) -> None:
    retried, failing, other = (bench.new(id, extras=Extras(group="g"), attempts=2) for id in ("a", "b", "c"))
    await bench.put_all([retried, failing, other, bench.new("alone")])
    first, second, third, alone = [await bench.claim() for _ in range(4)]
    await bench.settle(first, Snooze(0))
    await bench.settle(second, Fail(BOOM))
    await bench.settle(third, Release())
    await bench.settle(alone, Complete())
    await bench.settle(await bench.claim(), Complete())
    await bench.settle(await bench.claim(), Fail(BOOM, final=True))
    await bench.storage.cancel(bench.queue, ["a", "b", "c"])
    await bench.storage.retry(bench.queue, ["a", "b", "c"])
    await bench.storage.change(bench.queue, "b", Change(priority=3))
    lease = await bench.claim()
    await bench.storage.report(bench.queue, [Report(lease.id, lease.token, progress=b"1")])
    await bench.storage.cancel(bench.queue, [lease.id])
    await bench.shift(LEASE_MS)
    await bench.storage.sweep(bench.queue)
    await bench.storage.remove(bench.queue, ["a", "b", "c"])
    events = await bench.events()
    assert {event.group for event in events if event.id != "alone"} == {"g"}
    assert {event.group for event in events if event.id == "alone"} == {""}
    assert {event.type for event in events} >= {
        *(
            E.ENQUEUED,
            E.CLAIMED,
            E.SNOOZED,
            E.RETRYING,
            E.RELEASED,
            E.COMPLETED,
            E.FAILED,
            E.CANCELLED,
            E.RETRIED,
        ),
        *(E.CHANGED, E.PROGRESSED, E.CANCELLING, E.REMOVED),
    }


async def test_without_a_limit_a_group_is_a_label(bench: Bench) -> None:
    await put(bench, "a", "b", "c")

    assert await ids(bench) == ["a", "b", "c"]
    assert await group(bench) == GroupState("key", 0, 3, 0, 0, False)


async def test_at_most_the_cap_are_waiting_and_active_and_the_rest_is_blocked(bench: Bench) -> None:
    await limit(bench, CAPPED)
    await put(bench, "a", "b")
    await put(bench, "c", "d", "e")

    assert await bench.counts() == {S.WAITING: 3, S.BLOCKED: 2}
    assert (await bench.job("d")).blocked_by == "group"
    assert await ids(bench) == ["a", "b", "c"]
    assert await group(bench) == GroupState("key", 0, 3, 0, 2, False, "concurrency")
    assert [event.group for event in await bench.events() if event.type is E.CLAIMED] == ["key"] * 3


async def test_every_end_admits_the_next_which_the_same_call_may_claim(bench: Bench) -> None:
    await limit(bench, CAPPED)
    await put(bench, "a", "b", "c", "d", "e")
    leases = await claim(bench)
    await bench.events()

    done = [Settlement(lease.id, lease.token, Complete()) for lease in leases[:2]]
    batch = await bench.storage.settle(bench.queue, done, take=Take("w", 10, LONG_MS))

    assert batch.claimed
    assert [lease.id for lease in batch.claimed.leases] == ["d", "e"]
    kinds = [(event.type, event.id) for event in await bench.events()]
    assert kinds == [
        *((E.COMPLETED, id) for id in "ab"),
        *((E.UNBLOCKED, id) for id in "de"),
        *((E.CLAIMED, id) for id in "de"),
    ]


async def test_a_limit_of_every_group_holds_for_those_without_their_own(bench: Bench) -> None:
    await limit(bench, STRICT, "*")
    await limit(bench, Limit(), "free")
    for key in ("x", "y", "free"):
        await put(bench, f"{key}1", f"{key}2", key=key)

    assert sorted(await ids(bench)) == ["free1", "free2", "x1", "y1"]


async def test_groups_take_turns(bench: Bench) -> None:
    await limit(bench, STRICT, "*")
    await put(bench, "a1", "a2", "a3", key="a")
    await put(bench, "b1", "b2", "b3", key="b")

    ran: list[str] = []
    while leases := await claim(bench, 1):
        ran.append(leases[0].id)
        await bench.settle(leases[0], Complete())

    assert ran == ["a1", "b1", "a2", "b2", "a3", "b3"]
    assert await sound(bench)


async def test_blocked_members_come_in_by_priority_and_lifo_and_their_number(bench: Bench) -> None:
    await limit(bench, STRICT)
    await put(bench, "running")
    [lease] = await claim(bench)
    await put(bench, "fifo1", "fifo2")
    await put(bench, "lifo1", "lifo2", lifo=True)
    await put(bench, "urgent", priority=-1)
    await put(bench, "last", priority=1)
    await bench.storage.change(bench.queue, "fifo2", Change(priority=-2))

    ran = []
    while True:
        await bench.settle(lease, Complete())
        leases = await claim(bench)
        if not leases:
            break
        [lease] = leases
        ran.append(lease.id)

    assert ran == ["fifo2", "urgent", "lifo2", "lifo1", "fifo1", "last"]


async def test_a_limit_set_later_counts_the_members_there_are(bench: Bench) -> None:
    await put(bench, "a", "b", "c", "d")
    [first] = await claim(bench, 1)

    await limit(bench, Limit(concurrency=2))

    assert await ids(bench) == ["b"], "one runs, one more may"
    assert await bench.counts() == {S.ACTIVE: 2, S.BLOCKED: 2}
    await bench.settle(first, Complete())
    assert await ids(bench) == ["c"]
    assert await sound(bench)


async def test_a_raised_cap_admits_immediately_and_a_removed_one_admits_all(bench: Bench) -> None:
    await limit(bench, STRICT)
    await put(bench, "a", "b", "c", "d", "e")

    await limit(bench, Limit(concurrency=2))
    assert await bench.counts() == {S.WAITING: 2, S.BLOCKED: 3}

    await limit(bench, None)
    assert await bench.counts() == {S.WAITING: 5}
    assert await ids(bench) == ["a", "b", "c", "d", "e"]


async def test_a_changed_default_reaches_the_groups_without_their_own(bench: Bench) -> None:
    await limit(bench, STRICT, "*")
    await limit(bench, STRICT, "own")
    for key in ("x", "own"):
        await put(bench, f"{key}1", f"{key}2", key=key)

    await limit(bench, None, "*")

    assert await bench.counts() == {S.WAITING: 3, S.BLOCKED: 1}


# Strictly in order


async def test_the_slot_of_a_strict_group_is_held_through_backoff_and_snooze(bench: Bench) -> None:
    await limit(bench, STRICT)
    await put(bench, "a", "b")
    for outcome in (Fail(BOOM, retry_in_ms=MINUTE_MS), Snooze(MINUTE_MS)):
        [lease] = await claim(bench)
        assert lease.id == "a"
        await bench.settle(lease, outcome)
        assert await ids(bench) == []
        assert await group(bench) == GroupState("key", 0, 0, 1, 1, False, "concurrency")
        await bench.shift(MINUTE_MS)

    [lease] = await claim(bench)
    await bench.settle(lease, Complete())

    assert (lease.id, lease.run) == ("a", 3)
    assert await ids(bench) == ["b"]
    assert await sound(bench)


async def test_the_slot_of_a_strict_group_is_held_through_a_suspension(bench: Bench) -> None:
    await limit(bench, STRICT)
    await put(bench, "a", "b")
    await bench.settle((await claim(bench))[0], Suspend("go"))
    assert await ids(bench) == []
    assert await group(bench) == GroupState("key", 0, 0, 1, 1, False, "concurrency")

    await bench.storage.signal(bench.queue, "a", "go", b"")

    assert await ids(bench) == ["a"]
    assert await sound(bench)


@pytest.mark.parametrize(("cap", "next_one"), [(1, "a"), (2, "c")])
async def test_an_immediate_retry_goes_first_in_a_strict_group_and_last_in_others(
    bench: Bench, cap: int, next_one: str
) -> None:
    await limit(bench, Limit(concurrency=cap))
    await put(bench, "a", "b", "c")
    first, *_ = await claim(bench)

    await bench.settle(first, Fail(BOOM))

    assert await ids(bench) == [next_one]
    assert await sound(bench)


async def test_a_capped_group_gives_the_slot_of_a_scheduled_member_to_the_next(bench: Bench) -> None:
    await limit(bench, Limit(concurrency=2))
    await put(bench, "a", "b", "c")
    first, _ = await claim(bench)

    await bench.settle(first, Snooze(MINUTE_MS))

    assert await ids(bench) == ["c"]
    await bench.shift(MINUTE_MS)
    assert await ids(bench) == []
    assert await bench.state("a") is S.BLOCKED


@pytest.mark.parametrize("cap", [1, 2])
async def test_released_and_rescued_members_keep_their_place_and_their_slot(bench: Bench, cap: int) -> None:
    await limit(bench, Limit(concurrency=cap))
    await put(bench, "a", "b", "c")
    lease = await bench.claim(lease_ms=MINUTE_MS)
    await bench.settle(lease, Release())
    lease = await bench.claim(lease_ms=MINUTE_MS)
    assert lease.id == "a"

    await bench.shift(MINUTE_MS)
    await bench.storage.sweep(bench.queue)

    assert (await ids(bench, 1)) == ["a"]
    assert (await bench.job("a")).stalls == 1
    assert await sound(bench)


# Whatever ends or moves one


async def _complete(bench: Bench, lease: Lease) -> None:
    await bench.settle(lease, Complete())


async def _fail(bench: Bench, lease: Lease) -> None:
    await bench.settle(lease, Fail(BOOM, final=True))


async def _cancel(bench: Bench, lease: Lease) -> None:
    await bench.storage.cancel(bench.queue, [lease.id])
    await bench.settle(lease, Release())


async def _cancel_while_it_holds(bench: Bench, lease: Lease) -> None:
    await bench.settle(lease, Snooze(LONG_MS))
    await bench.storage.cancel(bench.queue, [lease.id])


async def _remove_while_it_holds(bench: Bench, lease: Lease) -> None:
    await bench.settle(lease, Snooze(LONG_MS))
    await bench.storage.remove(bench.queue, [lease.id])


async def _drain_while_it_holds(bench: Bench, lease: Lease) -> None:
    await bench.settle(lease, Snooze(LONG_MS))
    await bench.storage.drain(bench.queue, scheduled=True)
    await put(bench, "b")  # the first one was drained, too


async def _expire(bench: Bench, lease: Lease) -> None:
    await bench.settle(lease, Snooze(LONG_MS))
    await bench.shift(2 * MINUTE_MS)
    await bench.storage.sweep(bench.queue)


async def _replace(bench: Bench, lease: Lease) -> None:
    await bench.put(lease.id, unchecked=True, delay_ms=LONG_MS)


async def _rerun_without_ttl(bench: Bench, lease: Lease) -> None:
    await bench.put(lease.id, conflict=redispatch(), run_at_ms=2**42)
    await bench.settle(lease, Complete())


@pytest.mark.parametrize(
    "end",
    [
        _complete,
        _fail,
        _cancel,
        _cancel_while_it_holds,
        _remove_while_it_holds,
        _drain_while_it_holds,
        _expire,
        _replace,
        _rerun_without_ttl,
    ],
)
async def test_a_key_never_wedges(bench: Bench, end: Callable[[Bench, Lease], Awaitable[None]]) -> None:
    await limit(bench, STRICT)
    await put(bench, "a", ttl_ms=2 * MINUTE_MS)
    await put(bench, "b")
    [lease] = await claim(bench)
    assert await bench.state("b") is S.BLOCKED

    await end(bench, lease)

    assert await bench.state("b") is S.WAITING
    assert await ids(bench) == ["b"]
    assert await sound(bench)


@pytest.mark.parametrize("verb", ["cancel", "remove"])
@pytest.mark.parametrize("who", ["waiting", "first blocked", "all but the last"])
async def test_pending_members_may_be_removed_in_any_order(bench: Bench, verb: str, who: str) -> None:
    await limit(bench, STRICT)
    await put(bench, "a", "b", "c")
    gone = {"waiting": ["a"], "first blocked": ["b"], "all but the last": ["b", "a"]}[who]

    await getattr(bench.storage, verb)(bench.queue, gone)

    expected = [id for id in "abc" if id not in gone]
    for id in expected:
        [lease] = await claim(bench)
        assert lease.id == id
        await bench.settle(lease, Complete())
    assert await sound(bench)


async def test_a_waiting_member_that_expires_at_a_claim_admits_the_next(bench: Bench) -> None:
    await limit(bench, STRICT)
    await put(bench, "a", ttl_ms=MINUTE_MS)
    await put(bench, "b")
    await bench.shift(MINUTE_MS)

    first = await bench.storage.claim(bench.queue, Take("w", 5, LONG_MS))

    assert (first.leases, first.wait_ms) == ([], 0), "b was admitted: come again at once"
    assert await ids(bench) == ["b"]


async def test_a_member_delayed_while_it_waits_gives_its_slot_up(bench: Bench) -> None:
    await limit(bench, STRICT)
    await put(bench, "a", "b")

    assert await bench.storage.change(bench.queue, "a", Change(delay_ms=MINUTE_MS)) == "changed"
    assert await ids(bench) == ["b"]
    await bench.put("b2", extras=Extras(group="key"))
    await bench.shift(MINUTE_MS)
    assert await ids(bench) == []
    assert await bench.ids(S.BLOCKED) == ["b2", "a"]


async def test_a_retried_member_lines_up_again(bench: Bench) -> None:
    await limit(bench, STRICT)
    await put(bench, "a", "b", "c")
    await bench.settle((await claim(bench))[0], Fail(BOOM, final=True))

    await bench.storage.retry(bench.queue, ["a"])

    assert await bench.state("a") is S.BLOCKED
    ran = []
    while leases := await claim(bench):
        ran += [lease.id for lease in leases]
        await bench.settle(leases[0], Complete())
    assert ran == ["b", "c", "a"]


async def test_obliterate_empties_groups_and_leaves_their_limits(bench: Bench) -> None:
    await limit(bench, STRICT)
    await put(bench, "a", "b", "c")
    await claim(bench)

    await bench.storage.obliterate(bench.queue, force=True)

    assert await group(bench) is None
    await put(bench, "d", "e")
    assert await ids(bench) == ["d"]
    assert await sound(bench)


# Rates


async def test_a_rate_holds_in_every_stretch_and_the_group_is_looked_at_again_in_time(bench: Bench) -> None:
    await limit(bench, TWO_A_MINUTE)
    await put(bench, "a", "b", "c", "d", "e")
    await bench.put("other")

    assert await ids(bench, 1) == ["a"]
    await bench.shift(MINUTE_MS // 2)
    assert await ids(bench) == ["b", "other"]
    claimed = await bench.storage.claim(bench.queue, Take("w", 5, LONG_MS))
    assert claimed.wait_ms
    assert MINUTE_MS // 2 - 5000 < claimed.wait_ms <= MINUTE_MS // 2
    state = await group(bench)
    assert state
    assert (state.why, state.blocked) == ("rate", 3)
    assert state.wait_ms

    await bench.shift(claimed.wait_ms)
    assert await ids(bench) == ["c"]
    claimed = await bench.storage.claim(bench.queue, Take("w", 5, LONG_MS))
    assert claimed.wait_ms
    await bench.shift(claimed.wait_ms)
    assert await ids(bench) == ["d"]
    assert await sound(bench)


async def test_a_sweep_looks_at_groups_whose_time_has_come(bench: Bench) -> None:
    await limit(bench, TWO_A_MINUTE)
    await put(bench, "a", "b", "c")
    assert await ids(bench) == ["a", "b"]

    swept = await bench.storage.sweep(bench.queue)
    assert swept.wait_ms
    assert swept.wait_ms <= MINUTE_MS
    await bench.shift(MINUTE_MS)
    await bench.storage.sweep(bench.queue)

    assert await bench.state("c") is S.WAITING


async def test_a_retry_is_another_start(bench: Bench) -> None:
    await limit(bench, TWO_A_MINUTE)
    await put(bench, "a")
    for _ in range(2):
        [lease] = await claim(bench)
        await bench.settle(lease, Release())

    assert await ids(bench) == []
    assert await bench.state("a") is S.BLOCKED, "the claim sent it back"
    await bench.shift(MINUTE_MS)
    assert await ids(bench) == ["a"]


async def test_the_window_outlives_the_members(bench: Bench) -> None:
    await limit(bench, TWO_A_MINUTE)
    for id in ("a", "b"):
        await put(bench, id)
        await bench.settle((await claim(bench))[0], Complete())
    await put(bench, "c")
    assert await ids(bench) == []

    await bench.shift(MINUTE_MS)
    assert await ids(bench) == ["c"]


async def test_a_group_without_members_is_forgotten_once_its_window_is_empty(bench: Bench) -> None:
    await limit(bench, TWO_A_MINUTE)
    await put(bench, "a")
    await bench.settle((await claim(bench))[0], Complete())
    assert await group(bench) == GroupState("key", 0, 0, 0, 0, False)

    await bench.shift(MINUTE_MS)
    await bench.storage.sweep(bench.queue)

    assert await group(bench) is None


async def test_a_group_without_a_rate_is_forgotten_with_its_last_member(bench: Bench) -> None:
    await limit(bench, STRICT)
    await put(bench, "a")
    await bench.settle((await claim(bench))[0], Complete())

    assert await group(bench) is None


# Buckets


async def test_a_bucket_is_charged_what_jobs_cost_and_refills_with_time(bench: Bench) -> None:
    await limit(bench, Limit(bucket=Bucket(10, 5, MINUTE_MS)))
    await put(bench, "a", cost=6)
    await put(bench, "b", cost=4)
    await put(bench, "c", cost=5)
    await put(bench, "d", cost=0)

    assert await ids(bench) == ["a", "b"]
    state = await group(bench)
    assert state
    assert (state.why, state.blocked) == ("bucket", 2)
    assert state.wait_ms
    assert MINUTE_MS - 5000 < state.wait_ms <= MINUTE_MS
    await bench.shift(MINUTE_MS // 2)
    assert await ids(bench) == []
    await bench.shift(MINUTE_MS // 2)
    assert await ids(bench) == ["c", "d"]
    assert await sound(bench)


async def test_a_cost_above_the_capacity_is_refused_with_the_whole_call(bench: Bench) -> None:
    await limit(bench, Limit(bucket=Bucket(10, 1, 1000)))
    extras = Extras(group="key", cost=11)

    with pytest.raises(CostTooHigh, match=r"costs 11.*holds 10"):
        await bench.put_all([bench.new("fine"), bench.new("dear", extras=extras)])

    assert await bench.counts() == {}
    await bench.put("dear", extras=Extras(group="other", cost=11))


async def test_a_bucket_set_later_charges_a_dear_job_all_it_holds(bench: Bench) -> None:
    await limit(bench, STRICT)
    await put(bench, "first", "cheap")
    await put(bench, "dear", cost=100)
    await limit(bench, Limit(bucket=Bucket(2, 1, MINUTE_MS)))

    assert await ids(bench) == ["first", "cheap"]
    await bench.shift(MINUTE_MS)
    assert await ids(bench) == []
    await bench.shift(MINUTE_MS)
    assert await ids(bench) == ["dear"]


# Pausing and being asked


async def test_a_paused_group_gives_nothing_until_it_is_resumed(bench: Bench) -> None:
    await limit(bench, Limit(concurrency=2))
    await put(bench, "a", "b", "c")
    await bench.put("other")
    await bench.storage.pause(bench.queue, group="key")
    await put(bench, "d")
    await bench.events()

    assert await ids(bench) == ["other"]
    assert await bench.counts() == {S.ACTIVE: 1, S.BLOCKED: 4}
    assert await group(bench) == GroupState("key", 0, 0, 0, 4, True, "paused")
    seen = [(event.type, event.id) for event in await bench.events()]
    assert seen == [(E.BLOCKED, "a"), (E.BLOCKED, "b"), (E.CLAIMED, "other")]

    await bench.storage.resume(bench.queue, group="key")
    [event, *_] = await bench.events()
    assert (event.type, event.group) == (E.RESUMED, "key")
    assert await ids(bench) == ["a", "b"]
    assert await sound(bench)


async def test_pausing_a_group_twice_is_one_event(bench: Bench) -> None:
    for verb in ("resume", "pause", "pause", "resume"):
        await getattr(bench.storage, verb)(bench.queue, group="key")

    assert [event.type for event in await bench.events()] == [E.PAUSED, E.RESUMED]
    assert await group(bench) is None


@pytest.mark.parametrize("limit_of_group", [None, STRICT, CAPPED])
async def test_a_member_that_met_a_limit_out_there_holds_up_its_group_only(
    bench: Bench, limit_of_group: Limit | None
) -> None:
    await limit(bench, limit_of_group)
    await put(bench, "a", "b")
    [lease] = await claim(bench, 1)
    await bench.put("other")
    await bench.events()

    answer = await bench.settle(lease, Limited(MINUTE_MS))

    assert answer.state is S.BLOCKED
    [event] = await bench.events()
    assert (event.type, event.state, event.group) == (E.LIMITED, "blocked", "key")
    assert await ids(bench) == ["other"]
    state = await group(bench)
    assert state
    assert (state.why, state.waiting, state.blocked) == ("asked", 0, 2)
    claimed = await bench.storage.claim(bench.queue, Take("w", 5, LONG_MS))
    assert claimed.wait_ms
    await bench.shift(claimed.wait_ms)
    again = await claim(bench)
    assert again[0].id == "a"
    assert again[0].failures == 0
    assert await sound(bench)


async def test_a_member_may_hold_up_the_queue(bench: Bench) -> None:
    await put(bench, "a")
    await bench.put("other")
    [lease] = await claim(bench, 1)

    answer = await bench.settle(lease, Limited(MINUTE_MS, "queue"))

    assert answer.state is S.WAITING
    claimed = await bench.storage.claim(bench.queue, Take("w", 5, LONG_MS))
    assert (claimed.leases, claimed.limited) == ([], True)


# Looking


async def test_groups_are_listed_by_key_in_pages(bench: Bench) -> None:
    keys = sorted(["ü", "a", "b b", "🚰", "z"], key=str.encode)
    for key in keys:
        await put(bench, key, key=key)
    listed: list[str] = []
    cursor = ""

    while True:
        page = await bench.storage.groups(bench.queue, cursor=cursor, limit=2)
        listed += [state.key for state in page.groups]
        cursor = page.cursor
        if not cursor:
            break

    assert listed == keys


async def named(bench: Bench, *keys: str) -> list[GroupState]:
    return (await bench.storage.groups(bench.queue, keys=keys)).groups


async def test_a_group_paused_for_a_time_is_reported_while_none_of_its_jobs_is_blocked(
    bench: Bench,
) -> None:
    await put(bench, "a")
    await bench.storage.pause(bench.queue, group="key", duration_ms=MINUTE_MS)
    state = await group(bench)
    assert state
    assert (state.why, state.blocked) == ("asked", 0)
    assert state.wait_ms
    assert 0 < state.wait_ms <= MINUTE_MS

    await bench.shift(MINUTE_MS)

    assert not (after := await group(bench)) or after.why == ""


async def test_groups_are_read_by_key_in_the_order_asked_for(bench: Bench) -> None:
    await limit(bench, STRICT)
    await put(bench, "a", "b")
    await put(bench, "c", key="other")

    assert await named(bench, "other", "nobody", "key") == [
        GroupState("other", 1, 0, 0, 0, False),
        GroupState("nobody", 0, 0, 0, 0, False),
        GroupState("key", 1, 0, 0, 1, False, "concurrency"),
    ]


async def test_the_queue_says_which_pause_or_limit_of_its_own_holds_back_a_claim(bench: Bench) -> None:
    await bench.put_all([bench.new(id) for id in "abcd"])
    assert await named(bench, "") == [GroupState("", 4, 0, 0, 0, False)]

    await limit(bench, TWO_A_MINUTE, "")
    await claim(bench)
    [state] = await named(bench, "")
    assert (state.waiting, state.active, state.why) == (2, 2, "rate")
    assert state.wait_ms is not None
    assert 0 < state.wait_ms <= MINUTE_MS

    await limit(bench, Limit(concurrency=2), "")
    assert await named(bench, "") == [GroupState("", 2, 2, 0, 0, False, "concurrency")]

    await bench.storage.pause(bench.queue, duration_ms=MINUTE_MS)
    [state] = await named(bench, "")
    assert (state.why, state.paused) == ("asked", False)
    assert state.wait_ms is not None
    assert 0 < state.wait_ms <= MINUTE_MS

    await bench.storage.pause(bench.queue)
    assert await named(bench, "") == [GroupState("", 2, 2, 0, 0, True, "paused")]


async def test_a_check_finds_and_mends_nothing_wrong(bench: Bench) -> None:
    await limit(bench, STRICT, "*")
    await put(bench, "a", "b", "c")
    await put(bench, "x", "y", key="other")
    await bench.settle((await claim(bench))[0], Snooze(MINUTE_MS))

    checked = await bench.storage.check(bench.queue, repair=True)

    assert not any(checked.problems.values()), checked


async def test_members_of_many_groups_are_enqueued_and_settled_together(bench: Bench) -> None:
    await limit(bench, Limit(concurrency=2), key="*")
    jobs = [bench.new(f"{group}{n}", extras=Extras(group=group)) for n in range(4) for group in "xyz"]
    plain = [bench.new("plain"), bench.new("traced", extras=Extras(headers={"a": "b"}))]

    answers = await bench.put_all([*jobs, *plain])

    blocked = [answer.id for answer in answers if answer.state is S.BLOCKED]
    assert blocked == [f"{group}{n}" for n in (2, 3) for group in "xyz"]
    for answer in answers:
        assert (await bench.job(answer.id)).incarnation == answer.incarnation
    done = []
    while leases := await bench.claim_all(5):
        assert max(Counter(lease.id[0] for lease in leases).values()) <= 2
        done += [lease.id for lease in leases]
        assert await sound(bench)
        outcomes = [Settlement(lease.id, lease.token, Complete(b"")) for lease in leases]
        settled = await bench.storage.settle(bench.queue, outcomes)
        assert all(answer.applied for answer in settled.answers)
    assert sorted(done) == sorted(answer.id for answer in answers)
    assert await sound(bench)
