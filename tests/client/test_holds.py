"""Holds, from a client's side."""

from __future__ import annotations

from datetime import timedelta

import pytest

from penstock import App, InvalidName, InvalidOption


async def test_a_result_is_held_for_a_consumer_until_it_is_released(app: App) -> None:
    queue = app.queue("sums")
    await queue.enqueue(1, id="a", hold={"ledger": "1d"}, result_ttl=0)
    await queue.enqueue(2, id="b", result_ttl=0)
    assert await queue.hold("ledger", "b", "c", ttl="2h") == {"b": "held", "c": "not_found"}
    for job in await queue.claim_many(2):
        await job.complete(job.payload * 10)

    found = [job async for job in queue.held("ledger")]

    assert {job.id: job.result for job in found} == {"a": 10, "b": 20}
    assert {job.id: job.holds for job in found} == {
        "a": {"ledger": timedelta(days=1)},
        "b": {"ledger": timedelta(hours=2)},
    }
    assert await queue.release("ledger", "a", "b") == {"a": "released", "b": "released"}
    assert [job.id async for job in queue.held("ledger")] == []


async def test_a_task_s_jobs_can_be_held(memory_app: App) -> None:
    @memory_app.task
    async def add(a: int) -> int:
        return a

    job = await add.options(hold={"ledger": "7d"}, headers={"a": "b"}).enqueue(1)
    info = await job.get()
    assert (info.holds, info.headers) == ({"ledger": timedelta(days=7)}, {"a": "b"})


async def test_holds_are_checked_at_the_door(memory_app: App) -> None:
    queue = memory_app.queue("sums")
    with pytest.raises(InvalidName, match="consumer"):
        await queue.enqueue(1, hold={"two words": "1d"})
    with pytest.raises(InvalidOption, match="ledger"):
        await queue.enqueue(1, hold="ledger")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="duration"):
        await queue.enqueue(1, hold={"ledger": "soon"})
    assert await queue.open() == 0


def test_synchronous_code_fetches_and_releases() -> None:
    app = App("memory://")
    with app.sync:
        queue = app.sync.queue("sums")
        queue.enqueue(1, id="a", hold={"ledger": "1d"})
        job = queue.claim_one()
        assert job
        job.complete(2)
        assert [held.result for held in queue.held("ledger")] == [2]
        assert queue.release("ledger", "a") == {"a": "released"}
        assert queue.change("a", failure_ttl="1h", result_ttl="2h") == "changed"
        info = queue.get("a")
        assert info.kept_until
        assert info.finished_at
        assert info.kept_until - info.finished_at == timedelta(hours=2)
