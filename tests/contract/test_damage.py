"""Damaged records: one that cannot be read is put aside as failed, and all others go on."""

from __future__ import annotations

import random

import msgspec
import pytest

from penstock.core.flow import Node, link_nodes
from penstock.core.job import Dedup, Dependency, Extras, Lease
from penstock.core.lifecycle import EventType, State
from penstock.core.limits import Limit
from penstock.core.outcome import Cancel, Complete, Fail, Outcome, Release, Snooze, Suspend
from penstock.core.step import NewStep
from penstock.errors import StorageDamaged
from penstock.storage.values import Query, Settlement, Take
from tests.contract.damage import PARTS, harm, harm_events, harm_limit, harm_queue, spoil_step
from tests.contract.factories import BOOM, LEASE_MS, MINUTE_MS, Bench, redispatch

HEALTHY = [f"healthy-{n}" for n in range(20)]
AFTER_STEPS: dict[State, Outcome] = {
    State.WAITING: Release(),
    State.SCHEDULED: Snooze(MINUTE_MS),
    State.BLOCKED: Suspend("go"),
    State.COMPLETED: Complete(),
    State.FAILED: Fail(BOOM, final=True),
    State.CANCELLED: Cancel(),
}
RESULTS = {"charge": b"1", "load": b"z" * 5000}


async def complete_all(bench: Bench) -> list[str]:
    """Claim and complete until nothing is left; the ids in order."""
    done: list[str] = []
    while leases := await bench.claim_all(7):
        for lease in leases:
            await bench.settle(lease, Complete(b"1"))
        done += [lease.id for lease in leases]
    return done


async def bring_with(bench: Bench, part: str, state: State = State.WAITING) -> None:
    """A job, named ``bad``, that has this part."""
    fields = {"extras": Extras(group="g", stage="later")} if part == "extras" else {}
    if not part.endswith(("steps", "step")):
        await bench.bring(state, "bad", **fields)
        return
    await bench.put("bad")
    lease = await bench.claim()
    await record_steps(bench, lease)
    if state is not State.ACTIVE:
        await bench.settle(lease, Release())


async def record_steps(bench: Bench, lease: Lease) -> None:
    """A step with a small result, and one with a large one."""
    steps = [
        NewStep(lease.id, lease.token, name, result=result, arguments=b"digest", failures=1, failure=BOOM)
        for name, result in RESULTS.items()
    ]
    assert await bench.storage.record_steps(bench.queue, steps) == ["recorded"] * 2


@pytest.mark.parametrize("part", ["record", "options", "steps"])
async def test_twenty_healthy_jobs_run_beside_a_damaged_one(bench: Bench, part: str) -> None:
    await bring_with(bench, part)
    await bench.put_all([bench.new(id) for id in HEALTHY])
    await harm(bench.storage, bench.queue, "bad", part)

    assert await complete_all(bench) == HEALTHY

    bad = await bench.job("bad")
    assert bad.state is State.FAILED
    assert bad.failure is not None
    assert bad.failure.type == "Damaged"
    assert await bench.counts() == {State.COMPLETED: 20, State.FAILED: 1}
    assert not (await bench.storage.check(bench.queue)).problems


async def test_the_bytes_of_a_damaged_record_are_kept(bench: Bench) -> None:
    await bench.put("bad")
    await harm(bench.storage, bench.queue, "bad", "record")

    await bench.claim_all()

    bad = await bench.job("bad")
    assert bad.damaged is not None
    parts = msgspec.msgpack.decode(bad.damaged)
    assert any(b"?" in value or b"not what" in value for value in parts.values() if type(value) is bytes)


@pytest.mark.parametrize("part", PARTS)
async def test_a_sweep_rescues_all_jobs_but_the_damaged_one_and_logs_it(bench: Bench, part: str) -> None:
    await bring_with(bench, part, State.ACTIVE)
    await bench.put_all([bench.new(id) for id in HEALTHY])
    assert len(await bench.claim_all()) == 20
    if part == "rerun":
        await bench.put("bad", conflict=redispatch())
    await harm(bench.storage, bench.queue, "bad", part)
    await bench.shift(LEASE_MS)

    swept = await bench.storage.sweep(bench.queue)

    # A sweep does not read the last failure and the steps of a job that it puts back.
    if part not in ("failure", "steps", "large step"):
        assert swept.damaged == 1
        assert await bench.state("bad") is State.FAILED
    assert swept.rescued >= 20
    assert set(await complete_all(bench)) - {"bad"} == set(HEALTHY)


async def test_a_damaged_record_is_logged(bench: Bench) -> None:
    await bench.put("bad")
    await harm(bench.storage, bench.queue, "bad", "options")

    await bench.claim_all()

    *_, event = await bench.events()
    assert (event.type, event.id, event.state) == (EventType.FAILED, "bad", "failed")
    assert event.error_type == "Damaged"


@pytest.mark.parametrize("part", ["record", "extras"])
@pytest.mark.parametrize("state", [State.WAITING, State.ACTIVE])
async def test_the_slot_of_its_group_is_freed(bench: Bench, state: State, part: str) -> None:
    await bench.storage.limit(bench.queue, "g", Limit(concurrency=1))
    await bench.bring(state, "bad", extras=Extras(group="g", stage="later"))
    await bench.put_all([bench.new(id, extras=Extras(group="g")) for id in HEALTHY])
    await harm(bench.storage, bench.queue, "bad", part)
    await bench.shift(LEASE_MS)

    await bench.storage.sweep(bench.queue)

    assert await complete_all(bench) == HEALTHY
    assert await bench.state("bad") is State.FAILED
    assert not (await bench.storage.check(bench.queue)).problems


async def test_its_dedup_key_is_freed(bench: Bench) -> None:
    await bench.put("bad", dedup=Dedup("key"))
    await harm(bench.storage, bench.queue, "bad", "record")
    await bench.claim_all()

    answer = await bench.put("next", dedup=Dedup("key"))

    assert (answer.id, answer.status) == ("next", "queued")
    assert not (await bench.storage.check(bench.queue)).problems


@pytest.mark.parametrize("part", ["record", "extras"])
async def test_its_parent_is_notified_of_the_failure(bench: Bench, part: str) -> None:
    flow = link_nodes(
        [
            Node(bench.queue, bench.new("parent", after=(Dependency(bench.queue, "bad"),))),
            Node(bench.queue, bench.new("bad")),
        ],
        flow="flow",
    )
    await bench.storage.enqueue_flows(bench.queue, [flow])
    await bench.claim()
    await harm(bench.storage, bench.queue, "bad", part)
    await bench.shift(LEASE_MS)

    await bench.storage.sweep(bench.queue)

    parent = await bench.job("parent")
    assert parent.state is State.FAILED
    assert parent.failure is not None
    assert parent.failure.type == "DependencyFailed"
    assert "Damaged" in parent.failure.message


async def test_a_parent_in_another_queue_is_notified_too(bench: Bench) -> None:
    other = Bench(bench.storage, f"{bench.queue}-other")
    flow = link_nodes(
        [
            Node(other.queue, other.new("parent", after=(Dependency(bench.queue, "bad"),))),
            Node(bench.queue, bench.new("bad")),
        ],
        flow="flow",
    )
    await bench.storage.enqueue_flows(other.queue, [flow])
    await bench.claim()
    await harm(bench.storage, bench.queue, "bad", "record")
    await bench.shift(LEASE_MS)

    await bench.storage.sweep(bench.queue)
    await bench.storage.sweep(bench.queue)

    assert await other.state("parent") is State.FAILED


async def test_a_listener_is_notified(bench: Bench) -> None:
    await bench.put("bad", notify="ear")
    await harm(bench.storage, bench.queue, "bad", "record")
    await bench.claim_all()

    [news] = await bench.storage.listen(bench.queue, "ear", timeout_ms=5000)

    assert (news.id, news.state) == ("bad", State.FAILED)
    assert news.failure is not None
    assert news.failure.type == "Damaged"


@pytest.mark.parametrize("part", ["record", "options", "extras"])
async def test_a_listener_of_the_rerun_is_notified(bench: Bench, part: str) -> None:
    await bring_with(bench, part, State.ACTIVE)
    await bench.put("bad", notify="ear", conflict=redispatch())
    await harm(bench.storage, bench.queue, "bad", part)
    await bench.storage.check(bench.queue, repair=True)

    [news] = await bench.storage.listen(bench.queue, "ear", timeout_ms=5000)

    assert (news.id, news.state) == ("bad", State.FAILED)
    assert news.failure is not None
    assert news.failure.type == "Damaged"


@pytest.mark.parametrize("part", ["steps", "large step"])
async def test_check_counts_a_damaged_step_and_repair_puts_its_job_aside(bench: Bench, part: str) -> None:
    await bring_with(bench, part)
    await harm(bench.storage, bench.queue, "bad", part)

    found = await bench.storage.check(bench.queue)
    mended = await bench.storage.check(bench.queue, repair=True)

    assert found.problems == mended.problems == {"damaged_jobs": 1}
    assert not (await bench.storage.check(bench.queue)).problems
    bad = await bench.job("bad")
    assert (bad.state, bad.failure and bad.failure.type) == (State.FAILED, "Damaged")


@pytest.mark.parametrize("part", ["steps", "large step"])
async def test_steps_that_cannot_be_read_are_an_error_with_a_remedy(bench: Bench, part: str) -> None:
    await bring_with(bench, part)
    await harm(bench.storage, bench.queue, "bad", part)

    with pytest.raises(StorageDamaged, match=r"step of job 'bad' cannot be read.*doctor --repair"):
        await bench.storage.steps(bench.queue, "bad", names=list(RESULTS))


@pytest.mark.parametrize("seed", range(60))
async def test_check_finds_the_steps_that_cannot_be_read(bench: Bench, seed: int) -> None:
    await bring_with(bench, "steps")
    await spoil_step(bench.storage, bench.queue, "bad", random.Random(seed))

    found = await bench.storage.check(bench.queue)

    try:
        await bench.storage.steps(bench.queue, "bad", names=list(RESULTS))
        assert not found.problems
    except StorageDamaged:
        assert found.problems == {"damaged_jobs": 1}
    await bench.storage.check(bench.queue, repair=True)
    assert not (await bench.storage.check(bench.queue)).problems
    await bench.storage.steps(bench.queue, "bad", names=list(RESULTS))


async def test_a_job_with_a_damaged_step_keeps_the_others(bench: Bench) -> None:
    await bring_with(bench, "steps")
    await harm(bench.storage, bench.queue, "bad", "large step")
    assert (await bench.storage.check(bench.queue, repair=True)).problems == {"damaged_jobs": 1}
    bad = await bench.job("bad")
    assert bad.failure
    assert "the result of step load is missing" in bad.failure.message
    assert bad.damaged is not None
    assert b"load" in msgspec.msgpack.decode(bad.damaged)["steps"]

    assert await bench.storage.retry(bench.queue, ["bad"]) == ["retried"]

    lease = await bench.claim()
    assert lease.steps is not None
    assert [(step.name, step.result) for step in lease.steps] == [("charge", b"1")]


async def test_a_job_whose_extras_are_damaged_keeps_its_steps(bench: Bench) -> None:
    await bring_with(bench, "steps")
    await harm(bench.storage, bench.queue, "bad", "extras")
    assert await bench.claim_all() == []
    assert not (await bench.storage.check(bench.queue)).problems

    await bench.storage.retry(bench.queue, ["bad"])

    lease = await bench.claim()
    assert [step.name for step in lease.steps or ()] == list(RESULTS)


async def test_a_damaged_step_is_not_copied(bench: Bench) -> None:
    await bring_with(bench, "steps")
    lease = await bench.claim()
    await bench.storage.record_steps(bench.queue, [NewStep("bad", lease.token, "last")])
    await bench.settle(lease, Release())
    await bench.put("fork", delay_ms=MINUTE_MS)
    await harm(bench.storage, bench.queue, "bad", "large step")

    with pytest.raises(StorageDamaged, match="doctor --repair"):
        await bench.storage.copy_steps(bench.queue, "bad", "fork", before="last")

    assert await bench.storage.steps(bench.queue, "fork") == []


@pytest.mark.parametrize("part", ["record", "options", "steps"])
@pytest.mark.parametrize("state", [one for one in State if one is not State.ACTIVE])
async def test_remove_gets_rid_of_it(bench: Bench, state: State, part: str) -> None:
    if part == "steps":
        await bring_with(bench, part, State.ACTIVE)
        job = await bench.job("bad")
        await bench.storage.settle(bench.queue, [Settlement("bad", job.token, AFTER_STEPS[state])])
    else:
        await bench.bring(state, "bad")
    await harm(bench.storage, bench.queue, "bad", part)

    assert await bench.storage.remove(bench.queue, ["bad"]) == ["removed"]

    assert await bench.find("bad") is None
    assert not (await bench.storage.check(bench.queue)).problems


@pytest.mark.parametrize("part", ["record", "options"])
async def test_obliterate_gets_rid_of_it(bench: Bench, part: str) -> None:
    for n in range(30):
        await bench.put(f"bad-{n}", extras=Extras(group="g", flow="f"))
        await harm(bench.storage, bench.queue, f"bad-{n}", part)

    await bench.storage.obliterate(bench.queue, force=True)

    assert await bench.counts() == {}
    checked = await bench.storage.check(bench.queue)
    assert (checked.records, dict(checked.problems)) == (0, {})


@pytest.mark.parametrize("part", ["record", "options"])
async def test_check_counts_it_and_repair_puts_it_aside(bench: Bench, part: str) -> None:
    await bench.put_all([bench.new(f"bad-{n}") for n in range(15)])
    for n in range(15):
        await harm(bench.storage, bench.queue, f"bad-{n}", part)

    found = await bench.storage.check(bench.queue)
    mended = await bench.storage.check(bench.queue, repair=True)

    assert found.problems["damaged_jobs"] == mended.problems["damaged_jobs"] == 15
    assert not (await bench.storage.check(bench.queue)).problems
    assert await bench.counts() == {State.FAILED: 15}


async def test_many_damaged_records_are_not_buried(bench: Bench) -> None:
    await bench.put_all([bench.new(f"bad-{n}") for n in range(25)])
    for n in range(25):
        await harm(bench.storage, bench.queue, f"bad-{n}", "options")

    for _ in range(2):
        with pytest.raises(StorageDamaged, match="doctor --repair"):
            await bench.storage.claim(bench.queue, Take("worker", 5, LEASE_MS))

    assert (await bench.counts())[State.FAILED] == 10
    await bench.shift(MINUTE_MS)
    with pytest.raises(StorageDamaged):
        await bench.storage.claim(bench.queue, Take("worker", 5, LEASE_MS))
    assert (await bench.counts())[State.FAILED] == 20


@pytest.mark.parametrize("part", ["record", "options"])
async def test_a_damaged_job_is_shown_as_such(bench: Bench, part: str) -> None:
    await bench.bring(State.SCHEDULED, "bad")
    await bench.bring(State.SCHEDULED, "good")
    await harm(bench.storage, bench.queue, "bad", part)

    bad, good = await bench.storage.get(bench.queue, ["bad", "good"])

    assert bad is not None
    assert bad.failure is not None
    assert bad.failure.type == "Damaged"
    assert good is not None
    assert good.failure is None
    assert "good" in await bench.ids(State.SCHEDULED)
    assert "bad" in [job.id for job in (await bench.storage.scan_jobs(bench.queue)).jobs]
    found = await bench.storage.search(bench.queue, Query(state=State.SCHEDULED))
    assert "good" in [job.id for job in found.jobs]


async def test_an_id_whose_record_is_damaged_can_be_queued_afresh(bench: Bench) -> None:
    await bench.put("bad")
    await harm(bench.storage, bench.queue, "bad", "record")
    await bench.claim_all()

    answer = await bench.put("bad", payload=b"2")

    assert answer.status == "queued"
    assert await complete_all(bench) == ["bad"]
    assert (await bench.job("bad")).damaged is None


async def test_a_damaged_limit_does_not_stop_the_queue(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "g", Limit(concurrency=2))
    await bench.put_all([bench.new(id, extras=Extras(group="g")) for id in HEALTHY])
    await harm_limit(bench.storage, bench.queue, "g")

    assert sorted(await complete_all(bench)) == sorted(HEALTHY)


async def test_check_counts_a_damaged_limit_once(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "g", Limit(concurrency=1))
    await harm_limit(bench.storage, bench.queue, "g")

    assert (await bench.storage.check(bench.queue)).problems == {"damaged_limits": 1}


@pytest.mark.parametrize("missing", [False, True])
async def test_a_damaged_or_missing_entry_of_the_log_is_a_gap(bench: Bench, missing: bool) -> None:
    for id in ("one", "two", "three"):
        await bench.put(id)
    await harm_events(bench.storage, bench.queue, last=2, missing=missing)

    first = await bench.storage.read_events(bench.queue, after=0)
    rest = await bench.storage.read_events(bench.queue, after=first.next)

    assert [event.id for event in first.events] == ["one"]
    assert (first.next, first.gap) == (1, None)
    assert [event.id for event in rest.events] == ["three"]
    assert (rest.next, rest.gap) == (3, (2, 2))


@pytest.mark.parametrize("missing", [False, True])
async def test_check_sees_damaged_and_missing_entries(bench: Bench, missing: bool) -> None:
    for id in ("one", "two", "three"):
        await bench.put(id)
    await harm_events(bench.storage, bench.queue, last=2, missing=missing)
    kind = "missing_events" if missing else "damaged_events"

    found = await bench.storage.check(bench.queue)
    mended = await bench.storage.check(bench.queue, repair=True)

    assert found.problems == mended.problems == {kind: 1}
    assert not (await bench.storage.check(bench.queue)).problems
    page = await bench.storage.read_events(bench.queue, after=1)
    assert (page.gap, [event.id for event in page.events]) == ((2, 2), ["three"])
    await bench.put("four")
    tail = await bench.storage.tail(bench.queue, after=3, timeout_ms=0)
    assert [event.id for event in tail.events] == ["four"]


async def test_a_damaged_last_entry_does_not_hold_up_a_reader(bench: Bench) -> None:
    await bench.put("one")
    await bench.put("two")
    await harm_events(bench.storage, bench.queue, last=2)

    page = await bench.storage.read_events(bench.queue, after=1)

    assert (page.events, page.next, page.gap) == ([], 2, (2, 2))


@pytest.mark.parametrize("field", ["clock", "epoch", "trimmed"])
async def test_a_damaged_field_of_the_queue_does_not_stop_it(bench: Bench, field: str) -> None:
    await bench.put("one")
    await bench.jump(3_600_000)
    await bench.put("two")
    await bench.jump(-3_600_000)
    await bench.put("three")
    if not await harm_queue(bench.storage, bench.queue, field):
        return  # The engine does not keep it as bytes of the queue.

    found = await bench.storage.check(bench.queue)
    assert len(await bench.claim_all()) == 3
    await bench.storage.sweep(bench.queue)
    assert len((await bench.storage.tail(bench.queue, after=0, timeout_ms=0)).events) >= 6
    await bench.storage.check(bench.queue, repair=True)

    kind = {"clock": "damaged_clock", "epoch": "damaged_epoch", "trimmed": "damaged_log_start"}[field]
    assert found.problems == {kind: 1}
    assert not (await bench.storage.check(bench.queue)).problems
    assert len((await bench.storage.read_events(bench.queue, after=0)).events) >= 6
    await bench.put("four")
    assert len(await bench.claim_all()) == 1
