"""drain: waiting jobs are removed, and scheduled ones if asked for; bounded per call."""

from __future__ import annotations

import pytest

from penstock.core.job import Dependency, Extras
from penstock.core.lifecycle import EventType, State
from penstock.core.limits import Limit
from penstock.core.outcome import Complete, Suspend
from penstock.storage.values import Bulk, Finished
from tests.contract.factories import MINUTE_MS, STATES, Bench, Seen

E, S = EventType, State


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("state", STATES)
async def test_only_waiting_and_scheduled_jobs_and_those_their_group_blocks_are_removed(
    bench: Bench, state: State, scheduled: bool
) -> None:
    await bench.bring(state)
    picture = await bench.picture()
    await bench.events()

    bulk = await bench.storage.drain(bench.queue, scheduled=scheduled)

    if state in (S.WAITING, S.BLOCKED) or (state is S.SCHEDULED and scheduled):
        assert bulk == Bulk(1)
        assert await bench.find() is None
        assert await bench.counts() == {}
        assert await bench.seen() == [Seen(E.REMOVED, "job", "")]
    else:
        assert bulk == Bulk(0)
        assert await bench.picture() == picture


async def test_waiting_jobs_go_first_in_order_then_scheduled_ones(bench: Bench) -> None:
    await bench.put("c", delay_ms=2 * MINUTE_MS)
    await bench.put("d", delay_ms=3 * MINUTE_MS)
    await bench.put("b")
    await bench.put("a", priority=-1)
    await bench.events()

    assert await bench.storage.drain(bench.queue, scheduled=True) == Bulk(4)
    assert [event.id for event in await bench.events()] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("limit", [3, 1000])
async def test_all_members_of_a_capped_group_are_removed(bench: Bench, limit: int) -> None:
    await bench.storage.limit(bench.queue, "*", Limit(concurrency=1))
    await bench.put_all([bench.new(f"j{i}", extras=Extras(group="g")) for i in range(10)])
    await bench.put("later", delay_ms=MINUTE_MS)
    await bench.events()

    done, cursor, calls = 0, "", 0
    while calls == 0 or cursor:
        bulk = await bench.storage.drain(bench.queue, limit=limit, cursor=cursor)
        done, cursor, calls = done + bulk.done, bulk.cursor, calls + 1
        assert calls < 20, "drain does not end"

    assert done == 10
    assert await bench.counts() == {S.SCHEDULED: 1}
    assert [event.id for event in await bench.events()] == [f"j{i}" for i in (*range(1, 10), 0)]
    page = await bench.storage.groups(bench.queue)
    assert not any(group.blocked or group.waiting for group in page.groups)


async def test_a_member_that_is_unblocked_while_it_goes_on_is_removed(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "*", Limit(concurrency=1))
    await bench.put_all([bench.new(f"j{i}", extras=Extras(group="g")) for i in range(10)])

    bulk = await bench.storage.drain(bench.queue, limit=3)
    await bench.settle(await bench.claim(), Complete())
    while bulk.cursor:
        bulk = await bench.storage.drain(bench.queue, limit=3, cursor=bulk.cursor)

    assert await bench.counts() == {S.COMPLETED: 1}


async def test_jobs_that_wait_for_others_or_for_a_signal_stay(bench: Bench) -> None:
    await bench.bring(S.ACTIVE, "child")
    tied = Extras(flow="flow", has_dependencies=True)
    await bench.put("parent", after=(Dependency(bench.queue, "child"),), extras=tied)
    lease = await bench.bring(S.ACTIVE, "suspended")
    assert lease
    await bench.settle(lease, Suspend("go"))

    assert await bench.storage.drain(bench.queue, scheduled=True) == Bulk(0)
    assert await bench.counts() == {S.ACTIVE: 1, S.BLOCKED: 2}


async def test_waiters_of_a_drained_job_are_notified_of_its_cancellation(bench: Bench) -> None:
    answer = await bench.put(notify="ear")

    await bench.storage.drain(bench.queue)

    assert await bench.storage.listen(bench.queue, "ear", timeout_ms=5000) == [
        Finished("job", answer.incarnation, S.CANCELLED)
    ]


async def test_many_jobs_are_drained_a_bounded_number_at_a_time(bench: Bench) -> None:
    await bench.put_all([bench.new(f"w{i}") for i in range(25)])
    await bench.put_all([bench.new(f"s{i}", delay_ms=MINUTE_MS) for i in range(25)])

    done, cursor, calls = 0, "", 0
    while calls == 0 or cursor:
        bulk = await bench.storage.drain(bench.queue, scheduled=True, limit=10, cursor=cursor)
        assert bulk.done <= 10
        done, cursor, calls = done + bulk.done, bulk.cursor, calls + 1
        assert calls < 20, "it does not end"

    assert done == 50
    assert await bench.counts() == {}


@pytest.mark.parametrize("priority", [0, -1])
async def test_jobs_that_come_while_it_goes_on_are_spared(bench: Bench, priority: int) -> None:
    await bench.put_all([bench.new(f"old-{i}") for i in range(15)])

    bulk = await bench.storage.drain(bench.queue, limit=10)
    await bench.put_all([bench.new(f"new-{i}", priority=priority) for i in range(15)])
    done, calls = bulk.done, 1
    while bulk.cursor:
        bulk = await bench.storage.drain(bench.queue, limit=10, cursor=bulk.cursor)
        done, calls = done + bulk.done, calls + 1
        assert calls < 20, "drain does not end"

    assert done == 15
    assert await bench.ids(S.WAITING) == [f"new-{i}" for i in range(15)]
