"""remove_unchanged: finished jobs go, if they are still what was read of them."""

from __future__ import annotations

import pytest

from penstock.core.job import Conflict, Dependency, Extras, Job
from penstock.core.lifecycle import OPEN, EventType, State
from penstock.core.outcome import Complete, Fail
from penstock.storage.values import Unchanged
from tests.contract.factories import BOOM, MINUTE_MS, TERMINAL_STATES, Bench, Seen

E, S = EventType, State


def as_read(job: Job) -> Unchanged:
    return Unchanged(job.id, job.incarnation, job.finished_at_ms)


async def remove(bench: Bench, *jobs: Unchanged, consumer: str = "") -> list[str]:
    return list(await bench.storage.remove_unchanged(bench.queue, jobs, consumer=consumer))


@pytest.mark.parametrize("state", TERMINAL_STATES)
async def test_a_finished_job_that_is_as_it_was_read_goes(bench: Bench, state: State) -> None:
    await bench.bring(state)
    job = await bench.job()
    await bench.events()

    assert await remove(bench, as_read(job)) == ["removed"]

    assert await bench.find() is None
    assert await bench.counts() == {}
    assert await bench.seen() == [Seen(E.REMOVED, "job", "")]
    assert not any((await bench.storage.check(bench.queue)).problems.values())


@pytest.mark.parametrize("state", sorted(OPEN))
async def test_an_open_job_has_changed(bench: Bench, state: State) -> None:
    await bench.bring(state)
    picture = await bench.picture()

    assert await remove(bench, as_read(await bench.job())) == ["changed"]
    assert await bench.picture() == picture


async def test_another_life_of_the_id_stays(bench: Bench) -> None:
    await bench.bring(S.COMPLETED)
    read = as_read(await bench.job())
    await bench.put(conflict=Conflict(mode="redispatch"))
    assert await remove(bench, read) == ["changed"]
    await bench.settle(await bench.claim(), Complete(b"again"))

    assert await remove(bench, read) == ["changed"]
    assert (await bench.job()).result == b"again"


async def test_a_job_that_was_retried_and_has_failed_again_stays(bench: Bench) -> None:
    await bench.bring(S.FAILED)
    read = as_read(await bench.job())
    await bench.shift(MINUTE_MS)
    await bench.storage.retry(bench.queue, ["job"])
    await bench.settle(await bench.claim(), Fail(BOOM, final=True))

    assert (await bench.job()).incarnation == read.incarnation
    assert await remove(bench, read) == ["changed"]
    assert await bench.state() is S.FAILED


async def test_a_job_that_another_consumer_holds_stays(bench: Bench) -> None:
    await bench.bring(S.COMPLETED, extras=Extras(holds={"ledger": MINUTE_MS, "archive": 9 * MINUTE_MS}))
    read = as_read(await bench.job())

    assert await remove(bench, read) == ["held"]
    assert await remove(bench, read, consumer="archive") == ["held"]
    await bench.storage.release(bench.queue, "ledger", ["job"])
    assert await remove(bench, read) == ["held"]
    assert await remove(bench, read, consumer="archive") == ["removed"]
    assert (await bench.storage.held(bench.queue, "archive")).jobs == []
    assert not any((await bench.storage.check(bench.queue)).problems.values())


async def test_a_hold_that_has_lapsed_holds_nothing(bench: Bench) -> None:
    extras = Extras(holds={"ledger": MINUTE_MS, "archive": 9 * MINUTE_MS})
    await bench.bring(S.COMPLETED, extras=extras)
    await bench.shift(2 * MINUTE_MS)

    assert await remove(bench, as_read(await bench.job()), consumer="archive") == ["removed"]


async def test_a_batch_acts_item_after_item(bench: Bench) -> None:
    await bench.bring(S.COMPLETED, "done")
    await bench.bring(S.CANCELLED, "gone")
    done, gone = as_read(await bench.job("done")), as_read(await bench.job("gone"))

    answers = await remove(bench, done, Unchanged("nobody", 1, 1), gone._replace(incarnation=99), done, gone)

    assert answers == ["removed", "not_found", "changed", "not_found", "removed"]
    assert await remove(bench) == []


async def test_a_waiter_for_the_retry_of_a_failed_job_is_notified(bench: Bench) -> None:
    await bench.bring(S.FAILED, "child")
    tied = Extras(flow="f", has_dependencies=True)
    await bench.put("parent", after=(Dependency(bench.queue, "child", "wait"),), extras=tied)
    assert await bench.state("parent") is S.BLOCKED

    assert await remove(bench, as_read(await bench.job("child"))) == ["removed"]

    assert await bench.state("parent") is S.FAILED
