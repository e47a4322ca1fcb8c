"""Options: each has one name and goes to the app, the task or ``options(...)``, and the nearest wins."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock import App, InvalidOption, ResultTimeout, State
from tests.client.conftest import working


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How long each call was to wait. The calls themselves do nothing."""
    seen: list[Any] = []

    async def note(source: Any, job: Any, timeout: Any, refuse: Any) -> None:
        seen.append(timeout)

    monkeypatch.setattr("penstock.client.task.call", note)
    monkeypatch.setattr("penstock.client.queue.call", note)
    return seen


async def test_the_nearest_option_wins() -> None:
    async with App("memory://", priority=1, headers={"from": "app"}, ttl="1h", delay="1h") as app:

        @app.task(priority=2, lifo=True, hold={"ledger": "1d"})
        async def plain() -> None: ...

        @app.task(headers={"from": "task"}, delay="2h")
        async def own() -> None: ...

        first = await (await plain.enqueue()).get()
        assert (first.priority, first.headers, first.raw.lifo) == (2, {"from": "app"}, True)
        assert first.raw.extras is not None
        assert first.raw.extras.holds == {"ledger": 86_400_000}
        second = await (await own.options(priority=3).enqueue()).get()
        assert (second.priority, second.headers) == (3, {"from": "task"})
        assert second.run_at is not None
        assert first.run_at is not None
        assert second.run_at > first.run_at
        third = await (await own.options(run_at=first.enqueued_at).enqueue()).get()
        assert third.state is State.WAITING
        assert (await (await app.queue("default").enqueue(1)).get()).priority == 1


async def test_a_call_waits_for_30_seconds_unless_something_nearer_says_otherwise(waits: list[Any]) -> None:
    app, patient = App("memory://"), App("memory://", wait="2m")

    @app.task
    async def usual() -> None: ...

    @patient.task
    async def inherits() -> None: ...

    @patient.task(wait=None)
    async def endless() -> None: ...

    await usual.call()
    await usual.options(wait=None).call()
    await usual.options(wait="5s").call()
    await inherits.call()
    await endless.call()
    await endless.options(priority=1).call()
    await endless.options(wait=1).call()
    await app.queue("mail").call(1)
    await app.queue("mail").call(1, wait=None)
    await patient.queue("mail").call(1)
    assert waits == ["30s", None, "5s", "2m", None, None, 1, "30s", None, "2m"]


@pytest.mark.parametrize("place", ["app", "task", "options"])
def test_a_wait_that_is_not_a_duration_is_refused_where_it_is_given(place: str) -> None:
    wrong: dict[str, Any] = {"wait": "soon"}
    app = App("memory://")
    define: dict[str, Callable[[], object]] = {
        "app": lambda: App("memory://", **wrong),
        "task": lambda: app.task(name="t", **wrong)(lambda: None),
        "options": lambda: send.options(**wrong),
    }
    with pytest.raises(InvalidOption, match="wait"):
        define[place]()


async def test_the_error_of_a_call_says_whether_there_is_a_worker_and_whether_the_job_started(
    app: App,
) -> None:
    queue = app.queue("mail")
    await queue.enqueue(1, id="a")  # it is there, however short the waits below
    with pytest.raises(
        ResultTimeout, match=r"No worker runs for queue mail\. .* The job has not started\."
    ) as caught:
        await queue.call(1, id="a", wait="10ms")
    assert (caught.value.started, caught.value.workers) == (False, 0)

    storage = await app.connect()
    info = b'{"concurrency": 2, "active": 0, "consuming": true}'
    await storage.extend("mail", [], worker="w", lease_ms=60_000, info=info)
    await queue.pause()
    with pytest.raises(
        ResultTimeout, match=r"paused since .*not started; 1 worker of its queue is alive\."
    ) as caught:
        await queue.call(1, id="a", wait="10ms")
    assert (caught.value.started, caught.value.workers) == (False, 1)
    await queue.resume()
    job = await queue.claim_one(worker="w")
    assert job is not None
    with pytest.raises(ResultTimeout, match=r"It has been running since .* on worker w") as caught:
        await app.job(job.ref).result(timeout="10ms")
    assert caught.value.started


async def test_the_error_of_a_job_that_waits_for_its_retry_says_that_it_has_started(app: App) -> None:
    queue = app.queue("mail")
    job = await queue.enqueue(1, backoff="1h")
    claimed = await queue.claim_one()
    assert claimed is not None
    await claimed.fail("boom")
    with pytest.raises(ResultTimeout, match=r"is retried at .* The job has started 1 time; no worker"):
        await job.result(timeout="10ms")


async def test_options_serve_schedule_as_well(app: App) -> None:
    @app.task(queue="reports")
    async def report(kind: str, name: str = "x") -> None: ...

    often = report.options(priority=-1, cron="0 3 * * *", tz="Europe/Berlin")
    info = await often.schedule("nightly", "sales", name="y")
    assert (info.queue, info.when, info.spec.job.priority) == ("reports", "cron 0 3 * * * Europe/Berlin", -1)
    assert info.spec.job.payload == b'{"kind":"sales","name":"y"}'
    # The nearest time replaces the others.
    assert (
        await often.options(every="1h", tz="UTC").options(cron="1 * * * *").schedule("n", "a")
    ).when.startswith("cron 1 ")
    with pytest.raises(InvalidOption, match="needs one of cron, every and after_completion"):
        await report.schedule("nightly", "sales")
    raw = await app.queue("raw").schedule("r", {"n": 1}, every="1h", priority=5)
    assert (raw.when, raw.spec.job.priority) == ("every 1h", 5)


def test_options_serve_schedule_from_synchronous_code() -> None:
    app = App("memory://")

    @app.task
    def report(kind: str) -> None: ...

    info = report.sync.options(every="10m").schedule("often", "sales")
    assert info.when == "every 10m"
    app.sync.close()


app = App("memory://")


@app.task
async def send(to: str) -> None: ...


wrong: Any = send
queue: Any = app.queue("mail")


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: send.options(every="1h").enqueue("ada"), r"send.options(every=...).schedule(name, ...)"),
        (lambda: send.options(every="1h").call("ada"), r"send.options(every=...).schedule(name, ...)"),
        (lambda: wrong.enqueue("ada", every="1h"), r"Use send.options(every=...).schedule(name, ...)"),
        (lambda: wrong.enqueue("ada", wait="1h"), r"send.options(wait=...).enqueue(...)"),
        (lambda: wrong.schedule("nightly", "ada", cron="@daily"), r"send.options(cron=...).schedule(...)"),
        (lambda: queue.enqueue(1, every="1h"), "queue.schedule(..., every=...)"),
        (lambda: queue.enqueue(1, wait="1h"), "queue.call(payload, wait=...)"),
        (lambda: queue.schedule("a", 1, every="1h", wait="1s"), "queue.call(payload, wait=...)"),
        (lambda: queue.enqueue(1, retry_on=OSError), "It belongs to the task: @app.task(retry_on=...)"),
    ],
)
async def test_a_rejected_spelling_says_where_the_option_goes(
    refused: Callable[[], Awaitable[object]], said: str
) -> None:
    with pytest.raises(InvalidOption, match=re.escape(said)):
        await refused()


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: App("memory://", id="a"), "It belongs to single jobs: task.options(id=...)"),  # type: ignore[call-arg]
        (lambda: App("memory://", every="1h"), "task.options(every=...).schedule(...)"),  # type: ignore[call-arg]
        (lambda: App("memory://", runner="thread"), "It belongs to the task"),  # type: ignore[call-arg]
        (lambda: app.task(run_at=3), "It belongs to single jobs: task.options(run_at=...)"),  # type: ignore[call-overload]
        (lambda: app.task(cron="@daily"), "@app.scheduled(cron=...) above @app.task"),  # type: ignore[call-overload]
        (lambda: wrong.options(retry_on=OSError), "It belongs to the task: @app.task(retry_on=...)"),
    ],
)
def test_a_rejected_option_says_where_it_goes(refused: Callable[[], object], said: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(said)):
        refused()


async def test_a_call_still_gets_its_answer(app: App) -> None:
    async def answer(job: Any) -> int:
        return int(job.payload) + 1

    async with working(app.queue("mail"), answer):
        assert await app.queue("mail").call(1) == 2
