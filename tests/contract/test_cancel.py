"""cancel: pending jobs end now, active ones are asked to stop."""

from __future__ import annotations

import pytest

from penstock.core.lifecycle import CancelAnswer, EventType, State
from penstock.core.outcome import Complete, Fail
from penstock.storage.values import Finished
from tests.contract.factories import (
    BOOM,
    LEASE_MS,
    MINUTE_MS,
    STATES,
    Bench,
    Seen,
    other_states,
    redispatch,
    start_states,
)

E, S = EventType, State

FINISHED: dict[State, CancelAnswer] = {
    S.COMPLETED: "completed",
    S.FAILED: "failed",
    S.CANCELLED: "already_cancelled",
}


async def cancel(bench: Bench, *ids: str, rerun_only: bool = False) -> list[CancelAnswer]:
    return await bench.storage.cancel(bench.queue, ids, rerun_only=rerun_only)


@pytest.mark.parametrize("state", [state for state in start_states("cancel") if state is not S.ACTIVE])
async def test_a_pending_job_is_cancelled_immediately(bench: Bench, state: State) -> None:
    await bench.bring(state, result_ttl_ms=MINUTE_MS, notify="ear")
    before = await bench.job()
    await bench.events()

    assert await cancel(bench, "job") == ["cancelled"]

    job = await bench.job()
    assert await bench.state() is S.CANCELLED
    assert job.kept_until_ms == job.finished_at_ms + MINUTE_MS
    assert await bench.counts() == {S.CANCELLED: 1}
    assert await bench.seen() == [Seen(E.CANCELLED, "job", S.CANCELLED)]
    assert await bench.claim_all() == []
    assert await bench.storage.listen(bench.queue, "ear", timeout_ms=5000) == [
        Finished("job", before.incarnation, S.CANCELLED)
    ]


async def test_an_active_job_is_asked_to_stop_once(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.events()

    assert await cancel(bench, "job") == ["requested"]
    assert await cancel(bench, "job") == ["requested"]

    job = await bench.job()
    assert (job.state, job.cancelling, job.token) == (S.ACTIVE, True, lease.token)
    assert await bench.counts() == {S.ACTIVE: 1}
    assert await bench.seen() == [Seen(E.CANCELLING, "job", S.ACTIVE)]


async def test_only_the_rerun_of_an_active_job_is_cancelled(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.put(conflict=redispatch(), notify="ear")
    assert (await bench.job()).has_rerun
    await bench.events()

    assert await cancel(bench, "job", rerun_only=True) == ["rerun_cancelled"]

    job = await bench.job()
    assert (job.state, job.cancelling, job.has_rerun) == (S.ACTIVE, False, False)
    assert await bench.seen() == [Seen(E.CHANGED, "job", S.ACTIVE)]
    assert await cancel(bench, "job", rerun_only=True) == ["no_rerun"]
    await bench.settle(lease, Complete(b"done"))
    assert await bench.counts() == {S.COMPLETED: 1}
    assert await bench.storage.listen(bench.queue, "ear", timeout_ms=5000) == [
        Finished("job", lease.incarnation, S.COMPLETED, b"done")
    ]


@pytest.mark.parametrize("state", STATES)
async def test_a_job_without_a_rerun_is_left_alone_by_rerun_only(bench: Bench, state: State) -> None:
    await bench.bring(state)
    picture = await bench.picture()

    assert await cancel(bench, "job", "nobody", rerun_only=True) == ["no_rerun", "not_found"]
    assert await bench.picture() == picture


@pytest.mark.parametrize("state", other_states("cancel"))
async def test_a_finished_job_is_left_alone(bench: Bench, state: State) -> None:
    await bench.bring(state)
    picture = await bench.picture()

    assert await cancel(bench, "job") == [FINISHED[state]]
    assert await bench.picture() == picture


async def test_an_unknown_job_is_not_found(bench: Bench) -> None:
    assert await cancel(bench, "nobody") == ["not_found"]
    assert await cancel(bench) == []
    assert await bench.events() == []


async def test_the_request_outlives_the_worker_that_should_have_heard_it(bench: Bench) -> None:
    await bench.bring(S.ACTIVE)
    await cancel(bench, "job")
    await bench.shift(LEASE_MS)

    await bench.storage.sweep(bench.queue)

    assert await bench.state() is S.CANCELLED


async def test_a_failure_that_is_final_stays_a_failure(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await cancel(bench, "job")

    await bench.settle(lease, Fail(BOOM, final=True))

    assert await bench.state() is S.FAILED


@pytest.mark.parametrize("state", [S.WAITING, S.SCHEDULED])
async def test_a_result_ttl_of_nothing_leaves_no_record(bench: Bench, state: State) -> None:
    await bench.bring(state, result_ttl_ms=0)

    assert await cancel(bench, "job") == ["cancelled"]
    assert await bench.find() is None
    assert await bench.counts() == {}


async def test_a_batch_acts_item_after_item(bench: Bench) -> None:
    await bench.bring_all()
    await bench.events()

    answers = await cancel(bench, "waiting", "nobody", "active", "waiting", "failed", "scheduled")

    assert answers == ["cancelled", "not_found", "requested", "already_cancelled", "failed", "cancelled"]
    assert await bench.seen() == [
        Seen(E.CANCELLED, "waiting", S.CANCELLED),
        Seen(E.CANCELLING, "active", S.ACTIVE),
        Seen(E.CANCELLED, "scheduled", S.CANCELLED),
    ]


async def test_five_thousand_jobs_are_cancelled_in_one_call(bench: Bench) -> None:
    await bench.put_all([bench.new(str(i)) for i in range(5000)])

    assert await cancel(bench, *map(str, range(5000))) == ["cancelled"] * 5000
    assert await bench.counts() == {S.CANCELLED: 5000}
