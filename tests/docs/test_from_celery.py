"""The rows of docs/coming-from.md about Celery, run: what a user who ports a project writes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import (
    App,
    DeadLetter,
    Execution,
    Exponential,
    InvalidInput,
    JobContext,
    JobExpired,
    JobFailed,
    Retry,
    Snooze,
    WaitForChildren,
    chain,
    chord,
    current_job,
    group,
)
from penstock.testing import harness


async def worked_off(app: App) -> None:
    await app.worker(burst=True).run()


@pytest.fixture
def app() -> App:
    return App("memory://", backoff=0)


@pytest.mark.parametrize(("attempts", "runs"), [({}, 3), ({"attempts": 1}, 1), ({"max_retries": 5}, 6)])
async def test_a_failing_job_is_retried_by_default(attempts: Any, runs: int) -> None:
    app = App("memory://", backoff=0, **attempts)

    @app.task
    def fail() -> None:
        raise OSError("down")

    job = await fail.enqueue()
    await worked_off(app)
    assert (await job.get()).runs == runs


async def test_the_context_has_what_self_request_has(app: App) -> None:
    @app.task(queue="mail")
    def send(job: JobContext, to: str) -> list[Any]:
        assert current_job() is job
        if job.failures == 0:
            raise OSError("down")
        job.progress({"percent": 50})
        return [job.id, job.queue, job.task, job.run, job.failures, dict(job.headers)]

    job = await send.options(id="a", headers={"tenant": "x"}).enqueue("ada")
    await worked_off(app)
    assert await job.result() == ["a", "mail", "send", 2, 1, {"tenant": "x"}]
    assert (await job.get()).progress == {"percent": 50}


async def test_the_options_of_apply_async(app: App) -> None:
    @app.task
    def send(to: str) -> str:
        return to

    at = datetime.now(UTC) + timedelta(hours=1)
    assert (await send.options(delay="1h").enqueue("a")).state == "scheduled"
    assert (await (await send.options(run_at=at).enqueue("a")).get()).run_at is not None
    high = await send.options(id="h", priority=-1, queue="fast", headers={"a": "b"}).enqueue("a")
    assert high.ref == "fast/h"
    late = await send.options(ttl="1h").enqueue("a")
    await (await app.connect()).shift_clock("default", 3_601_000)
    await worked_off(app)
    with pytest.raises(JobExpired):
        await late.result()


async def test_link_is_a_chain_and_link_error_a_dead_letter(app: App) -> None:
    letters: list[str] = []

    @app.task(queue="mail")
    def double(n: int) -> int:
        return n * 2

    @app.task(queue="mail", attempts=1)
    def broken(n: int) -> int:
        raise ValueError(n)

    @app.dead_letter("mail")
    def tell(letter: DeadLetter) -> None:
        letters.append(letter.error["type"])

    linked = await app.enqueue_flow(chain(double.job(1), double.partial()))
    await broken.enqueue(1)
    await worked_off(app)
    assert await linked.result() == 4
    await worked_off(app)
    assert letters == ["ValueError"]


async def test_self_retry_is_a_verdict(app: App) -> None:
    @app.task(max_retries=1, backoff=Exponential.of(base="1ms", cap="10ms", jitter=1))
    def fetch(job: JobContext) -> int:
        if job.run == 1:
            raise Snooze(0)
        try:
            raise OSError("busy")
        except OSError as error:
            raise Retry(error, delay=0) from error

    job = await fetch.enqueue()
    await worked_off(app)
    with pytest.raises(JobFailed, match="OSError: busy"):
        await job.result()
    assert (await job.get()).runs == 3


async def test_signatures_and_the_canvas(app: App) -> None:
    @app.task
    def add(x: int, y: int) -> int:
        return x + y

    @app.task
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    @app.task
    async def replaced(job: JobContext) -> list[Any]:
        if not (done := await job.children()):
            await job.add_children([add.job(1, 2)])
            raise WaitForChildren
        return [child.result for child in done]

    flows: list[Any] = [
        await chain(add.job(1, 2), add.partial(3), add.job(5, 5)).enqueue(),
        await group(add.job(1, 2), add.job(3, 4)).enqueue(),
        await group([add.job(1, 2), add.job(3, 4)]).enqueue(),
        await chord([add.job(1, 2), add.job(3, 4)], total.partial()).enqueue(),
        await replaced.enqueue(),
        *await add.enqueue_many([add.job(n, n) for n in (1, 2)]),
    ]
    await worked_off(app)
    assert [await flow.result(timeout="10s") for flow in flows] == [10, [3, 7], [3, 7], 10, [3], 2, 4]


async def test_beat_is_a_decorator_or_a_call(app: App) -> None:
    @app.scheduled(cron="30 7 * * mon", tz="Europe/Berlin")
    @app.task
    def weekly() -> None: ...

    @app.task
    def remind(to: str) -> None: ...

    await worked_off(app)  # a worker puts the declared schedulers in
    await app.schedule("remind-ada", remind.job("ada"), every="30s")
    assert [one.name for one in await app.schedulers()] == ["remind-ada", "weekly"]


async def test_async_result_takes_the_ref(app: App) -> None:
    @app.task(queue="mail")
    def send(to: str) -> str:
        return to

    ref = (await send.enqueue("ada")).ref
    await worked_off(app)
    assert await app.job(ref).result(timeout="10s") == "ada"
    assert (await app.job(ref).get()).state == "completed"
    by_name = await app.queue("mail").enqueue({"to": "bob"}, task="send")
    await worked_off(app)
    assert await by_name.result(timeout="10s") == "bob"
    assert await app.job(ref).remove() == "removed"


async def test_a_rate_belongs_to_a_queue_or_a_worker(app: App) -> None:
    @app.task(queue="mail")
    def send(to: str) -> None: ...

    assert app.worker(limits={"mail": "10/m"}).options.limits.keys() == {"mail"}
    await app.queue("mail").limit(rate="2/1h")
    await send.enqueue_many([send.job(name) for name in "abc"])
    worker = app.worker()
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(20):
        while worker.stats.completed < 2 or (await app.queue("mail").counts()).waiting != 1:
            await asyncio.sleep(0.01)
    worker.stop()
    await running


async def test_eager_is_the_inline_mode_of_the_harness(app: App) -> None:
    @app.task
    def add(x: int, y: int) -> int:
        return x + y

    async with harness(app, mode="inline"):
        assert await (await add.enqueue(1, 2)).result() == 3
    assert add(1, 2) == 3, "a call runs the function here"


async def test_purge_and_revoke(app: App) -> None:
    @app.task(queue="mail")
    def send(to: str) -> None: ...

    job, _ = await send.enqueue_many([send.job("a"), send.job("b")])
    assert await job.cancel() == "cancelled"
    await app.queue("mail").drain()
    assert await app.queue("mail").open() == 0


async def test_values_arrive_as_they_were_only_with_annotations(app: App) -> None:
    @app.task
    def plain(at) -> str:
        return type(at).__name__

    @app.task
    def annotated(at: datetime) -> str:
        return type(at).__name__

    jobs = [await plain.enqueue(datetime.now(UTC)), await annotated.enqueue(datetime.now(UTC))]
    await worked_off(app)
    assert [await job.result() for job in jobs] == ["str", "datetime"]


async def test_retry_on_is_autoretry_for(app: App) -> None:
    @app.task(retry_on=(OSError,))
    def read(broken: str) -> None:
        raise OSError if broken == "disk" else KeyError(broken)

    disk, key = await read.enqueue("disk"), await read.enqueue("key")
    await worked_off(app)
    assert ((await disk.get()).runs, (await key.get()).runs) == (3, 1)
    with pytest.raises(JobFailed) as failed:
        await key.result()
    assert (failed.value.error_type, "in read" in failed.value.traceback) == ("KeyError", True)
    info = await key.get()  # the row propagate=False
    assert (info.state, info.failure is not None) == ("failed", True)


async def test_a_bound_task_is_performed_in_a_test(app: App) -> None:
    @app.task
    def send(job: JobContext, to: str) -> str:
        return f"{job.run} {to}"

    async with harness(app) as h:
        assert await h.perform(send, "ada") == "1 ada"


async def test_each_job_of_a_chain_that_failed_has_a_letter(app: App) -> None:
    letters: list[DeadLetter] = []

    @app.task(queue="mail", attempts=1)
    def broken(n: int) -> int:
        raise ValueError(n)

    @app.dead_letter("mail")
    def tell(letter: DeadLetter) -> None:
        letters.append(letter)

    await chain(broken.job(1), broken.partial(), broken.partial()).enqueue()
    await worked_off(app)
    await worked_off(app)
    assert len(letters) == 3
    [first] = [letter for letter in letters if letter.error["type"] == "ValueError"]
    assert first.error.keys() == {"type", "message"}
    failure = (await app.job(first.ref).get()).failure
    assert failure is not None
    assert "in broken" in failure.traceback


async def test_a_countdown_of_a_chain_is_that_of_its_first_job(app: App) -> None:
    @app.task
    def add(x: int, y: int) -> int:
        return x + y

    flow = await chain(add.options(delay=10).job(1, 2), add.partial(3)).enqueue()
    assert sorted([(await job.get()).state for job in flow.jobs]) == ["blocked", "scheduled"]
    assert (await app.flow(flow.ref).tree()).state == "blocked"


async def test_a_chord_needs_a_job(app: App) -> None:
    @app.task
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    with pytest.raises(InvalidInput, match="at least one job"):
        chord([], total.partial())
    job = await total.enqueue([])
    await worked_off(app)
    assert await job.result() == 0


async def test_schedules_may_be_added_when_a_worker_starts(app: App) -> None:
    @app.task
    def remind(to: str) -> None: ...

    @app.on_start
    async def schedules() -> None:
        await app.schedule("remind-ada", remind.job("ada"), every="1h")

    await worked_off(app)
    await worked_off(app)
    assert [one.name for one in await app.schedulers()] == ["remind-ada"]


async def test_purge_leaves_scheduled_jobs_unless_asked(app: App) -> None:
    @app.task(queue="mail")
    def send(to: str) -> None: ...

    await send.options(delay="1h").enqueue("a")
    assert await app.queue("mail").drain() == 0
    assert await app.queue("mail").drain(scheduled=True) == 1


async def test_signals_are_hooks_and_events(app: App) -> None:
    seen: list[str] = []

    @app.task(attempts=1)
    def fail() -> None:
        raise OSError("down")

    @app.after_execution
    def note(execution: Execution) -> None:
        seen.append(execution.status)

    await fail.enqueue()
    worker = app.worker(burst=True, grace="5m")
    worker.on("ready", lambda event: seen.append(event.type))
    worker.on("failed", lambda event: seen.append(event.failure.type if event.failure else ""))
    await worker.run()
    assert seen == ["ready", "failed", "OSError"]


@pytest.mark.parametrize(("reads", "state"), [(False, "completed"), (True, "cancelled")])
async def test_a_coroutine_that_reads_cancelled_does_not_complete(app: App, reads: bool, state: str) -> None:
    started, told = asyncio.Event(), list[bool]()

    @app.task(attempts=1)
    async def work(context: JobContext) -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if reads:
                assert context.cancelled
            told.append((await app.job(context.ref).get()).cancelling)

    worker = app.worker(heartbeat="20ms")
    running = asyncio.create_task(worker.run())
    job = await work.enqueue()
    await asyncio.wait_for(started.wait(), 10)
    await job.cancel()
    await asyncio.wait([asyncio.create_task(job.result(timeout="10s"))])
    assert (await job.refresh(), told) == (state, [True])

    late = await work.options(timeout="50ms").enqueue()
    await asyncio.wait([asyncio.create_task(late.result(timeout="10s"))])
    assert (await late.refresh(), told) == ("failed" if reads else "completed", [True, False])
    worker.stop()
    await running
