"""claim: order, promotion, ttl, pause, fencing, repeated calls."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.lifecycle import EventType, State
from penstock.core.outcome import FAILURE_TEXTS, Complete, Fail, Failure, Outcome, Release, Snooze
from penstock.storage.values import Claimed, Take, Ticket
from tests.contract.factories import BOOM, LEASE_MS, MINUTE_MS, Bench, Seen, other_states

E, S = EventType, State


async def test_a_claimed_job_is_active_under_a_token(bench: Bench) -> None:
    await bench.put(payload=b"p", task="send", priority=2, ttl_ms=5 * MINUTE_MS, run_id="r")
    put = await bench.job()
    await bench.events()
    await bench.shift(MINUTE_MS)

    lease = await bench.claim(worker="ada")

    job = await bench.job()
    assert await bench.state() is S.ACTIVE
    assert (job.worker, job.token, job.runs) == ("ada", lease.token, 1)
    assert (job.claimed_at_ms, job.lease_until_ms) == (lease.claimed_at_ms, lease.claimed_at_ms + LEASE_MS)
    assert lease.token > put.incarnation == lease.incarnation
    assert (lease.id, lease.run, lease.failures, lease.stalls) == ("job", 1, 0, 0)
    assert (lease.payload, lease.options, lease.priority, lease.run_id) == (b"p", put.options, 2, "r")
    assert (lease.enqueued_at_ms, lease.expires_at_ms) == (put.enqueued_at_ms, put.expires_at_ms)
    assert not lease.cancelling
    [event] = await bench.events()
    assert (event.type, event.id, event.state, event.incarnation) == (
        E.CLAIMED,
        "job",
        S.ACTIVE,
        lease.incarnation,
    )
    assert (event.run, event.token, event.worker, event.task) == (1, lease.token, "ada", "send")
    assert (event.priority, event.run_id) == (2, "r")
    assert event.at_ms == lease.claimed_at_ms
    assert event.wait_ms == lease.claimed_at_ms - put.enqueued_at_ms >= MINUTE_MS


@pytest.mark.parametrize("state", other_states("claim"))
async def test_a_job_that_is_not_in_line_is_not_claimed(bench: Bench, state: State) -> None:
    await bench.bring(state)
    picture = await bench.picture()

    assert await bench.claim_all() == []
    assert await bench.picture() == picture


async def test_a_scheduled_job_is_not_claimed_before_its_time(bench: Bench) -> None:
    await bench.bring(S.SCHEDULED)
    picture = await bench.picture()

    claimed = await bench.storage.claim(bench.queue, Take("w", 1, LEASE_MS))

    assert claimed.leases == []
    assert claimed.wait_ms is not None
    assert 0 < claimed.wait_ms <= MINUTE_MS
    assert await bench.picture() == picture


async def test_a_scheduled_job_whose_time_has_come_is_promoted_and_claimed(bench: Bench) -> None:
    await bench.put("later", delay_ms=MINUTE_MS)
    await bench.put("sooner", delay_ms=MINUTE_MS // 2)
    await bench.events()
    await bench.shift(MINUTE_MS)

    assert [lease.id for lease in await bench.claim_all()] == ["sooner", "later"]
    assert await bench.seen() == [
        Seen(E.PROMOTED, "sooner", S.WAITING),
        Seen(E.PROMOTED, "later", S.WAITING),
        Seen(E.CLAIMED, "sooner", S.ACTIVE),
        Seen(E.CLAIMED, "later", S.ACTIVE),
    ]
    assert await bench.counts() == {S.ACTIVE: 2}


async def test_jobs_due_at_the_same_time_are_promoted_in_the_order_of_their_ids(bench: Bench) -> None:
    await bench.put_all([bench.new(id, delay_ms=MINUTE_MS) for id in ("z", "ä", "a", "B")])
    await bench.shift(MINUTE_MS)

    assert [lease.id for lease in await bench.claim_all()] == ["B", "a", "z", "ä"]


@pytest.mark.parametrize(
    ("jobs", "order"),
    [
        ([("a", {}), ("b", {}), ("c", {})], "abc"),
        ([("a", {"priority": 1}), ("b", {}), ("c", {"priority": -1}), ("d", {})], "cbda"),
        ([("a", {}), ("b", {"lifo": True}), ("c", {"lifo": True}), ("d", {})], "cbad"),
        ([("a", {"priority": -1}), ("b", {"lifo": True}), ("c", {"priority": -1, "lifo": True})], "cab"),
        ([("a", {"priority": 2**31 - 1}), ("b", {"priority": -(2**31)}), ("c", {})], "bca"),
    ],
    ids=["fifo", "priority", "lifo", "lifo within priority", "extremes"],
)
async def test_the_order_is_by_priority_then_lifo_then_fifo(
    bench: Bench, jobs: list[tuple[str, dict[str, Any]]], order: str
) -> None:
    await bench.put_all([bench.new(id, **fields) for id, fields in jobs])

    assert await bench.ids(S.WAITING) == list(order)
    one_by_one = [(await bench.claim()).id for _ in jobs]
    assert one_by_one == list(order)


@pytest.mark.parametrize("lifo", [False, True])
async def test_handed_back_and_rescued_jobs_keep_their_place(bench: Bench, lifo: bool) -> None:
    await bench.put_all([bench.new(id, lifo=lifo) for id in "abcd"])
    first, second = await bench.claim_all(2)

    await bench.settle(second, Release())
    await bench.shift(LEASE_MS)
    await bench.storage.sweep(bench.queue)

    assert first.id == ("d" if lifo else "a")
    assert await bench.ids(S.WAITING) == list("dcba" if lifo else "abcd")


async def test_retried_and_snoozed_jobs_go_to_the_end_of_the_line(bench: Bench) -> None:
    await bench.put_all([bench.new(id) for id in "abc"])
    await bench.settle(await bench.claim(), Fail(BOOM))
    await bench.settle(await bench.claim(), Snooze(0))

    assert await bench.ids(S.WAITING) == ["c", "a", "b"]


async def test_no_more_than_asked_for_are_claimed_and_wait_ms_says_when_to_come_again(bench: Bench) -> None:
    await bench.put_all([bench.new(id) for id in "abc"])

    two = await bench.storage.claim(bench.queue, Take("w", 2, LEASE_MS))
    rest = await bench.storage.claim(bench.queue, Take("w", 2, LEASE_MS))
    none = await bench.storage.claim(bench.queue, Take("w", 2, LEASE_MS))

    assert ([lease.id for lease in two.leases], two.wait_ms) == (["a", "b"], 0)
    assert ([lease.id for lease in rest.leases], rest.wait_ms) == (["c"], None)
    assert none == Claimed([], None)


async def test_a_paused_queue_gives_nothing_and_promotes_nothing(bench: Bench) -> None:
    await bench.put("waiting")
    await bench.put("due", delay_ms=MINUTE_MS)
    await bench.storage.pause(bench.queue)
    await bench.shift(MINUTE_MS)
    picture = await bench.picture()

    assert await bench.storage.claim(bench.queue, Take("w", 9, LEASE_MS)) == Claimed([], None, paused=True)
    assert await bench.picture() == picture


async def test_a_job_past_its_ttl_expires_instead_of_being_claimed(bench: Bench) -> None:
    await bench.put_all([bench.new("a"), bench.new("b", ttl_ms=MINUTE_MS), bench.new("c")])
    await bench.events()
    await bench.shift(MINUTE_MS)

    assert [lease.id for lease in await bench.claim_all(2)] == ["a", "c"]
    job = await bench.job("b")
    assert (job.state, job.failure, job.runs) == (S.FAILED, Failure("Expired", FAILURE_TEXTS["Expired"]), 0)
    assert await bench.seen() == [
        Seen(E.CLAIMED, "a", S.ACTIVE),
        Seen(E.EXPIRED, "b", S.FAILED),
        Seen(E.CLAIMED, "c", S.ACTIVE),
    ]
    assert await bench.counts() == {S.ACTIVE: 2, S.FAILED: 1}


@pytest.mark.parametrize("fields", [{}, {"lifo": True}, {"priority": 1}, {"run_at_ms": 1}], ids=repr)
async def test_a_job_that_expires_at_a_claim_and_is_not_kept_leaves_nothing(
    bench: Bench, fields: dict[str, Any]
) -> None:
    await bench.put(ttl_ms=MINUTE_MS, failure_ttl_ms=0, **fields)
    await bench.put("other", **fields)
    await bench.shift(MINUTE_MS)

    assert [lease.id for lease in await bench.claim_all()] == ["other"]
    assert await bench.find() is None
    assert await bench.counts() == {S.ACTIVE: 1}
    assert not any((await bench.storage.check(bench.queue)).problems.values())


async def test_a_scheduled_job_past_its_ttl_is_promoted_and_then_expires(bench: Bench) -> None:
    await bench.put(delay_ms=MINUTE_MS, ttl_ms=MINUTE_MS)
    await bench.events()
    await bench.shift(MINUTE_MS)

    assert await bench.claim_all() == []
    assert await bench.seen() == [Seen(E.PROMOTED, "job", S.WAITING), Seen(E.EXPIRED, "job", S.FAILED)]


async def test_tokens_rise_from_claim_to_claim(bench: Bench) -> None:
    await bench.put()
    tokens = []
    for _ in range(5):
        lease = await bench.claim()
        tokens.append(lease.token)
        await bench.settle(lease, Release())

    assert tokens == sorted(set(tokens))


async def test_every_claim_counts_a_run(bench: Bench) -> None:
    await bench.put(attempts=10)
    outcomes: list[Outcome] = [Fail(BOOM), Snooze(0), Release(), Complete()]
    for run, outcome in enumerate(outcomes, start=1):
        lease = await bench.claim()
        assert lease.run == run
        await bench.settle(lease, outcome)

    job = await bench.job()
    assert (job.runs, job.failures, job.stalls) == (4, 1, 0)


async def test_a_repeated_call_with_its_ticket_gets_the_same_leases(bench: Bench) -> None:
    await bench.put_all([bench.new(id) for id in "abcd"])
    take, ticket = Take("w", 2, LEASE_MS), Ticket("stream", 1)
    first = await bench.storage.claim(bench.queue, take, ticket=ticket)
    picture = await bench.picture()

    assert await bench.storage.claim(bench.queue, take, ticket=ticket) == first
    assert await bench.picture() == picture
    second = await bench.storage.claim(bench.queue, take, ticket=Ticket("stream", 2))
    assert [lease.id for lease in second.leases] == ["c", "d"]


async def test_leases_that_are_held_no_longer_are_left_out_of_a_repeated_answer(bench: Bench) -> None:
    await bench.put_all([bench.new(id) for id in "ab"])
    take, ticket = Take("w", 2, LEASE_MS), Ticket("stream", 1)
    first = await bench.storage.claim(bench.queue, take, ticket=ticket)
    await bench.settle(first.leases[0], Complete())
    await bench.storage.cancel(bench.queue, ["b"])

    again = await bench.storage.claim(bench.queue, take, ticket=ticket)

    assert [(lease.id, lease.token, lease.cancelling) for lease in again.leases] == [
        ("b", first.leases[1].token, True)
    ]


async def test_two_queues_do_not_see_each_other(bench: Bench) -> None:
    other = Bench(bench.storage, f"{bench.queue}-2")
    await bench.put("job", payload=b"one")
    await other.put("job", payload=b"two")
    await other.storage.pause(other.queue)
    await other.shift(MINUTE_MS)

    assert (await bench.claim()).payload == b"one"
    assert await other.claim_all() == []
    assert (await other.job()).state is S.WAITING
    assert [event.queue for event in await other.events()] == [other.queue] * 2
