"""sweep: promote, rescue, expire, prune; bounded, and paused queues too. Trimming is in test_events."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import FAILURE_TEXTS, Complete, Failure
from penstock.storage.values import QueueSettings, Swept
from tests.contract.factories import LEASE_MS, MINUTE_MS, STATES, TERMINAL_STATES, Bench, Seen

E, S = EventType, State
STALLED = "its worker died or stopped renewing the lease %d times; the last one was worker"


async def sweep(bench: Bench, *, limit: int = 1000) -> Swept:
    return await bench.storage.sweep(bench.queue, limit=limit)


@pytest.mark.parametrize("state", STATES)
async def test_what_time_has_not_come_for_is_left_alone(bench: Bench, state: State) -> None:
    await bench.bring(state, ttl_ms=9 * MINUTE_MS)
    picture = await bench.picture()

    swept = await sweep(bench)

    assert (swept.promoted, swept.rescued, swept.expired, swept.pruned, swept.more) == (0, 0, 0, 0, False)
    assert await bench.picture() == picture


async def test_due_jobs_are_promoted_in_order(bench: Bench) -> None:
    for id, minutes in [("c", 3), ("a", 1), ("b", 2), ("later", 9)]:
        await bench.put(id, delay_ms=minutes * MINUTE_MS)
    await bench.events()
    await bench.shift(3 * MINUTE_MS)

    swept = await sweep(bench)

    assert swept.promoted == 3
    assert await bench.ids(S.WAITING) == ["a", "b", "c"]
    assert await bench.seen() == [Seen(E.PROMOTED, id, S.WAITING) for id in "abc"]
    assert await bench.counts() == {S.WAITING: 3, S.SCHEDULED: 1}


async def test_a_job_whose_lease_ran_out_waits_again(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.events()
    await bench.shift(LEASE_MS)

    swept = await sweep(bench)

    job = await bench.job()
    assert swept.rescued == 1
    assert await bench.state() is S.WAITING
    assert (job.runs, job.failures, job.stalls, job.token) == (1, 0, 1, 0)
    assert await bench.seen() == [Seen(E.STALLED, "job", S.WAITING)]
    assert await bench.counts() == {S.WAITING: 1}
    again = await bench.claim()
    assert (again.run, again.stalls) == (2, 1)


async def test_a_job_that_stalls_too_often_fails(bench: Bench) -> None:
    await bench.put(max_stalls=2)
    for _ in range(3):
        await bench.claim()
        await bench.shift(LEASE_MS)
        await sweep(bench)

    job = await bench.job()
    assert (job.state, job.failure) == (S.FAILED, Failure("Stalled", STALLED % 3))
    assert (job.runs, job.failures, job.stalls) == (3, 0, 3)
    events = await bench.events()
    assert [event.type for event in events][-2:] == [E.CLAIMED, E.FAILED]
    assert events[-1].error == STALLED % 3
    assert await bench.counts() == {S.FAILED: 1}


async def test_without_any_stalls_allowed_the_first_one_fails_the_job_and_tells_the_waiter(
    bench: Bench,
) -> None:
    await bench.bring(S.ACTIVE, max_stalls=0, failure_ttl_ms=0, notify="ear")
    await bench.shift(LEASE_MS)

    await sweep(bench)

    assert await bench.find() is None
    [news] = await bench.storage.listen(bench.queue, "ear", timeout_ms=5000)
    assert (news.state, news.failure) == (S.FAILED, Failure("Stalled", STALLED % 1))


async def test_a_job_to_be_cancelled_is_cancelled_when_its_lease_runs_out(bench: Bench) -> None:
    await bench.bring(S.ACTIVE, ttl_ms=MINUTE_MS, max_stalls=0)
    await bench.storage.cancel(bench.queue, ["job"])
    await bench.events()
    await bench.shift(LEASE_MS)

    swept = await sweep(bench)

    assert swept.rescued == 1
    assert await bench.state() is S.CANCELLED
    assert await bench.seen() == [Seen(E.CANCELLED, "job", S.CANCELLED)]


async def test_a_job_past_its_ttl_expires_when_its_lease_runs_out_and_not_before(bench: Bench) -> None:
    await bench.bring(S.ACTIVE, ttl_ms=LEASE_MS // 2)
    await bench.events()
    await bench.shift(LEASE_MS // 2)
    assert (await sweep(bench)).expired == 0
    assert await bench.state() is S.ACTIVE
    await bench.shift(LEASE_MS // 2)

    await sweep(bench)

    job = await bench.job()
    assert (job.state, job.failure) == (S.FAILED, Failure("Expired", FAILURE_TEXTS["Expired"]))
    assert await bench.seen() == [Seen(E.EXPIRED, "job", S.FAILED)]


@pytest.mark.parametrize("state", [S.WAITING, S.SCHEDULED])
async def test_a_pending_job_past_its_ttl_expires(bench: Bench, state: State) -> None:
    delay: dict[str, Any] = {"delay_ms": 9 * MINUTE_MS} if state is S.SCHEDULED else {}
    await bench.bring(state, ttl_ms=MINUTE_MS, notify="ear", **delay)
    await bench.events()
    await bench.shift(MINUTE_MS)

    swept = await sweep(bench)

    job = await bench.job()
    assert swept.expired == 1
    assert await bench.state() is S.FAILED
    assert job.failure == Failure("Expired", "the job's ttl passed before it was finished")
    assert await bench.seen() == [Seen(E.EXPIRED, "job", S.FAILED)]
    assert await bench.counts() == {S.FAILED: 1}
    [news] = await bench.storage.listen(bench.queue, "ear", timeout_ms=5000)
    assert (news.state, news.failure) == (S.FAILED, job.failure)


@pytest.mark.parametrize("state", TERMINAL_STATES)
async def test_finished_jobs_are_forgotten_after_their_ttl_without_an_event(
    bench: Bench, state: State
) -> None:
    await bench.bring(state, result_ttl_ms=MINUTE_MS, failure_ttl_ms=MINUTE_MS)
    await bench.events()
    await bench.shift(MINUTE_MS)
    assert (await bench.job()).state is state, "shown until a sweep takes it"

    swept = await sweep(bench)

    assert swept.pruned == 1
    assert await bench.find() is None
    assert await bench.counts() == {}
    assert await bench.events() == []


@pytest.mark.parametrize("state", [S.COMPLETED, S.FAILED])
async def test_a_maximum_count_is_kept_and_the_next_to_expire_go_first(bench: Bench, state: State) -> None:
    for id, minutes in [("a", 3), ("b", 1), ("c", 2)]:
        await bench.bring(state, id, result_ttl_ms=minutes * MINUTE_MS, failure_ttl_ms=minutes * MINUTE_MS)
    await bench.bring(S.CANCELLED, "bystander")
    await bench.storage.configure(bench.queue, QueueSettings(keep_completed=1, keep_failed=1))
    await bench.events()

    swept = await sweep(bench)

    assert swept.pruned == 2
    assert await bench.ids(state) == ["a"]
    assert await bench.ids(S.CANCELLED) == ["bystander"]
    assert await bench.events() == []


async def test_a_paused_queue_is_swept_like_any_other(bench: Bench) -> None:
    await bench.bring(S.ACTIVE, "stalled")
    await bench.put("due", delay_ms=MINUTE_MS)
    await bench.put("expired", ttl_ms=MINUTE_MS)
    await bench.storage.pause(bench.queue)
    await bench.shift(MINUTE_MS)

    swept = await sweep(bench)

    assert (swept.promoted, swept.rescued, swept.expired) == (1, 1, 1)
    assert await bench.counts() == {S.WAITING: 2, S.FAILED: 1}


async def test_a_second_sweep_finds_nothing_to_do(bench: Bench) -> None:
    await bench.bring(S.ACTIVE)
    await bench.put("due", delay_ms=MINUTE_MS)
    await bench.shift(MINUTE_MS)
    await sweep(bench)
    picture = await bench.picture()

    swept = await sweep(bench)

    assert (swept.promoted, swept.rescued, swept.expired, swept.pruned) == (0, 0, 0, 0)
    assert await bench.picture() == picture


async def test_the_work_of_a_call_is_bounded_and_it_says_when_there_is_more(bench: Bench) -> None:
    await bench.put_all([bench.new(f"active-{i}") for i in range(25)])
    await bench.claim_all()
    await bench.put_all([bench.new(f"due-{i}", delay_ms=MINUTE_MS) for i in range(25)])
    await bench.shift(MINUTE_MS)

    first = await sweep(bench, limit=10)
    sweeps = [first]
    while sweeps[-1].more:
        sweeps.append(await sweep(bench, limit=10))

    assert first.more
    assert all(swept.promoted <= 10 and swept.rescued <= 10 for swept in sweeps)
    assert (sum(swept.promoted for swept in sweeps), sum(swept.rescued for swept in sweeps)) == (25, 25)
    assert await bench.counts() == {S.WAITING: 50}


@pytest.mark.parametrize(
    ("state", "fields", "within_ms"),
    [
        (S.SCHEDULED, {"delay_ms": 3 * MINUTE_MS}, 3 * MINUTE_MS),
        (S.ACTIVE, {}, LEASE_MS),
        (S.WAITING, {"ttl_ms": 4 * MINUTE_MS}, 4 * MINUTE_MS),
        (S.COMPLETED, {"result_ttl_ms": 5 * MINUTE_MS}, 5 * MINUTE_MS),
        (S.WAITING, {}, None),
    ],
)
async def test_wait_ms_is_the_time_to_the_next_thing(
    bench: Bench, state: State, fields: dict[str, Any], within_ms: int | None
) -> None:
    await bench.bring(state, **fields)

    wait_ms = (await sweep(bench)).wait_ms

    if within_ms is None:
        assert wait_ms is None
    else:
        assert wait_ms is not None
        assert within_ms - MINUTE_MS < wait_ms <= within_ms


async def test_a_job_settled_before_the_sweep_is_not_rescued(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.settle(lease, Complete())
    await bench.shift(LEASE_MS)

    assert (await sweep(bench)).rescued == 0
    assert await bench.state() is S.COMPLETED


async def test_five_thousand_due_jobs_are_promoted_in_a_few_calls(bench: Bench) -> None:
    await bench.put_all([bench.new(f"{i:04}", delay_ms=MINUTE_MS) for i in range(5000)])
    await bench.shift(MINUTE_MS)

    while (await sweep(bench)).more:
        pass

    assert await bench.counts() == {S.WAITING: 5000}
    assert [lease.id for lease in await bench.claim_all(5000)] == [f"{i:04}" for i in range(5000)]


async def test_an_unknown_queue_can_be_swept(bench: Bench) -> None:
    assert await sweep(bench) == Swept()
