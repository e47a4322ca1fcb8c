"""enqueue: new jobs, known ids, batches."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.job import Conflict, Enqueued, Extras, NewJob, Options
from penstock.core.lifecycle import OPEN, EventType, State
from penstock.core.outcome import Complete, Fail
from penstock.storage.values import Report, Ticket
from tests.contract.factories import BOOM, MINUTE_MS, STATES, Bench, Seen, redispatch

E, S = EventType, State


async def test_a_new_job_waits_and_its_record_says_all_that_was_given(bench: Bench) -> None:
    options = Options(task="send", version="2", attempts=5, max_stalls=1, timeout_ms=1000)
    new = NewJob(
        "job", b"\x00payload", options, priority=-3, lifo=True, ttl_ms=MINUTE_MS, run_id="r", write_id="w"
    )

    [answer] = await bench.put_all([new])

    job = await bench.job()
    assert answer == Enqueued("job", "queued", S.WAITING, job.incarnation)
    assert (job.queue, job.payload, job.options, job.priority) == (bench.queue, b"\x00payload", options, -3)
    assert (job.lifo, job.run_id, job.write_id) == (True, "r", "w")
    assert (job.runs, job.failures, job.stalls, job.token) == (0, 0, 0, 0)
    assert job.expires_at_ms == job.enqueued_at_ms + MINUTE_MS
    assert job.run_at_ms == job.enqueued_at_ms
    assert await bench.counts() == {S.WAITING: 1}
    [event] = await bench.events()
    assert (event.type, event.id, event.state, event.incarnation) == (
        E.ENQUEUED,
        "job",
        S.WAITING,
        job.incarnation,
    )
    assert (event.task, event.version, event.run_id, event.priority, event.size) == ("send", "2", "r", -3, 8)
    assert event.at_ms == event.enqueued_at_ms == job.enqueued_at_ms
    assert event.queue == bench.queue


async def test_a_delayed_job_is_scheduled_that_long_after_now(bench: Bench) -> None:
    answer = await bench.put(delay_ms=MINUTE_MS)

    job = await bench.job()
    assert answer == Enqueued("job", "queued", S.SCHEDULED, job.incarnation)
    assert job.run_at_ms == job.enqueued_at_ms + MINUTE_MS
    assert await bench.seen() == [Seen(E.ENQUEUED, "job", S.SCHEDULED)]
    assert await bench.counts() == {S.SCHEDULED: 1}


async def test_a_job_with_an_instant_is_scheduled_for_it_or_waits_if_it_has_passed(bench: Bench) -> None:
    await bench.put("clock")
    now_ms = (await bench.job("clock")).enqueued_at_ms

    await bench.put("future", run_at_ms=now_ms + MINUTE_MS)
    await bench.put("past", run_at_ms=now_ms - MINUTE_MS)

    assert (await bench.job("future")).state is S.SCHEDULED
    assert (await bench.job("future")).run_at_ms == now_ms + MINUTE_MS
    assert (await bench.job("past")).state is S.WAITING
    assert (await bench.job("past")).run_at_ms == now_ms - MINUTE_MS


@pytest.mark.parametrize("state", STATES)
async def test_default_a_known_id_is_answered_by_its_state(bench: Bench, state: State) -> None:
    await bench.bring(state, payload=b"old")
    before, picture = await bench.job(), await bench.picture()
    await bench.events()

    answer = await bench.put(payload=b"new")

    if state in OPEN:
        assert answer == Enqueued("job", "duplicate", state, before.incarnation)
        assert await bench.picture() == picture
    elif state is S.COMPLETED:
        assert answer == Enqueued("job", "completed", state, before.incarnation, b"result")
        assert await bench.picture() == picture
    else:
        after = await bench.job()
        assert answer == Enqueued("job", "queued", S.WAITING, after.incarnation)
        assert after.incarnation > before.incarnation
        assert (after.payload, after.runs, after.failures, after.failure) == (b"new", 0, 0, None)
        assert await bench.counts() == {S.WAITING: 1}
        assert await bench.seen() == [Seen(E.ENQUEUED, "job", S.WAITING)]


@pytest.mark.parametrize("state", STATES)
async def test_absent_any_kept_record_is_a_duplicate(bench: Bench, state: State) -> None:
    await bench.bring(state)
    before, picture = await bench.job(), await bench.picture()

    answer = await bench.put(conflict=Conflict(mode="absent"))

    result = b"result" if state is S.COMPLETED else None
    assert answer == Enqueued("job", "duplicate", state, before.incarnation, result)
    assert await bench.picture() == picture


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("conflict", [Conflict(), redispatch()], ids=["default", "redispatch"])
async def test_the_same_write_is_a_duplicate_in_every_state(
    bench: Bench, state: State, conflict: Conflict
) -> None:
    await bench.bring(state, write_id="save-1")
    picture = await bench.picture()

    answer = await bench.put(write_id="save-1", conflict=conflict)

    assert (answer.status, answer.state) == ("duplicate", state)
    assert answer.result == (b"result" if state is S.COMPLETED else None)
    assert await bench.picture() == picture


async def test_another_write_is_treated_like_none(bench: Bench) -> None:
    await bench.bring(S.FAILED, write_id="save-1")

    assert (await bench.put(write_id="save-2")).status == "queued"
    assert (await bench.job()).write_id == "save-2"


@pytest.mark.parametrize("state", [S.COMPLETED, S.FAILED, S.CANCELLED])
@pytest.mark.parametrize("mode", ["default", "absent", "redispatch"])
async def test_an_id_is_free_once_its_record_is_kept_no_longer(bench: Bench, state: State, mode: str) -> None:
    await bench.bring(state, result_ttl_ms=MINUTE_MS, failure_ttl_ms=MINUTE_MS, write_id="w")
    before = await bench.job()
    await bench.shift(MINUTE_MS)

    answer = await bench.put(conflict=Conflict(mode=mode), write_id="w")  # type: ignore[arg-type]

    assert (answer.status, answer.state, answer.result) == ("queued", S.WAITING, None)
    assert answer.incarnation > before.incarnation
    assert await bench.counts() == {S.WAITING: 1}


async def test_what_the_earlier_life_of_an_id_left_is_gone(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, payload=b"old", attempts=1)
    assert lease
    await bench.storage.report(bench.queue, [Report(lease.id, lease.token, b"0.5", ("line",))])
    await bench.settle(lease, Fail(BOOM))

    await bench.put(payload=b"new")

    job = await bench.job()
    assert (job.payload, job.progress, job.failure, job.result) == (b"new", None, None, None)
    assert (job.runs, job.failures, job.token, job.finished_at_ms, job.kept_until_ms) == (0, 0, 0, 0, 0)
    assert (await bench.storage.logs(bench.queue, "job")).lines == []


async def test_unchecked_puts_a_new_job_in(bench: Bench) -> None:
    answer = await bench.put(unchecked=True, delay_ms=MINUTE_MS)

    assert (answer.status, answer.state) == ("queued", S.SCHEDULED)
    assert await bench.seen() == [Seen(E.ENQUEUED, "job", S.SCHEDULED)]


@pytest.mark.parametrize("state", STATES)
async def test_unchecked_replaces_the_record_if_the_id_is_known_after_all(bench: Bench, state: State) -> None:
    lease = await bench.bring(state, payload=b"old")

    answer = await bench.put(payload=b"new", unchecked=True)

    assert answer.status == "queued"
    assert await bench.state() is S.WAITING
    assert await bench.counts() == {S.WAITING: 1}
    assert not any((await bench.storage.check(bench.queue)).problems.values())
    assert [lease.payload for lease in await bench.claim_all()] == [b"new"]
    if lease:
        assert not (await bench.settle(lease, Complete())).applied


async def test_a_batch_acts_item_after_item(bench: Bench) -> None:
    answers = await bench.put_all(
        [
            bench.new("a", payload=b"1"),
            bench.new("b"),
            bench.new("a", payload=b"2"),
            bench.new("a", payload=b"3", conflict=redispatch()),
            bench.new("b", conflict=redispatch(), delay_ms=MINUTE_MS),
            bench.new("b"),
        ]
    )

    statuses = [(answer.id, answer.status, answer.state) for answer in answers]
    assert statuses == [
        ("a", "queued", S.WAITING),
        ("b", "queued", S.WAITING),
        ("a", "duplicate", S.WAITING),
        ("a", "updated", S.WAITING),
        ("b", "updated", S.SCHEDULED),
        ("b", "duplicate", S.SCHEDULED),
    ]
    assert (await bench.job("a")).payload == b"3"
    assert await bench.seen() == [
        Seen(E.ENQUEUED, "a", S.WAITING),
        Seen(E.ENQUEUED, "b", S.WAITING),
        Seen(E.CHANGED, "a", S.WAITING),
        Seen(E.CHANGED, "b", S.SCHEDULED),
    ]
    assert await bench.counts() == {S.WAITING: 1, S.SCHEDULED: 1}


async def test_an_empty_batch_changes_nothing(bench: Bench) -> None:
    assert await bench.put_all([]) == []
    assert await bench.events() == []


async def test_five_thousand_jobs_in_one_call_come_out_in_order(bench: Bench) -> None:
    answers = await bench.put_all([NewJob(f"job-{i}", b"x" * 100) for i in range(5000)])

    assert [answer.status for answer in answers] == ["queued"] * 5000
    incarnations = [answer.incarnation for answer in answers]
    assert incarnations == list(range(incarnations[0], incarnations[0] + 5000))
    assert await bench.counts() == {S.WAITING: 5000}
    leases = await bench.claim_all(5000)
    assert [lease.id for lease in leases] == [f"job-{i}" for i in range(5000)]
    assert [event.id for event in await bench.events()] == [f"job-{i}" for i in range(5000)] * 2


async def test_ids_of_any_script_and_payloads_of_any_bytes_come_back_as_they_were(bench: Bench) -> None:
    everything = bytes(range(256))
    for id in ("日本語", "é", "🚰 tap", "a:b/{c}", "*", "x" * 200):
        await bench.put(id, payload=everything)

    assert [(lease.id, lease.payload) for lease in await bench.claim_all()] == [
        (id, everything) for id in ("日本語", "é", "🚰 tap", "a:b/{c}", "*", "x" * 200)
    ]


async def test_a_repeated_call_with_its_ticket_gets_the_first_answers(bench: Bench) -> None:
    jobs = [bench.new("a"), bench.new("a"), bench.new("b", delay_ms=MINUTE_MS)]
    first = await bench.storage.enqueue(bench.queue, jobs, ticket=Ticket("stream", 1))
    picture = await bench.picture()

    again = await bench.storage.enqueue(bench.queue, jobs, ticket=Ticket("stream", 1))

    assert [answer.status for answer in first] == ["queued", "duplicate", "queued"]
    assert again == first
    assert await bench.picture() == picture


async def test_a_ticket_of_another_lane_or_number_is_another_call(bench: Bench) -> None:
    jobs = [bench.new("a")]
    for ticket, status in [
        (Ticket("one", 1), "queued"),
        (Ticket("two", 1), "duplicate"),
        (Ticket("one", 2), "duplicate"),
        (None, "duplicate"),
    ]:
        [answer] = await bench.storage.enqueue(bench.queue, jobs, ticket=ticket)
        assert answer.status == status


async def test_an_incarnation_never_comes_back_even_after_obliterate(bench: Bench) -> None:
    first = await bench.put()
    await bench.storage.obliterate(bench.queue)

    assert (await bench.put()).incarnation > first.incarnation


@pytest.mark.parametrize(
    "first", [{"delay_ms": MINUTE_MS}, {"extras": Extras(holds={"reader": MINUTE_MS})}, {}]
)
async def test_an_id_given_twice_in_a_call_is_enqueued_once(bench: Bench, first: dict[str, Any]) -> None:
    answers = await bench.put_all([bench.new("job", **first), bench.new("job")])

    assert [answer.status for answer in answers] == ["queued", "duplicate"]
    assert answers[0].incarnation == answers[1].incarnation
    assert sum((await bench.counts()).values()) == 1
