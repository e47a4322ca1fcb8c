"""Results: waiting for them, calling for them, and every way in which there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import pytest

from penstock import (
    App,
    ClaimedJob,
    JobCancelled,
    JobExpired,
    JobFailed,
    JobNotFound,
    ResultTimeout,
    SerializationError,
    State,
    StorageUnavailable,
)
from penstock.client.waiter import ResultWait, Waiter
from penstock.core.job import Enqueued, NewJob
from penstock.storage.values import Finished, Ticket
from tests.client.conftest import until, working
from tests.client.spy import Spy, spy_on


@dataclass
class Receipt:
    to: str
    on: date


async def receipt(job: ClaimedJob) -> Any:
    return Receipt(job.payload["to"], date(2026, 1, 2))


async def failing(job: ClaimedJob) -> Any:
    raise ValueError("bad address")


async def test_a_result_is_waited_for_and_decoded_to_the_annotated_type(app: App) -> None:
    @app.task(queue="mail")
    async def send(to: str) -> Receipt:
        raise AssertionError("it is worked off below")

    job = await send.enqueue("ada")
    waiting = asyncio.create_task(job.result(timeout="10s"))
    async with working(app.queue("mail"), receipt):
        assert await waiting == Receipt("ada", date(2026, 1, 2))

    assert await job.result() == Receipt("ada", date(2026, 1, 2)), "it is kept"
    assert job.state is State.COMPLETED


async def test_a_known_id_gives_the_cached_result_and_runs_nothing(app: App) -> None:
    @app.task(queue="mail")
    async def send(to: str) -> Receipt:
        raise AssertionError("it is worked off below")

    async with working(app.queue("mail"), receipt):
        await send.options(id="a").call("ada")

    again = await send.options(id="a").enqueue("bob")

    assert again.status == "completed"
    assert (await again.result()).to == "ada"
    assert (await send.options(id="a").call("bob")).to == "ada"


async def test_a_failed_job_raises_what_its_handler_raised_last(app: App) -> None:
    queue = app.queue("mail")
    job = await queue.enqueue("x", attempts=1)
    async with working(queue, failing):
        with pytest.raises(JobFailed, match="ValueError: bad address") as failure:
            await job.result(timeout="10s")

    assert failure.value.job_id == job.id
    assert failure.value.error_type == "ValueError"
    assert "raise ValueError" in failure.value.traceback


async def test_a_cancelled_job_raises(app: App) -> None:
    job = await app.queue("mail").enqueue("x")
    waiting = asyncio.create_task(job.result(timeout="10s"))

    assert await job.cancel() == "cancelled"

    with pytest.raises(JobCancelled):
        await waiting
    with pytest.raises(JobCancelled):
        await job.result()


async def test_an_expired_job_raises(app: App) -> None:
    queue = app.queue("mail")
    job = await queue.enqueue("x", ttl="10s")
    storage = await app.connect()

    await storage.shift_clock("mail", 11_000)
    assert await queue.claim_one(wait=0) is None

    with pytest.raises(JobExpired, match="ttl"):
        await job.result()


async def test_a_wait_notices_a_passed_ttl_where_no_worker_does(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.client.waiter._LISTEN_MS", 20)
    queue = app.queue("mail")
    job = await queue.enqueue("x", ttl="1h")
    waits = [asyncio.create_task(job.result()), asyncio.create_task(queue.call("x", ttl="1h"))]
    while await queue.open() < 2:
        await asyncio.sleep(0.002)
    storage = await app.connect()

    await storage.shift_clock("mail", 3_601_000)

    for waiting in waits:
        with pytest.raises(JobExpired, match="ttl passed"):
            await asyncio.wait_for(waiting, 10)


async def test_a_wait_that_is_over_tells_that_the_ttl_has_passed(app: App) -> None:
    queue = app.queue("mail")
    short, long = await queue.enqueue("x", ttl="10s"), await queue.enqueue("x", ttl="1h")
    storage = await app.connect()

    await storage.shift_clock("mail", 11_000)

    with pytest.raises(JobExpired, match="ttl passed"):
        await short.result(timeout="10ms")
    with pytest.raises(JobExpired, match="ttl passed"):
        await queue.call("x", id=short.id, on_conflict="absent", wait="10ms")
    with pytest.raises(ResultTimeout, match="No worker runs"):
        await long.result(timeout="10ms")
    assert (await long.get()).state == "waiting"


async def test_a_wait_goes_on_if_the_store_cannot_be_swept(
    memory_app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.client.waiter._LISTEN_MS", 5)
    storage = await memory_app.connect()
    sweep, refused = storage.sweep, asyncio.Event()

    async def refuse(queue: str, *, limit: int = 1000) -> Any:
        if refused.is_set():
            return await sweep(queue, limit=limit)
        refused.set()
        raise StorageUnavailable("away")

    monkeypatch.setattr(storage, "sweep", refuse)
    queue = memory_app.queue("mail")
    job = await queue.enqueue({"to": "ada"})
    waiting = asyncio.create_task(job.result())
    await asyncio.wait_for(refused.wait(), 10)
    async with working(queue, receipt):
        assert await asyncio.wait_for(waiting, 10) == {"to": "ada", "on": "2026-01-02"}
    assert not caplog.records


async def test_an_unknown_job_raises(app: App) -> None:
    with pytest.raises(JobNotFound) as unknown:
        await app.job("mail/nobody").result(timeout="5s")
    assert unknown.value.job_id == "nobody"
    with pytest.raises(JobNotFound):
        await app.job("mail/nobody").refresh()
    assert await app.job("mail/nobody").get_or_none() is None


async def test_a_wait_that_is_over_leaves_the_job_alone(app: App) -> None:
    job = await app.queue("mail").enqueue("x")

    with pytest.raises(ResultTimeout, match="20ms"):
        await job.result(timeout="20ms")
    with pytest.raises(TimeoutError):
        await app.queue("mail").call("x", id=job.id, wait="20ms")

    assert await job.refresh() is State.WAITING


async def test_a_result_of_another_type_is_a_serialization_error(app: App) -> None:
    @app.task(queue="mail")
    async def send(to: str) -> Receipt:
        raise AssertionError("it is worked off below")

    async def wrong(job: ClaimedJob) -> Any:
        return 7

    async with working(app.queue("mail"), wrong):
        with pytest.raises(
            SerializationError, match="the function returned 7, but its annotation says Receipt"
        ):
            await send.options(wait="10s").call("ada")


async def test_calls_share_one_subscription(spy: Spy) -> None:
    app = App(spy)
    queue = app.queue("mail")

    async def echo(job: ClaimedJob) -> Any:
        return job.payload

    async with working(queue, echo):
        answers = await asyncio.gather(*(queue.call(n, wait="20s") for n in range(200)))

    assert answers == list(range(200))
    assert len({job.notify for batch in spy.enqueues for job in batch}) == 1
    assert "watch" not in spy.calls
    await app.close()


async def test_a_duplicate_call_waits_for_the_job_that_is_there(app: App) -> None:
    queue = app.queue("mail")
    runs = 0

    async def count(job: ClaimedJob) -> Any:
        nonlocal runs
        runs += 1
        return runs

    calls = [asyncio.create_task(queue.call("x", id="same", wait="10s")) for _ in range(5)]
    while await queue.waiting() == 0:
        await asyncio.sleep(0)
    async with working(queue, count):
        assert await asyncio.gather(*calls) == [1] * 5


async def test_a_call_of_an_ended_job_that_is_not_run_again_says_how_it_ended(app: App) -> None:
    queue = app.queue("mail")
    async with working(queue, failing):
        with pytest.raises(JobFailed):
            await queue.call("x", id="a", attempts=1, wait="10s")

    with pytest.raises(JobFailed, match="bad address"):
        await queue.call("x", id="a", on_conflict="absent", wait="10s")


async def test_a_call_gets_its_answer_even_if_no_result_is_kept(app: App) -> None:
    queue = app.queue("mail")
    async with working(queue, receipt):
        answer = await queue.call({"to": "ada"}, id="a", result_ttl=0, wait="10s")

    assert answer["to"] == "ada"
    assert await queue.get_or_none("a") is None


async def test_results_of_many_jobs_are_asked_for_together(spy: Spy) -> None:
    app = App(spy)
    queue = app.queue("mail")
    handles = await queue.enqueue_many(range(50))
    for job in await queue.claim_many(50):
        await job.complete(job.payload)

    assert await asyncio.gather(*(handle.result() for handle in handles)) == list(range(50))
    assert spy.calls.count("watch") <= 3
    await app.close()


async def test_an_unknown_id_among_many_spoils_only_its_own_result(app: App) -> None:
    queue = app.queue("mail")
    handles = [await queue.enqueue(n, id=f"job-{n}") for n in range(3)]
    for job in await queue.claim_many(3):
        await job.complete(job.payload)

    results = await asyncio.gather(
        *(handle.result() for handle in [*handles, queue.job("nobody")]), return_exceptions=True
    )

    assert results[:3] == [0, 1, 2]
    assert isinstance(results[3], JobNotFound)


async def test_closing_the_app_ends_the_waits() -> None:
    app = App("memory://")
    job = await app.queue("mail").enqueue("x")
    waiting = asyncio.create_task(job.result())
    await asyncio.sleep(0.01)

    await app.close()

    with pytest.raises(Exception, match="closed"):
        await waiting


class Broken(Spy):
    """Listening fails for a while, and the news that came meanwhile are lost."""

    failures = 0

    async def listen(self, queue: str, listener: str, *, timeout_ms: int) -> list[Finished]:
        self.failures += 1
        raise StorageUnavailable("the connection went away")

    async def enqueue(
        self, queue: str, jobs: Sequence[NewJob], *, ticket: Ticket | None = None
    ) -> list[Enqueued]:
        await until(lambda: self.failures >= 2)
        return await self._storage.enqueue(queue, jobs, ticket=ticket)


async def test_after_a_lost_connection_even_amid_the_enqueue_the_ends_are_asked_for(
    spy: Spy, caplog: pytest.LogCaptureFixture
) -> None:
    broken = spy_on(spy, Broken)
    app = App(broken)
    queue = app.queue("mail")
    call = asyncio.create_task(queue.call("x", wait="10s"))
    job = await queue.claim_one()
    assert job is not None
    await job.complete("done")

    assert await call == "done"
    assert "watch" in broken.calls
    assert "went away" in caplog.text
    await app.close()


async def test_news_of_an_earlier_life_of_an_id_are_not_for_a_later_caller() -> None:
    earlier = Finished("a", 1, State.COMPLETED, b"1")
    later = Finished("a", 5, State.COMPLETED, b"5")
    expected = ResultWait("a")

    expected.receive(earlier)
    expected.begin(5)
    assert not expected.future.done()
    expected.receive(later)
    assert expected.future.result() == later


async def test_news_that_come_before_the_enqueue_has_answered_are_kept() -> None:
    news = Finished("a", 5, State.COMPLETED, b"5")
    expected = ResultWait("a")

    expected.receive(news)
    assert not expected.future.done()
    expected.begin(5)
    assert expected.future.result() == news


async def test_listening_ends_without_waiters(memory_app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.client.waiter._LISTEN_MS", 20)
    waiter = Waiter(await memory_app.connect(), "mail")
    expected = waiter.expect("a")
    listening = waiter._listening
    assert listening is not None

    waiter.forget(expected)

    await until(listening.done)
    waiter.forget(waiter.expect("b"))
    assert waiter._listening is not listening, "the next one who waits starts it again"
    await waiter.close()
