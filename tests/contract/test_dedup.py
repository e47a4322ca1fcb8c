"""Dedup keys: several jobs that are to be one, whatever their ids."""

from __future__ import annotations

import pytest

from penstock.core.job import Dedup, Dependency, Enqueued, Extras
from penstock.core.lifecycle import OPEN, EventType, State
from penstock.core.outcome import Cancel, Complete, Fail, Failure, Outcome
from penstock.storage.values import Finished
from tests.contract.factories import (
    BOOM,
    LEASE_MS,
    MINUTE_MS,
    STATES,
    TERMINAL_STATES,
    Bench,
    Seen,
    redispatch,
)

SIMPLE = Dedup("key")
THROTTLE = Dedup("key", "throttle", 10 * MINUTE_MS)
DEBOUNCE = Dedup("key", "debounce")
OPEN_STATES = [state for state in STATES if state in OPEN]
PENDING_STATES = [State.SCHEDULED, State.WAITING]


def is_duplicate_of(answer: Enqueued, id: str, state: State | None) -> bool:
    return (answer.id, answer.status, answer.state) == (id, "duplicate", state)


# simple


@pytest.mark.parametrize("state", OPEN_STATES)
async def test_simple_is_a_duplicate_of_an_open_job_of_the_key(bench: Bench, state: State) -> None:
    await bench.bring(state, "first", dedup=SIMPLE)
    before = await bench.picture()
    answer = await bench.put("second", dedup=SIMPLE)
    assert is_duplicate_of(answer, "first", state)
    assert answer.incarnation == (await bench.job("first")).incarnation
    assert await bench.find("second") is None
    assert await bench.picture() == before


@pytest.mark.parametrize("state", TERMINAL_STATES)
async def test_simple_enqueues_again_once_the_earlier_job_has_ended(bench: Bench, state: State) -> None:
    await bench.bring(state, "first", dedup=SIMPLE)
    assert (await bench.put("second", dedup=SIMPLE)).status == "queued"
    assert await bench.storage.dedup_of(bench.queue, "key") == "second"


async def test_jobs_with_other_keys_or_no_key_are_enqueued(bench: Bench) -> None:
    await bench.put("first", dedup=SIMPLE)
    answers = await bench.put_all([bench.new("other", dedup=Dedup("other key")), bench.new("none")])
    assert [answer.status for answer in answers] == ["queued", "queued"]


@pytest.mark.parametrize(
    "outcome", [Complete(b""), Fail(BOOM, final=True), Cancel("asked")], ids=["complete", "fail", "cancel"]
)
async def test_every_end_frees_the_key(bench: Bench, outcome: Outcome) -> None:
    await bench.put("first", dedup=SIMPLE)
    await bench.settle(await bench.claim(), outcome)
    assert await bench.storage.dedup_of(bench.queue, "key") is None


async def test_removal_and_expiry_free_the_key(bench: Bench) -> None:
    await bench.put("first", dedup=SIMPLE)
    await bench.storage.remove(bench.queue, ["first"])
    assert (await bench.put("second", dedup=SIMPLE, ttl_ms=1000)).status == "queued"
    await bench.shift(2000)
    await bench.storage.sweep(bench.queue)
    assert (await bench.put("third", dedup=SIMPLE)).status == "queued"


async def test_a_retry_backoff_does_not_free_the_key(bench: Bench) -> None:
    await bench.put("first", dedup=SIMPLE)
    await bench.settle(await bench.claim(), Fail(BOOM, retry_in_ms=1000))
    assert is_duplicate_of(await bench.put("second", dedup=SIMPLE), "first", State.SCHEDULED)


async def test_the_ttl_of_simple_bounds_it(bench: Bench) -> None:
    dedup = Dedup("key", "simple", MINUTE_MS)
    await bench.put("first", dedup=dedup)
    await bench.shift(MINUTE_MS - 5000)
    assert (await bench.put("second", dedup=dedup)).status == "duplicate"
    await bench.shift(6000)
    assert (await bench.put("third", dedup=dedup)).status == "queued"


async def test_the_end_of_a_job_leaves_the_record_of_a_later_one_alone(bench: Bench) -> None:
    dedup = Dedup("key", "simple", 1000)
    await bench.put("first", dedup=dedup)
    lease = await bench.claim()
    await bench.shift(2000)
    await bench.put("second", dedup=dedup)
    await bench.settle(lease, Complete(b""))
    assert await bench.storage.dedup_of(bench.queue, "key") == "second"


async def test_the_rule_of_the_id_comes_first(bench: Bench) -> None:
    await bench.put("first", dedup=SIMPLE)
    answer = await bench.put("first", dedup=Dedup("other key"))
    assert is_duplicate_of(answer, "first", State.WAITING)
    assert await bench.storage.dedup_of(bench.queue, "other key") is None
    updated = await bench.put("first", dedup=DEBOUNCE, conflict=redispatch())
    assert updated.status == "updated"
    await bench.put("unchecked", dedup=SIMPLE, unchecked=True)
    assert await bench.find("unchecked") is None


async def test_items_of_one_batch_see_each_other(bench: Bench) -> None:
    answers = await bench.put_all([bench.new(id, dedup=SIMPLE) for id in ("a", "b", "c")])
    assert [(answer.id, answer.status) for answer in answers] == [
        ("a", "queued"),
        ("a", "duplicate"),
        ("a", "duplicate"),
    ]
    assert await bench.ids(State.WAITING) == ["a"]


async def test_a_listener_of_a_duplicate_is_notified_when_the_earlier_job_ends(bench: Bench) -> None:
    await bench.put("first", dedup=SIMPLE)
    answer = await bench.put("second", dedup=SIMPLE, notify="ear")
    await bench.settle(await bench.claim(), Complete(b"result"))
    news = await bench.storage.listen(bench.queue, "ear", timeout_ms=5000)
    assert news == [Finished("first", answer.incarnation, State.COMPLETED, b"result")]


async def test_a_rerun_does_not_stand_for_the_key(bench: Bench) -> None:
    await bench.put("first", dedup=SIMPLE)
    lease = await bench.claim()
    await bench.put("first", dedup=SIMPLE, conflict=redispatch())
    await bench.settle(lease, Complete(b""))
    assert await bench.state("first") is State.WAITING
    assert await bench.storage.dedup_of(bench.queue, "key") is None


# throttle


@pytest.mark.parametrize("state", STATES)
async def test_throttle_is_a_duplicate_whatever_became_of_the_earlier_job(bench: Bench, state: State) -> None:
    await bench.bring(state, "first", dedup=THROTTLE)
    answer = await bench.put("second", dedup=THROTTLE)
    assert is_duplicate_of(answer, "first", state)
    assert answer.result == (b"result" if state is State.COMPLETED else None)


async def test_throttle_lets_one_in_per_ttl_from_the_enqueue(bench: Bench) -> None:
    await bench.put("first", dedup=THROTTLE)
    await bench.shift(THROTTLE.ttl_ms - 5000)
    assert (await bench.put("second", dedup=THROTTLE)).status == "duplicate"
    await bench.shift(6000)
    assert (await bench.put("third", dedup=THROTTLE)).status == "queued"
    assert (await bench.put("fourth", dedup=THROTTLE)).id == "third"


@pytest.mark.parametrize("fields", [{}, {"result_ttl_ms": 0}], ids=["removed", "kept for no time"])
async def test_throttle_outlives_the_record_of_its_job(bench: Bench, fields: dict[str, int]) -> None:
    first = await bench.put("first", dedup=THROTTLE, **fields)
    await bench.settle(await bench.claim(), Complete(b""))
    await bench.storage.remove(bench.queue, ["first"])
    answer = await bench.put("second", dedup=THROTTLE, notify="ear")
    assert answer == Enqueued("first", "duplicate", None, first.incarnation)


async def test_another_life_of_the_id_is_not_the_job_that_was_throttled(bench: Bench) -> None:
    first = await bench.put("first", dedup=THROTTLE)
    await bench.storage.remove(bench.queue, ["first"])
    await bench.put("first")
    answer = await bench.put("second", dedup=THROTTLE)
    assert answer == Enqueued("first", "duplicate", None, first.incarnation)


async def test_a_sweep_forgets_records_past_their_time(bench: Bench) -> None:
    await bench.put_all([bench.new(f"job {i}", dedup=Dedup(f"key {i}", "throttle", 1000)) for i in range(5)])
    await bench.shift(2000)
    swept = [await bench.storage.sweep(bench.queue, limit=2) for _ in range(3)]
    assert [one.more for one in swept] == [True, True, False]
    assert (await bench.storage.check(bench.queue)).problems == {}


# debounce


@pytest.mark.parametrize("state", PENDING_STATES)
async def test_debounce_takes_the_place_of_a_pending_job(bench: Bench, state: State) -> None:
    await bench.bring(state, "first", dedup=DEBOUNCE)
    await bench.events()
    answer = await bench.put("second", dedup=DEBOUNCE, delay_ms=MINUTE_MS)
    assert (answer.id, answer.status, answer.state) == ("second", "queued", State.SCHEDULED)
    first = await bench.job("first")
    assert first.state is State.CANCELLED
    assert first.failure == Failure("Replaced", "by job second")
    events = await bench.events()
    assert [Seen(event.type, event.id, event.state) for event in events] == [
        Seen(EventType.CANCELLED, "first", "cancelled"),
        Seen(EventType.ENQUEUED, "second", "scheduled"),
    ]
    assert (events[0].error_type, events[0].error) == ("Replaced", "by job second")


async def test_waiters_of_a_replaced_job_learn_its_replacement(bench: Bench) -> None:
    first = await bench.put("first", dedup=DEBOUNCE, notify="ear")
    await bench.put("second", dedup=DEBOUNCE)
    news = await bench.storage.listen(bench.queue, "ear", timeout_ms=5000)
    end = Finished("first", first.incarnation, State.CANCELLED, None, Failure("Replaced", "by job second"))
    assert news == [end]
    assert await bench.storage.watch(bench.queue, ["first"], listener="ear") == [end]


async def test_debounce_leaves_an_active_job_alone(bench: Bench) -> None:
    lease = await bench.bring(State.ACTIVE, "first", dedup=DEBOUNCE)
    assert lease is not None
    assert (await bench.put("second", dedup=DEBOUNCE)).status == "queued"
    assert (await bench.settle(lease, Complete(b""))).applied
    assert await bench.storage.dedup_of(bench.queue, "key") == "second"
    await bench.put("third", dedup=DEBOUNCE)
    assert await bench.counts() == {State.COMPLETED: 1, State.CANCELLED: 1, State.WAITING: 1}


async def test_of_a_batch_only_the_last_debounced_job_is_left(bench: Bench) -> None:
    jobs = [bench.new(id, dedup=DEBOUNCE, notify="ear", payload=b"x") for id in ("a", "b", "c")]
    answers = await bench.put_all(jobs)
    assert [(answer.id, answer.status) for answer in answers] == [(id, "queued") for id in "abc"]
    assert await bench.ids(State.WAITING) == ["c"]
    news = await bench.storage.listen(bench.queue, "ear", timeout_ms=5000)
    assert [(one.id, one.failure) for one in news] == [
        ("a", Failure("Replaced", "by job b")),
        ("b", Failure("Replaced", "by job c")),
    ]
    cancelled = [await bench.job("a"), await bench.job("b")]
    assert all(job.finished_at_ms and job.kept_until_ms for job in cancelled)
    assert (await bench.storage.check(bench.queue)).problems == {}


async def test_a_replaced_job_may_come_again_in_the_same_batch(bench: Bench) -> None:
    for fields in ({}, {"result_ttl_ms": 0}):
        jobs = [bench.new(id, dedup=DEBOUNCE, **fields) for id in ("a", "b", "a")]
        answers = await bench.put_all(jobs)
        assert [answer.status for answer in answers] == ["queued"] * 3
        assert await bench.ids(State.WAITING) == ["a"]
        await bench.storage.remove(bench.queue, ["a", "b"])
    assert (await bench.storage.check(bench.queue)).problems == {}


async def test_a_replaced_job_that_is_retried_does_not_stand_for_the_key(bench: Bench) -> None:
    await bench.put("first", dedup=DEBOUNCE)
    await bench.put("second", dedup=DEBOUNCE)
    assert await bench.storage.retry(bench.queue, ["first"]) == ["retried"]
    await bench.storage.cancel(bench.queue, ["first"])
    assert await bench.storage.dedup_of(bench.queue, "key") == "second"
    assert (await bench.job("first")).failure is None


# Looking, clearing, and what else touches records


async def test_a_key_can_be_looked_up_and_cleared(bench: Bench) -> None:
    assert await bench.storage.dedup_of(bench.queue, "key") is None
    assert not await bench.storage.clear_dedup(bench.queue, "key")
    await bench.put("first", dedup=SIMPLE)
    assert await bench.storage.dedup_of(bench.queue, "key") == "first"
    assert await bench.storage.clear_dedup(bench.queue, "key")
    assert await bench.storage.dedup_of(bench.queue, "key") is None
    assert (await bench.put("second", dedup=SIMPLE)).status == "queued"
    assert await bench.ids(State.WAITING) == ["first", "second"]


async def test_obliterate_forgets_all_keys(bench: Bench) -> None:
    await bench.put("first", dedup=SIMPLE)
    await bench.put("other", dedup=Dedup("other", "throttle", MINUTE_MS))
    await bench.storage.obliterate(bench.queue)
    assert await bench.storage.dedup_of(bench.queue, "key") is None
    assert await bench.storage.dedup_of(bench.queue, "other") is None


async def test_the_job_of_a_rescued_lease_still_stands_for_its_key(bench: Bench) -> None:
    await bench.bring(State.ACTIVE, "first", dedup=SIMPLE)
    await bench.shift(LEASE_MS + 1000)
    await bench.storage.sweep(bench.queue)
    assert is_duplicate_of(await bench.put("second", dedup=SIMPLE), "first", State.WAITING)


async def test_check_mends_a_record_that_its_job_left_behind(bench: Bench) -> None:
    await bench.put("first", dedup=SIMPLE)
    await bench.put("first", unchecked=True)  # a broken promise: nobody looked at the key
    assert sum((await bench.storage.check(bench.queue)).problems.values()) == 1
    await bench.storage.check(bench.queue, repair=True)
    assert (await bench.storage.check(bench.queue)).problems == {}
    assert await bench.storage.dedup_of(bench.queue, "key") is None


async def test_a_key_that_changes_its_time_twice_in_one_call_leaves_nothing_behind(bench: Bench) -> None:
    jobs = [
        bench.new("first", dedup=THROTTLE),
        bench.new("second", dedup=DEBOUNCE),
    ]
    await bench.put_all(jobs)

    assert await bench.storage.dedup_of(bench.queue, "key") == "second"
    assert not any((await bench.storage.check(bench.queue)).problems.values())


async def test_a_key_does_not_stand_for_a_job_that_failed_as_it_came(bench: Bench) -> None:
    """A debounce cancels the job that stands for the key, and the newcomer was to wait for that one."""
    await bench.put("a", dedup=SIMPLE)
    extras = Extras(flow="flow", has_dependencies=True)
    answer = await bench.put("b", dedup=DEBOUNCE, after=(Dependency(bench.queue, "a"),), extras=extras)
    assert answer.state is State.FAILED
    assert await bench.storage.dedup_of(bench.queue, "key") is None
    assert not any((await bench.storage.check(bench.queue)).problems.values())


# Chosen states


@pytest.mark.parametrize("state", STATES)
async def test_chosen_states_decide_which_earlier_job_makes_a_duplicate(bench: Bench, state: State) -> None:
    chosen = (State.WAITING, State.ACTIVE, State.COMPLETED)
    dedup = Dedup("key", "simple", 10 * MINUTE_MS, chosen)
    await bench.bring(state, "first", dedup=dedup)
    answer = await bench.put("second", dedup=dedup)
    if state in chosen:
        assert is_duplicate_of(answer, "first", state)
        assert answer.result == (b"result" if state is State.COMPLETED else None)
        assert await bench.find("second") is None
    else:
        assert answer.status == "queued"
        assert await bench.storage.dedup_of(bench.queue, "key") == "second"
    assert (await bench.storage.check(bench.queue)).problems == {}


async def test_a_key_of_pending_jobs_lets_one_in_beside_the_running_one(bench: Bench) -> None:
    pending = Dedup("key", "simple", 0, (State.SCHEDULED, State.WAITING, State.BLOCKED))
    await bench.bring(State.ACTIVE, "first", dedup=pending)
    assert (await bench.put("second", dedup=pending)).status == "queued"
    assert is_duplicate_of(await bench.put("third", dedup=pending), "second", State.WAITING)
    assert await bench.counts() == {State.ACTIVE: 1, State.WAITING: 1}


async def test_a_key_that_outlives_its_job_goes_by_its_time(bench: Bench) -> None:
    dedup = Dedup("key", "simple", MINUTE_MS, (State.COMPLETED,))
    await bench.put("first", dedup=dedup, result_ttl_ms=0)
    await bench.settle(await bench.claim(), Complete(b""))
    # A job that is gone has completed, as far as anyone can tell.
    assert is_duplicate_of(await bench.put("second", dedup=dedup), "first", None)
    await bench.shift(MINUTE_MS + 1000)
    assert (await bench.put("third", dedup=dedup)).status == "queued"
    await bench.shift(MINUTE_MS + 1000)
    await bench.storage.sweep(bench.queue)
    assert await bench.storage.dedup_of(bench.queue, "key") is None
    assert (await bench.storage.check(bench.queue)).problems == {}


async def test_a_job_that_failed_makes_room_if_only_completed_ones_count(bench: Bench) -> None:
    dedup = Dedup("key", "simple", 10 * MINUTE_MS, (*OPEN_STATES, State.COMPLETED))
    await bench.put("first", dedup=dedup)
    await bench.settle(await bench.claim(), Fail(BOOM, final=True))
    assert (await bench.put("second", dedup=dedup)).status == "queued"
    await bench.settle(await bench.claim(), Complete(b"result"))
    answer = await bench.put("third", dedup=dedup)
    assert (answer.id, answer.status, answer.result) == ("second", "duplicate", b"result")


async def test_a_replacement_leaves_a_running_job_of_a_chosen_state_alone(bench: Bench) -> None:
    dedup = Dedup("key", "debounce", 0, (State.ACTIVE,))
    await bench.put("first", dedup=dedup)
    assert (await bench.put("second", dedup=dedup)).status == "queued"
    assert (await bench.job("first")).failure == Failure("Replaced", "by job second")
    await bench.claim()
    assert is_duplicate_of(await bench.put("third", dedup=dedup), "second", State.ACTIVE)
    answers = await bench.put_all(
        [bench.new(id, dedup=Dedup("other", "debounce", 0, (State.ACTIVE,))) for id in "ab"]
    )
    assert [answer.status for answer in answers] == ["queued", "queued"]
    assert await bench.ids(State.WAITING) == ["b"]
