"""Limits as users set them: what is accepted, what is refused at the door, and that the sync face has them too."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from penstock import App, Bucket, CostTooHigh, InvalidName, InvalidOption, Limit, Rate, RateLimited


async def test_limits_are_set_read_and_removed(app: App) -> None:
    queue = app.queue("mail")

    assert await queue.limit(concurrency=3, rate="100/s") == Limit(3, Rate(100, 1000))
    await queue.limit(group="*", rate=(5, "2m"), bucket=(10, "1/s"))
    await queue.limit(group="tenant 7")
    assert await queue.limits() == {
        "": Limit(3, Rate(100, 1000)),
        "*": Limit(None, Rate(5, 120_000), Bucket(10, 1, 1000)),
        "tenant 7": Limit(),
    }

    await queue.unlimit()
    await queue.unlimit(group="*")
    await queue.unlimit(group="tenant 7")
    assert await queue.limits() == {}


@pytest.mark.parametrize("group", [None, "*", "tenant 7"])
async def test_what_is_not_named_stays_and_none_removes_it(app: App, group: str | None) -> None:
    queue = app.queue("mail")
    await queue.limit(group=group, concurrency=3, rate="100/s")

    assert await queue.limit(group=group, concurrency=5) == Limit(5, Rate(100, 1000))
    assert await queue.limit(group=group, rate=None) == Limit(5)
    assert await queue.limit(group=group, rate="9/s") == Limit(5, Rate(9, 1000))
    assert await queue.limits() == {group or "": Limit(5, Rate(9, 1000))}


async def test_a_queue_without_any_bound_left_has_no_limit(app: App) -> None:
    queue = app.queue("mail")
    await queue.limit(concurrency=3)

    assert await queue.limit(concurrency=None) == Limit()
    assert await queue.limits() == {}


async def test_a_limit_of_its_own_begins_without_that_of_every_group(app: App) -> None:
    queue = app.queue("mail")
    await queue.limit(group="*", concurrency=1)

    assert await queue.limit(group="a", rate="1/s") == Limit(None, Rate(1, 1000))
    assert await queue.limit(group="a") == Limit(None, Rate(1, 1000))
    assert await queue.limit(group="b") == Limit()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"concurrency": 0},
        {"concurrency": True},
        {"concurrency": "3"},
        {"rate": "100"},
        {"rate": "0/s"},
        {"bucket": (10, "1/s")},
        {"group": "x", "bucket": 10},
        {"group": "x", "bucket": (0, "1/s")},
        {"group": "x", "bucket": (10, "fast")},
        {"group": "x", "bucket": (1_000_000, "1/1000d")},
    ],
)
async def test_a_limit_that_cannot_be_is_refused_and_nothing_is_set(
    memory_app: App, options: dict[str, Any]
) -> None:
    queue = memory_app.queue("mail")

    with pytest.raises(InvalidOption):
        await queue.limit(**options)

    assert await queue.limits() == {}


async def test_the_name_for_every_group_is_not_a_group(memory_app: App) -> None:
    queue = memory_app.queue("mail")

    with pytest.raises(InvalidName, match="all groups"):
        await queue.enqueue(1, group="*")
    with pytest.raises(InvalidName, match="all groups"):
        await queue.pause(group="*")


async def test_changes_of_different_bounds_at_a_time_both_hold(app: App) -> None:
    queue = app.queue("mail")
    for group in (None, "g", "*"):
        for n in range(1, 6):
            await asyncio.gather(
                queue.limit(group=group, concurrency=n), queue.limit(group=group, rate=f"{n}/s")
            )
            limit = (await queue.limits())[group or ""]
            assert (limit.concurrency, limit.rate) == (n, Rate(n, 1000))


async def test_a_job_that_costs_too_much_fails_no_other_call(app: App) -> None:
    queue = app.queue("mail")
    await queue.limit(group="dear", bucket=(10, "1/s"))

    answers = await asyncio.gather(
        *(queue.enqueue(n, group="dear", cost=11 if n == 3 else 1) for n in range(8)), return_exceptions=True
    )

    assert [n for n, answer in enumerate(answers) if isinstance(answer, CostTooHigh)] == [3]
    assert await queue.open() == 7


async def test_groups_are_listed_with_what_they_wait_for(app: App) -> None:
    queue = app.queue("mail")
    await queue.limit(group="*", concurrency=1)
    await queue.enqueue_many([1, 2], group="a")
    await queue.enqueue_many([3], group="b")
    await queue.pause(group="b")
    job = await queue.claim_one(wait=0)
    assert job
    assert (job.payload, job.group) == (1, "a")

    found = {group.key: group async for group in queue.groups()}

    assert (found["a"].active, found["a"].blocked, found["a"].why) == (1, 1, "concurrency")
    assert (found["b"].paused, found["b"].why) == (True, "paused")
    [blocked] = [info async for info in queue.list_jobs("blocked")]
    assert blocked.blocked_by == "group"


def test_synchronous_code_has_limits_and_groups() -> None:
    with App("memory://").sync as app:
        queue = app.queue("mail")
        queue.limit(group="a", concurrency=1)
        queue.enqueue_many([1, 2], group="a")
        job = queue.claim_one(wait=0)

        assert job
        assert [(group.key, group.blocked) for group in queue.groups()] == [("a", 1)]
        assert job.rate_limited("1h")
        assert queue.claim_one(wait=0) is None
        assert [group.why for group in queue.groups()] == ["asked"]
        queue.unlimit(group="a")
        assert queue.limits() == {}


async def test_a_loop_of_ones_own_may_raise_what_a_handler_may(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue(1)

    async with queue.claim(wait="5s") as job:
        assert job
        raise RateLimited("1h", scope="queue")

    assert await queue.claim_one(wait=0) is None
    assert await queue.waiting() == 1


def test_a_scope_that_is_unknown_is_refused() -> None:
    with pytest.raises(InvalidOption, match="scope"):
        RateLimited("1s", scope="planet")  # type: ignore[arg-type]


async def test_a_queue_and_a_group_are_paused_for_a_time(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue("job", group="ada")
    await queue.pause("1h", group="ada")
    [group] = [group async for group in queue.groups()]
    assert (group.paused, group.why, group.blocked) == (False, "asked", 0)
    assert await queue.claim_one(wait=0) is None
    [group] = [group async for group in queue.groups()]
    assert (group.why, group.blocked) == ("asked", 1)
    await queue.resume(group="ada")
    await queue.pause(timedelta(hours=1))
    assert await queue.claim_one(wait=0) is None
    assert not (await queue.counts()).paused
    await queue.resume()
    job = await queue.claim_one(wait=0)
    assert job is not None


async def test_a_pause_of_no_time_is_refused(app: App) -> None:
    queue = app.queue("mail")
    for duration in (0, "0s", -1, "soon"):
        with pytest.raises(InvalidOption):
            await queue.pause(duration)
