"""search and errors: jobs by state, task, time and error class, within a bound that is told."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.job import Extras
from penstock.core.lifecycle import State
from penstock.core.outcome import Complete, Fail, Failure
from penstock.storage.values import Found, Query
from tests.contract.factories import MINUTE_MS, STATES, Bench, redispatch

S = State


async def search(
    bench: Bench, state: State, *, cursor: str = "", limit: int = 100, scan: int = 10_000, **fields: Any
) -> Found:
    query = Query(state=state, **fields)
    return await bench.storage.search(bench.queue, query, cursor=cursor, limit=limit, scan=scan)


async def ids(bench: Bench, state: State, **fields: Any) -> list[str]:
    found = await search(bench, state, **fields)
    assert found.cursor == ""
    return [job.id for job in found.jobs]


async def fail(bench: Bench, id: str, kind: str, **fields: Any) -> None:
    await bench.put(id, **fields)
    await bench.settle(await bench.claim(), Fail(Failure(kind, "message", "trace"), final=True))


async def sound(bench: Bench) -> bool:
    return not any((await bench.storage.check(bench.queue)).problems.values())


@pytest.mark.parametrize("state", STATES)
async def test_jobs_of_a_state_come_in_its_order(bench: Bench, state: State) -> None:
    for number in range(3):
        await bench.bring(state, f"job {number}")
    listed = await bench.storage.list_jobs(bench.queue, state)
    found = await search(bench, state)
    assert found.jobs == listed.jobs
    assert (found.scanned, found.cursor) == (3, "")


async def test_an_empty_queue_has_nothing_to_find(bench: Bench) -> None:
    assert await ids(bench, S.FAILED) == []
    assert await ids(bench, S.FAILED, error_type="Boom") == []
    assert await bench.storage.errors(bench.queue) == {}


async def test_jobs_are_found_by_task(bench: Bench) -> None:
    for number in range(4):
        await bench.put(f"job {number}", task=("send", "resize")[number % 2], priority=number % 3)
    assert await ids(bench, S.WAITING, task="send") == ["job 0", "job 2"]
    assert await ids(bench, S.WAITING, task="unheard of") == []


async def test_jobs_are_found_by_the_time_they_came_and_the_time_they_ended(bench: Bench) -> None:
    for number in range(3):
        await bench.bring(S.COMPLETED, f"job {number}")
        await bench.shift(MINUTE_MS)
    jobs = [await bench.job(f"job {number}") for number in range(3)]
    assert await ids(bench, S.COMPLETED, enqueued_from_ms=jobs[1].enqueued_at_ms) == ["job 1", "job 2"]
    assert await ids(bench, S.COMPLETED, enqueued_to_ms=jobs[1].enqueued_at_ms) == ["job 0"]
    assert await ids(bench, S.COMPLETED, finished_from_ms=jobs[2].finished_at_ms) == ["job 2"]
    between = {"finished_from_ms": jobs[1].finished_at_ms, "finished_to_ms": jobs[2].finished_at_ms}
    assert await ids(bench, S.COMPLETED, **between) == ["job 1"]


async def test_a_search_goes_on_where_it_stopped_and_says_how_much_it_looked_at(bench: Bench) -> None:
    await bench.put_all(
        [bench.new(f"{number:03}", task="send" if number % 10 == 0 else "") for number in range(60)]
    )

    first = await search(bench, S.WAITING, task="send", limit=2)
    second = await search(bench, S.WAITING, task="send", cursor=first.cursor, scan=15)
    third = await search(bench, S.WAITING, task="send", cursor=second.cursor)

    assert [[job.id for job in found.jobs] for found in (first, second, third)] == [
        ["000", "010"],
        ["020"],
        ["030", "040", "050"],
    ]
    assert (first.scanned, second.scanned, third.scanned) == (11, 15, 34)
    assert (bool(first.cursor), bool(second.cursor), third.cursor) == (True, True, "")


async def test_a_cursor_is_good_when_its_job_has_gone(bench: Bench) -> None:
    await bench.put_all([bench.new(f"job {number}") for number in range(4)])
    first = await search(bench, S.WAITING, limit=2)
    await bench.storage.remove(bench.queue, ["job 1"])
    assert await ids(bench, S.WAITING, cursor=first.cursor) == ["job 2", "job 3"]


async def test_failed_jobs_are_found_by_error_class_without_looking_at_others(bench: Bench) -> None:
    for number in range(20):
        await fail(
            bench, f"job {number:02}", "ValueError" if number % 10 else "KeyError", task=f"t{number % 2}"
        )
        await bench.shift(1)
    found = await search(bench, S.FAILED, error_type="KeyError")
    assert [job.id for job in found.jobs] == ["job 00", "job 10"]
    assert found.scanned == 2
    assert [job.failure and job.failure.type for job in found.jobs] == ["KeyError", "KeyError"]
    assert await ids(bench, S.FAILED, error_type="ValueError", task="t1") == [
        f"job {number:02}" for number in range(1, 20, 2)
    ]
    first = await search(bench, S.FAILED, error_type="ValueError", limit=3)
    rest = await search(bench, S.FAILED, error_type="ValueError", cursor=first.cursor)
    assert len(first.jobs) + len(rest.jobs) == 18
    assert await bench.storage.errors(bench.queue) == {"KeyError": 2, "ValueError": 18}
    assert await sound(bench)


async def test_stalled_and_expired_jobs_have_a_class_too(bench: Bench) -> None:
    await bench.put("expired", ttl_ms=1)
    await bench.shift(10)
    await bench.storage.sweep(bench.queue)
    await bench.put("stalled", max_stalls=0)
    await bench.claim(lease_ms=1)
    await bench.shift(10)
    await bench.storage.sweep(bench.queue)
    assert await bench.storage.errors(bench.queue) == {"Expired": 1, "Stalled": 1}


async def test_a_job_that_has_left_failed_is_not_found_by_its_error(bench: Bench) -> None:
    for name in ("retried", "removed", "cleaned", "again", "forgotten", "stays"):
        await fail(bench, name, "Boom", failure_ttl_ms=1 if name == "forgotten" else MINUTE_MS)
    await bench.shift(10)

    await bench.storage.retry(bench.queue, ["retried"])
    await bench.storage.remove(bench.queue, ["removed", "cleaned"])
    await bench.put("again", conflict=redispatch())
    await bench.storage.sweep(bench.queue)

    assert await ids(bench, S.FAILED, error_type="Boom") == ["stays"]
    assert await bench.storage.errors(bench.queue) == {"Boom": 1}
    assert await sound(bench)
    await bench.storage.retry_all(bench.queue)
    assert await bench.storage.errors(bench.queue) == {}
    assert await sound(bench)


async def test_a_job_that_fails_otherwise_the_next_time_is_found_by_that(bench: Bench) -> None:
    await fail(bench, "job", "First", extras=Extras(headers={"a": "b"}))
    await bench.storage.retry(bench.queue, ["job"])
    await bench.settle(await bench.claim(), Fail(Failure("Second", ""), final=True))
    assert await bench.storage.errors(bench.queue) == {"Second": 1}
    await bench.storage.retry(bench.queue, ["job"])
    await bench.settle(await bench.claim(), Complete(b""))
    assert await bench.storage.errors(bench.queue) == {}
    assert await sound(bench)


async def test_a_failure_with_attempts_left_is_not_an_error_yet(bench: Bench) -> None:
    await bench.put()
    await bench.settle(await bench.claim(), Fail(Failure("Boom", "")))
    assert await bench.storage.errors(bench.queue) == {}


async def test_obliterate_forgets_all_errors(bench: Bench) -> None:
    await fail(bench, "job", "Boom")
    await bench.storage.obliterate(bench.queue)
    assert await bench.storage.errors(bench.queue) == {}
    assert await ids(bench, S.FAILED, error_type="Boom") == []
