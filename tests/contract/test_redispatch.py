"""enqueue with ``on_conflict="redispatch"``: every flag, and the rerun slot of an active job."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from msgspec.structs import replace

from penstock.core.job import Enqueued, Options
from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import Cancel, Complete, Fail, Outcome, Release, Snooze
from penstock.storage.values import Finished, Settled
from tests.contract.factories import BOOM, LEASE_MS, MINUTE_MS, TERMINAL_STATES, Bench, Seen, redispatch

E, S = EventType, State

When = Literal["always", "never", "if_earlier", "if_later"]


# Pending jobs are updated


@pytest.mark.parametrize("state", [S.WAITING, S.SCHEDULED])
async def test_a_pending_job_takes_all_of_the_new_dispatch(bench: Bench, state: State) -> None:
    await bench.bring(state, payload=b"old")
    before = await bench.job()
    await bench.events()

    fields: dict[str, Any] = {
        "payload": b"new",
        "attempts": 9,
        "priority": 4,
        "lifo": True,
        "ttl_ms": MINUTE_MS,
    }
    answer = await bench.put(delay_ms=5 * MINUTE_MS, conflict=redispatch(), **fields)

    job = await bench.job()
    assert answer == Enqueued("job", "updated", S.SCHEDULED, before.incarnation)
    assert (job.payload, job.options.attempts, job.priority, job.lifo) == (b"new", 9, 4, True)
    assert job.run_at_ms > before.run_at_ms + 3 * MINUTE_MS
    assert MINUTE_MS <= job.expires_at_ms - before.enqueued_at_ms < 2 * MINUTE_MS
    assert (job.incarnation, job.enqueued_at_ms) == (before.incarnation, before.enqueued_at_ms)
    assert await bench.seen() == [Seen(E.CHANGED, "job", S.SCHEDULED)]
    assert await bench.counts() == {S.SCHEDULED: 1}


@pytest.mark.parametrize("state", [S.WAITING, S.SCHEDULED])
async def test_a_pending_job_keeps_what_the_flags_keep(bench: Bench, state: State) -> None:
    await bench.bring(state, payload=b"old", attempts=2, priority=1)
    before = await bench.job()
    await bench.events()
    keep = redispatch(payload="keep", options="keep", run_at="never")

    answer = await bench.put(payload=b"new", attempts=9, priority=4, delay_ms=9 * MINUTE_MS, conflict=keep)

    assert answer == Enqueued("job", "updated", state, before.incarnation)
    assert await bench.job() == before
    assert await bench.seen() == [Seen(E.CHANGED, "job", state)]


async def test_options_without_a_ttl_take_the_old_ttl_away(bench: Bench) -> None:
    await bench.put(ttl_ms=MINUTE_MS)

    await bench.put(conflict=redispatch())

    assert (await bench.job()).expires_at_ms == 0


@pytest.mark.parametrize(
    ("flag", "delay_ms", "moves"),
    [
        ("always", MINUTE_MS, True),
        ("always", 9 * MINUTE_MS, True),
        ("never", MINUTE_MS, False),
        ("never", 9 * MINUTE_MS, False),
        ("if_earlier", MINUTE_MS, True),
        ("if_earlier", 9 * MINUTE_MS, False),
        ("if_later", MINUTE_MS, False),
        ("if_later", 9 * MINUTE_MS, True),
    ],
)
async def test_the_time_is_replaced_as_the_flag_says(
    bench: Bench, flag: When, delay_ms: int, moves: bool
) -> None:
    await bench.put(delay_ms=5 * MINUTE_MS)
    before = await bench.job()

    await bench.put(delay_ms=delay_ms, conflict=redispatch(run_at=flag))

    job = await bench.job()
    assert (job.run_at_ms != before.run_at_ms) is moves
    assert (job.run_at_ms - before.enqueued_at_ms) // MINUTE_MS == (delay_ms // MINUTE_MS if moves else 5)


@pytest.mark.parametrize(
    ("state", "flag", "target"),
    [
        (S.SCHEDULED, "always", S.WAITING),
        (S.SCHEDULED, "if_earlier", S.WAITING),
        (S.SCHEDULED, "if_later", S.SCHEDULED),
        (S.SCHEDULED, "never", S.SCHEDULED),
        (S.WAITING, "always", S.WAITING),
        (S.WAITING, "never", S.WAITING),
    ],
)
async def test_a_dispatch_for_now_moves_a_scheduled_job_into_line(
    bench: Bench, state: State, flag: When, target: State
) -> None:
    await bench.bring(state)

    answer = await bench.put(conflict=redispatch(run_at=flag))

    assert (answer.status, answer.state) == ("updated", target)
    assert await bench.state() is target


async def test_a_waiting_job_that_is_updated_keeps_its_place(bench: Bench) -> None:
    for id in ("a", "b", "c"):
        await bench.put(id)

    await bench.put("a", payload=b"new", conflict=redispatch())

    assert await bench.ids(S.WAITING) == ["a", "b", "c"]


async def test_a_waiting_job_whose_priority_changed_takes_its_new_place_under_its_old_number(
    bench: Bench,
) -> None:
    for id, priority in [("a", 0), ("b", 1), ("c", 1), ("d", 0)]:
        await bench.put(id, priority=priority)

    await bench.put("a", priority=1, conflict=redispatch())
    await bench.put("c", priority=0, conflict=redispatch())

    assert await bench.ids(S.WAITING) == ["c", "d", "a", "b"]


async def test_reset_counts_forgets_failures_and_stalls_of_a_pending_job(bench: Bench) -> None:
    await _failed_and_stalled_once(bench)

    await bench.put(conflict=redispatch())
    assert ((await bench.job()).failures, (await bench.job()).stalls) == (1, 1)

    await bench.put(conflict=redispatch(reset_counts=True))
    job = await bench.job()
    assert (job.runs, job.failures, job.stalls) == (2, 0, 0)


@pytest.mark.parametrize("state", [S.WAITING, S.SCHEDULED, S.BLOCKED])
@pytest.mark.parametrize(
    "flags", [{}, {"payload": "keep", "options": "keep", "run_at": "never"}], ids=["replace", "keep"]
)
async def test_a_pending_job_is_of_the_run_and_the_write_that_updated_it_last(
    bench: Bench, state: State, flags: dict[str, Any]
) -> None:
    await bench.bring(state, payload=b"1", run_id="run-1", write_id="save-1")
    await bench.events()
    fields: dict[str, Any] = {"delay_ms": MINUTE_MS, "conflict": redispatch(**flags)}

    answer = await bench.put(payload=b"2", run_id="run-2", write_id="save-2", **fields)

    job = await bench.job()
    assert (answer.status, job.run_id, job.write_id) == ("updated", "run-2", "save-2")
    assert [(event.type, event.run_id) for event in await bench.events()] == [(E.CHANGED, "run-2")]
    picture = await bench.picture()
    assert (await bench.put(payload=b"2", run_id="run-2", write_id="save-2", **fields)).status == "duplicate"
    assert await bench.picture() == picture

    answer = await bench.put(payload=b"1", run_id="run-1", write_id="save-1", **fields)

    job = await bench.job()
    assert (answer.status, job.run_id, job.write_id) == ("updated", "run-1", "save-1")
    assert job.payload == b"1"


async def test_a_job_that_was_updated_belongs_to_no_write_if_the_update_did_not(bench: Bench) -> None:
    await bench.put(run_id="run-1", write_id="save-1")

    await bench.put(conflict=redispatch())

    assert ((await bench.job()).run_id, (await bench.job()).write_id) == ("", "")
    assert (await bench.put(write_id="save-1", conflict=redispatch())).status == "updated"


@pytest.mark.parametrize("state", [S.ACTIVE, S.COMPLETED, S.FAILED])
async def test_the_write_that_updated_a_job_is_its_duplicate_whatever_has_become_of_it(
    bench: Bench, state: State
) -> None:
    await bench.put(run_id="run-1", write_id="save-1")
    await bench.put(run_id="run-2", write_id="save-2", conflict=redispatch())
    lease = await bench.claim()
    assert lease.run_id == "run-2"
    if state is not S.ACTIVE:
        await bench.settle(lease, Complete() if state is S.COMPLETED else Fail(BOOM, final=True))
    picture = await bench.picture()

    answer = await bench.put(run_id="run-2", write_id="save-2", conflict=redispatch())

    assert (answer.status, answer.state) == ("duplicate", state)
    assert await bench.picture() == picture


@pytest.mark.parametrize("state", TERMINAL_STATES)
async def test_a_finished_job_is_queued_afresh(bench: Bench, state: State) -> None:
    await bench.bring(state, payload=b"old")
    before = await bench.job()
    await bench.events()

    answer = await bench.put(payload=b"new", conflict=redispatch(payload="keep"))

    job = await bench.job()
    assert answer == Enqueued("job", "queued", S.WAITING, job.incarnation)
    assert job.incarnation > before.incarnation
    assert (job.payload, job.runs, job.result, job.failure) == (b"new", 0, None, None)
    assert await bench.counts() == {S.WAITING: 1}
    assert await bench.seen() == [Seen(E.ENQUEUED, "job", S.WAITING)]


# Active jobs get a rerun slot


async def test_an_active_job_keeps_the_new_dispatch_in_its_slot(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, payload=b"old")
    assert lease
    await bench.events()

    answer = await bench.put(payload=b"new", conflict=redispatch())

    job = await bench.job()
    assert answer == Enqueued("job", "rerun", S.ACTIVE, lease.incarnation)
    assert (job.state, job.payload, job.token, job.has_rerun) == (S.ACTIVE, b"old", lease.token, True)
    assert await bench.counts() == {S.ACTIVE: 1}
    assert await bench.seen() == [Seen(E.CHANGED, "job", S.ACTIVE)]


@pytest.mark.parametrize(
    ("outcome", "event", "ended_as"),
    [(Complete(b"r"), E.COMPLETED, S.COMPLETED), (Fail(BOOM, final=True), E.FAILED, S.FAILED)],
    ids=["complete", "fail"],
)
async def test_a_terminal_settle_answers_the_waiters_then_queues_the_slot(
    bench: Bench, outcome: Outcome, event: EventType, ended_as: State
) -> None:
    await bench.put(payload=b"old", notify="first")
    lease = await bench.claim()
    await bench.put(payload=b"new", priority=7, conflict=redispatch(), notify="second")
    await bench.events()

    assert await bench.settle(lease, outcome) == Settled(True, ended_as)

    [news] = await bench.storage.listen(bench.queue, "first", timeout_ms=5000)
    assert (news.id, news.state, news.incarnation) == ("job", ended_as, lease.incarnation)
    assert await bench.storage.listen(bench.queue, "second", timeout_ms=1) == []
    job = await bench.job()
    assert (job.state, job.payload, job.priority, job.has_rerun) == (S.WAITING, b"new", 7, False)
    assert (job.runs, job.failures, job.result, job.failure) == (0, 0, None, None)
    assert job.incarnation > lease.incarnation
    assert await bench.seen() == [Seen(event, "job", ended_as), Seen(E.ENQUEUED, "job", S.WAITING)]
    assert await bench.counts() == {S.WAITING: 1}

    await bench.settle(await bench.claim(), Complete(b"2"))
    assert await bench.storage.listen(bench.queue, "second", timeout_ms=5000) == [
        Finished("job", job.incarnation, S.COMPLETED, b"2")
    ]


async def test_the_slot_is_queued_although_the_result_is_not_kept(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, result_ttl_ms=0)
    assert lease
    await bench.put(payload=b"new", conflict=redispatch())

    assert await bench.settle(lease, Complete()) == Settled(True, S.COMPLETED)

    assert (await bench.job()).payload == b"new"
    assert await bench.counts() == {S.WAITING: 1}


async def test_a_repeated_settle_is_recognised_after_the_slot_was_queued(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.put(conflict=redispatch())
    first = await bench.settle(lease, Complete(b"r"))
    picture = await bench.picture()

    assert await bench.settle(lease, Complete(b"r")) == first == Settled(True, S.COMPLETED)
    assert await bench.picture() == picture


async def test_a_slot_that_keeps_payload_and_options_is_queued_with_the_old_ones(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, payload=b"old", attempts=8, priority=3)
    assert lease
    await bench.put(payload=b"new", attempts=1, conflict=redispatch(payload="keep", options="keep"))

    await bench.settle(lease, Complete())

    job = await bench.job()
    assert (job.payload, job.options.attempts, job.priority) == (b"old", 8, 3)


async def test_a_slot_for_later_is_scheduled_for_its_instant(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.put(delay_ms=5 * MINUTE_MS, conflict=redispatch())
    await bench.shift(2 * MINUTE_MS)

    await bench.settle(lease, Complete())

    job = await bench.job()
    assert job.state is S.SCHEDULED
    assert (job.run_at_ms - lease.claimed_at_ms) // MINUTE_MS == 5


async def test_later_dispatches_merge_into_the_slot(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, payload=b"old", attempts=8)
    assert lease
    await bench.put(payload=b"1", attempts=1, delay_ms=5 * MINUTE_MS, conflict=redispatch())
    kept = redispatch(payload="keep", options="keep", run_at="if_earlier")
    answer = await bench.put(payload=b"2", attempts=2, delay_ms=2 * MINUTE_MS, conflict=kept)
    await bench.put(payload=b"3", attempts=3, delay_ms=MINUTE_MS, conflict=redispatch(run_at="never"))
    await bench.put(payload=b"4", delay_ms=0, conflict=redispatch(run_at="if_later", options="keep"))

    assert answer == Enqueued("job", "rerun", S.ACTIVE, lease.incarnation)
    await bench.settle(lease, Complete())
    job = await bench.job()
    assert (job.payload, job.options.attempts, job.state) == (b"4", 3, S.SCHEDULED)
    assert (job.run_at_ms - lease.claimed_at_ms) // MINUTE_MS == 2
    assert await bench.counts() == {S.SCHEDULED: 1}


@pytest.mark.parametrize(
    ("outcome", "event"),
    [
        (Fail(BOOM), E.RETRYING),
        (Fail(BOOM, retry_in_ms=MINUTE_MS), E.RETRYING),
        (Snooze(MINUTE_MS), E.SNOOZED),
        (Release(), E.RELEASED),
    ],
    ids=["retry now", "retry later", "snooze", "release"],
)
async def test_what_puts_the_job_back_absorbs_the_slot(
    bench: Bench, outcome: Outcome, event: EventType
) -> None:
    lease = await bench.bring(S.ACTIVE, payload=b"old", notify="first")
    assert lease
    await bench.put(payload=b"new", attempts=9, conflict=redispatch(), notify="second")
    await bench.events()

    assert await bench.settle(lease, outcome) == Settled(True, S.WAITING)

    job = await bench.job()
    assert (job.payload, job.options.attempts, job.has_rerun) == (b"new", 9, False)
    assert (job.incarnation, job.runs) == (lease.incarnation, 1)
    assert await bench.state() is S.WAITING
    assert await bench.seen() == [Seen(event, "job", S.WAITING)]
    await bench.settle(await bench.claim(), Complete(b"r"))
    for listener in ("first", "second"):
        [news] = await bench.storage.listen(bench.queue, listener, timeout_ms=5000)
        assert (news.state, news.result) == (S.COMPLETED, b"r")
    assert await bench.counts() == {S.COMPLETED: 1}


async def test_a_stall_absorbs_the_slot(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, payload=b"old")
    assert lease
    await bench.put(payload=b"new", delay_ms=10 * LEASE_MS, conflict=redispatch())
    await bench.events()
    await bench.shift(LEASE_MS)

    await bench.storage.sweep(bench.queue)

    job = await bench.job()
    assert (job.state, job.payload, job.stalls, job.has_rerun) == (S.SCHEDULED, b"new", 1, False)
    assert await bench.seen() == [Seen(E.STALLED, "job", S.SCHEDULED)]


async def test_absorbing_respects_the_flags_of_the_slot(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, payload=b"old")
    assert lease
    keep = redispatch(payload="keep", options="keep", run_at="never", reset_counts=True)
    await bench.put(payload=b"new", conflict=keep)

    answer = await bench.settle(lease, Fail(BOOM, retry_in_ms=MINUTE_MS))

    job = await bench.job()
    assert answer == Settled(True, S.SCHEDULED)
    assert (job.state, job.payload, job.failures, job.runs) == (S.SCHEDULED, b"old", 0, 1)
    assert job.options == Options()


@pytest.mark.parametrize(
    "outcome",
    [Complete(), Fail(BOOM, final=True), Fail(BOOM), Snooze(MINUTE_MS), Release(), None],
    ids=["complete", "fail", "retry", "snooze", "release", "stall"],
)
async def test_a_job_is_of_the_run_and_the_write_of_its_slot_once_its_run_is_over(
    bench: Bench, outcome: Outcome | None
) -> None:
    lease = await bench.bring(S.ACTIVE, payload=b"1", run_id="run-1", write_id="save-1")
    assert lease
    again = bench.new("job", payload=b"2", run_id="run-2", write_id="save-2", conflict=redispatch())
    await bench.put_all([again])
    assert ((await bench.job()).run_id, (await bench.job()).write_id) == ("run-1", "save-1")

    if outcome is not None:
        await bench.settle(lease, outcome)
    else:
        await bench.shift(LEASE_MS)
        await bench.storage.sweep(bench.queue)

    job = await bench.job()
    assert (job.payload, job.run_id, job.write_id, job.has_rerun) == (b"2", "run-2", "save-2", False)
    assert (await bench.events())[-1].run_id == "run-2"
    picture = await bench.picture()
    assert [answer.status for answer in await bench.put_all([again])] == ["duplicate"]
    assert await bench.picture() == picture
    assert (await bench.claim()).run_id == "run-2"


@pytest.mark.parametrize("at_once", [False, True], ids=["in calls of their own", "in one call"])
async def test_the_write_of_a_slot_is_its_duplicate(bench: Bench, at_once: bool) -> None:
    lease = await bench.bring(S.ACTIVE, payload=b"1", write_id="save-1")
    assert lease
    await bench.events()
    fields: dict[str, Any] = {"payload": b"2", "write_id": "save-2", "delay_ms": MINUTE_MS}
    again = bench.new("job", conflict=redispatch(run_at="if_later"), **fields)

    if at_once:
        answers = await bench.put_all([again, again])
    else:
        answers = await bench.put_all([again])
        await bench.shift(MINUTE_MS // 2)
        answers += await bench.put_all([again])

    statuses = ["rerun", "duplicate"]
    assert answers == [Enqueued("job", status, S.ACTIVE, lease.incarnation) for status in statuses]  # type: ignore[arg-type]
    assert await bench.seen() == [Seen(E.CHANGED, "job", S.ACTIVE)]
    await bench.settle(lease, Complete())
    job = await bench.job()
    assert (job.payload, (job.run_at_ms - lease.claimed_at_ms) // MINUTE_MS) == (b"2", 1)


async def test_the_write_of_the_run_takes_a_slot_that_another_write_had(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, payload=b"1", run_id="run-1", write_id="save-1")
    assert lease
    await bench.put(payload=b"2", run_id="run-2", write_id="save-2", conflict=redispatch())

    answer = await bench.put(payload=b"1", run_id="run-3", write_id="save-1", conflict=redispatch())

    assert answer == Enqueued("job", "rerun", S.ACTIVE, lease.incarnation)
    await bench.settle(lease, Complete())
    job = await bench.job()
    assert (job.payload, job.run_id, job.write_id) == (b"1", "run-3", "save-1")


async def test_repeating_the_write_of_a_slot_waits_for_the_end_of_its_run(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, write_id="save-1")
    assert lease
    again = bench.new("job", write_id="save-2", conflict=redispatch())
    await bench.put_all([again])

    await bench.put_all([replace(again, notify="ear")])

    await bench.settle(lease, Complete(b"1"))
    assert await bench.storage.listen(bench.queue, "ear", timeout_ms=1) == []
    second = await bench.claim()
    await bench.settle(second, Complete(b"2"))
    assert await bench.storage.listen(bench.queue, "ear", timeout_ms=5000) == [
        Finished("job", second.incarnation, S.COMPLETED, b"2")
    ]


async def test_too_many_stalls_fail_the_job_and_queue_the_slot(bench: Bench) -> None:
    await bench.bring(S.ACTIVE, payload=b"old", max_stalls=0)
    await bench.put(payload=b"new", conflict=redispatch())
    await bench.events()
    await bench.shift(LEASE_MS)

    await bench.storage.sweep(bench.queue)

    assert (await bench.job()).payload == b"new"
    assert await bench.seen() == [Seen(E.FAILED, "job", S.FAILED), Seen(E.ENQUEUED, "job", S.WAITING)]
    assert await bench.counts() == {S.WAITING: 1}


@pytest.mark.parametrize("by", ["verb", "outcome"])
async def test_a_cancelled_job_loses_its_slot_and_the_waiters_of_the_slot_are_notified(
    bench: Bench, by: str
) -> None:
    lease = await bench.bring(S.ACTIVE, notify="first")
    assert lease
    await bench.put(conflict=redispatch(), notify="second")
    if by == "verb":
        assert await bench.storage.cancel(bench.queue, ["job"]) == ["requested"]
        assert not (await bench.job()).has_rerun

    await bench.settle(lease, Cancel())

    assert await bench.counts() == {S.CANCELLED: 1}
    for listener in ("first", "second"):
        [news] = await bench.storage.listen(bench.queue, listener, timeout_ms=5000)
        assert (news.id, news.state) == ("job", S.CANCELLED)


@pytest.mark.parametrize("by", ["cancel", "release"])
async def test_a_waiter_for_a_job_and_its_slot_is_notified_once(bench: Bench, by: str) -> None:
    lease = await bench.bring(S.ACTIVE, notify="ear")
    assert lease
    await bench.put(conflict=redispatch(), notify="ear")

    await bench.settle(lease, Cancel() if by == "cancel" else Release())
    if by == "release":
        await bench.settle(await bench.claim(), Complete())

    assert len(await bench.storage.listen(bench.queue, "ear", timeout_ms=5000)) == 1
    assert await bench.storage.listen(bench.queue, "ear", timeout_ms=20) == []


async def _failed_and_stalled_once(bench: Bench) -> None:
    await bench.put()
    await bench.settle(await bench.claim(), Fail(BOOM))
    await bench.claim()
    await bench.shift(LEASE_MS)
    await bench.storage.sweep(bench.queue)


async def test_a_new_job_beside_an_updated_one_gets_its_own_incarnation(bench: Bench) -> None:
    await bench.put("old", delay_ms=MINUTE_MS)

    answers = await bench.put_all([bench.new("old", conflict=redispatch()), bench.new("new")])

    assert [answer.status for answer in answers] == ["updated", "queued"]
    assert answers[1].incarnation == (await bench.job("new")).incarnation
