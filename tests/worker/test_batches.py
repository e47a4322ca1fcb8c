"""Handlers that take several jobs at once."""

from __future__ import annotations

import asyncio
import threading
import time
from random import Random
from typing import Any

import pytest

from penstock import (
    App,
    InvalidOption,
    JobCancelled,
    JobContext,
    JobFailed,
    Retry,
    Snooze,
    Unrecoverable,
    Worker,
    current_job,
)
from penstock.core.lifecycle import State
from tests.worker.conftest import LEASE_S, Hog, exceed_timeouts, recorded, until, working


async def test_jobs_that_are_there_go_to_one_call_and_each_gets_its_own_result(app: App) -> None:
    calls: list[list[int]] = []

    @app.task(batch=10)
    async def double(numbers: list[int]) -> list[int]:
        calls.append(numbers)
        return [2 * number for number in numbers]

    jobs = await double.enqueue_many([double.job(n) for n in range(25)])
    async with working(app):
        assert [await job.result(timeout="20s") for job in jobs] == [2 * n for n in range(25)]

    assert sorted(n for call in calls for n in call) == list(range(25))
    assert max(map(len, calls)) == 10
    assert len(calls) < 25


async def test_a_batch_that_does_not_fill_begins_when_its_first_job_has_waited(memory_app: App) -> None:
    calls: list[list[int]] = []

    @memory_app.task(batch=100, batch_wait="50ms")
    async def note(numbers: list[int]) -> None:
        calls.append(numbers)

    async with working(memory_app):
        began = asyncio.get_running_loop().time()
        assert await note.options(wait="10s").call(1) is None
        assert asyncio.get_running_loop().time() - began >= 0.05

    assert calls == [[1]]


async def test_jobs_that_come_while_a_batch_fills_are_in_it(memory_app: App) -> None:
    calls: list[list[int]] = []

    @memory_app.task(batch=3, batch_wait="20s")
    async def note(numbers: list[int]) -> None:
        calls.append(numbers)

    async with working(memory_app) as worker:
        jobs = []
        for n in range(3):
            jobs.append(await note.enqueue(n))
            await until(lambda n=n: worker.stats.claimed == n + 1)  # type: ignore[misc]
        for job in jobs:
            await job.result(timeout="10s")

    assert calls == [[0, 1, 2]]


async def test_threads_take_batches_too(app: App) -> None:
    threads: set[str] = set()

    @app.task(batch=5)
    def lengths(texts: list[str]) -> list[int]:
        threads.add(threading.current_thread().name)
        return [len(text) for text in texts]

    jobs = await lengths.enqueue_many([lengths.job("a" * n) for n in range(5)])
    async with working(app):
        assert [await job.result(timeout="20s") for job in jobs] == list(range(5))
    assert all(name.startswith("penstock-handler") for name in threads)


async def test_an_item_of_the_list_may_be_the_fate_of_its_job(memory_app: App) -> None:
    @memory_app.task(batch=6, batch_wait="50ms", attempts=2, backoff="1ms")
    async def judge(words: list[str], *, jobs: list[JobContext]) -> list[object]:
        fates: dict[str, object] = {
            "done": "well done",
            "nothing": None,
            "boom": ValueError("boom"),
            "never": Unrecoverable("never"),
            "later": Snooze("1ms"),
            "again": Retry("again", delay="1ms"),
        }
        return [
            f"{word} after all" if job.run > 1 and word != "boom" else fates[word]
            for word, job in zip(words, jobs, strict=True)
        ]

    words = ["done", "nothing", "boom", "never", "later", "again"]
    jobs = await judge.enqueue_many([judge.job(word) for word in words])
    async with working(memory_app) as worker:
        events = recorded(worker, "retrying", "snoozed")
        assert await jobs[0].result(timeout="10s") == "well done"
        assert await jobs[1].result(timeout="10s") is None
        with pytest.raises(JobFailed, match="ValueError: boom"):
            await jobs[2].result(timeout="10s")
        with pytest.raises(JobFailed, match="Unrecoverable: never"):
            await jobs[3].result(timeout="10s")
        assert await jobs[4].result(timeout="10s") == "later after all"
        assert await jobs[5].result(timeout="10s") == "again after all"
    infos = [await job.get() for job in jobs]
    assert [info.failures for info in infos] == [0, 0, 2, 1, 0, 1]
    assert sorted(event.type for event in events) == ["retrying", "retrying", "snoozed"]


async def test_results_may_be_given_by_job_id(memory_app: App) -> None:
    @memory_app.task(batch=3, attempts=1)
    async def name(jobs: list[JobContext], words: list[str]) -> dict[str, object]:
        return {job.id: word.upper() for job, word in zip(jobs, words, strict=True) if word != "lost"}

    jobs = await name.enqueue_many([name.options(id=word).job(word) for word in ("a", "lost", "b")])
    async with working(memory_app):
        assert await jobs[0].result(timeout="10s") == "A"
        assert await jobs[2].result(timeout="10s") == "B"
        with pytest.raises(JobFailed, match=r"BatchMismatch: .* none for this one"):
            await jobs[1].result(timeout="10s")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([1], "1 results for a batch of 2 jobs"),
        ([1, 2, 3], "3 results for a batch of 2 jobs"),
        ("ab", "a str for a batch of 2 jobs"),
        ({"nobody": 1}, "'nobody', which is not a job of its batch"),
    ],
)
async def test_an_answer_that_cannot_be_matched_to_its_jobs_fails_all_of_them(
    memory_app: App, answer: Any, said: str
) -> None:
    @memory_app.task(batch=2, attempts=1)
    async def wrong(numbers: list[int]) -> Any:
        return answer

    jobs = await wrong.enqueue_many([wrong.job(1), wrong.job(2)])
    async with working(memory_app):
        for job in jobs:
            with pytest.raises(JobFailed, match=said) as failed:
                await job.result(timeout="10s")
            assert failed.value.error_type == "BatchMismatch"


async def test_what_the_handler_raises_is_every_jobs_failure(app: App) -> None:
    @app.task(batch=20, attempts=1)
    async def broken(numbers: list[int]) -> None:
        raise LookupError("no such thing")

    jobs = await broken.enqueue_many([broken.job(n) for n in range(20)])
    async with working(app):
        tracebacks = []
        for job in jobs:
            with pytest.raises(JobFailed, match="LookupError: no such thing") as failed:
                await job.result(timeout="20s")
            tracebacks.append(failed.value.traceback)
    assert all("in broken" in text for text in tracebacks)
    assert len({text.count("\n") for text in tracebacks}) == 1  # none carries the raises of the others


async def test_a_payload_that_does_not_decode_fails_alone(memory_app: App) -> None:
    calls: list[list[int]] = []

    @memory_app.task(batch=3, batch_wait="50ms")
    async def double(numbers: list[int]) -> list[int]:
        calls.append(numbers)
        return [2 * number for number in numbers]

    queue = memory_app.queue("default")
    jobs = [await queue.enqueue({"numbers": item}, task="double") for item in (1, "one", 3)]
    async with working(memory_app):
        assert await jobs[0].result(timeout="10s") == 2
        assert await jobs[2].result(timeout="10s") == 6
        with pytest.raises(JobFailed, match="SerializationError"):
            await jobs[1].result(timeout="10s")
    assert calls == [[1, 3]]


async def test_a_result_that_cannot_be_encoded_fails_alone(memory_app: App) -> None:
    @memory_app.task(batch=2)
    async def odd(numbers: list[int]) -> list[Any]:
        return [object() if n % 2 else n for n in numbers]

    good, bad = await odd.enqueue_many([odd.job(2), odd.job(1)])
    async with working(memory_app):
        assert await good.result(timeout="10s") == 2
        with pytest.raises(JobFailed, match="SerializationError"):
            await bad.result(timeout="10s")


async def test_a_cancelled_job_leaves_and_the_others_go_on(app: App) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()
    endings: list[str] = []

    @app.task(batch=3)
    async def slow(numbers: list[int]) -> list[int]:
        began.set()
        try:
            await go_on.wait()
        finally:
            endings.append("ended")
        return numbers

    jobs = await slow.enqueue_many([slow.job(n) for n in range(3)])
    async with working(app, heartbeat="20ms") as worker:
        await began.wait()
        assert await jobs[1].cancel() == "requested"
        with pytest.raises(JobCancelled):
            await jobs[1].result(timeout="10s")
        assert endings == []
        assert len(worker.health().active) == 2
        go_on.set()
        assert [await jobs[n].result(timeout="10s") for n in (0, 2)] == [0, 2]
    assert endings == ["ended"]


async def test_the_handler_is_stopped_with_the_last_of_its_jobs(memory_app: App) -> None:
    began = asyncio.Event()
    endings: list[str] = []

    @memory_app.task(batch=2)
    async def endless(numbers: list[int]) -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            endings.append("stopped")
            raise

    jobs = await endless.enqueue_many([endless.job(1), endless.job(2)])
    async with working(memory_app, heartbeat="20ms"):
        await began.wait()
        for job in jobs:
            await job.cancel()
        for job in jobs:
            with pytest.raises(JobCancelled):
                await job.result(timeout="10s")
        assert endings == ["stopped"]


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_job_cancelled_while_its_batch_fills_is_not_in_it(memory_app: App, kind: str) -> None:
    calls: list[list[int]] = []

    def note(numbers: list[int]) -> None:
        calls.append(numbers)

    async def note_async(numbers: list[int]) -> None:
        calls.append(numbers)

    task = memory_app.task(batch=2, batch_wait="20s", name="note")(note_async if kind == "async" else note)
    async with working(memory_app, heartbeat="20ms") as worker:
        first = await task.enqueue(1)
        await until(lambda: worker.stats.claimed == 1)
        await first.cancel()
        if kind == "async":
            with pytest.raises(JobCancelled):
                await first.result(timeout="10s")
        else:
            await until(lambda: _all_are_aborted(worker))
        second, third = await task.enqueue(2), await task.enqueue(3)
        await until(lambda: worker.stats.claimed == 3)
        worker.stop("10s")
        await until(lambda: worker.state == "stopped")
        with pytest.raises(JobCancelled):
            await first.result(timeout="10s")
        await second.result(timeout="10s")
        await third.result(timeout="10s")
    assert sorted(n for call in calls for n in call) == [2, 3]


def _all_are_aborted(worker: Worker) -> bool:
    assert worker._session is not None
    return all(run.abort for served in worker._session.fetcher.served_queues for run in served.held.values())


async def test_the_shortest_timeout_is_the_batchs(app: App) -> None:
    stopped: list[list[int]] = []

    @app.task(batch=3, attempts=1)
    async def slow(numbers: list[int]) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append(numbers)

    short = await slow.options(timeout="50ms", id="short").enqueue(1)
    patient = await slow.options(timeout="1h").enqueue(2)
    endless = await slow.enqueue(3)
    async with working(app):
        with pytest.raises(JobFailed, match="Timeout: the run took longer than its timeout of 50ms"):
            await short.result(timeout="10s")
        for job in (patient, endless):
            with pytest.raises(JobFailed, match=r"Timeout: .* its job 'short' had a timeout of 50 ms"):
                await job.result(timeout="10s")
    assert stopped == [[1, 2, 3]]


async def test_a_timeout_counts_from_the_beginning_of_the_batch(memory_app: App) -> None:
    @memory_app.task(batch=2, batch_wait="1h", timeout="10m", attempts=1)
    async def quick(numbers: list[int]) -> list[int]:
        return numbers

    async with working(memory_app) as worker:
        first = await quick.enqueue(8)
        await until(lambda: worker.health().active)
        exceed_timeouts(worker)
        await quick.enqueue(9)
        assert await first.result(timeout="10s") == 8


async def test_a_thread_that_goes_on_keeps_the_slots_of_all_its_jobs(memory_app: App) -> None:
    go_on = threading.Event()

    @memory_app.task(batch=2, attempts=1, timeout="50ms")
    def stubborn(numbers: list[int]) -> None:
        go_on.wait(20)

    jobs = await stubborn.enqueue_many([stubborn.job(1), stubborn.job(2)])
    async with working(memory_app, concurrency=2) as worker:
        try:
            for job in jobs:
                with pytest.raises(JobFailed, match="Timeout"):
                    await job.result(timeout="10s")
            assert worker.health().stuck == 2
        finally:
            go_on.set()
        await until(lambda: worker.health().stuck == 0)


async def test_a_worker_that_stops_hands_back_a_batch_once_its_handler_has_ended(app: App) -> None:
    began = asyncio.Event()
    states: list[object] = []

    @app.task(batch=2)
    async def endless(numbers: list[int]) -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            states.extend([await job.refresh() for job in jobs])

    jobs = await endless.enqueue_many([endless.job(1), endless.job(2)])
    async with working(app):
        await began.wait()
    assert states == [State.ACTIVE, State.ACTIVE]
    assert [await job.refresh() for job in jobs] == [State.WAITING, State.WAITING]


async def test_a_stopping_worker_does_not_wait_for_a_batch_to_fill(memory_app: App) -> None:
    calls: list[list[int]] = []

    @memory_app.task(batch=10, batch_wait="1h")
    async def note(numbers: list[int]) -> None:
        calls.append(numbers)

    async with working(memory_app) as worker:
        await note.enqueue(1)
        await until(lambda: worker.stats.claimed == 1)
        worker.stop("20s")
        await until(lambda: worker.state == "stopped")
    assert calls == [[1]]
    assert worker.stats.completed == 1


async def test_leases_of_jobs_that_wait_for_their_batch_are_renewed(memory_app: App) -> None:
    @memory_app.task(batch=2, batch_wait="1h")
    async def note(numbers: list[int]) -> None:
        return

    async with working(memory_app, lease=LEASE_S, heartbeat="50ms") as worker:
        job = await note.enqueue(1)
        await until(lambda: worker.health().active)
        await asyncio.to_thread(Hog(memory_app, worker).hold_the_loop)
        await note.enqueue(2)
        await job.result(timeout="10s")
    info = await job.get()
    assert (info.runs, info.stalls) == (1, 0)


async def test_no_more_jobs_are_claimed_than_there_are_slots(memory_app: App) -> None:
    sizes: list[int] = []

    @memory_app.task(batch=50, batch_wait="20s")
    async def note(numbers: list[int]) -> None:
        sizes.append(len(numbers))

    jobs = await note.enqueue_many([note.job(n) for n in range(12)])
    async with working(memory_app, concurrency=4):
        for job in jobs:
            await job.result(timeout="10s")
    assert sizes == [4, 4, 4]  # full as far as it can be: to wait for more would be in vain


async def test_contexts_speak_for_their_own_jobs(memory_app: App) -> None:
    @memory_app.task(batch=2)
    async def note(words: list[str], jobs: list[JobContext]) -> None:
        for word, job in zip(words, jobs, strict=True):
            job.log(word)
            await job.progress(word)
        with pytest.raises(LookupError):
            current_job()

    jobs = await note.enqueue_many([note.job("a"), note.job("b")])
    async with working(memory_app):
        for job in jobs:
            await job.result(timeout="10s")
    assert [await job.logs() for job in jobs] == [["a"], ["b"]]
    infos = [await job.get() for job in jobs]
    assert [info.progress for info in infos] == ["a", "b"]


async def test_middleware_is_around_each_job_of_a_batch(memory_app: App) -> None:
    seen: dict[str, object] = {}

    async def traced(job: JobContext, call_next: Any) -> object:
        seen[job.id] = result = await call_next()
        return f"<{result}>"

    @memory_app.task(batch=2)
    async def shout(words: list[str]) -> list[str]:
        return [word.upper() for word in words]

    jobs = await shout.enqueue_many([shout.options(id="1").job("a"), shout.options(id="2").job("b")])
    async with working(memory_app, middleware=[traced]):
        assert [await job.result(timeout="10s") for job in jobs] == ["<A>", "<B>"]
    assert seen == {"1": "A", "2": "B"}


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_queues_handler_may_take_batches(app: App, kind: str) -> None:
    worker = app.worker(queues=["raw"], burst=True)
    sizes: list[int] = []

    if kind == "async":

        @worker.handler("raw", batch=3)
        async def handle(jobs: list[JobContext]) -> list[int]:
            sizes.append(len(jobs))
            return [len(job.payload) for job in jobs]
    else:

        @worker.handler("raw", batch=3)
        def handle_in_thread(jobs: list[JobContext]) -> list[int]:
            sizes.append(len(jobs))
            return [len(job.payload) for job in jobs]

    handles = await app.queue("raw", serde="raw").enqueue_many([b"a", b"bb", b"ccc"])
    await worker.run()
    results = [await app.job(f"raw/{handle.id}").result(timeout="10s") for handle in handles]
    assert (results, sizes) == ([1, 2, 3], [3])


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_no_slot_is_lost_and_no_job_left_whatever_is_cancelled_when(memory_app: App, kind: str) -> None:
    chance = Random(11)

    async def rest(numbers: list[int]) -> list[int]:
        await asyncio.sleep(chance.random() / 100)
        return numbers

    def rest_in_thread(numbers: list[int]) -> list[int]:
        time.sleep(chance.random() / 100)
        return numbers

    task = memory_app.task(batch=7, batch_wait="5ms", name="rest", attempts=2, timeout="8ms", backoff="1ms")(
        rest if kind == "async" else rest_in_thread
    )
    async with working(memory_app, heartbeat="5ms", concurrency=15) as worker:
        jobs = await task.enqueue_many([task.job(n) for n in range(150)])
        for job in chance.sample(jobs, 40):
            await job.cancel()
            await asyncio.sleep(0)

        async def over() -> bool:
            return await memory_app.queue("default").open() == 0

        await until(over, seconds=30)
        await until(lambda: not worker.health().active)
        last = await task.options(timeout="10s").enqueue(1)
        assert await last.result(timeout="10s") == 1
    stats = worker.stats
    assert stats.completed > 0
    assert stats.cancelled + stats.failed + stats.retrying > 0


def test_a_batch_task_can_still_be_called_here() -> None:
    app = App("memory://")

    @app.task(batch=10)
    def double(numbers: list[int]) -> list[int]:
        return [2 * n for n in numbers]

    assert double([1, 2]) == [2, 4]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 0}, "batch must be .* got 0"),
        ({"batch": "many"}, "batch must be .* got 'many'"),
        ({"batch": 10_001}, "batch must be .* got 10001"),
        ({"batch": 5, "batch_wait": "soon"}, "batch_wait='soon'"),
        ({"batch_wait": "1s"}, "needs batch="),
        ({"batch": 5, "takes_context": True}, "takes_context does not suit"),
        ({"batch": 5, "runner": "process"}, "in a process"),
        ({"batch": 5, "runner": "sandbox"}, "in a sandbox"),
    ],
)
def test_options_that_make_no_batch_are_refused(options: dict[str, Any], said: str) -> None:
    app = App("memory://")

    def double(numbers: list[int]) -> list[int]:
        return numbers

    with pytest.raises(InvalidOption, match=said):
        app.task(**options)(double)


def test_functions_that_take_no_list_are_refused() -> None:
    app = App("memory://")

    async def nothing() -> None: ...
    async def two(a: list[int], b: list[int]) -> None: ...
    async def one(a: int) -> None: ...
    async def star(*items: int) -> None: ...
    async def by_context(job: JobContext) -> None: ...

    for function in (nothing, two, one, star, by_context):
        with pytest.raises(InvalidOption, match="cannot take batches"):
            app.task(batch=5)(function)


@pytest.mark.parametrize("runner", ["async", "thread"])
async def test_a_handler_of_a_batch_that_exits_fails_its_jobs_and_not_the_worker(
    memory_app: App, runner: str
) -> None:
    async def leave(numbers: list[int]) -> None:
        raise SystemExit(3)

    def leave_in_a_thread(numbers: list[int]) -> None:
        raise SystemExit(3)

    function: Any = leave if runner == "async" else leave_in_a_thread
    task = memory_app.task(batch=2, attempts=1, name="leave")(function)
    jobs = await task.enqueue_many([task.job(1), task.job(2)])
    async with working(memory_app) as worker:
        for job in jobs:
            with pytest.raises(JobFailed) as caught:
                await job.result(timeout="10s")
            assert caught.value.error_type == "SystemExit"
        assert worker.health().consuming
