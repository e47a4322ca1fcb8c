"""signal, Suspend and steps: a job goes on later where it was, by a signal or by its timeout, never by both."""

from __future__ import annotations

import asyncio

import pytest

from penstock.core.job import Extras, Lease
from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import FAILURE_TEXTS, Complete, Fail, Failure, Snooze, Suspend
from penstock.storage.values import Settled
from tests.contract.factories import BOOM, LEASE_MS, MINUTE_MS, Bench, Seen, redispatch

E, S = EventType, State
DATA = b"\x00\xff any bytes \xc3"


async def suspended(bench: Bench, id: str = "job", *, timeout_ms: int = 0, stage: str | None = None) -> Lease:
    """A job that waits for the signal ``go``."""
    await bench.put(id)
    lease = await bench.claim()
    assert await bench.settle(lease, Suspend("go", timeout_ms, stage)) == Settled(True, S.BLOCKED)
    return lease


async def send(bench: Bench, name: str = "go", data: bytes = DATA, id: str = "job") -> str:
    return await bench.storage.signal(bench.queue, id, name, data)


async def test_a_suspended_job_is_blocked_by_a_signal_and_not_claimed(bench: Bench) -> None:
    await suspended(bench, timeout_ms=MINUTE_MS, stage="ship")

    job = await bench.job()

    assert (await bench.state(), job.blocked_by) == (S.BLOCKED, "signal")
    assert job.extras
    assert (job.extras.awaits, job.extras.stage) == ("go", "ship")
    assert job.extras.awaits_until_ms > job.claimed_at_ms + MINUTE_MS - 1
    assert (job.failures, job.stalls) == (0, 0)
    assert await bench.claim_all() == []


async def test_its_event_tells_the_state_it_ends_in_and_the_signal(bench: Bench) -> None:
    await bench.put()
    lease = await bench.claim(worker="ada")
    await bench.events()

    await bench.settle(lease, Suspend("go"))

    [seen] = await bench.events()
    assert (seen.type, seen.id, seen.state, seen.data) == (E.SUSPENDED, "job", S.BLOCKED, '{"signal":"go"}')
    assert (seen.run, seen.token, seen.worker) == (1, lease.token, "ada")


async def test_the_signal_resumes_the_job_and_its_data_comes_with_the_next_run(bench: Bench) -> None:
    await suspended(bench, timeout_ms=MINUTE_MS, stage="ship")
    await bench.events()

    assert await send(bench) == "resumed"

    assert await bench.state() is S.WAITING
    [seen] = await bench.events()
    assert (seen.type, seen.state, seen.data) == (E.SIGNALLED, S.WAITING, '{"signal":"go"}')
    lease = await bench.claim()
    assert lease.extras == Extras(stage="ship", received="go")
    assert (lease.signal, lease.run) == (DATA, 2)


async def test_signal_and_data_stay_with_the_job_through_failure_stall_and_retry(bench: Bench) -> None:
    await suspended(bench)
    await send(bench)

    await bench.settle(await bench.claim(), Fail(BOOM))
    assert (await bench.claim()).signal == DATA
    await bench.shift(LEASE_MS)
    await bench.storage.sweep(bench.queue)
    lease = await bench.claim()
    assert lease.signal == DATA
    await bench.settle(lease, Fail(BOOM, final=True))
    await bench.storage.retry(bench.queue, ["job"])

    lease = await bench.claim()
    assert lease.signal == DATA
    assert lease.extras == Extras(received="go")


async def test_the_next_suspension_forgets_the_last_signal(bench: Bench) -> None:
    await suspended(bench)
    await send(bench)

    await bench.settle(await bench.claim(), Suspend("again"))

    job = await bench.job()
    assert job.extras == Extras(awaits="again")
    await send(bench, "again", b"2")
    assert (await bench.claim()).signal == b"2"


async def test_no_data_is_data_of_no_bytes(bench: Bench) -> None:
    await suspended(bench)
    await send(bench, data=b"")
    assert (await bench.claim()).signal == b""


@pytest.mark.parametrize("state", [S.SCHEDULED, S.WAITING, S.ACTIVE])
async def test_a_signal_that_comes_early_is_kept(bench: Bench, state: State) -> None:
    await bench.bring(state)
    await bench.events()

    assert await send(bench) == "kept"

    assert await bench.seen() == [Seen(E.SIGNALLED, "job", state)]
    job = await bench.job()
    assert job.extras == Extras(kept=1)
    assert await bench.state() is state


async def test_a_kept_signal_is_consumed_by_the_suspension_that_asks_for_it(bench: Bench) -> None:
    await bench.put()
    lease = await bench.claim()
    await send(bench, "other", b"0")
    await send(bench, "go", b"1")
    await send(bench, "go", b"2")
    await bench.events()

    assert await bench.settle(lease, Suspend("go", MINUTE_MS)) == Settled(True, S.WAITING)

    assert await bench.seen() == [Seen(E.SUSPENDED, "job", S.WAITING)]
    lease = await bench.claim()
    assert (lease.extras, lease.signal) == (Extras(received="go", kept=2), b"1")
    await bench.settle(lease, Suspend("go"))
    lease = await bench.claim()
    assert (lease.extras, lease.signal) == (Extras(received="go", kept=1), b"2")
    await bench.settle(lease, Suspend("go"))
    assert await bench.state() is S.BLOCKED
    assert await send(bench, "third") == "kept"


async def test_signals_of_other_names_do_not_resume(bench: Bench) -> None:
    await suspended(bench)
    assert await send(bench, "stop") == "kept"
    assert await bench.state() is S.BLOCKED
    assert await send(bench, "go") == "resumed"
    assert (await bench.job()).extras == Extras(received="go", kept=1)


async def test_a_hundred_signals_are_kept_and_no_more(bench: Bench) -> None:
    await bench.put()
    for number in range(100):
        assert await send(bench, "go", b"%d" % number) == "kept"
    picture = await bench.picture()

    assert await send(bench, "go", b"more") == "full"
    assert await bench.picture() == picture

    await bench.settle(await bench.claim(), Suspend("go"))
    assert (await bench.claim()).signal == b"0"
    assert await send(bench, "go", b"more") == "kept"


@pytest.mark.parametrize("state", [S.COMPLETED, S.FAILED, S.CANCELLED])
async def test_a_job_that_has_ended_hears_nothing(bench: Bench, state: State) -> None:
    await bench.bring(state)
    picture = await bench.picture()

    assert await send(bench) == "ended"
    assert await bench.picture() == picture


async def test_an_unknown_or_forgotten_job_is_not_found(bench: Bench) -> None:
    assert await send(bench, id="nobody") == "not_found"
    await bench.bring(S.COMPLETED, result_ttl_ms=MINUTE_MS)
    await bench.shift(MINUTE_MS)
    assert await send(bench) == "not_found"


async def test_a_timeout_lets_the_job_run_without_the_signal(bench: Bench) -> None:
    await suspended(bench, timeout_ms=MINUTE_MS, stage="remind")
    await bench.events()
    assert (await bench.storage.sweep(bench.queue)).unblocked == 0

    await bench.shift(MINUTE_MS)
    swept = await bench.storage.sweep(bench.queue)

    assert swept.unblocked == 1
    assert await bench.seen() == [Seen(E.UNBLOCKED, "job", S.WAITING)]
    lease = await bench.claim()
    assert (lease.extras, lease.signal) == (Extras(stage="remind", timed_out=True), None)
    assert await send(bench) == "kept"


async def test_timeouts_come_in_their_order_and_within_the_limit(bench: Bench) -> None:
    for id, minutes in (("late", 3), ("middle", 2), ("early", 1)):
        await suspended(bench, id, timeout_ms=minutes * MINUTE_MS)
    await bench.shift(5 * MINUTE_MS)

    swept = await bench.storage.sweep(bench.queue, limit=2)

    assert (swept.unblocked, swept.more) == (2, True)
    await bench.storage.sweep(bench.queue)
    assert [lease.id for lease in await bench.claim_all()] == ["early", "middle", "late"]


async def test_sweep_says_when_the_next_timeout_comes(bench: Bench) -> None:
    await suspended(bench, timeout_ms=MINUTE_MS)
    wait_ms = (await bench.storage.sweep(bench.queue)).wait_ms
    assert wait_ms is not None
    assert 0 < wait_ms <= MINUTE_MS


async def test_a_suspension_without_a_timeout_lasts(bench: Bench) -> None:
    await suspended(bench)
    await bench.shift(1000 * 24 * 60 * MINUTE_MS)
    swept = await bench.storage.sweep(bench.queue)
    assert (swept.unblocked, swept.wait_ms) == (0, None)
    assert await bench.state() is S.BLOCKED


async def test_of_concurrent_signals_and_sweeps_exactly_one_resumes_each_job(bench: Bench) -> None:
    ids = [f"job {number}" for number in range(20)]
    for id in ids:
        await suspended(bench, id, timeout_ms=MINUTE_MS)
    await bench.shift(MINUTE_MS)

    answers = await asyncio.gather(
        *(send(bench, id=id) for id in ids[:10]),
        bench.storage.sweep(bench.queue),
        *(send(bench, id=id) for id in ids[10:]),
    )

    resumed = [answer for answer in answers if answer == "resumed"]
    leases = await bench.claim_all()
    assert sorted(lease.id for lease in leases) == sorted(ids)
    assert sum(lease.signal is not None for lease in leases) == len(resumed)
    assert sum(lease.extras is not None and lease.extras.timed_out for lease in leases) == 20 - len(resumed)


async def test_cancel_ends_a_suspended_job_and_its_timeout_with_it(bench: Bench) -> None:
    await suspended(bench, timeout_ms=MINUTE_MS)
    assert await bench.storage.cancel(bench.queue, ["job"]) == ["cancelled"]
    await bench.shift(MINUTE_MS)
    assert (await bench.storage.sweep(bench.queue)).unblocked == 0
    assert await bench.state() is S.CANCELLED
    assert await send(bench) == "ended"


async def test_a_job_that_is_to_be_cancelled_is_not_suspended(bench: Bench) -> None:
    await bench.put()
    lease = await bench.claim()
    await bench.storage.cancel(bench.queue, ["job"])
    assert await bench.settle(lease, Suspend("go", stage="next")) == Settled(True, S.CANCELLED)
    assert (await bench.job()).extras is None


async def test_a_suspended_job_expires_by_its_ttl(bench: Bench) -> None:
    await bench.put(ttl_ms=MINUTE_MS)
    await bench.settle(await bench.claim(), Suspend("go", 2 * MINUTE_MS))
    await bench.shift(MINUTE_MS)
    assert (await bench.storage.sweep(bench.queue)).expired == 1
    job = await bench.job()
    assert (job.state, job.failure) == (S.FAILED, Failure("Expired", FAILURE_TEXTS["Expired"]))


async def test_a_retried_job_that_was_suspended_does_not_time_out(bench: Bench) -> None:
    await suspended(bench, timeout_ms=MINUTE_MS)
    await bench.storage.cancel(bench.queue, ["job"])
    await bench.storage.retry(bench.queue, ["job"])
    await bench.shift(MINUTE_MS)
    assert (await bench.storage.sweep(bench.queue)).unblocked == 0
    assert await bench.state() is S.WAITING


async def test_a_suspended_job_can_be_removed_and_its_signals_with_it(bench: Bench) -> None:
    await suspended(bench, timeout_ms=MINUTE_MS)
    await send(bench, "early")
    await bench.storage.remove(bench.queue, ["job"])
    await bench.put()
    assert (await bench.job()).extras is None
    await bench.settle(await bench.claim(), Suspend("early"))
    assert await bench.state() is S.BLOCKED


async def test_a_new_life_of_the_id_knows_nothing_of_old_signals(bench: Bench) -> None:
    await suspended(bench, stage="later")
    await send(bench)
    await send(bench, "early")
    lease = await bench.claim()
    await bench.put(conflict=redispatch())
    await bench.settle(lease, Complete(b""))

    lease = await bench.claim()
    assert (lease.extras, lease.signal, lease.run) == (None, None, 1)
    await bench.settle(lease, Suspend("early"))
    assert await bench.state() is S.BLOCKED


async def test_a_redispatch_of_a_suspended_job_changes_it_where_it_is(bench: Bench) -> None:
    await suspended(bench)
    run_at_ms = (await bench.job()).run_at_ms
    answer = await bench.put(conflict=redispatch(), payload=b"new", delay_ms=MINUTE_MS)
    assert (answer.status, answer.state) == ("updated", S.BLOCKED)
    job = await bench.job()
    assert (job.payload, job.run_at_ms) == (b"new", run_at_ms)
    await send(bench)
    assert (await bench.claim()).payload == b"new"


async def test_a_rerun_slot_is_absorbed_by_a_suspension(bench: Bench) -> None:
    await bench.put()
    lease = await bench.claim()
    await bench.put(conflict=redispatch(), payload=b"new")
    assert await bench.settle(lease, Suspend("go")) == Settled(True, S.BLOCKED)
    assert not (await bench.job()).has_rerun
    await send(bench)
    assert (await bench.claim()).payload == b"new"


async def test_a_repeated_settle_of_a_suspension_is_known_as_such(bench: Bench) -> None:
    lease = await suspended(bench)
    await send(bench)
    assert await bench.settle(lease, Suspend("go")) == Settled(True, S.BLOCKED)
    assert await bench.state() is S.WAITING


async def test_a_snooze_with_a_stage_goes_on_there(bench: Bench) -> None:
    await bench.put()
    await bench.settle(await bench.claim(), Snooze(MINUTE_MS, "second"))
    assert (await bench.job()).extras == Extras(stage="second")
    await bench.shift(MINUTE_MS)
    lease = await bench.claim()
    assert lease.extras == Extras(stage="second")
    await bench.settle(lease, Snooze(0))
    assert (await bench.job()).extras == Extras(stage="second")
    await bench.settle(await bench.claim(), Snooze(0, ""))
    assert (await bench.job()).extras is None
    lease = await bench.claim()
    assert lease.extras is None
    assert await bench.settle(lease, Complete(b"")) == Settled(True, S.COMPLETED)


async def test_a_job_that_was_handed_back_says_in_which_run(bench: Bench) -> None:
    await bench.put()
    await bench.settle(await bench.claim(), Snooze(MINUTE_MS, "second"))
    await bench.shift(MINUTE_MS)
    await bench.settle(await bench.claim(), Snooze(MINUTE_MS, unknown=True))
    job = await bench.job()
    assert (job.runs, job.extras) == (2, Extras(stage="second", unknown_run=2))
    assert (job.failures, job.failure, job.is_handed_back) == (0, None, True)
    await bench.shift(MINUTE_MS)
    lease = await bench.claim()
    assert lease.extras == Extras(stage="second", unknown_run=2)
    assert not (await bench.job()).is_handed_back
    assert await bench.settle(lease, Complete(b"")) == Settled(True, S.COMPLETED)
    assert not (await bench.job()).is_handed_back


async def test_a_job_that_is_enqueued_again_was_not_handed_back(bench: Bench) -> None:
    await bench.put()
    await bench.settle(await bench.claim(), Snooze(0, unknown=True))
    assert (await bench.job()).is_handed_back
    await bench.settle(await bench.claim(), Fail(BOOM, final=True))
    await bench.put()
    job = await bench.job()
    assert (job.runs, job.extras, job.is_handed_back) == (0, None, False)


async def test_stages_and_signals_stand_beside_what_the_user_said(bench: Bench) -> None:
    said = Extras(cost=3, headers={"a": "ż"})
    await bench.put(extras=said)
    await bench.settle(await bench.claim(), Suspend("go", stage="naïve stage"))
    await send(bench)
    assert (await bench.claim()).extras == Extras(
        cost=3, headers={"a": "ż"}, stage="naïve stage", received="go"
    )


async def test_a_queue_with_suspended_jobs_is_sound_and_can_be_obliterated(bench: Bench) -> None:
    await suspended(bench, "timed", timeout_ms=MINUTE_MS)
    await suspended(bench, "untimed")
    await suspended(bench, "resumed")
    await send(bench, id="resumed")
    await send(bench, "early", id="untimed")
    checked = await bench.storage.check(bench.queue, repair=True)
    assert not any(checked.problems.values()), checked.problems

    assert await bench.storage.obliterate(bench.queue) == 3

    assert not any((await bench.storage.check(bench.queue)).problems.values())
    await bench.put("untimed")
    await bench.settle(await bench.claim(), Suspend("early"))
    assert await bench.state("untimed") is S.BLOCKED
    await bench.shift(MINUTE_MS)
    assert (await bench.storage.sweep(bench.queue)).unblocked == 0
