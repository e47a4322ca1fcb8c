"""hold, release, held: finished jobs are kept for named consumers until they have fetched them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.core.job import Extras
from penstock.core.lifecycle import State
from penstock.core.outcome import Complete, Fail, Outcome
from penstock.storage.values import Change, QueueSettings, Report, Settlement
from tests.contract.factories import BOOM, MINUTE_MS, TERMINAL_STATES, Bench, redispatch

S = State
DAY_MS = 24 * 60 * MINUTE_MS
LEDGER = Extras(holds={"ledger": DAY_MS})


async def finished(bench: Bench, id: str = "job", **fields: object) -> None:
    await bench.bring(S.COMPLETED, id, **fields)


async def held(bench: Bench, consumer: str = "ledger") -> list[str]:
    page = await bench.storage.held(bench.queue, consumer)
    assert page.cursor == ""
    return [job.id for job in page.jobs]


async def swept(bench: Bench, after_ms: int) -> None:
    await bench.shift(after_ms)
    await bench.storage.sweep(bench.queue)
    checked = await bench.storage.check(bench.queue)
    assert not any(checked.problems.values()), checked.problems


@pytest.mark.parametrize("state", TERMINAL_STATES)
@pytest.mark.parametrize("ttl_ms", [0, MINUTE_MS])
async def test_a_held_job_outlives_its_own_ttl(bench: Bench, state: State, ttl_ms: int) -> None:
    await bench.bring(state, extras=LEDGER, result_ttl_ms=ttl_ms, failure_ttl_ms=ttl_ms)

    await swept(bench, 2 * MINUTE_MS)

    assert await bench.state() is state
    assert await held(bench) == ["job"]
    job = await bench.job()
    assert job.kept_until_ms == job.finished_at_ms + DAY_MS


async def test_a_job_released_is_kept_as_its_own_ttl_says(bench: Bench) -> None:
    await finished(bench, extras=LEDGER, result_ttl_ms=5 * MINUTE_MS)

    assert await bench.storage.release(bench.queue, "ledger", ["job"]) == ["released"]

    job = await bench.job()
    assert job.kept_until_ms == job.finished_at_ms + 5 * MINUTE_MS
    assert await held(bench) == []
    await swept(bench, MINUTE_MS)
    assert await bench.state() is S.COMPLETED
    await swept(bench, 4 * MINUTE_MS)
    assert await bench.state() is None


async def test_a_job_past_its_own_ttl_is_gone_once_it_is_released(bench: Bench) -> None:
    await finished(bench, extras=LEDGER, result_ttl_ms=MINUTE_MS)
    await bench.shift(2 * MINUTE_MS)

    answers = await bench.storage.release(bench.queue, "ledger", ["job", "job"])

    assert answers == ["released", "not_found"]


async def test_every_consumer_must_release_it(bench: Bench) -> None:
    await finished(bench, extras=Extras(holds={"ledger": DAY_MS, "audit": 2 * DAY_MS}), result_ttl_ms=0)
    await bench.storage.release(bench.queue, "ledger", ["job"])
    await swept(bench, MINUTE_MS)
    assert await bench.state() is S.COMPLETED
    assert (await held(bench, "ledger"), await held(bench, "audit")) == ([], ["job"])
    await bench.storage.release(bench.queue, "audit", ["job"])
    await swept(bench, MINUTE_MS)
    assert await bench.state() is None


async def test_an_abandoned_hold_ends_by_its_ttl(bench: Bench) -> None:
    await finished(bench, extras=LEDGER, result_ttl_ms=MINUTE_MS)
    await swept(bench, DAY_MS - MINUTE_MS)
    assert await bench.state() is S.COMPLETED
    await swept(bench, MINUTE_MS)
    assert await bench.state() is None
    assert await held(bench) == []


async def test_a_hold_that_lapses_before_the_job_is_forgotten_is_gone(bench: Bench) -> None:
    await finished(bench, extras=Extras(holds={"ledger": MINUTE_MS}))
    await swept(bench, MINUTE_MS)
    assert await held(bench) == []
    job = await bench.job()
    assert (job.state, job.extras) == (S.COMPLETED, None)


@pytest.mark.parametrize("keep", [0, 1])
async def test_pruning_by_count_passes_over_held_jobs(bench: Bench, keep: int) -> None:
    await bench.storage.configure(bench.queue, QueueSettings(keep_completed=keep, keep_failed=keep))
    for id in ("held 1", "free 1", "held 2", "free 2"):
        await finished(bench, id, extras=LEDGER if id.startswith("held") else None)
    await bench.bring(S.FAILED, "held failure", extras=LEDGER)

    await swept(bench, 1)

    assert sorted(await bench.ids(S.COMPLETED)) == ["held 1", "held 2"]
    assert await bench.ids(S.FAILED) == ["held failure"]
    await bench.storage.release(bench.queue, "ledger", ["held 1", "held 2", "held failure"])
    await swept(bench, 1)
    assert await bench.counts() == ({S.COMPLETED: 1, S.FAILED: 1} if keep else {})


async def test_clean_leaves_held_jobs_alone_and_remove_does_not(bench: Bench) -> None:
    await finished(bench, "held", extras=LEDGER)
    await finished(bench, "free")
    assert (await bench.storage.clean(bench.queue, S.COMPLETED)).done == 1
    assert await held(bench) == ["held"]
    assert await bench.storage.remove(bench.queue, ["held"]) == ["removed"]
    assert await held(bench) == []
    await swept(bench, 1)


@pytest.mark.parametrize("state", [S.WAITING, S.ACTIVE, S.SCHEDULED])
async def test_an_open_job_can_be_held_before_it_ends(bench: Bench, state: State) -> None:
    await bench.bring(state, result_ttl_ms=0)
    assert await bench.storage.hold(bench.queue, "ledger", ["job", "nobody"], ttl_ms=DAY_MS) == [
        "held",
        "not_found",
    ]
    assert await held(bench) == []
    await bench.storage.cancel(bench.queue, ["job"])
    if state is S.ACTIVE:
        await swept(bench, 2 * MINUTE_MS)
    assert await bench.state() is S.CANCELLED
    assert await held(bench) == ["job"]


async def test_a_hold_on_a_finished_job_counts_from_now(bench: Bench) -> None:
    await finished(bench, result_ttl_ms=10 * MINUTE_MS)
    await bench.shift(9 * MINUTE_MS)
    await bench.storage.hold(bench.queue, "ledger", ["job"], ttl_ms=5 * MINUTE_MS)
    await swept(bench, 4 * MINUTE_MS)
    assert await held(bench) == ["job"]
    await swept(bench, MINUTE_MS)
    assert await bench.state() is None


async def test_a_job_past_its_time_can_be_neither_held_nor_released(bench: Bench) -> None:
    await finished(bench, result_ttl_ms=MINUTE_MS)
    await bench.shift(MINUTE_MS)
    assert await bench.storage.hold(bench.queue, "ledger", ["job"], ttl_ms=DAY_MS) == ["not_found"]
    assert await bench.storage.release(bench.queue, "ledger", ["job"]) == ["not_found"]


async def test_releasing_a_job_that_is_not_held_says_so(bench: Bench) -> None:
    await finished(bench, extras=LEDGER)
    await finished(bench, "free")
    answers = await bench.storage.release(bench.queue, "audit", ["job", "free", "nobody"])
    assert answers == ["not_held", "not_held", "not_found"]
    assert await held(bench) == ["job"]


async def test_held_jobs_come_in_pages_in_the_order_they_ended(bench: Bench) -> None:
    ids = [f"job {number}" for number in range(5)]
    for id in ids:
        await finished(bench, id, extras=LEDGER)
        await bench.shift(1)
    first = await bench.storage.held(bench.queue, "ledger", limit=2)
    assert [(job.id, job.result) for job in first.jobs] == [("job 0", b"result"), ("job 1", b"result")]
    await bench.storage.release(bench.queue, "ledger", ["job 0", "job 1"])
    second = await bench.storage.held(bench.queue, "ledger", cursor=first.cursor, limit=2)
    third = await bench.storage.held(bench.queue, "ledger", cursor=second.cursor, limit=2)
    assert [job.id for job in second.jobs + third.jobs] == ids[2:]
    assert third.cursor == ""


HEADERS = {
    "short": {"key": "[1]"},
    "over 31 bytes": {"key": "k" * 40},
    "over 255 bytes": {"key": "ĝ" * 200, "k" * 300: ""},
    "over 65535 bytes": {"key": "k" * 70_000},
    "more than 15": {f"name {number}": str(number) for number in range(20)},
}


async def bring_run(bench: Bench, extras: Extras) -> list[str]:
    """Run three jobs of a run to their ends, looking at what the worker and the log are told of them."""
    ids = ["first", "second", "third"]
    fields = {"run_id": "run", "conflict": redispatch(), "task": "score"}
    jobs = [bench.new(id, payload=id.encode(), extras=extras, write_id=f"of {id}", **fields) for id in ids]
    assert [answer.status for answer in await bench.put_all(jobs)] == ["queued"] * 3
    leases = await bench.claim_all()
    assert [(lease.id, lease.run_id, lease.payload, lease.extras) for lease in leases] == [
        (id, "run", id.encode(), extras) for id in ids
    ]
    outcomes: tuple[Outcome, ...] = (Complete(b"short"), Complete(b"long" * 100), Fail(BOOM, final=True))
    settled = [
        Settlement(lease.id, lease.token, outcome) for lease, outcome in zip(leases, outcomes, strict=True)
    ]
    await bench.storage.settle(bench.queue, settled)
    seen = [(event.id, event.type, event.run_id, event.task) for event in await bench.events()]
    assert [row for row in seen if row[0]] == [
        *((id, "enqueued", "run", "score") for id in ids),
        *((id, "claimed", "run", "score") for id in ids),
        *(
            (id, end, "run", "score")
            for id, end in zip(ids, ("completed", "completed", "failed"), strict=True)
        ),
    ]
    return ids


@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("group", ["", "group"])
async def test_jobs_of_a_run_keep_all_but_the_hold_that_is_released(
    bench: Bench, headers: dict[str, str], group: str
) -> None:
    extras = Extras(headers=headers, holds={"ledger": DAY_MS, "audit": 2 * DAY_MS}, flow="flow", group=group)
    ids = await bring_run(bench, extras)
    before = await bench.storage.get(bench.queue, ids)
    assert await held(bench) == ids

    answers = await bench.storage.release(bench.queue, "ledger", [*ids, "first", "nobody"])

    assert answers == ["released", "released", "released", "not_held", "not_found"]
    assert (await held(bench, "ledger"), await held(bench, "audit")) == ([], ids)
    left = Extras(headers=headers, holds={"audit": 2 * DAY_MS}, flow="flow", group=group)
    assert await bench.storage.get(bench.queue, ids) == [replace(job, extras=left) for job in before if job]
    await bench.storage.release(bench.queue, "audit", ids)
    left = Extras(headers=headers, flow="flow", group=group)
    after = [job for job in await bench.storage.get(bench.queue, ids) if job]
    assert [(job.extras, job.run_id, job.write_id) for job in after] == [
        (left, "run", f"of {id}") for id in ids
    ]
    assert [job.kept_until_ms - job.finished_at_ms for job in after] == [
        job.options.failure_ttl_ms if job.id == "third" else job.options.result_ttl_ms for job in after
    ]
    await swept(bench, 1)


async def test_a_job_that_reported_usage_keeps_it_when_it_is_released(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, extras=Extras(headers={"key": "[1]"}, holds={"ledger": DAY_MS}))
    assert lease
    await bench.storage.report(bench.queue, [Report("job", lease.token, usage={"tokens": 5})])
    await bench.settle(lease, Complete(b"result"))
    assert await bench.storage.release(bench.queue, "ledger", ["job", "job"]) == ["released", "not_held"]
    assert (await bench.job()).extras == Extras(headers={"key": "[1]"}, usage={"tokens": 5})
    assert await held(bench) == []
    await swept(bench, 1)


async def test_a_job_of_a_run_that_its_group_blocks_is_held_when_it_ends(bench: Bench) -> None:
    extras = Extras(headers={"key": "[1]"}, holds={"ledger": DAY_MS}, group="group")
    await bench.storage.pause(bench.queue, group="group")
    await bench.put(extras=extras, run_id="run", write_id="write", conflict=redispatch())
    job = await bench.job()
    assert (job.state, job.run_id, job.extras) == (S.BLOCKED, "run", extras)
    await bench.storage.resume(bench.queue, group="group")
    lease = await bench.claim()
    assert (lease.run_id, lease.extras) == ("run", extras)
    await bench.settle(lease, Complete(b"result"))
    assert {event.run_id for event in await bench.events() if event.id} == {"run"}
    assert await held(bench) == ["job"]
    await swept(bench, 1)


async def test_a_retried_job_is_held_again_when_it_ends_again(bench: Bench) -> None:
    await bench.bring(S.FAILED, extras=LEDGER)
    await bench.storage.retry(bench.queue, ["job"])
    assert await held(bench) == []
    await bench.settle(await bench.claim(), Complete(b"now"))
    assert await held(bench) == ["job"]
    await swept(bench, 1)


async def test_a_new_life_has_the_holds_of_its_enqueue(bench: Bench) -> None:
    await bench.bring(S.FAILED, extras=LEDGER)
    await bench.put()
    assert await held(bench) == []
    await bench.settle(await bench.claim(), Fail(BOOM, final=True))
    assert await held(bench) == []
    await bench.put(extras=LEDGER)
    await bench.settle(await bench.claim(), Fail(BOOM, final=True))
    assert await held(bench) == ["job"]
    await swept(bench, 1)


async def test_a_rerun_is_held_as_the_job_was(bench: Bench) -> None:
    lease = await bench.bring(S.ACTIVE, extras=LEDGER)
    assert lease
    await bench.put(conflict=redispatch())
    await bench.settle(lease, Complete(b"first"))
    assert await held(bench) == []
    await bench.settle(await bench.claim(), Complete(b"second"))
    assert await held(bench) == ["job"]
    await swept(bench, 1)


async def test_obliterate_forgets_all_holds(bench: Bench) -> None:
    await finished(bench, extras=LEDGER)
    await bench.storage.obliterate(bench.queue)
    assert await held(bench) == []
    await swept(bench, 1)


@pytest.mark.parametrize("state", TERMINAL_STATES)
async def test_the_ttls_of_a_finished_job_can_be_changed_and_its_id_is_free_when_they_end(
    bench: Bench, state: State
) -> None:
    await bench.bring(state)
    change = Change(result_ttl_ms=MINUTE_MS, failure_ttl_ms=MINUTE_MS)
    assert await bench.storage.change(bench.queue, "job", change) == "changed"
    job = await bench.job()
    assert job.kept_until_ms == job.finished_at_ms + MINUTE_MS
    await bench.shift(MINUTE_MS)
    assert (await bench.put()).status == "queued"


async def test_a_change_of_the_failure_ttl_leaves_a_result_alone(bench: Bench) -> None:
    await finished(bench)
    kept_until_ms = (await bench.job()).kept_until_ms
    await bench.storage.change(bench.queue, "job", Change(failure_ttl_ms=1))
    job = await bench.job()
    assert (job.kept_until_ms, job.options.failure_ttl_ms) == (kept_until_ms, 1)
