"""Dedup keys from the client's side: options, handles, waiting, the sync face."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock import App, Dedup, EnqueueCall, InvalidName, InvalidOption, JobCancelled, JobNotFound, State


async def test_a_key_alone_is_simple_and_the_handle_follows_the_earlier_job(app: App) -> None:
    queue = app.queue("mail")
    first = await queue.enqueue("a", dedup="key")
    second = await queue.enqueue("b", dedup="key")
    assert (second.status, second.id, second.state) == ("duplicate", first.id, State.WAITING)
    async with queue.claim() as job:
        job.result = job.payload
    assert await second.result(timeout="5s") == "a"


async def test_handles_of_many_follow_the_earlier_job(app: App) -> None:
    handles = await app.queue("mail").enqueue_many(["a", "b"], ids=["a", "b"], dedup="key")
    assert [(handle.id, handle.status) for handle in handles] == [("a", "queued"), ("a", "duplicate")]


async def test_a_call_that_is_a_duplicate_by_its_key_waits_for_the_earlier_job(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue("a", dedup="key")
    answered = asyncio.Event()

    @app.enqueue_middleware
    async def note(call: EnqueueCall, call_next: Any) -> Any:
        answers = await call_next(call)
        answered.set()
        return answers

    call = asyncio.create_task(queue.call("b", dedup="key", wait="10s"))
    await asyncio.wait_for(answered.wait(), 10)
    async with queue.claim() as job:
        job.result = "of the first"
    assert await call == "of the first"


async def test_a_call_whose_job_is_replaced_says_by_which(app: App) -> None:
    queue = app.queue("mail")
    call = asyncio.create_task(queue.call("a", dedup=Dedup.debounce("key", "1h"), wait="10s"))
    while await queue.dedup("key") is None:
        await asyncio.sleep(0.005)
    second = await queue.enqueue("b", dedup=Dedup.debounce("key", "1h"))
    with pytest.raises(JobCancelled, match=f"was cancelled: replaced by job {second.id}"):
        await call


async def test_a_throttle_that_outlived_its_job_has_no_state(app: App) -> None:
    queue = app.queue("mail")
    first = await queue.enqueue("a", dedup=Dedup.throttle("key", "1h"))
    await first.remove()
    second = await queue.enqueue("b", dedup=Dedup.throttle("key", "1h"))
    assert (second.id, second.state) == (first.id, None)
    with pytest.raises(JobNotFound):
        await second.result()
    with pytest.raises(JobNotFound):
        await queue.call("c", dedup=Dedup.throttle("key", "1h"))


async def test_debounce_delays_a_job_that_has_no_time_of_its_own(app: App) -> None:
    @app.task
    async def save(n: int) -> None: ...

    typing = save.options(dedup=Dedup.debounce("key", "1h"))
    assert (await typing.enqueue(1)).state is State.SCHEDULED
    assert (await typing.options(delay=0).enqueue(2)).state is State.WAITING
    assert (await save.options(dedup=Dedup.debounce("other")).enqueue(3)).state is State.WAITING


@pytest.mark.parametrize("given", [3, b"key", {"key": "x"}])
async def test_an_invalid_dedup_is_refused(app: App, given: Any) -> None:
    with pytest.raises(InvalidOption, match=r"Dedup\.throttle"):
        await app.queue("mail").enqueue("a", dedup=given)


def test_keys_and_windows_are_checked_at_the_door() -> None:
    with pytest.raises(InvalidName, match="dedup key"):
        Dedup.simple(" key")
    with pytest.raises(InvalidOption, match="ttl must be at least 1 ms, got 0"):
        Dedup.throttle("key", 0)
    assert Dedup.simple("key", "1m") == Dedup("key", "simple", 60_000)


async def test_none_is_not_a_key(app: App) -> None:
    queue = app.queue("mail")
    given: Any = None
    assert (await queue.enqueue("a", dedup=given)).status == "queued"


def test_the_sync_face_has_it_too() -> None:
    app = App("memory://")
    queue = app.queue("mail").sync
    first = queue.enqueue("a", dedup="key")
    assert queue.enqueue("b", dedup="key").id == first.id
    assert queue.dedup("key") == first.id
    assert queue.clear_dedup("key")
    assert queue.dedup("key") is None
    app.sync.close()
