"""change: payload, priority, delay and result ttl of one job; all of it, or nothing."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.lifecycle import OPEN, EventType, State
from penstock.core.outcome import Release
from penstock.storage.values import Change
from tests.contract.factories import MINUTE_MS, STATES, TERMINAL_STATES, Bench, Seen

E, S = EventType, State

OPEN_STATES = [state for state in STATES if state in OPEN]


async def change(bench: Bench, id: str = "job", **fields: Any) -> str:
    return await bench.storage.change(bench.queue, id, Change(**fields))


@pytest.mark.parametrize("state", [state for state in OPEN_STATES if state is not S.ACTIVE])
async def test_payload_and_priority_of_a_pending_job_can_be_changed(bench: Bench, state: State) -> None:
    await bench.bring(state, payload=b"old")
    before = await bench.job()
    await bench.events()

    assert await change(bench, payload=b"new", priority=-5) == "changed"

    job = await bench.job()
    assert (job.payload, job.priority, job.incarnation) == (b"new", -5, before.incarnation)
    assert await bench.state() is state
    assert await bench.seen() == [Seen(E.CHANGED, "job", state)]


async def test_the_payload_of_an_active_job_can_be_changed_for_its_next_run(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, payload=b"old")
    assert lease

    assert await change(bench, payload=b"new") == "changed"

    await bench.settle(lease, Release())
    assert (await bench.claim()).payload == b"new"


async def test_the_priority_of_an_active_job_cannot_be_changed_nor_anything_with_it(bench: Bench) -> None:
    await bench.bring(S.ACTIVE)
    picture = await bench.picture()

    assert await change(bench, priority=-5) == "wrong_state"
    assert await change(bench, priority=-5, payload=b"new", result_ttl_ms=1) == "wrong_state"
    assert await bench.picture() == picture


@pytest.mark.parametrize("state", TERMINAL_STATES)
@pytest.mark.parametrize("fields", [{"payload": b"new"}, {"priority": 1}, {"delay_ms": 0}], ids=repr)
async def test_payload_priority_and_delay_of_a_finished_job_cannot(
    bench: Bench, state: State, fields: dict[str, Any]
) -> None:
    await bench.bring(state)
    picture = await bench.picture()

    assert await change(bench, **fields) == "wrong_state"
    assert await change(bench, result_ttl_ms=1, **fields) == "wrong_state"
    assert await bench.picture() == picture


async def test_the_delay_of_an_active_job_cannot_be_changed_nor_anything_with_it(bench: Bench) -> None:
    await bench.bring(S.ACTIVE)
    picture = await bench.picture()

    assert await change(bench, delay_ms=MINUTE_MS, payload=b"new", result_ttl_ms=1) == "wrong_state"
    assert await bench.picture() == picture


async def test_a_waiting_job_whose_priority_changed_takes_its_new_place_under_its_old_number(
    bench: Bench,
) -> None:
    for id, priority in [("a", 0), ("b", 1), ("c", 1), ("d", 0)]:
        await bench.put(id, priority=priority)

    await change(bench, "a", priority=1)
    await change(bench, "c", priority=0)

    assert await bench.ids(S.WAITING) == ["c", "d", "a", "b"]
    assert [lease.id for lease in await bench.claim_all()] == ["c", "d", "a", "b"]


@pytest.mark.parametrize("state", [S.WAITING, S.SCHEDULED])
async def test_a_delay_schedules_a_pending_job_from_now(bench: Bench, state: State) -> None:
    await bench.bring(state)
    before = await bench.job()
    await bench.events()
    await bench.shift(MINUTE_MS // 2)

    assert await change(bench, delay_ms=5 * MINUTE_MS) == "changed"

    job = await bench.job()
    assert await bench.state() is S.SCHEDULED
    assert 5 * MINUTE_MS + MINUTE_MS // 2 <= job.run_at_ms - before.enqueued_at_ms < 6 * MINUTE_MS
    assert await bench.seen() == [Seen(E.CHANGED, "job", S.SCHEDULED)]
    assert await bench.counts() == {S.SCHEDULED: 1}
    assert await bench.claim_all() == []
    await bench.shift(5 * MINUTE_MS)
    assert (await bench.claim()).id == "job"


@pytest.mark.parametrize("state", [S.WAITING, S.SCHEDULED])
async def test_no_delay_puts_a_scheduled_job_in_line_and_leaves_a_waiting_one_in_its_place(
    bench: Bench, state: State
) -> None:
    await bench.bring(state)
    before = await bench.job()
    await bench.put("other")
    await bench.events()

    assert await change(bench, delay_ms=0) == "changed"

    assert (await bench.job()).run_at_ms == before.run_at_ms, "when it was to be due stays on record"
    assert await bench.ids(S.WAITING) == (["job", "other"] if state is S.WAITING else ["other", "job"])
    assert await bench.seen() == [Seen(E.CHANGED, "job", S.WAITING)]


@pytest.mark.parametrize("state", STATES)
async def test_the_result_ttl_can_be_changed_in_every_state(bench: Bench, state: State) -> None:
    await bench.bring(state)
    before = await bench.job()
    await bench.events()

    assert await change(bench, result_ttl_ms=7 * MINUTE_MS) == "changed"

    job = await bench.job()
    assert job.options.result_ttl_ms == 7 * MINUTE_MS
    if state in (S.COMPLETED, S.CANCELLED):
        assert job.kept_until_ms == job.finished_at_ms + 7 * MINUTE_MS
    else:
        assert job.kept_until_ms == before.kept_until_ms
    assert await bench.state() is state
    assert await bench.seen() == [Seen(E.CHANGED, "job", state)]


async def test_a_longer_result_ttl_saves_a_completed_job_from_the_sweep(bench: Bench) -> None:
    await bench.bring(S.COMPLETED, "short", result_ttl_ms=MINUTE_MS)
    await bench.bring(S.COMPLETED, "long", result_ttl_ms=MINUTE_MS)
    await change(bench, "long", result_ttl_ms=5 * MINUTE_MS)
    await bench.shift(MINUTE_MS)

    assert (await bench.storage.sweep(bench.queue)).pruned == 1
    assert await bench.ids(S.COMPLETED) == ["long"]


async def test_an_unknown_job_is_not_found(bench: Bench) -> None:
    assert await change(bench, "nobody", priority=1) == "not_found"
    assert await bench.events() == []
