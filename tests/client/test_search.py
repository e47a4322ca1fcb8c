"""Search, dead letters and metrics, from a client's side."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import App, InvalidOption, Queue


async def fail(queue: Queue, id: str, payload: Any, error: Exception, **options: Any) -> None:
    await queue.enqueue(payload, id=id, **options)
    job = await queue.claim_one()
    assert job
    await job.fail(error, final=True)


@pytest.fixture
async def queue(app: App) -> Queue:
    """Ten failed jobs of two users, three tasks and two error classes."""
    queue = app.queue("mail")
    for number in range(10):
        error = KeyError("k") if number % 5 == 0 else ValueError("v")
        payload = {"user": {"id": number % 2}, "to": [f"{number}@example.org"]}
        await fail(queue, f"job {number}", payload, error, task=f"task{number % 3}")
    return queue


async def test_failed_jobs_are_found_by_error_task_and_fields_of_the_payload(queue: Queue) -> None:
    assert [job.id for job in (await queue.search("failed", error_type="KeyError")).jobs] == [
        "job 0",
        "job 5",
    ]
    page = await queue.search("failed", task="task0", where={"user.id": 1})
    assert [job.id for job in page.jobs] == ["job 3", "job 9"]
    assert (page.scanned, page.cursor) == (10, "")
    page = await queue.search("failed", where={"to.0": "7@example.org"})
    assert [job.id for job in page.jobs] == ["job 7"]
    page = await queue.search(
        "failed", where=lambda payload: payload["user"]["id"] == 0, error_type="KeyError"
    )
    assert [job.id for job in page.jobs] == ["job 0"]
    assert (await queue.search("failed", where={"user.name": None})).jobs == []


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_pages_neither_miss_nor_repeat_a_job(queue: Queue, limit: int) -> None:
    found: list[str] = []
    cursor = ""
    while True:
        page = await queue.search("failed", where={"user.id": 1}, limit=limit, cursor=cursor)
        assert len(page.jobs) <= limit
        found += [job.id for job in page.jobs]
        cursor = page.cursor
        if not cursor:
            break
    assert found == ["job 1", "job 3", "job 5", "job 7", "job 9"]


async def test_a_bounded_search_says_that_it_stopped(queue: Queue) -> None:
    page = await queue.search("failed", where={"user.id": 99}, scan=4)
    assert (page.jobs, page.scanned, bool(page.cursor)) == ([], 4, True)


async def test_jobs_are_found_by_time(queue: Queue) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    assert len((await queue.search("failed", finished_before=soon)).jobs) == 10
    assert (await queue.search("failed", enqueued_after=soon)).jobs == []


async def test_those_that_match_are_retried_or_removed(queue: Queue) -> None:
    assert await queue.errors() == {"ValueError": 8, "KeyError": 2}
    assert await queue.retry_all(error_type="KeyError") == 2
    assert await queue.errors() == {"ValueError": 8}
    assert await queue.remove_all("failed", where={"user.id": 1}) == 4
    assert await queue.retry_all() == 4
    counts = await queue.counts()
    assert (counts.waiting, counts.failed) == (6, 0)
    assert await queue.remove_all("waiting", task="task0") == 2
    assert await queue.waiting() == 4


async def test_clean_stops_at_its_limit(queue: Queue) -> None:
    assert await queue.clean("failed", limit=3) == 3
    assert (await queue.counts()).failed == 7
    assert await queue.clean("failed") == 7


async def test_a_search_that_makes_no_sense_is_refused(memory_app: App) -> None:
    queue = memory_app.queue("mail")
    with pytest.raises(InvalidOption, match="applies only to failed jobs"):
        await queue.search("waiting", error_type="KeyError")
    with pytest.raises(InvalidOption, match="have not finished"):
        await queue.search("waiting", finished_after=datetime.now(UTC))
    with pytest.raises(InvalidOption, match="time zone"):
        await queue.search("failed", enqueued_after=datetime(2026, 1, 1))
    with pytest.raises(InvalidOption, match="no option 'tsk'"):
        await queue.search("failed", tsk="x")  # type: ignore[call-arg]
    with pytest.raises(InvalidOption, match="is unknown"):
        await queue.search("dead")
    with pytest.raises(InvalidOption, match="where must be fields"):
        await queue.search("failed", where=7)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="active"):
        await queue.remove_all("active")


async def test_metrics_tell_what_happened(queue: Queue) -> None:
    minutes = await queue.metrics("1h")
    assert sum(minute.enqueued for minute in minutes) == 10
    assert sum(minute.failed for minute in minutes) == 10


def test_synchronous_code_searches_and_operates() -> None:
    app = App("memory://")
    with app.sync:
        queue = app.sync.queue("mail")
        queue.enqueue({"a": 1}, id="job")
        job = queue.claim_one()
        assert job
        job.fail(KeyError("k"), final=True)
        assert [found.id for found in queue.search("failed", where={"a": 1}).jobs] == ["job"]
        assert queue.errors() == {"KeyError": 1}
        assert queue.retry_all(task="") == 1
        assert queue.remove_all("waiting", where={"a": 1}) == 1
        assert queue.metrics()[-1].retried == 0
