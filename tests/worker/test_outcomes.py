"""What becomes of a job, by what its handler does."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import (
    App,
    Fixed,
    InvalidOption,
    JobContext,
    JobFailed,
    JobHandle,
    RateLimited,
    Retry,
    SerializationError,
    Snooze,
    State,
    Unrecoverable,
    WaitForChildren,
    current_job,
)
from penstock.core.job import NewJob
from penstock.testing import harness
from penstock.worker.context import JobContext as Context
from tests.worker.conftest import recorded, until, working


async def test_an_async_handler_runs_and_its_result_is_kept(app: App) -> None:
    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    async with working(app) as worker:
        job = await add.enqueue(2, b=3)
        assert await job.result(timeout="10s") == 5
        await until(lambda: worker.stats.completed == 1)


async def test_a_sync_handler_runs_in_a_thread(app: App) -> None:
    @app.task
    def where() -> bool:
        return threading.current_thread() is threading.main_thread()

    async with working(app):
        assert await where.call() is False


async def test_many_jobs_are_all_run_once(app: App) -> None:
    seen: list[int] = []

    @app.task
    async def note(n: int) -> None:
        seen.append(n)

    await note.enqueue_many([note.job(n=n) for n in range(1000)])
    async with working(app, concurrency=50) as worker:
        await until(lambda: worker.stats.completed == 1000)
    assert sorted(seen) == list(range(1000))


async def test_a_handler_that_raises_is_retried_and_then_succeeds(app: App) -> None:
    @app.task(attempts=3)
    async def flaky(context: JobContext) -> list[int]:
        if context.failures < 2:
            raise ValueError("not yet")
        return [context.run, context.failures]

    async with working(app) as worker:
        retrying = recorded(worker, "retrying")
        assert await flaky.call() == [3, 2]
        assert [event.failure.type for event in retrying if event.failure] == ["ValueError", "ValueError"]


async def test_a_job_fails_for_good_when_its_attempts_are_used_up(app: App) -> None:
    @app.task(attempts=2)
    async def broken() -> None:
        raise KeyError("nothing there")

    async with working(app) as worker:
        job = await broken.enqueue()
        with pytest.raises(JobFailed) as caught:
            await job.result(timeout="10s")
        assert caught.value.error_type == "KeyError"
        assert "nothing there" in str(caught.value)
        info = await job.get()
        assert info.failures == 2
        assert info.failure is not None
        assert "test_outcomes.py" in info.failure.traceback
        await until(lambda: (worker.stats.failed, worker.stats.retrying) == (1, 1))


async def test_unrecoverable_ends_a_job_immediately(app: App) -> None:
    @app.task(attempts=5)
    async def hopeless() -> None:
        raise Unrecoverable("no such user")

    async with working(app):
        job = await hopeless.enqueue()
        with pytest.raises(JobFailed, match="no such user"):
            await job.result(timeout="10s")
        info = await job.get()
        assert info.failures == 1


async def test_after_discard_a_failure_is_final(app: App) -> None:
    @app.task(attempts=5)
    async def half(context: JobContext) -> None:
        context.discard()
        raise ValueError("too late to try again")

    async with working(app):
        with pytest.raises(JobFailed, match="too late"):
            await half.call()


async def test_retry_with_a_delay_overrides_the_backoff_and_counts_as_a_failure(app: App) -> None:
    @app.task(backoff="1h", attempts=3)
    async def busy(context: JobContext) -> int:
        if context.run == 1:
            raise Retry(delay="5ms")
        return context.failures

    async with working(app):
        assert await busy.call() == 1


async def test_retry_at_an_instant_schedules_the_job_for_it(memory_app: App) -> None:
    at = datetime.now(UTC) + timedelta(hours=1)

    @memory_app.task
    async def later() -> None:
        raise Retry(at=at)

    async with working(memory_app):
        job = await later.enqueue()
        await until(lambda: _state_is(job, State.SCHEDULED))
        info = await job.get()
        assert info.run_at is not None
        assert abs(info.run_at - at) < timedelta(seconds=30)


async def test_snooze_runs_again_without_counting_a_failure(app: App) -> None:
    @app.task(attempts=1)
    async def sleepy(context: JobContext) -> list[int]:
        if context.run < 3:
            raise Snooze("5ms")
        return [context.run, context.failures]

    async with working(app) as worker:
        assert await sleepy.call() == [3, 0]
        await until(lambda: worker.stats.snoozed == 2)


async def test_a_payload_that_cannot_be_decoded_fails_that_job_alone(app: App) -> None:
    @app.task(attempts=3)
    async def double(n: int) -> int:
        return 2 * n

    storage = await app.connect()
    await storage.enqueue("default", [NewJob("bad", b"\xff\x00", double.defaults)])
    async with working(app):
        assert await double.call(4) == 8
        failed = await until(lambda: _failed(app, "bad"))
    assert failed.failure.type == "SerializationError"
    assert failed.failures == 1


async def test_a_result_that_cannot_be_encoded_fails_with_a_clear_text(app: App) -> None:
    @app.task(attempts=3)
    async def odd() -> object:
        return object()

    async with working(app):
        job = await odd.enqueue()
        with pytest.raises(JobFailed, match="object"):
            await job.result(timeout="10s")
        info = await job.get()
        assert (info.failures, info.runs) == (1, 1)


async def test_a_result_over_the_limit_fails_with_a_clear_text() -> None:
    async with App("memory://", max_payload="10KiB") as app:

        @app.task
        async def large() -> str:
            return "x" * 20_000

        async with working(app):
            with pytest.raises(JobFailed, match="limit is 10240"):
                await large.call()


async def test_text_that_utf8_cannot_say_does_not_keep_a_failure_from_being_settled(app: App) -> None:
    @app.task(attempts=1)
    async def odd() -> None:
        raise ValueError("lone surrogate \ud800 here")

    async with working(app):
        with pytest.raises(JobFailed, match="ud800"):
            await odd.call()


async def test_a_handler_that_exits_fails_its_job_and_not_the_worker(app: App) -> None:
    @app.task(attempts=1)
    async def leave() -> None:
        raise SystemExit(3)

    @app.task
    async def stay() -> str:
        return "here"

    async with working(app):
        with pytest.raises(JobFailed) as caught:
            await leave.call()
        assert caught.value.error_type == "SystemExit"
        assert await stay.call() == "here"


async def test_a_custom_backoff_function_decides_the_rest(app: App) -> None:
    asked: list[int] = []

    def rest(failures: int, error: BaseException | None) -> str:
        asked.append(failures)
        return "1ms"

    @app.task(backoff=rest, attempts=3)
    async def broken() -> None:
        raise ValueError

    async with working(app):
        with pytest.raises(JobFailed):
            await broken.call()
    assert asked == [1, 2, 3]


async def test_a_backoff_function_that_fails_does_not_cost_the_job_its_retries(memory_app: App) -> None:
    def rest(failures: int, error: BaseException | None) -> str:
        raise RuntimeError("no idea")

    @memory_app.task(backoff=rest)
    async def broken() -> None:
        raise ValueError("the cause")

    async with working(memory_app):
        job = await broken.enqueue()
        await until(lambda: _state_is(job, State.SCHEDULED))
        info = await job.get()
        assert info.failure is not None
        assert info.failure.type == "ValueError"
        assert "no idea" in info.failure.message


async def test_jobs_without_a_task_go_to_the_queues_handler(app: App) -> None:
    queue = app.queue("raw")
    worker = app.worker(queues=["raw"], grace=0)

    @worker.handler("raw")
    async def handle(job: Context) -> int:
        return len(job.payload)

    from tests.worker.conftest import running

    async with running(worker):
        assert await queue.call({"a": 1}) == len(b'{"a":1}')


async def test_jobs_without_a_task_and_without_a_handler_fail_with_the_reason(app: App) -> None:
    async with working(app, queues=["raw"], unknown_after=0):
        job = await app.queue("raw").enqueue("x", attempts=1)
        with pytest.raises(JobFailed, match="no handler") as caught:
            await job.result(timeout="10s")
    assert caught.value.error_type == "UnknownTask"


async def test_the_current_job_is_known_below_the_handler_in_every_runner(app: App) -> None:
    async def below() -> str:
        await asyncio.sleep(0)
        return current_job().id

    @app.task
    async def on_loop() -> str:
        return await asyncio.create_task(below())

    @app.task
    def in_thread() -> str:
        return current_job().id

    async with working(app):
        assert await on_loop.options(id="one").call() == "one"
        assert await in_thread.options(id="two").call() == "two"
    with pytest.raises(LookupError):
        current_job()


async def test_context_variables_of_one_job_are_not_seen_by_the_next(memory_app: App) -> None:
    from contextvars import ContextVar

    seen: ContextVar[str] = ContextVar("seen", default="nothing")

    @memory_app.task
    async def look() -> str:
        before = seen.get()
        seen.set("something")
        return before

    async with working(memory_app, concurrency=1):
        assert [await look.call() for _ in range(3)] == ["nothing"] * 3


async def _state_is(job: object, state: State) -> bool:
    return await job.refresh() is state  # type: ignore[attr-defined]


async def _failed(app: App, id: str) -> object | None:
    (job,) = await (await app.connect()).get("default", [id])
    return job if job is not None and job.state is State.FAILED else None


async def test_an_error_that_says_when_to_come_back_is_believed(memory_app: App) -> None:
    class TooManyRequests(Exception):
        retry_at = datetime.now(UTC) + timedelta(hours=1)

    @memory_app.task(queue="limited", attempts=2, backoff="1ms")
    async def ask() -> None:
        raise TooManyRequests("slow down")

    handle = await ask.enqueue()
    async with working(memory_app, queues=["limited"]) as worker:
        await until(lambda: worker.stats.retrying)
    job = await memory_app.queue("limited").get(handle.id)

    assert job.state is State.SCHEDULED
    assert job.run_at is not None
    assert timedelta(minutes=59) < job.run_at - datetime.now(UTC) < timedelta(minutes=61)


@pytest.mark.parametrize("verdict", [Retry, Snooze])
def test_a_time_without_a_zone_is_refused_where_it_is_raised(verdict: type[Retry] | type[Snooze]) -> None:
    with pytest.raises(InvalidOption, match="no time zone"):
        verdict(at=datetime(2030, 1, 1))


async def test_a_rate_limit_met_by_a_handler_holds_up_its_group_and_uses_no_attempt(app: App) -> None:
    seen: list[str] = []

    @app.task(attempts=1)
    async def fetch(page: str) -> str:
        seen.append(page)
        if seen.count("a1") == 1 and page == "a1":
            raise RateLimited("200ms")
        return page

    async with working(app, concurrency=1) as worker:
        limited = recorded(worker, "limited")
        jobs = [await fetch.options(group=page[0]).enqueue(page) for page in ("a1", "a2", "b1")]
        assert [await job.result(timeout="10s") for job in jobs] == ["a1", "a2", "b1"]

    assert [event.id for event in limited] == [jobs[0].id]
    assert seen[0] == "a1"
    assert seen.index("b1") < seen.index("a2"), "another group goes on meanwhile"
    info = await jobs[0].get()
    assert (info.failures, info.runs) == (0, 2)


async def test_a_limited_queue_is_worked_off_by_workers_that_wait_for_room(app: App) -> None:
    most = running = 0

    @app.task(queue="narrow")
    async def work() -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    await app.queue("narrow").limit(concurrency=2)
    jobs = await work.enqueue_many([work.job() for _ in range(20)])
    async with working(app, concurrency=8, queues=["narrow"]), working(app, concurrency=8, queues=["narrow"]):
        await asyncio.gather(*(job.result(timeout="20s") for job in jobs))

    assert most == 2


async def test_a_result_of_another_type_than_the_annotation_is_the_readers_to_refuse(app: App) -> None:
    @app.task
    async def count(text: str) -> int:
        return text  # type: ignore[return-value]

    async with working(app):
        job = await count.enqueue("x")
        with pytest.raises(SerializationError, match="returned 'x', but its annotation says int"):
            await job.result(timeout="10s")
    info = await job.get()
    assert (info.state, info.raw.result) == ("completed", b'"x"')


async def test_a_job_that_waits_for_children_it_does_not_have_fails(app: App) -> None:
    runs: list[int] = []

    @app.task
    async def lonely() -> None:
        runs.append(current_job().run)
        raise WaitForChildren

    async with working(app):
        job = await lonely.enqueue()
        with pytest.raises(JobFailed, match="no children to wait for"):
            await job.result(timeout="10s")
    assert runs == [1]


async def test_a_job_that_waits_for_the_same_children_again_and_again_fails(app: App) -> None:
    runs: list[int] = []

    @app.task
    async def child() -> None: ...

    @app.task
    async def stubborn(context: JobContext) -> None:
        runs.append(context.run)
        await context.add_children([child.options(id="only").job()])
        raise WaitForChildren

    async with working(app):
        job = await stubborn.enqueue()
        with pytest.raises(JobFailed, match="no new ones since its last wait"):
            await job.result(timeout="10s")
    assert runs == [1, 2]


async def test_retry_on_names_the_errors_that_are_retried(app: App) -> None:
    @app.task(attempts=2, retry_on=[ConnectionError, TimeoutError])
    async def fetch(kind: str) -> None:
        match kind:
            case "named":
                raise ConnectionResetError("away")
            case "asked":
                raise Retry("again", delay=0)
            case "slow":
                await asyncio.sleep(60)
            case _:
                raise KeyError("other")

    expected = {"named": 2, "asked": 2, "slow": 2, "other": 1}
    async with working(app):
        for kind, failures in expected.items():
            timeout = "20ms" if kind == "slow" else None
            job = await fetch.options(timeout=timeout).enqueue(kind)
            with pytest.raises(JobFailed):
                await job.result(timeout="20s")
            assert (await job.get()).failures == failures, kind


class Answered(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def is_busy(error: BaseException) -> bool:
    return getattr(error, "status", 0) == 503


async def delay_of(app: App, job: JobHandle[Any]) -> tuple[int, float] | str:
    """Return the failures of a job that is retried, and the seconds until then; else its error."""
    info = await job.get()
    if info.failure is not None and info.state == "failed":
        return str(info.failure.type)
    assert info.run_at is not None
    assert info.claimed_at is not None
    return info.failures, round((info.run_at - info.claimed_at).total_seconds())


async def test_each_error_has_a_backoff_of_its_own(memory_app: App) -> None:
    rules: Any = {
        ConnectionError: "1h",
        (LookupError, ArithmeticError): lambda failures, error: 60 * (failures + len(error.args)),
        is_busy: Fixed.of("2m"),
        OSError: None,
    }

    @memory_app.task(
        attempts=5, backoff="5m", retry_on=rules, give_up_on=[KeyError, lambda error: "no" in str(error)]
    )
    async def fetch(kind: str) -> None:
        errors: dict[str, Exception] = {
            "reset": ConnectionResetError("away"),
            "index": IndexError("one"),
            "busy": Answered(503),
            "gone": Answered(404),
            "os": OSError("disk"),
            "key": KeyError("k"),
            "refused": ConnectionError("no"),
            "asked": Retry(delay="7m"),
        }
        raise errors[kind]

    async with harness(memory_app) as h:
        expected: dict[str, Any] = {
            "reset": (1, 3600),
            "index": (1, 120),
            "busy": (1, 120),
            "gone": "Answered",
            "os": (1, 300),
            "key": "KeyError",
            "refused": "ConnectionError",
            "asked": (1, 420),
        }
        jobs = {kind: await fetch.enqueue(kind) for kind in expected}
        await h.drain()
        assert {kind: await delay_of(memory_app, job) for kind, job in jobs.items()} == expected


async def test_without_retry_on_all_but_some_errors_are_retried(memory_app: App) -> None:
    @memory_app.task(attempts=2, backoff="1m", give_up_on=LookupError)
    async def fetch(kind: str) -> None:
        raise KeyError(kind) if kind == "key" else ValueError(kind)

    async with harness(memory_app) as h:
        jobs = [await fetch.enqueue("key"), await fetch.enqueue("value")]
        await h.drain()
        assert [await delay_of(memory_app, job) for job in jobs] == ["KeyError", (1, 60)]


async def test_a_rule_that_fails_does_not_cost_the_job_its_retries(memory_app: App) -> None:
    @memory_app.task(attempts=2, backoff="1h", retry_on=lambda error: error.status == 5)
    async def fetch() -> None:
        raise ValueError("no status")

    async with harness(memory_app) as h:
        job = await fetch.enqueue()
        await h.drain()
        assert (await job.get()).state == "scheduled"
        error = (await job.get()).failure
        assert error is not None
        assert "deciding about it failed: AttributeError" in error.message


@pytest.mark.parametrize("given", [["ConnectionError"], "ConnectionError", [3], [int], 5])
@pytest.mark.parametrize("option", ["retry_on", "give_up_on"])
def test_retry_on_takes_exception_classes_and_functions_only(option: str, given: object) -> None:
    with pytest.raises(InvalidOption, match="exception classes"):
        App("memory://").task(name="send", **{option: given})(lambda: None)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"retry_on": {OSError: "soon"}}, r"retry_on of task 'send': backoff='soon' is not"),
        ({"retry_on": {"OSError": "1s"}}, "must name exception classes, or functions that take the error"),
        ({"give_up_on": {OSError: "1s"}}, "give_up_on of task 'send' has no backoff. Give a list."),
    ],
)
def test_a_wrong_rule_about_errors_is_refused_where_the_task_is_defined(options: Any, said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        App("memory://").task(name="send", **options)(lambda: None)
