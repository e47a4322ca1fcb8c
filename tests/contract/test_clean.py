"""clean: finished jobs of one state are removed by age; bounded per call."""

from __future__ import annotations

import pytest

from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import Complete
from penstock.storage.values import Bulk
from tests.contract.factories import MINUTE_MS, TERMINAL_STATES, Bench, Seen

E, S = EventType, State


@pytest.mark.parametrize("state", TERMINAL_STATES)
async def test_jobs_of_that_state_and_no_other_are_removed(bench: Bench, state: State) -> None:
    await bench.bring_all()
    before = await bench.counts()
    await bench.events()

    assert await bench.storage.clean(bench.queue, state) == Bulk(1)

    assert await bench.find(state.value) is None
    assert await bench.counts() == {other: n for other, n in before.items() if other is not state}
    assert await bench.seen() == [Seen(E.REMOVED, state.value, "")]
    assert not any((await bench.storage.check(bench.queue)).problems.values())


@pytest.mark.parametrize("state", TERMINAL_STATES)
async def test_only_jobs_that_ended_long_enough_ago_are_removed(bench: Bench, state: State) -> None:
    ttls = {"result_ttl_ms": 60 * MINUTE_MS, "failure_ttl_ms": 60 * MINUTE_MS}
    await bench.bring(state, "old", **ttls)
    await bench.shift(5 * MINUTE_MS)
    await bench.bring(state, "young", result_ttl_ms=20 * MINUTE_MS, failure_ttl_ms=20 * MINUTE_MS)

    assert await bench.storage.clean(bench.queue, state, older_than_ms=9 * MINUTE_MS) == Bulk(0)
    assert await bench.storage.clean(bench.queue, state, older_than_ms=4 * MINUTE_MS) == Bulk(1)
    assert await bench.ids(state) == ["young"]


async def test_many_jobs_are_cleaned_a_bounded_number_at_a_time(bench: Bench) -> None:
    await bench.put_all([bench.new(str(i)) for i in range(25)])
    for lease in await bench.claim_all():
        await bench.settle(lease, Complete())

    done, cursor, calls = 0, "", 0
    while calls == 0 or cursor:
        bulk = await bench.storage.clean(bench.queue, S.COMPLETED, limit=10, cursor=cursor)
        assert bulk.done <= 10
        done, cursor, calls = done + bulk.done, bulk.cursor, calls + 1
        assert calls < 20, "clean does not end"

    assert done == 25
    assert await bench.counts() == {}


async def test_the_young_are_passed_over_however_many_calls_it_takes(bench: Bench) -> None:
    await bench.put_all([bench.new(f"old-{i}", result_ttl_ms=60 * MINUTE_MS) for i in range(12)])
    for lease in await bench.claim_all():
        await bench.settle(lease, Complete())
    await bench.shift(5 * MINUTE_MS)
    await bench.put_all([bench.new(f"young-{i}", result_ttl_ms=20 * MINUTE_MS) for i in range(12)])
    for lease in await bench.claim_all():
        await bench.settle(lease, Complete())

    done, cursor, calls = 0, "", 0
    while calls == 0 or cursor:
        bulk = await bench.storage.clean(
            bench.queue, S.COMPLETED, older_than_ms=MINUTE_MS, limit=5, cursor=cursor
        )
        done, cursor, calls = done + bulk.done, bulk.cursor, calls + 1
        assert calls < 20, "clean does not end"

    assert done == 12
    assert sorted(await bench.ids(S.COMPLETED)) == sorted(f"young-{i}" for i in range(12))
