"""Staging: jobs of a write that are released, or removed, as a whole."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from penstock.core.job import STAGED_FROM_MS, Conflict, Dedup, Dependency, Extras, NewJob
from penstock.core.lifecycle import EventType, State
from penstock.core.limits import Limit
from penstock.core.staging import staged_at_ms
from penstock.errors import InvalidOption
from penstock.storage.values import Change, Finished, Take
from tests.contract.factories import MINUTE_MS, Bench, Seen

E, S = EventType, State


async def stage(bench: Bench, *ids: str, write: str = "w1", **fields: Any) -> list[str]:
    """Stage jobs; what became of each."""
    jobs = [bench.new(id, staged=True, write_id=write, **fields) for id in ids]
    return [answer.status for answer in await bench.put_all(jobs)]


async def unstage(bench: Bench, write: str = "w1", *, discard: bool = False, limit: int = 1000) -> int:
    """All steps of an unstage."""
    done, cursor = 0, ""
    while True:
        bulk = await bench.storage.unstage(bench.queue, write, discard=discard, limit=limit, cursor=cursor)
        done, cursor = done + bulk.done, bulk.cursor
        if not cursor:
            return done


# Staged


async def test_a_staged_job_is_scheduled_for_the_instant_of_its_write(bench: Bench) -> None:
    assert await stage(bench, "job", payload=b"p") == ["queued"]

    job = await bench.job()
    assert (job.state, job.run_at_ms, job.is_staged) == (S.SCHEDULED, staged_at_ms("w1"), True)
    assert job.run_at_ms >= STAGED_FROM_MS
    assert await bench.seen() == [Seen(E.ENQUEUED, "job", S.SCHEDULED)]


async def test_neither_claim_nor_sweep_nor_time_brings_it_out(bench: Bench) -> None:
    await stage(bench, "a", "b", ttl_ms=MINUTE_MS, delay_ms=MINUTE_MS)
    await bench.events()
    await bench.shift(1000 * MINUTE_MS)

    claimed = await bench.storage.claim(bench.queue, Take("worker", 10, MINUTE_MS))
    swept = await bench.storage.sweep(bench.queue)

    assert (claimed.leases, claimed.wait_ms) == ([], None)
    assert (swept.promoted, swept.expired, swept.wait_ms) == (0, 0, None)
    assert await bench.seen() == []


async def test_staged_jobs_are_counted_apart_and_are_not_open(bench: Bench) -> None:
    await stage(bench, "a", "b")
    await bench.put("later", delay_ms=MINUTE_MS)

    counts = await bench.storage.counts(bench.queue)

    assert (counts.staged, counts.scheduled, counts.due, counts.open) == (2, 1, 0, 1)
    await unstage(bench)
    counts = await bench.storage.counts(bench.queue)
    assert (counts.staged, counts.scheduled, counts.waiting) == (0, 1, 2)


async def test_promote_and_a_new_time_leave_it_staged(bench: Bench) -> None:
    await stage(bench, "job")
    before = await bench.job()

    assert await bench.storage.promote(bench.queue, ["job"]) == ["not_scheduled"]
    assert await bench.storage.change(bench.queue, "job", Change(delay_ms=0)) == "wrong_state"
    assert await bench.storage.change(bench.queue, "job", Change(payload=b"p", delay_ms=5)) == "wrong_state"
    assert await bench.job() == before
    assert await bench.storage.change(bench.queue, "job", Change(payload=b"new", priority=3)) == "changed"
    assert (await bench.job()).payload == b"new"
    assert (await bench.job()).is_staged


async def test_attach_does_not_find_it(bench: Bench) -> None:
    await stage(bench, "job")
    await bench.put("child")

    answer = await bench.storage.attach(bench.queue, "job", [Dependency(bench.queue, "child")], flow="f")

    assert answer == "not_found"
    assert (await bench.job()).is_staged


async def test_a_cancelled_one_may_be_retried_and_is_staged_no_more(bench: Bench) -> None:
    await stage(bench, "job")

    assert await bench.storage.cancel(bench.queue, ["job"]) == ["cancelled"]
    assert await unstage(bench) == 0
    await bench.storage.retry(bench.queue, ["job"])

    job = await bench.job()
    assert job.state is S.WAITING
    assert job.run_at_ms < STAGED_FROM_MS


# Known ids


async def test_the_same_write_finds_its_own_jobs_whatever_became_of_them(bench: Bench) -> None:
    await stage(bench, "job")

    assert await stage(bench, "job") == ["duplicate"]
    await unstage(bench)
    assert await stage(bench, "job") == ["duplicate"]
    assert await bench.state() is S.WAITING


@pytest.mark.parametrize("mode", ["default", "absent", "redispatch"])
@pytest.mark.parametrize("write", ["", "w2"])
async def test_an_enqueue_of_another_write_takes_the_place_of_a_staged_job(
    bench: Bench, mode: Any, write: str
) -> None:
    await stage(bench, "job", payload=b"old", notify="ear", ttl_ms=5, extras=Extras(headers={"a": "b"}))
    before = await bench.job()
    await bench.events()

    answer = await bench.put(payload=b"new", write_id=write, conflict=Conflict(mode=mode))

    job = await bench.job()
    assert (answer.status, job.state, job.payload, job.extras) == ("queued", S.WAITING, b"new", None)
    assert job.incarnation > before.incarnation
    assert await bench.seen() == [Seen(E.ENQUEUED, "job", S.WAITING)]
    assert (await bench.storage.counts(bench.queue)).staged == 0
    assert await unstage(bench) == 0
    await bench.storage.cancel(bench.queue, ["job"])
    news = await bench.storage.listen(bench.queue, "ear", timeout_ms=5000)
    assert news == [Finished("job", job.incarnation, S.CANCELLED)]


async def test_a_write_that_was_killed_does_not_block_the_next(bench: Bench) -> None:
    await stage(bench, "a", "b")

    assert await stage(bench, "b", "c", write="w2") == ["queued", "queued"]

    assert await unstage(bench, "w2") == 2
    assert await bench.ids(S.WAITING) == ["b", "c"]
    assert await unstage(bench, "w1", discard=True) == 1
    assert await bench.find("a") is None


async def test_dependents_of_a_replaced_staged_job_are_notified(bench: Bench) -> None:
    await stage(bench, "job")
    tied = Extras(flow="f", has_dependencies=True)
    await bench.put("parent", after=(Dependency(bench.queue, "job"),), extras=tied)
    assert (await bench.job("parent")).blocked_by == "children"

    await bench.put("job")

    assert await bench.state("parent") is S.FAILED


async def test_the_same_write_is_known_in_a_call_in_which_another_job_waits_for_its_own(bench: Bench) -> None:
    await stage(bench, "job")
    tied = Extras(flow="f", has_dependencies=True)
    parent = bench.new("parent", after=(Dependency(bench.queue, "job"),), extras=tied)

    answers = await bench.put_all([parent, bench.new("job", write_id="w1")])

    assert [answer.status for answer in answers] == ["queued", "duplicate"]
    assert (await bench.job()).is_staged


async def test_a_job_that_is_open_already_is_a_duplicate(bench: Bench) -> None:
    await bench.put("job")

    assert await stage(bench, "job") == ["duplicate"]
    assert await bench.state() is S.WAITING
    assert await unstage(bench) == 0


# Release


async def test_released_jobs_wait_from_now_in_the_order_of_their_enqueue(bench: Bench) -> None:
    await stage(bench, "c", "a")
    await stage(bench, "b", "first", priority=0)
    await bench.put("between")
    await bench.shift(5 * MINUTE_MS)
    await bench.events()

    assert await unstage(bench) == 4

    promoted = await bench.seen()
    assert sorted(promoted) == [Seen(E.PROMOTED, id, S.WAITING) for id in ("a", "b", "c", "first")]
    leases = await bench.claim_all()
    assert [lease.id for lease in leases] == ["c", "a", "b", "first", "between"]
    waits = {event.id: event.wait_ms for event in await bench.events() if event.type is E.CLAIMED}
    assert waits["a"] < MINUTE_MS <= waits["between"]


async def test_a_delay_counts_from_the_release(bench: Bench) -> None:
    await stage(bench, "job", delay_ms=5 * MINUTE_MS)
    await bench.shift(10 * MINUTE_MS)
    await bench.events()

    assert await unstage(bench) == 1

    assert await bench.seen() == [Seen(E.CHANGED, "job", S.SCHEDULED)]
    assert await bench.state() is S.SCHEDULED
    assert await bench.claim_all() == []
    await bench.shift(5 * MINUTE_MS)
    assert [lease.id for lease in await bench.claim_all()] == ["job"]


async def test_a_ttl_counts_from_the_release(bench: Bench) -> None:
    await stage(bench, "job", ttl_ms=5 * MINUTE_MS)
    assert (await bench.job()).expires_at_ms == 0
    await bench.shift(10 * MINUTE_MS)
    await unstage(bench)

    job = await bench.job()
    assert job.expires_at_ms == job.run_at_ms + 5 * MINUTE_MS
    await bench.shift(5 * MINUTE_MS)
    assert (await bench.storage.sweep(bench.queue)).expired == 1


async def test_priority_lifo_cost_group_and_hold_come_with_it(bench: Bench) -> None:
    await bench.storage.limit(bench.queue, "g", Limit(concurrency=1))
    extras = Extras(group="g", cost=2, holds={"ledger": MINUTE_MS})
    await stage(bench, "a", "b", extras=extras)
    await stage(bench, "low", priority=5)
    await stage(bench, "top", lifo=True)
    await bench.events()

    assert await unstage(bench) == 4

    seen = {one.id: one.state for one in await bench.seen()}
    assert seen == {"a": S.WAITING, "b": S.BLOCKED, "low": S.WAITING, "top": S.WAITING}
    assert [lease.id for lease in await bench.claim_all()] == ["top", "a", "low"]
    assert (await bench.job("b")).extras == extras
    assert not any((await bench.storage.check(bench.queue)).problems.values())


async def test_a_claim_that_waits_is_woken(bench: Bench) -> None:
    await stage(bench, "job")
    assert await bench.storage.wait(bench.queue, timeout_ms=0) is False

    await unstage(bench)

    assert await bench.storage.wait(bench.queue, timeout_ms=5000) is True


async def test_only_jobs_of_the_write_are_touched(bench: Bench) -> None:
    await stage(bench, "a", write="w1")
    await stage(bench, "b", write="w2")
    await bench.put("c", delay_ms=MINUTE_MS, write_id="w1")

    assert await unstage(bench, "w1") == 1
    assert await unstage(bench, "unknown") == 0

    assert await bench.ids(S.WAITING) == ["a"]
    assert (await bench.job("b")).is_staged


async def test_the_jobs_of_a_write_are_removed(bench: Bench) -> None:
    await stage(bench, "a", "b", notify="ear")
    await bench.put("c")
    await bench.events()

    assert await unstage(bench, discard=True) == 2

    assert await bench.seen() == [Seen(E.REMOVED, "a", ""), Seen(E.REMOVED, "b", "")]
    assert [await bench.find(id) for id in "ab"] == [None, None]
    news = await bench.storage.listen(bench.queue, "ear", timeout_ms=5000)
    assert [(item.id, item.state) for item in news] == [("a", S.CANCELLED), ("b", S.CANCELLED)]


@pytest.mark.parametrize("discard", [True, False])
async def test_the_work_of_a_call_is_bounded(bench: Bench, discard: bool) -> None:
    await stage(bench, *(f"job-{i}" for i in range(25)))
    await stage(bench, "other", write="w2")

    first = await bench.storage.unstage(bench.queue, "w1", discard=discard, limit=10)

    assert (first.done, bool(first.cursor)) == (10, True)
    second = await bench.storage.unstage(bench.queue, "w1", discard=discard, limit=10, cursor=first.cursor)
    assert await unstage(bench, discard=discard, limit=7) == 5
    assert second.done == 10
    assert (await bench.storage.counts(bench.queue)).staged == 1


async def test_what_is_staged_while_it_goes_on_stays(bench: Bench) -> None:
    await stage(bench, "a", "c")
    first = await bench.storage.unstage(bench.queue, "w1", limit=1)
    await stage(bench, "b")

    rest = await bench.storage.unstage(bench.queue, "w1", limit=10, cursor=first.cursor)

    assert (first.done, rest.done) == (1, 1)
    assert (await bench.job("b")).is_staged


# At the door


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"write_id": ""}, "write_id"),
        ({"run_at_ms": 5}, "run_at"),
        ({"dedup": Dedup("key", "simple", 0)}, "dedup"),
        ({"extras": Extras(flow="f")}, "flow"),
        ({"conflict": Conflict(mode="redispatch")}, "redispatch"),
    ],
)
async def test_what_cannot_be_staged_is_refused_and_nothing_is_written(
    bench: Bench, fields: dict[str, Any], why: str
) -> None:
    bad = replace(NewJob("bad", staged=True, write_id="w1"), **fields)

    with pytest.raises(InvalidOption, match=why):
        await bench.put_all([bench.new("good"), bad])

    assert await bench.counts() == {}
