"""retry and retry_all: failed and cancelled jobs wait again."""

from __future__ import annotations

import pytest

from penstock.core.lifecycle import EventType, RetryAnswer, State
from penstock.core.outcome import Complete, Fail
from tests.contract.factories import BOOM, MINUTE_MS, Bench, Seen, other_states, start_states

E, S = EventType, State


async def retry(bench: Bench, *ids: str) -> list[RetryAnswer]:
    return await bench.storage.retry(bench.queue, ids)


@pytest.mark.parametrize("state", start_states("retry"))
async def test_a_job_waits_again_with_counts_from_zero(bench: Bench, state: State) -> None:
    lease = await bench.bring(state, payload=b"p", ttl_ms=5 * MINUTE_MS)
    before = await bench.job()
    await bench.events()
    await bench.shift(2 * MINUTE_MS)

    assert await retry(bench, "job") == ["retried"]

    job = await bench.job()
    assert await bench.state() is S.WAITING
    assert (job.failures, job.stalls, job.runs) == (0, 0, 1 if lease else 0)
    assert (job.failure, job.result, job.finished_at_ms, job.kept_until_ms, job.token) == (
        None,
        None,
        0,
        0,
        0,
    )
    assert (job.incarnation, job.payload, job.cancelling) == (before.incarnation, b"p", False)
    assert job.expires_at_ms >= before.expires_at_ms + 2 * MINUTE_MS
    assert await bench.counts() == {S.WAITING: 1}
    assert await bench.seen() == [Seen(E.RETRIED, "job", S.WAITING)]
    again = await bench.claim()
    assert await bench.settle(again, Complete()) == await bench.settle(again, Complete())


@pytest.mark.parametrize("state", other_states("retry"))
async def test_a_job_in_another_state_is_left_alone(bench: Bench, state: State) -> None:
    await bench.bring(state)
    picture = await bench.picture()

    assert await retry(bench, "job") == ["not_failed"]
    assert await bench.picture() == picture


async def test_an_unknown_job_is_not_found(bench: Bench) -> None:
    assert await retry(bench, "nobody") == ["not_found"]
    assert await retry(bench) == []
    assert await bench.events() == []


async def test_a_retried_job_goes_to_the_end_of_the_line(bench: Bench) -> None:
    await bench.bring(S.FAILED, "first")
    await bench.put("second")

    await retry(bench, "first")

    assert await bench.ids(S.WAITING) == ["second", "first"]


async def test_a_job_asked_to_stop_is_not_asked_any_more_after_a_retry(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.storage.cancel(bench.queue, ["job"])
    await bench.settle(lease, Fail(BOOM))
    assert await bench.state() is S.CANCELLED

    await retry(bench, "job")

    assert not (await bench.claim()).cancelling


async def test_attempts_count_from_zero(bench: Bench) -> None:
    await bench.put(attempts=2)
    for _ in range(2):
        await bench.settle(await bench.claim(), Fail(BOOM))
    await retry(bench, "job")

    states = [(await bench.settle(await bench.claim(), Fail(BOOM))).state for _ in range(2)]

    assert states == [S.WAITING, S.FAILED]
    assert (await bench.job()).runs == 4


async def test_a_batch_acts_item_after_item(bench: Bench) -> None:
    await bench.bring_all()

    assert await retry(bench, "failed", "failed", "completed", "nobody", "cancelled") == [
        "retried",
        "not_failed",
        "not_failed",
        "not_found",
        "retried",
    ]


# retry_all


async def test_all_failed_jobs_are_retried_a_bounded_number_at_a_time(bench: Bench) -> None:
    await bench.put_all([bench.new(f"{i:02}", attempts=1) for i in range(25)])
    for lease in await bench.claim_all():
        await bench.settle(lease, Fail(BOOM))
    await bench.bring(S.CANCELLED, "cancelled")
    await bench.bring(S.COMPLETED, "completed")
    await bench.events()

    done, cursor, calls = 0, "", 0
    while calls == 0 or cursor:
        bulk = await bench.storage.retry_all(bench.queue, limit=10, cursor=cursor)
        assert bulk.done <= 10
        done, cursor, calls = done + bulk.done, bulk.cursor, calls + 1
        assert calls < 20, "it does not end"

    assert done == 25
    assert await bench.counts() == {S.WAITING: 25, S.CANCELLED: 1, S.COMPLETED: 1}
    assert [event.type for event in await bench.events()] == [E.RETRIED] * 25
    assert await bench.ids(S.WAITING) == [f"{i:02}" for i in range(25)]


async def test_jobs_that_fail_again_meanwhile_are_not_retried_twice(bench: Bench) -> None:
    await bench.put_all([bench.new(f"{i:02}", attempts=1) for i in range(15)])
    for lease in await bench.claim_all():
        await bench.settle(lease, Fail(BOOM))

    done, cursor, calls = 0, "", 0
    while calls == 0 or cursor:
        bulk = await bench.storage.retry_all(bench.queue, limit=5, cursor=cursor)
        done, cursor, calls = done + bulk.done, bulk.cursor, calls + 1
        await bench.shift(1)
        for lease in await bench.claim_all():
            await bench.settle(lease, Fail(BOOM))
        assert calls < 20, "retry_all does not end"

    assert done == 15
    assert await bench.counts() == {S.FAILED: 15}
    assert {job.runs for job in await bench.storage.get(bench.queue, await bench.ids(S.FAILED)) if job} == {2}


async def test_with_nothing_failed_there_is_nothing_to_retry(bench: Bench) -> None:
    bulk = await bench.storage.retry_all(bench.queue)

    assert (bulk.done, bulk.cursor) == (0, "")
