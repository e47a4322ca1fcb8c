"""promote: scheduled jobs wait from now on."""

from __future__ import annotations

import pytest

from penstock.core.lifecycle import EventType, State
from tests.contract.factories import MINUTE_MS, Bench, Seen, other_states, start_states

E, S = EventType, State


@pytest.mark.parametrize("state", start_states("promote"))
async def test_a_scheduled_job_waits_at_the_end_of_the_line(bench: Bench, state: State) -> None:
    await bench.bring(state)
    await bench.put("other")
    await bench.events()

    assert await bench.storage.promote(bench.queue, ["job"]) == ["promoted"]

    assert await bench.state() is S.WAITING
    assert await bench.counts() == {S.WAITING: 2}
    assert await bench.seen() == [Seen(E.PROMOTED, "job", S.WAITING)]
    assert [lease.id for lease in await bench.claim_all()] == ["other", "job"]


async def test_wait_ms_of_a_claim_counts_from_the_promotion(bench: Bench) -> None:
    await bench.put(delay_ms=9 * MINUTE_MS)
    await bench.shift(5 * MINUTE_MS)
    await bench.storage.promote(bench.queue, ["job"])
    await bench.shift(MINUTE_MS)

    await bench.claim()

    event = (await bench.events())[-1]
    assert event.type is E.CLAIMED
    assert MINUTE_MS <= event.wait_ms < 2 * MINUTE_MS


@pytest.mark.parametrize("state", other_states("promote"))
async def test_a_job_in_another_state_is_left_alone(bench: Bench, state: State) -> None:
    await bench.bring(state)
    picture = await bench.picture()

    assert await bench.storage.promote(bench.queue, ["job"]) == ["not_scheduled"]
    assert await bench.picture() == picture


async def test_a_batch_acts_item_after_item(bench: Bench) -> None:
    await bench.put_all([bench.new(id, delay_ms=MINUTE_MS) for id in "abc"])
    await bench.events()

    answers = await bench.storage.promote(bench.queue, ["c", "nobody", "a", "c"])

    assert answers == ["promoted", "not_found", "promoted", "not_scheduled"]
    assert await bench.ids(S.WAITING) == ["c", "a"]
    assert await bench.seen() == [Seen(E.PROMOTED, "c", S.WAITING), Seen(E.PROMOTED, "a", S.WAITING)]
    assert await bench.storage.promote(bench.queue, []) == []
