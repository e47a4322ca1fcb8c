"""A loop of one's own."""

from __future__ import annotations

import asyncio

import pytest

from penstock import (
    App,
    InvalidOption,
    LeaseLost,
    PayloadTooLarge,
    Retry,
    SerializationError,
    Snooze,
    State,
    Unrecoverable,
)
from tests.client.conftest import until
from tests.client.spy import Spy


async def test_a_block_that_is_left_normally_completes_the_job(app: App) -> None:
    queue = app.queue("mail")
    handle = await queue.enqueue({"to": "ada"})

    async with queue.claim(lease="30s") as job:
        assert (job.id, job.payload, job.run, job.failures) == (handle.id, {"to": "ada"}, 1, 0)
        assert job.enqueued_at.tzinfo is not None
        job.result = "sent"

    assert await handle.result() == "sent"


async def test_a_block_that_raises_fails_the_job_to_be_retried(app: App) -> None:
    queue = app.queue("mail")
    handle = await queue.enqueue("x", attempts=2, backoff="10s")

    with pytest.raises(ValueError, match="bad address"):
        async with queue.claim():
            raise ValueError("bad address")

    info = await handle.get()
    assert (info.state, info.failures) == (State.SCHEDULED, 1)
    assert info.failure is not None
    assert (info.failure.type, info.failure.message) == ("ValueError", "bad address")


@pytest.mark.parametrize(
    ("verdict", "state", "failures"),
    [
        (Snooze("1h"), State.SCHEDULED, 0),
        (Retry(delay="1h"), State.SCHEDULED, 1),
        (Unrecoverable("no such user"), State.FAILED, 1),
    ],
)
async def test_a_verdict_is_carried_out_and_ends_there(
    app: App, verdict: Exception, state: State, failures: int
) -> None:
    queue = app.queue("mail")
    handle = await queue.enqueue("x")

    async with queue.claim():
        raise verdict

    info = await handle.get()
    assert (info.state, info.failures) == (state, failures)


async def test_a_block_that_is_cancelled_hands_the_job_back(app: App) -> None:
    queue = app.queue("mail")
    handle = await queue.enqueue("x")
    begun = asyncio.Event()

    async def work() -> None:
        async with queue.claim():
            begun.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    info = await handle.get()
    assert (info.state, info.failures, info.stalls) == (State.WAITING, 0, 0)


async def test_what_is_settled_inside_the_block_counts(app: App) -> None:
    queue = app.queue("mail")
    handle = await queue.enqueue("x")

    async with queue.claim() as job:
        assert await job.complete("first")
        job.result = "second"

    assert await handle.result() == "first"


async def test_a_wait_with_a_limit_gives_none(app: App) -> None:
    queue = app.queue("mail")

    async with queue.claim(wait="10ms") as job:
        assert job is None
    assert await queue.claim_one(wait=0) is None
    assert await queue.claim_many(5, wait=0) == []


async def test_a_claim_waits_for_a_job(app: App) -> None:
    queue = app.queue("mail")
    claiming = asyncio.create_task(queue.claim_one(wait="20s"))
    await asyncio.sleep(0.01)
    handle = await queue.enqueue("x")

    job = await asyncio.wait_for(claiming, 10)

    assert job is not None
    assert job.id == handle.id


async def test_many_jobs_are_claimed_together_in_order(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue_many(range(5))

    jobs = await queue.claim_many(3)

    assert [job.payload for job in jobs] == [0, 1, 2]
    assert len({job.token for job in jobs}) == 3
    assert await queue.active() == 3


async def test_a_settle_may_set_how_long_the_finished_job_is_kept(app: App) -> None:
    queue = app.queue("mail")
    done, failed, usual = await queue.enqueue_many([1, 2, 3], result_ttl="1h", failure_ttl="1h")
    jobs = await queue.claim_many(3)
    assert await jobs[0].complete("r", ttl="5m")
    assert await jobs[1].fail("no", final=True, ttl=120)
    assert await jobs[2].complete("r")

    kept = []
    for handle in (done, failed, usual):
        info = await handle.get()
        kept.append(info.raw.kept_until_ms - info.raw.finished_at_ms)
    assert kept == [300_000, 120_000, 3_600_000]


async def test_complete_is_true_for_exactly_one_holder(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue("x")
    first = await queue.claim_one(lease="10s")
    await (await app.connect()).shift_clock("mail", 11_000)
    second = await queue.claim_one(lease="10s", wait=0)
    assert first is not None
    assert second is not None, "an abandoned lease comes back without a cleaner"
    assert (second.id, second.run) == (first.id, 2)

    assert [await first.complete(1), await second.complete(2), await second.complete(3)] == [
        False,
        True,
        False,
    ]
    assert await queue.job(first.id).result() == 2


async def test_a_lost_lease_is_reported(app: App) -> None:
    queue = app.queue("mail")
    await queue.enqueue("x")

    claim = queue.claim(lease="10s")
    job = await claim.__aenter__()
    await (await app.connect()).shift_clock("mail", 11_000)
    other = await queue.claim_one(wait=0)

    for speak in (job.extend, lambda: job.progress(1), lambda: job.log("x")):
        with pytest.raises(LeaseLost):
            await speak()
    assert job.cancelled
    with pytest.raises(LeaseLost, match="another worker"):
        await claim.__aexit__(None, None, None)
    assert other is not None
    assert await other.complete()


async def test_the_lease_is_extended_while_the_block_runs(spy: Spy) -> None:
    queue = App(spy).queue("mail")
    await queue.enqueue("x")

    async with queue.claim(lease="60ms"):
        await until(lambda: spy.calls.count("extend") >= 3)

    assert (await queue.counts()).completed == 1
    assert (await queue.counts()).active == 0


async def test_a_request_to_cancel_is_seen_at_the_next_heartbeat(app: App) -> None:
    queue = app.queue("mail")
    handle = await queue.enqueue("x")

    async with queue.claim(lease="60ms") as job:
        assert not job.cancelled
        assert await handle.cancel() == "requested"
        await until(lambda: job.cancelled)
        await job.release()

    assert await handle.refresh() is State.CANCELLED


async def test_fail_release_snooze_and_extend_do_what_they_say(app: App) -> None:
    queue = app.queue("mail")
    handle = await queue.enqueue("x", attempts=3, backoff="1h")

    job = await queue.claim_one(wait=0)
    assert job is not None
    assert await job.extend("1m") == "extended"
    assert await job.release()
    job = await queue.claim_one(wait=0)
    assert job is not None
    assert await job.fail("not now", retry_in=0)
    job = await queue.claim_one(wait=0)
    assert job is not None
    assert (job.run, job.failures) == (3, 1)
    assert await job.snooze(0)
    job = await queue.claim_one(wait=0)
    assert job is not None
    assert await job.fail("never", final=True)

    info = await handle.get()
    assert info.state is State.FAILED
    assert info.failure is not None
    assert info.failure.message == "never"


async def test_a_running_job_speaks_of_itself(app: App) -> None:
    queue = app.queue("mail")
    handle = await queue.enqueue("x")

    async with queue.claim() as job:
        await job.progress({"done": 3})
        await job.log("one", "two")
        await job.update_payload("y")
        info = await handle.get()
        assert (info.progress, info.payload, job.payload) == ({"done": 3}, "y", "x")
        with pytest.raises(SerializationError):
            await job.progress(object())

    assert await handle.logs() == ["one", "two"]


async def test_a_payload_that_cannot_be_decoded_fails_that_job_alone(app: App) -> None:
    await app.queue("mail", serde="raw").enqueue(b"\xff", attempts=1)
    await app.queue("mail").enqueue("fine")
    queue = app.queue("mail")

    with pytest.raises(SerializationError):
        async with queue.claim() as job:
            _ = job.payload
    async with queue.claim() as job:
        assert job.payload == "fine"

    assert (await queue.counts()).failed == 1


@pytest.mark.parametrize(("result", "error"), [(object(), SerializationError), ("x" * 2000, PayloadTooLarge)])
async def test_a_result_that_cannot_be_kept_fails_the_job(result: object, error: type[Exception]) -> None:
    async with App("memory://", max_payload=1000) as app:
        queue = app.queue("mail")
        handle = await queue.enqueue("x", attempts=1)

        with pytest.raises(error):
            async with queue.claim() as job:
                job.result = result

        assert await handle.refresh() is State.FAILED


async def test_a_claim_that_is_given_up_leaves_nothing_leased(app: App) -> None:
    queue = app.queue("mail")
    for _ in range(20):
        claiming = asyncio.create_task(queue.claim_one())
        await asyncio.sleep(0)
        enqueuing = asyncio.create_task(queue.enqueue("x"))
        await asyncio.sleep(0)
        claiming.cancel()
        got = (await asyncio.gather(claiming, return_exceptions=True))[0]
        await enqueuing
        assert isinstance(got, asyncio.CancelledError)

    async with asyncio.timeout(10):
        while await queue.active():
            await asyncio.sleep(0.002)
    assert await queue.waiting() == 20


async def test_concurrent_settles_travel_together(spy: Spy) -> None:
    queue = App(spy).queue("mail")
    await queue.enqueue_many(range(100))
    jobs = await queue.claim_many(100)

    assert await asyncio.gather(*(job.complete() for job in jobs)) == [True] * 100
    assert spy.calls.count("settle") <= 3


async def test_claiming_also_sweeps_once_per_lease(spy: Spy) -> None:
    queue = App(spy).queue("mail")
    await queue.enqueue_many(range(50))

    for _ in range(50):
        async with queue.claim(lease="1h"):
            pass

    assert spy.calls.count("sweep") == 1


async def test_a_lease_of_no_length_is_refused(memory_app: App) -> None:
    with pytest.raises(InvalidOption, match="lease"):
        memory_app.queue("mail").claim(lease=0)
    with pytest.raises(InvalidOption, match="count"):
        await memory_app.queue("mail").claim_many(0)
