"""settle: outcomes, counters, ttl, repeated calls, and the claim that goes with it. Fencing is in test_fencing."""

from __future__ import annotations

import pytest

from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import FAILURE_TEXTS, Cancel, Complete, Fail, Failure, Outcome, Release, Snooze
from penstock.core.retry import Fixed
from penstock.storage.values import Settled, Settlement, Take, Ticket
from tests.contract.factories import BOOM, LEASE_MS, MINUTE_MS, Bench, Seen, other_states

E, S = EventType, State

OUTCOMES: list[tuple[Outcome, State, EventType]] = [
    (Complete(b"r"), S.COMPLETED, E.COMPLETED),
    (Fail(BOOM), S.WAITING, E.RETRYING),
    (Fail(BOOM, retry_in_ms=MINUTE_MS), S.SCHEDULED, E.RETRYING),
    (Fail(BOOM, final=True), S.FAILED, E.FAILED),
    (Snooze(0), S.WAITING, E.SNOOZED),
    (Snooze(MINUTE_MS), S.SCHEDULED, E.SNOOZED),
    (Release(), S.WAITING, E.RELEASED),
    (Cancel("asked"), S.CANCELLED, E.CANCELLED),
]
NAMES = ["complete", "retry now", "retry later", "fail", "snooze 0", "snooze", "release", "cancel"]
PUT_BACK = [row[0] for row in OUTCOMES if row[1] in (S.WAITING, S.SCHEDULED)]
every_outcome = pytest.mark.parametrize(("outcome", "state", "event"), OUTCOMES, ids=NAMES)


@every_outcome
async def test_an_outcome_takes_the_job_where_the_table_says(
    bench: Bench, outcome: Outcome, state: State, event: EventType
) -> None:
    await bench.put(task="send", run_id="r")
    lease = await bench.claim(worker="ada")
    await bench.events()
    await bench.shift(1000)

    assert await bench.settle(lease, outcome) == Settled(True, state)

    assert await bench.state() is state
    assert await bench.counts() == {state: 1}
    [seen] = await bench.events()
    assert (seen.type, seen.id, seen.state, seen.incarnation) == (event, "job", state, lease.incarnation)
    assert (seen.run, seen.token, seen.worker, seen.task, seen.run_id) == (1, lease.token, "ada", "send", "r")
    assert seen.run_ms == seen.at_ms - lease.claimed_at_ms >= 1000
    if isinstance(outcome, Fail):
        assert (seen.error_type, seen.error) == ("Boom", "it went off")
    if isinstance(outcome, Complete):
        assert seen.size == 1


@every_outcome
async def test_only_a_failure_counts_as_one(
    bench: Bench, outcome: Outcome, state: State, event: EventType
) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease

    await bench.settle(lease, outcome)

    job = await bench.job()
    assert (job.runs, job.failures, job.stalls) == (1, 1 if isinstance(outcome, Fail) else 0, 0)
    assert job.failure == (BOOM if isinstance(outcome, Fail) else None)


@pytest.mark.parametrize("state", other_states("settle"))
async def test_a_job_that_is_not_active_is_left_alone(bench: Bench, state: State) -> None:
    await bench.bring(state)
    picture = await bench.picture()

    batch = await bench.storage.settle(bench.queue, [Settlement("job", 123_456, Complete())])

    assert batch.answers == [Settled(False, state)]
    assert batch.claimed is None
    assert await bench.picture() == picture


async def test_an_unknown_job_is_not_settled(bench: Bench) -> None:
    batch = await bench.storage.settle(bench.queue, [Settlement("nobody", 1, Complete())])

    assert batch.answers == [Settled(False, None)]
    assert await bench.events() == []


async def test_a_completed_job_keeps_its_result_for_its_ttl(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, result_ttl_ms=MINUTE_MS)
    assert lease

    await bench.settle(lease, Complete(b"\x00result\xff"))

    job = await bench.job()
    assert (job.result, job.failure) == (b"\x00result\xff", None)
    assert job.kept_until_ms == job.finished_at_ms + MINUTE_MS
    assert job.finished_at_ms >= lease.claimed_at_ms
    assert job.lease_until_ms == 0


@pytest.mark.parametrize("ttl_ms", [5 * MINUTE_MS, 400 * 24 * 60 * MINUTE_MS])
@pytest.mark.parametrize("task", ["", "send"])
async def test_an_outcome_may_say_how_long_its_end_is_kept(bench: Bench, ttl_ms: int, task: str) -> None:
    outcomes: dict[str, Outcome] = {
        "done": Complete(b"r" * 500, ttl_ms=ttl_ms),
        "failed": Fail(BOOM, final=True, ttl_ms=ttl_ms),
        "usual": Complete(b"r"),
    }
    backoff = Fixed(delay_ms=7, jitter=0.25)
    given = {"result_ttl_ms": MINUTE_MS, "task": task, "backoff": backoff, "payload": b"load", "run_id": "r"}
    for id in outcomes:
        await bench.put(id, **given)
    leases = await bench.claim_all()

    items = [Settlement(lease.id, lease.token, outcomes[lease.id]) for lease in leases]
    batch = await bench.storage.settle(bench.queue, items)

    assert [answer.state for answer in batch.answers] == [S.COMPLETED, S.FAILED, S.COMPLETED]
    done, failed, usual = [await bench.job(id) for id in outcomes]
    assert done.kept_until_ms == done.finished_at_ms + ttl_ms
    assert failed.kept_until_ms == failed.finished_at_ms + ttl_ms
    assert usual.kept_until_ms == usual.finished_at_ms + MINUTE_MS
    assert (done.result, done.payload, failed.failure) == (b"r" * 500, b"load", BOOM)
    assert (done.options.result_ttl_ms, failed.options.failure_ttl_ms) == (ttl_ms, ttl_ms)
    for job in (done, failed):
        assert (job.options.task, job.options.attempts, job.options.backoff) == (task, 3, backoff)
        assert (job.run_id, job.payload) == ("r", b"load")
    await bench.shift(2 * MINUTE_MS)
    await bench.storage.sweep(bench.queue)
    assert await bench.find("usual") is None
    assert [(await bench.job(id)).id for id in ("done", "failed")] == ["done", "failed"]


async def test_a_ttl_of_zero_in_the_outcome_removes_the_record_immediately(bench: Bench) -> None:
    outcomes: list[Outcome] = [Complete(b"r", ttl_ms=0), Fail(BOOM, final=True, ttl_ms=0)]
    for outcome in outcomes:
        await bench.put()
        assert (await bench.settle(await bench.claim(), outcome)).applied
    assert await bench.counts() == {}


async def test_a_failure_that_is_not_the_end_leaves_the_ttl_alone(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, attempts=2, failure_ttl_ms=MINUTE_MS)
    assert lease
    await bench.settle(lease, Fail(BOOM, ttl_ms=1))

    assert await bench.settle(await bench.claim(), Fail(BOOM)) == Settled(True, S.FAILED)

    job = await bench.job()
    assert job.kept_until_ms == job.finished_at_ms + MINUTE_MS


async def test_an_empty_result_is_a_result(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.settle(lease, Complete())

    assert (await bench.job()).result == b""
    assert (await bench.put()).result == b""


@pytest.mark.parametrize(
    ("outcome", "state"),
    [(Complete(b"r"), S.COMPLETED), (Cancel(), S.CANCELLED), (Fail(BOOM, final=True), S.FAILED)],
    ids=["complete", "cancel", "fail"],
)
async def test_a_ttl_of_zero_removes_the_record_immediately(
    bench: Bench, outcome: Outcome, state: State
) -> None:
    await bench.put(result_ttl_ms=0, failure_ttl_ms=0, notify="ear")
    lease = await bench.claim()
    await bench.events()

    assert await bench.settle(lease, outcome) == Settled(True, state)

    assert await bench.find() is None
    assert await bench.counts() == {}
    [event] = await bench.events()
    assert event.state == state
    [news] = await bench.storage.listen(bench.queue, "ear", timeout_ms=5000)
    assert (news.state, news.result) == (state, b"r" if state is S.COMPLETED else None)
    assert await bench.settle(lease, outcome) == Settled(False, None)


async def test_retries_end_when_the_attempts_are_used_up(bench: Bench) -> None:
    await bench.put(attempts=3, failure_ttl_ms=MINUTE_MS)
    states = [(await bench.settle(await bench.claim(), Fail(BOOM))).state for _ in range(3)]

    assert states == [S.WAITING, S.WAITING, S.FAILED]
    job = await bench.job()
    assert (job.runs, job.failures, job.failure) == (3, 3, BOOM)
    assert job.kept_until_ms == job.finished_at_ms + MINUTE_MS
    assert [event.type for event in await bench.events()][-2:] == [E.CLAIMED, E.FAILED]


async def test_a_retry_later_comes_due_after_its_delay(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.settle(lease, Fail(BOOM, retry_in_ms=MINUTE_MS))

    assert await bench.claim_all() == []
    await bench.shift(MINUTE_MS)
    again = await bench.claim()
    assert (again.run, again.failures) == (2, 1)
    assert again.token > lease.token


@pytest.mark.parametrize("outcome", PUT_BACK, ids=repr)
async def test_a_job_to_be_cancelled_is_cancelled_instead_of_put_back(bench: Bench, outcome: Outcome) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.storage.cancel(bench.queue, ["job"])
    await bench.events()

    assert await bench.settle(lease, outcome) == Settled(True, S.CANCELLED)
    assert await bench.seen() == [Seen(E.CANCELLED, "job", S.CANCELLED)]
    assert await bench.counts() == {S.CANCELLED: 1}


async def test_a_complete_that_comes_before_the_cancel_took_effect_wins(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.storage.cancel(bench.queue, ["job"])

    assert await bench.settle(lease, Complete(b"r")) == Settled(True, S.COMPLETED)
    assert (await bench.job()).result == b"r"


@pytest.mark.parametrize("outcome", [Fail(BOOM), Fail(BOOM, retry_in_ms=MINUTE_MS), Snooze(0)], ids=repr)
async def test_a_job_past_its_ttl_expires_instead_of_being_put_back(bench: Bench, outcome: Outcome) -> None:
    lease = await bench.bring(S.ACTIVE, ttl_ms=MINUTE_MS)
    assert lease
    await bench.events()
    await bench.shift(MINUTE_MS)

    assert await bench.settle(lease, outcome) == Settled(True, S.FAILED)
    failure = (await bench.job()).failure
    assert failure
    assert failure == Failure("Expired", FAILURE_TEXTS["Expired"])
    assert await bench.seen() == [Seen(E.EXPIRED, "job", S.FAILED)]


async def test_a_job_past_its_ttl_can_be_completed_and_released(bench: Bench) -> None:
    await bench.put_all([bench.new(id, ttl_ms=MINUTE_MS) for id in ("a", "b")])
    a, b = await bench.claim_all()
    await bench.shift(MINUTE_MS)

    assert await bench.settle(a, Complete()) == Settled(True, S.COMPLETED)
    assert await bench.settle(b, Release()) == Settled(True, S.WAITING)


# Repeated calls


@every_outcome
async def test_a_settle_repeated_with_its_token_gets_the_first_answer(
    bench: Bench, outcome: Outcome, state: State, event: EventType
) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.settle(lease, outcome)
    picture = await bench.picture()

    assert await bench.settle(lease, outcome) == Settled(True, state)
    assert await bench.settle(lease, Complete(b"another")) == Settled(True, state)
    assert await bench.picture() == picture


@pytest.mark.parametrize("outcome", [Fail(BOOM), Snooze(0), Release()], ids=repr)
async def test_a_repeated_settle_is_refused_once_the_job_was_claimed_again(
    bench: Bench, outcome: Outcome
) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.settle(lease, outcome)
    await bench.claim()

    assert await bench.settle(lease, outcome) == Settled(False, S.ACTIVE)


async def test_a_repeated_settle_is_refused_after_an_operator_retried_the_job(bench: Bench) -> None:
    lease = await bench.bring(S.FAILED)
    assert lease
    await bench.storage.retry(bench.queue, ["job"])

    assert await bench.settle(lease, Fail(BOOM, final=True)) == Settled(False, S.WAITING)


async def test_a_repeated_call_with_its_ticket_gets_answers_and_leases_again(bench: Bench) -> None:
    await bench.put_all([bench.new(id, result_ttl_ms=0) for id in "abcd"])
    a, b = await bench.claim_all(2)
    items = [Settlement("a", a.token, Complete()), Settlement("b", b.token, Fail(BOOM))]
    take, ticket = Take("w", 2, LEASE_MS), Ticket("stream", 1)
    first = await bench.storage.settle(bench.queue, items, take=take, ticket=ticket)
    picture = await bench.picture()

    again = await bench.storage.settle(bench.queue, items, take=take, ticket=ticket)

    assert first.answers == [Settled(True, S.COMPLETED), Settled(True, S.WAITING)]
    assert first.claimed
    assert [lease.id for lease in first.claimed.leases] == ["c", "d"]
    assert again == first
    assert await bench.picture() == picture


# Batches


async def test_outcomes_are_applied_item_after_item_and_then_the_next_are_claimed(bench: Bench) -> None:
    await bench.put_all([bench.new(id) for id in "abcd"])
    leases = await bench.claim_all(3)
    await bench.events()
    outcomes: list[Outcome] = [Complete(), Release(), Fail(BOOM, final=True)]
    items = [
        Settlement(lease.id, lease.token, outcome) for lease, outcome in zip(leases, outcomes, strict=True)
    ]

    batch = await bench.storage.settle(bench.queue, items, take=Take("w", 9, LEASE_MS))

    assert batch.answers == [Settled(True, S.COMPLETED), Settled(True, S.WAITING), Settled(True, S.FAILED)]
    assert batch.claimed
    assert [(lease.id, lease.run) for lease in batch.claimed.leases] == [("b", 2), ("d", 1)]
    assert await bench.seen() == [
        Seen(E.COMPLETED, "a", S.COMPLETED),
        Seen(E.RELEASED, "b", S.WAITING),
        Seen(E.FAILED, "c", S.FAILED),
        Seen(E.CLAIMED, "b", S.ACTIVE),
        Seen(E.CLAIMED, "d", S.ACTIVE),
    ]


async def test_the_same_lease_twice_in_a_batch_is_settled_once(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    await bench.events()
    items = [Settlement("job", lease.token, Complete(b"1")), Settlement("job", lease.token, Complete(b"2"))]

    batch = await bench.storage.settle(bench.queue, items)

    assert batch.answers == [Settled(True, S.COMPLETED)] * 2
    assert (await bench.job()).result == b"1"
    assert await bench.seen() == [Seen(E.COMPLETED, "job", S.COMPLETED)]


async def test_the_second_settle_of_a_batch_finds_what_the_first_one_left(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, result_ttl_ms=0)
    assert lease
    item = Settlement("job", lease.token, Complete())

    batch = await bench.storage.settle(bench.queue, [item, item])

    assert batch.answers == [Settled(True, S.COMPLETED), Settled(False, None)]


async def test_a_lost_lease_in_a_batch_does_not_keep_the_others_from_being_settled(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE)
    assert lease
    items = [
        Settlement("nobody", 1, Complete()),
        Settlement("job", lease.token, Complete()),
        Settlement("job", lease.token + 1, Complete()),
    ]

    batch = await bench.storage.settle(bench.queue, items)

    assert batch.answers == [Settled(False, None), Settled(True, S.COMPLETED), Settled(False, S.COMPLETED)]


async def test_without_settlements_it_is_a_claim(bench: Bench) -> None:
    await bench.put()

    batch = await bench.storage.settle(bench.queue, [], take=Take("w", 1, LEASE_MS))

    assert batch.answers == []
    assert batch.claimed
    assert [lease.id for lease in batch.claimed.leases] == ["job"]


async def test_a_paused_queue_is_settled_but_gives_nothing(bench: Bench) -> None:
    await bench.put_all([bench.new(id) for id in "ab"])
    lease = await bench.claim()
    await bench.storage.pause(bench.queue)

    item = Settlement("a", lease.token, Complete())
    batch = await bench.storage.settle(bench.queue, [item], take=Take("w", 1, LEASE_MS))

    assert batch.answers == [Settled(True, S.COMPLETED)]
    assert batch.claimed
    assert (batch.claimed.leases, batch.claimed.paused) == ([], True)


async def test_five_thousand_jobs_are_settled_in_one_call(bench: Bench) -> None:
    await bench.put_all([bench.new(str(i)) for i in range(5000)])
    leases = await bench.claim_all(5000)
    items = [Settlement(lease.id, lease.token, Complete(b"r")) for lease in leases]

    batch = await bench.storage.settle(bench.queue, items)

    assert batch.answers == [Settled(True, S.COMPLETED)] * 5000
    assert await bench.counts() == {S.COMPLETED: 5000}
    assert len(await bench.events()) == 15_000
