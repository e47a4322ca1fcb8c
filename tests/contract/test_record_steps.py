"""record_steps, steps, reset_step: the recorded parts of a job's runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.core.job import Extras, Lease
from penstock.core.lifecycle import EventType, State, StepAnswer
from penstock.core.outcome import Complete, Fail, Failure, Release, Snooze
from penstock.core.step import (
    MOST_JOB_BYTES,
    MOST_STEP_BYTES,
    MOST_STEPS,
    SENT_RESULT,
    SENT_STEPS,
    NewStep,
    Step,
)
from tests.contract.factories import BOOM, LEASE_MS, MINUTE_MS, Bench, redispatch

E, S = EventType, State


async def record(bench: Bench, *steps: NewStep, lease_ms: int = 0) -> list[StepAnswer]:
    return await bench.storage.record_steps(bench.queue, steps, lease_ms=lease_ms)


async def steps_of(bench: Bench, id: str = "job", **options: Any) -> list[Step]:
    return await bench.storage.steps(bench.queue, id, **options)


async def running(bench: Bench, id: str = "job", **fields: Any) -> Lease:
    lease = await bench.bring(S.ACTIVE, id, **fields)
    assert lease
    await bench.events()
    return lease


def done(lease: Lease, name: str, result: bytes = b"1", **fields: Any) -> NewStep:
    return NewStep(lease.id, lease.token, name, result=result, **fields)


async def test_a_recorded_step_is_kept_with_its_event(bench: Bench) -> None:
    lease = await running(bench)

    assert await record(bench, done(lease, "charge[7]", b'"ok"', arguments=b"digest", run_ms=30)) == [
        "recorded"
    ]

    [step] = await steps_of(bench)
    assert (step.name, step.status, step.result, step.size) == ("charge[7]", "completed", b'"ok"', 4)
    assert (step.arguments, step.until_ms, step.failure) == (b"digest", 0, None)
    [event] = await bench.events()
    assert (event.type, event.id, event.state, event.run, event.token) == (
        E.RECORDED,
        "job",
        S.ACTIVE,
        1,
        lease.token,
    )
    assert (event.run_ms, event.size, event.worker, event.at_ms) == (30, 4, "worker", step.at_ms)
    assert json.loads(event.data) == {"step": "charge[7]", "status": "completed"}
    assert (await bench.job()).extras == Extras(has_steps=True)


async def test_the_next_run_gets_the_steps_in_their_order(bench: Bench) -> None:
    lease = await running(bench)
    assert lease.steps is None
    await record(bench, done(lease, "b", b"first"))
    await record(bench, done(lease, "c", b"second"), done(lease, "a", b"third"))
    await bench.settle(lease, Release())

    again = await bench.claim()

    assert again.steps is not None
    assert [(step.name, step.result) for step in again.steps] == [
        ("b", b"first"),
        ("c", b"second"),
        ("a", b"third"),
    ]
    assert list(again.steps) == await steps_of(bench)
    assert again.extras == Extras(has_steps=True)


async def test_the_first_final_record_stays(bench: Bench) -> None:
    lease = await running(bench)
    await record(bench, done(lease, "charge", b"first"))
    await bench.events()

    assert await record(
        bench, done(lease, "charge", b"second"), done(lease, "ship"), done(lease, "ship", b"2")
    ) == [
        "known",
        "recorded",
        "known",
    ]

    assert [(step.name, step.result) for step in await steps_of(bench)] == [
        ("charge", b"first"),
        ("ship", b"1"),
    ]
    assert [event.type for event in await bench.events()] == [E.RECORDED]


async def test_an_attempt_that_failed_is_replaced_and_keeps_its_place(bench: Bench) -> None:
    lease = await running(bench)
    failed = NewStep("job", lease.token, "charge", "retrying", failures=1, failure=BOOM)
    await record(bench, failed, done(lease, "other"))
    [event, _] = await bench.events()
    assert (event.error_type, event.error) == (BOOM.type, BOOM.message)
    assert json.loads(event.data) == {"step": "charge", "status": "retrying", "failures": 1}
    [step, _] = await steps_of(bench)
    assert (step.status, step.failures, step.failure) == ("retrying", 1, BOOM)

    assert await record(bench, done(lease, "charge", failures=1)) == ["recorded"]

    assert [(step.name, step.status) for step in await steps_of(bench)] == [
        ("charge", "completed"),
        ("other", "completed"),
    ]


async def test_a_step_that_waits_knows_until_when(bench: Bench) -> None:
    lease = await running(bench)

    await record(
        bench,
        NewStep("job", lease.token, "sleep", "waiting", delay_ms=MINUTE_MS),
        NewStep("job", lease.token, "signal", "waiting"),
    )

    sleep, signal = await steps_of(bench)
    assert (sleep.status, sleep.until_ms - sleep.at_ms, signal.until_ms) == ("waiting", MINUTE_MS, 0)


async def test_only_the_holder_of_the_lease_records(bench: Bench) -> None:
    lost = await running(bench)
    await bench.settle(lost, Release())
    lease = await bench.claim()
    await bench.events()

    assert await record(bench, done(lost, "a"), NewStep("nobody", 1, "a"), done(lease, "b")) == [
        "lost",
        "lost",
        "recorded",
    ]

    assert [step.name for step in await steps_of(bench)] == ["b"]
    assert [event.token for event in await bench.events()] == [lease.token]
    await bench.settle(lease, Complete())
    assert await record(bench, done(lease, "c")) == ["lost"]


async def test_recording_extends_the_lease_and_never_shortens_it(bench: Bench) -> None:
    lease = await running(bench)
    before = (await bench.job()).lease_until_ms
    await record(bench, done(lease, "a"))
    assert (await bench.job()).lease_until_ms == before

    await bench.shift(LEASE_MS // 2)
    await record(bench, done(lease, "b"), lease_ms=LEASE_MS)
    extended = (await bench.job()).lease_until_ms
    await record(bench, done(lease, "c"), lease_ms=1)

    assert extended >= before + LEASE_MS // 2
    assert (await bench.job()).lease_until_ms == extended


async def test_large_results_come_only_by_name(bench: Bench) -> None:
    lease = await running(bench)
    large = b"x" * (SENT_RESULT + 1)
    await record(bench, done(lease, "large", large), done(lease, "small", b"y" * SENT_RESULT))
    await bench.settle(lease, Release())

    again = await bench.claim()

    assert again.steps is not None
    assert [(step.result is None, step.size) for step in again.steps] == [
        (True, len(large)),
        (False, SENT_RESULT),
    ]
    [step] = await steps_of(bench, names=["large"])
    assert step.result == large
    assert [step.name for step in await steps_of(bench, names=["small", "unknown", "large"])] == [
        "large",
        "small",
    ]
    assert await steps_of(bench, names=[]) == []


async def test_many_steps_do_not_travel(bench: Bench) -> None:
    lease = await running(bench)
    await record(bench, *(done(lease, f"s[{n}]") for n in range(SENT_STEPS)))
    await bench.settle(lease, Release())
    lease = await bench.claim()
    assert lease.steps is not None
    assert len(lease.steps) == SENT_STEPS
    await record(bench, done(lease, "one more"))
    await bench.settle(lease, Release())

    lease = await bench.claim()

    assert lease.steps is None
    assert lease.extras == Extras(has_steps=True)
    assert len(await steps_of(bench)) == SENT_STEPS + 1


async def test_steps_of_several_jobs_in_one_call(bench: Bench) -> None:
    leases = [await running(bench, id, extras=Extras(group="g")) for id in ("a", "b")]

    assert (
        await record(bench, *(done(lease, "same", lease.id.encode()) for lease in leases)) == ["recorded"] * 2
    )

    assert [(await steps_of(bench, id))[0].result for id in ("a", "b")] == [b"a", b"b"]
    assert [event.group for event in await bench.events()] == ["g", "g"]
    assert (await bench.job("a")).extras == Extras(group="g", has_steps=True)
    await bench.storage.settle(bench.queue, [])
    for lease in leases:
        assert (await bench.settle(lease, Complete())).applied


async def test_steps_stay_with_the_finished_job_and_go_with_its_record(bench: Bench) -> None:
    lease = await running(bench)
    await record(bench, done(lease, "a", b"z" * 5000))
    await bench.settle(lease, Complete(b"r"))
    assert [step.name for step in await steps_of(bench)] == ["a"]

    await bench.storage.remove(bench.queue, ["job"])

    assert await steps_of(bench) == []
    assert await steps_of(bench, names=["a"]) == []
    await bench.put()
    assert (await bench.claim()).steps is None


@pytest.mark.parametrize("how", ["afresh", "rerun", "obliterate", "prune", "ttl 0"])
async def test_a_new_life_of_an_id_has_no_steps(bench: Bench, how: str) -> None:
    lease = await running(bench, result_ttl_ms=0 if how == "ttl 0" else MINUTE_MS)
    await record(bench, done(lease, "a"), done(lease, "b", b"z" * 5000))
    if how == "rerun":
        await bench.put(conflict=redispatch())
    await bench.settle(lease, Fail(BOOM, final=True) if how == "afresh" else Complete())
    if how == "obliterate":
        await bench.storage.obliterate(bench.queue)
    if how == "prune":
        await bench.shift(2 * MINUTE_MS)
        await bench.storage.sweep(bench.queue)
    if how != "rerun":
        await bench.put()

    assert await steps_of(bench) == []
    assert await steps_of(bench, names=["b"]) == []
    again = await bench.claim()
    assert (again.steps, again.extras) == (None, None)
    assert not any((await bench.storage.check(bench.queue)).problems.values())


@pytest.mark.parametrize("outcome", [Fail(BOOM), Snooze(0), Release()])
async def test_every_run_of_the_job_has_the_steps(bench: Bench, outcome: Any) -> None:
    lease = await running(bench)
    await record(bench, done(lease, "a"))
    await bench.settle(lease, outcome)
    await bench.shift(MINUTE_MS)

    again = await bench.claim()

    assert again.steps is not None
    assert [step.name for step in again.steps] == ["a"]


async def test_a_rescued_job_has_the_steps(bench: Bench) -> None:
    lease = await running(bench)
    await record(bench, done(lease, "a"))
    await bench.shift(2 * LEASE_MS)
    await bench.storage.sweep(bench.queue)

    again = await bench.claim()

    assert again.steps is not None
    assert [step.name for step in again.steps] == ["a"]
    assert await record(bench, done(lease, "b")) == ["lost"]


async def test_retry_forgets_what_has_not_completed(bench: Bench) -> None:
    lease = await running(bench)
    failed = Failure("Declined", "no")
    await record(
        bench,
        done(lease, "load"),
        NewStep("job", lease.token, "charge", "failed", failure=failed),
        NewStep("job", lease.token, "ship", "retrying", failures=2, failure=failed),
    )
    await bench.settle(lease, Fail(BOOM, final=True))
    assert [step.status for step in await steps_of(bench)] == ["completed", "failed", "retrying"]

    await bench.storage.retry(bench.queue, ["job"])

    again = await bench.claim()
    assert again.steps is not None
    assert [(step.name, step.status) for step in again.steps] == [("load", "completed")]


async def test_a_record_that_replaces_wins_over_a_final_one(bench: Bench) -> None:
    lease = await running(bench)
    await record(bench, done(lease, "a", b"z" * 5000), done(lease, "b"))

    assert await record(bench, done(lease, "a", b"again", replaces=True)) == ["recorded"]

    [first, _] = await steps_of(bench)
    assert (first.name, first.result, first.size) == ("a", b"again", 5)
    assert [step.result for step in await steps_of(bench, names=["a"])] == [b"again"]


async def test_an_unused_step_is_an_event_and_nothing_else(bench: Bench) -> None:
    lease = await running(bench)
    await record(bench, done(lease, "a"))
    before = await steps_of(bench)
    await bench.events()

    unused = [NewStep("job", lease.token, name, "unused") for name in ("a", "unknown")]
    assert await record(bench, *unused) == ["recorded", "known"]

    [event] = await bench.events()
    assert (event.type, json.loads(event.data)) == (E.RECORDED, {"step": "a", "status": "unused"})
    assert await steps_of(bench) == before


async def test_a_job_has_steps_once_there_is_one(bench: Bench) -> None:
    lease = await running(bench)
    assert await record(bench, NewStep("job", lease.token, "a", "unused"), lease_ms=1) == ["known"]
    assert (await bench.job()).extras is None

    await record(bench, done(lease, "a"))

    assert (await bench.job()).extras == Extras(has_steps=True)


async def test_reset_step_lets_the_next_run_run_it_again(bench: Bench) -> None:
    lease = await running(bench)
    await record(bench, done(lease, "a"), done(lease, "b", b"z" * 5000))
    reset = bench.storage.reset_step
    assert await reset(bench.queue, "job", "b") == "active"
    await bench.settle(lease, Release())
    await bench.events()

    assert await reset(bench.queue, "job", "b") == "reset"

    assert [step.name for step in await steps_of(bench)] == ["a"]
    [event] = await bench.events()
    assert (event.type, json.loads(event.data)) == (E.CHANGED, {"step": "b"})
    assert await reset(bench.queue, "job", "b") == "unknown_step"
    assert await reset(bench.queue, "nobody", "b") == "not_found"
    lease = await bench.claim()
    assert await record(bench, done(lease, "b", b"again")) == ["recorded"]


async def test_a_job_without_steps_has_none(bench: Bench) -> None:
    await bench.put()

    assert await steps_of(bench) == []
    assert await steps_of(bench, "nobody") == []
    assert await bench.storage.reset_step(bench.queue, "job", "a") == "unknown_step"


async def test_copy_steps_gives_another_job_those_before_a_step(bench: Bench) -> None:
    lease = await running(bench)
    await record(bench, done(lease, "load", b"z" * 5000), done(lease, "charge", b"paid"))
    await record(bench, done(lease, "ship[1]"), done(lease, "ship[2]"), done(lease, "tell"))
    await bench.settle(lease, Complete())
    await bench.put("fork", delay_ms=MINUTE_MS)
    await bench.events()
    copy = bench.storage.copy_steps

    assert await copy(bench.queue, "job", "fork", before="ship") == "copied"

    assert [(step.name, step.size) for step in await steps_of(bench, "fork")] == [
        ("load", 5000),
        ("charge", 4),
    ]
    [load] = await steps_of(bench, "fork", names=["load"])
    assert load.result == b"z" * 5000
    [event] = await bench.events()
    assert (event.type, event.id, json.loads(event.data)) == (E.CHANGED, "fork", {"steps": 2, "of": "job"})
    assert await copy(bench.queue, "job", "fork", before="unknown") == "unknown_step"
    assert await copy(bench.queue, "nobody", "fork", before="ship") == "not_found"
    assert await copy(bench.queue, "job", "nobody", before="ship") == "not_found"
    await bench.storage.promote(bench.queue, ["fork"])
    lease = await bench.claim()
    assert lease.steps is not None
    assert [step.name for step in lease.steps] == ["load", "charge"]
    assert await copy(bench.queue, "job", "fork", before="ship") == "active"


async def test_a_stall_names_the_step_that_was_under_way(bench: Bench) -> None:
    lease = await running(bench, max_stalls=1)
    await record(bench, done(lease, "load"), NewStep("job", lease.token, 'transcode["x"]', "started"))
    await bench.shift(2 * LEASE_MS)
    await bench.events()
    await bench.storage.sweep(bench.queue)
    [event] = await bench.events()
    assert (event.type, json.loads(event.data)) == (E.STALLED, {"step": 'transcode["x"]'})

    lease = await bench.claim()
    await record(bench, NewStep("job", lease.token, "other", "started"))
    await bench.shift(2 * LEASE_MS)
    await bench.storage.sweep(bench.queue)

    failure = (await bench.job()).failure
    message = "its worker died or stopped renewing the lease 2 times; the last one was worker, in step other"
    assert failure == Failure("Stalled", message)


async def test_a_stall_blames_no_step_of_an_earlier_run(bench: Bench) -> None:
    lease = await running(bench)
    await record(bench, NewStep("job", lease.token, "transcode", "started"))
    await bench.settle(lease, Release())
    await bench.shift(1)
    await bench.claim()
    await bench.shift(2 * LEASE_MS)
    await bench.events()
    await bench.storage.sweep(bench.queue)

    [event] = await bench.events()
    assert (event.type, event.data) == (E.STALLED, "")


async def test_a_stall_names_its_worker_and_step_whatever_their_names(bench: Bench) -> None:
    await bench.put(max_stalls=0)
    lease = await bench.claim(worker="w%d\0\x1b%s" + "x" * 50)
    await record(bench, NewStep("job", lease.token, "s%d\0%%ü", "started"))
    await bench.shift(2 * LEASE_MS)

    await bench.storage.sweep(bench.queue)

    failure = (await bench.job()).failure
    assert failure
    assert failure.message.endswith(
        " 1 times; the last one was w%d\0\x1b%s" + "x" * 50 + ", in step s%d\0%%ü"
    )


async def test_a_job_may_have_ten_thousand_steps(bench: Bench) -> None:
    lease = await running(bench)
    steps = [done(lease, f"s[{n}]", b"%d" % n) for n in range(MOST_STEPS)]
    for first in range(0, MOST_STEPS, 2000):
        assert await record(bench, *steps[first : first + 2000]) == ["recorded"] * 2000
    await bench.settle(lease, Release())

    lease = await bench.claim()

    assert lease.steps is None
    assert [(step.name, step.result) for step in await steps_of(bench)] == [(s.name, s.result) for s in steps]
    assert await record(bench, done(lease, "s[7]", b"other")) == ["known"]
    await bench.settle(lease, Complete())
    await bench.put("fork", delay_ms=MINUTE_MS)
    before = f"s[{MOST_STEPS - 1}]"
    assert await bench.storage.copy_steps(bench.queue, "job", "fork", before=before) == "copied"
    assert len(await steps_of(bench, "fork")) == MOST_STEPS - 1
    assert not (await bench.storage.check(bench.queue)).problems
    await bench.storage.remove(bench.queue, ["job", "fork"])
    assert await steps_of(bench) == await steps_of(bench, "fork") == []


async def test_the_results_of_a_job_may_have_sixteen_megabytes(bench: Bench) -> None:
    lease = await running(bench)
    results = {f"s[{n}]": bytes([n]) * MOST_STEP_BYTES for n in range(MOST_JOB_BYTES // MOST_STEP_BYTES)}
    for name, result in results.items():
        assert await record(bench, done(lease, name, result)) == ["recorded"]
    await bench.settle(lease, Release())

    lease = await bench.claim()

    assert lease.steps is not None
    assert [(step.name, step.result, step.size) for step in lease.steps] == [
        (name, None, MOST_STEP_BYTES) for name in results
    ]
    assert {step.name: step.result for step in await steps_of(bench, names=list(results))} == results
    assert not (await bench.storage.check(bench.queue)).problems
