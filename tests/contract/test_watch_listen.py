"""watch, notify and listen: news of jobs' ends."""

from __future__ import annotations

import asyncio

import pytest

from penstock.core.lifecycle import State
from penstock.core.outcome import Complete, Fail, Snooze
from penstock.errors import JobNotFound
from penstock.storage.values import Finished
from tests.contract.factories import BOOM, MINUTE_MS, STATES, TERMINAL_STATES, Bench

S = State
OPEN_STATES = [state for state in STATES if state not in TERMINAL_STATES]


async def hear(bench: Bench, listener: str, count: int = 1) -> list[Finished]:
    """The next so many news, in the order of their jobs' ids."""
    news: list[Finished] = []
    while len(news) < count:
        heard = await bench.storage.listen(bench.queue, listener, timeout_ms=5000)
        assert heard, f"only {news} in time"
        news += heard
    return sorted(news, key=lambda item: item.id)


async def hear_nothing(bench: Bench, listener: str) -> None:
    assert await bench.storage.listen(bench.queue, listener, timeout_ms=20) == []


@pytest.mark.parametrize("state", OPEN_STATES)
async def test_an_open_job_is_watched_until_it_ends(bench: Bench, state: State) -> None:
    lease = await bench.bring(state)
    assert await bench.storage.watch(bench.queue, ["job"], listener="ear") == [None]
    await hear_nothing(bench, "ear")

    if lease:
        await bench.settle(lease, Complete(b"r"))
    else:
        await bench.storage.cancel(bench.queue, ["job"])

    [news] = await hear(bench, "ear")
    assert (news.id, news.state) == ("job", S.COMPLETED if lease else S.CANCELLED)
    await hear_nothing(bench, "ear")


@pytest.mark.parametrize("state", TERMINAL_STATES)
async def test_a_finished_job_is_answered_immediately(bench: Bench, state: State) -> None:
    await bench.bring(state)
    job = await bench.job()

    [answer] = await bench.storage.watch(bench.queue, ["job"], listener="ear")

    result = b"result" if state is S.COMPLETED else None
    failure = BOOM if state is S.FAILED else None
    assert answer == Finished("job", job.incarnation, state, result, failure)
    await hear_nothing(bench, "ear")


async def test_an_unknown_id_is_refused_and_nothing_is_watched(bench: Bench) -> None:
    await bench.put()

    with pytest.raises(JobNotFound):
        await bench.storage.watch(bench.queue, ["job", "nobody"], listener="ear")

    await bench.storage.cancel(bench.queue, ["job"])
    await hear_nothing(bench, "ear")


async def test_a_result_that_is_kept_no_longer_cannot_be_watched(bench: Bench) -> None:
    await bench.bring(S.COMPLETED, result_ttl_ms=MINUTE_MS)
    await bench.shift(MINUTE_MS)

    with pytest.raises(JobNotFound):
        await bench.storage.watch(bench.queue, ["job"], listener="ear")


async def test_several_jobs_are_watched_in_one_call(bench: Bench) -> None:
    await bench.bring(S.COMPLETED, "done")
    await bench.put("open")

    done, still_open = await bench.storage.watch(bench.queue, ["done", "open"], listener="ear")

    assert done
    assert (done.id, done.state) == ("done", S.COMPLETED)
    assert still_open is None
    assert await bench.storage.watch(bench.queue, [], listener="ear") == []


async def test_an_enqueue_with_notify_is_notified_of_the_end(bench: Bench) -> None:
    answer = await bench.put(notify="ear")

    await bench.settle(await bench.claim(), Complete(b"r"))

    assert await hear(bench, "ear") == [Finished("job", answer.incarnation, S.COMPLETED, b"r")]


async def test_only_a_final_failure_is_reported_with_its_reason(bench: Bench) -> None:
    answer = await bench.put(attempts=2, notify="ear")
    await bench.settle(await bench.claim(), Fail(BOOM))
    await bench.settle(await bench.claim(), Snooze(0))
    await hear_nothing(bench, "ear")

    await bench.settle(await bench.claim(), Fail(BOOM))

    assert await hear(bench, "ear") == [Finished("job", answer.incarnation, S.FAILED, None, BOOM)]


async def test_a_duplicate_waits_for_the_end_of_the_one_that_is_there(bench: Bench) -> None:
    await bench.put(notify="first")
    await bench.put(notify="second")
    await bench.put(notify="second")

    await bench.settle(await bench.claim(), Complete(b"r"))

    for listener in ("first", "second"):
        [news] = await hear(bench, listener)
        assert news.result == b"r"
        await hear_nothing(bench, listener)


async def test_a_cached_result_comes_with_the_answer(bench: Bench) -> None:
    await bench.bring(S.COMPLETED)

    answer = await bench.put(notify="ear")

    assert answer.result == b"result"
    await hear_nothing(bench, "ear")


async def test_one_listener_is_notified_of_many_ends(bench: Bench) -> None:
    await bench.put_all([bench.new(f"{i:03}", notify="ear") for i in range(300)])
    for lease in await bench.claim_all(100):
        await bench.settle(lease, Complete(lease.id.encode()))
    await bench.storage.cancel(bench.queue, [f"{i:03}" for i in range(100, 300)])

    news = await hear(bench, "ear", 300)

    assert [item.id for item in news] == [f"{i:03}" for i in range(300)]
    assert [item.result for item in news[:100]] == [f"{i:03}".encode() for i in range(100)]


async def test_news_come_to_a_listener_that_sleeps(bench: Bench) -> None:
    await bench.put(notify="ear")
    listening = asyncio.create_task(bench.storage.listen(bench.queue, "ear", timeout_ms=30_000))
    await hear_nothing(bench, "other")  # as long as a call takes: the listener has gone to sleep

    await bench.storage.cancel(bench.queue, ["job"])

    [news] = await asyncio.wait_for(listening, 10)
    assert news.state is S.CANCELLED


async def test_a_removed_job_watched_again_is_another_life(bench: Bench) -> None:
    await bench.put(notify="ear")
    await bench.storage.remove(bench.queue, ["job"])
    await hear(bench, "ear")
    await bench.put()

    await bench.settle(await bench.claim(), Complete())

    await hear_nothing(bench, "ear")
