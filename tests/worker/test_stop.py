"""The ways a worker ends: stopped, signalled, drained."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock import App, JobContext, State, Worker
from penstock.core.outcome import Release
from penstock.errors import InvalidOption, StorageUnavailable
from penstock.storage import open_storage
from penstock.storage.values import Settlement, Take
from penstock.worker import session
from tests.worker.conftest import Hog, recorded, running, until, working

SCRIPT = """
import asyncio, sys
from penstock import App

app = App(sys.argv[1])

@app.task(queue="q")
async def slow(seconds: float) -> str:
    print("started", flush=True)
    await asyncio.sleep(seconds)
    return "done"

app.worker(concurrency=1, grace=sys.argv[2], heartbeat="200ms").run_sync()
print("ended", flush=True)
"""


async def test_a_stopping_worker_finishes_its_jobs_and_claims_none(app: App) -> None:
    started, finish = asyncio.Event(), asyncio.Event()

    @app.task
    async def wait() -> str:
        started.set()
        await finish.wait()
        return "finished"

    first, second = await wait.enqueue(), await wait.enqueue()
    worker = app.worker(concurrency=1, grace="20s")
    run = asyncio.create_task(worker.run())
    await asyncio.wait_for(started.wait(), 10)
    worker.stop()
    await until(lambda: worker.state == "stopping")
    finish.set()
    await asyncio.wait_for(run, 10)
    assert await first.result(timeout="10s") == "finished"
    assert await second.refresh() is State.WAITING
    assert worker.state == "stopped"


async def test_what_does_not_finish_in_its_grace_is_handed_back_uncounted(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    started, cleaned = asyncio.Event(), asyncio.Event()

    @app.task(attempts=1)
    async def endless(context: JobContext) -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cleaned.set()

    job = await endless.enqueue()
    worker = app.worker(grace="50ms")
    released = recorded(worker, "released")
    run = asyncio.create_task(worker.run())
    await asyncio.wait_for(started.wait(), 10)
    worker.stop()
    await asyncio.wait_for(run, 10)
    info = await job.get()
    assert (info.state, info.failures, info.stalls, info.runs) == (State.WAITING, 0, 0, 1)
    assert cleaned.is_set()
    assert [event.id for event in released] == [job.id]
    assert f"hands back jobs that did not finish within its grace: default/{job.id}" in caplog.text


async def test_a_second_stop_is_told_as_the_end_of_the_grace(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    started = asyncio.Event()

    @app.task
    async def endless() -> None:
        started.set()
        await asyncio.sleep(3600)

    job = await endless.enqueue()
    worker = app.worker(grace="1h")
    run = asyncio.create_task(worker.run())
    await asyncio.wait_for(started.wait(), 10)
    worker.stop()
    worker.stop(0)
    await asyncio.wait_for(run, 10)
    assert f"hands back jobs because a second stop ended its grace: default/{job.id}" in caplog.text
    assert "within its grace" not in caplog.text


async def test_a_thread_that_goes_on_does_not_keep_the_worker_from_ending(app: App) -> None:
    started, release = threading.Event(), threading.Event()

    @app.task
    def deaf() -> None:
        started.set()
        release.wait(30)

    job = await deaf.enqueue()
    try:
        async with working(app):
            await until(started.is_set)
        assert await job.refresh() is State.WAITING
    finally:
        release.set()


async def test_jobs_of_a_claim_under_way_are_handed_back(app: App) -> None:
    ran: list[int] = []

    @app.task
    async def note(n: int) -> None:
        ran.append(n)

    storage = await app.connect()
    claim = storage.claim
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow_claim(*args: object, **kwargs: object) -> object:
        claimed = await claim(*args, **kwargs)  # type: ignore[arg-type]
        asked.set()
        await answer.wait()
        return claimed

    storage.claim = slow_claim  # type: ignore[method-assign, assignment]
    job = await note.enqueue(1)
    worker = app.worker(grace="5s")
    run = asyncio.create_task(worker.run())
    await asyncio.wait_for(asked.wait(), 10)
    worker.stop()
    await until(lambda: worker.state == "stopping")
    answer.set()
    await asyncio.wait_for(run, 10)
    assert ran == []
    assert await job.refresh() is State.WAITING


class Gate:
    """Hold up the answer to the first call for which ``applies`` returns true; then give it, or raise ``error``."""

    def __init__(
        self,
        call: Any,
        applies: Callable[..., bool] = lambda *_, **__: True,
        error: BaseException | None = None,
    ) -> None:
        self._call = call
        self._applies = applies
        self._error = error
        self.reached, self.open = asyncio.Event(), asyncio.Event()

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = await self._call(*args, **kwargs)
        if not self.reached.is_set() and self._applies(*args, **kwargs):
            self.reached.set()
            await self.open.wait()
            if self._error is not None:
                raise self._error
        return answer


def _releases(_: str, settlements: Sequence[Settlement], *, take: Take | None = None) -> bool:
    return all(isinstance(settlement.outcome, Release) for settlement in settlements)


def _does_not_wait(*_: Any, **kwargs: Any) -> bool:
    return "wait_ms" not in kwargs


def _claim_again(worker: Worker) -> None:
    """What an alarm does when a delayed job falls due."""
    assert worker._session is not None
    worker.resume()
    worker._session.fetcher._wake(*worker._session.fetcher.served_queues)


class Held:
    """A worker with one running job and no call under way. ``finish`` lets the job complete."""

    def __init__(self, app: App) -> None:
        self.finish, self.started = asyncio.Event(), asyncio.Event()

        @app.task(name="work")
        async def work() -> str:
            self.started.set()
            await self.finish.wait()
            return "done"

        self.task = work
        self.worker = app.worker(concurrency=4, grace="60s")

    async def start(self) -> None:
        self.job = await self.task.enqueue()
        self.run = asyncio.create_task(self.worker.run())
        await asyncio.wait_for(self.started.wait(), 10)
        self.worker.pause()
        await until(lambda: not self.worker._session.fetcher._calls)  # type: ignore[union-attr]

    async def stop(self) -> None:
        self.worker.stop()
        await until(lambda: self.worker.state == "stopping")

    async def complete(self) -> None:
        self.finish.set()
        await until(lambda: not self.worker.health().active)

    async def ended_with_the_job_settled(self) -> None:
        await asyncio.wait_for(self.run, 10)
        assert await self.job.result(timeout="10s") == "done"


ENDS = [None, StorageUnavailable("away"), UnicodeError("odd"), asyncio.CancelledError()]


@pytest.mark.parametrize("error", ENDS)
async def test_an_outcome_that_waits_for_a_hand_back_is_settled_after_it(
    app: App, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    """The last run ends while jobs of a claim that was under way are handed back."""
    held, storage = Held(app), await app.connect()
    await held.start()
    claim, release = Gate(storage.claim, _does_not_wait), Gate(storage.settle, _releases, error)
    monkeypatch.setattr(storage, "claim", claim)
    monkeypatch.setattr(storage, "settle", release)
    unstarted = await held.task.enqueue()
    _claim_again(held.worker)
    await asyncio.wait_for(claim.reached.wait(), 10)
    await held.stop()
    claim.open.set()
    await asyncio.wait_for(release.reached.wait(), 10)
    await held.complete()
    release.open.set()
    await held.ended_with_the_job_settled()
    assert await unstarted.refresh() is State.WAITING


@pytest.mark.parametrize("error", ENDS)
async def test_an_outcome_that_waits_for_a_claim_is_settled_after_it(
    app: App, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    held, storage = Held(app), await app.connect()
    await held.start()
    claim = Gate(storage.claim, _does_not_wait, error)
    monkeypatch.setattr(storage, "claim", claim)
    _claim_again(held.worker)
    await asyncio.wait_for(claim.reached.wait(), 10)
    await held.stop()
    await held.complete()
    claim.open.set()
    await held.ended_with_the_job_settled()


@pytest.mark.parametrize("error", ENDS)
async def test_an_outcome_that_waits_for_a_look_at_leases_is_settled_after_it(
    app: App, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    """A claim that waited was given up, so the worker looks for what it may have brought."""
    held, storage = Held(app), await app.connect()
    await held.start()
    look = Gate(storage.leases_of, error=error)
    monkeypatch.setattr(storage, "leases_of", look)
    held.worker.resume()
    await until(lambda: held.worker._session.fetcher.served_queues[0].waiter is not None)  # type: ignore[union-attr]
    await held.stop()
    await asyncio.wait_for(look.reached.wait(), 10)
    await held.complete()
    look.open.set()
    await held.ended_with_the_job_settled()


async def test_a_stop_ends_in_bounded_time_without_a_store(
    memory_app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the grace it waits a little for the store to take what is left, then it ends."""
    away = asyncio.Event()

    @memory_app.task
    async def work() -> None:
        away.set()

    storage = await memory_app.connect()
    never = asyncio.Event()
    for verb in ("settle", "depart"):
        monkeypatch.setattr(storage, verb, lambda *_, **__: never.wait())
    for bound in ("PATIENCE_S", "_SETTLE_S", "_DEPART_S"):
        monkeypatch.setattr(session, bound, 0.2)
    await work.enqueue()
    worker = memory_app.worker(grace="200ms")
    run = asyncio.create_task(worker.run())
    await asyncio.wait_for(away.wait(), 10)
    worker.stop()
    await asyncio.wait_for(run, 5)
    assert "stops with 1 jobs that the store did not take back" in caplog.text


async def test_a_burst_worker_ends_when_its_queues_are_drained(app: App) -> None:
    @app.task(queue="a", attempts=2)
    async def twice(context: JobContext) -> None:
        if context.run == 1:
            raise ValueError

    @app.task(queue="b")
    async def chained() -> None:
        await twice.enqueue()

    await twice.enqueue_many([twice.job() for _ in range(20)])
    await chained.enqueue()
    worker = app.worker(queues=["a", "b"], burst=True)
    drained = recorded(worker, "drained")
    await asyncio.wait_for(worker.run(), 20)
    assert worker.stats.completed == 22
    assert {event.queue for event in drained} == {"a", "b"}
    for name in ("a", "b"):
        assert await app.queue(name).open() == 0


async def test_a_burst_worker_ends_with_a_message_on_a_paused_queue(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def never() -> None: ...

    await never.enqueue()
    await app.queue("default").pause()
    caplog.set_level("INFO", logger="penstock.worker")
    await asyncio.wait_for(app.worker(burst=True).run(), 20)
    assert "paused with 1 open jobs" in caplog.text
    assert await app.queue("default").waiting() == 1


async def test_a_worker_stopped_before_it_runs_ends_immediately(memory_app: App) -> None:
    @memory_app.task
    async def note() -> None: ...

    job = await note.enqueue()
    worker = memory_app.worker()
    worker.stop()
    await asyncio.wait_for(worker.run(), 10)
    assert await job.refresh() is State.WAITING


async def test_a_worker_runs_once(memory_app: App) -> None:
    worker = memory_app.worker()
    async with running(worker):
        pass
    with pytest.raises(InvalidOption, match="already"):
        await worker.run()


async def test_a_paused_worker_claims_nothing_until_it_resumes(app: App) -> None:
    @app.task
    async def echo(n: int) -> int:
        return n

    async with working(app) as worker:
        assert await echo.call(1) == 1
        worker.pause()
        assert worker.state == "paused"
        await until(lambda: not worker._session.fetcher._calls)  # type: ignore[union-attr]
        job = await echo.enqueue(2)
        storage = await app.connect()
        assert (await storage.counts("default")).waiting == 1
        assert worker.health().consuming is False
        worker.resume()
        assert await job.result(timeout="10s") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_running_jobs_finish(number: signal.Signals, tmp_path: Path) -> None:
    async with App(f"sqlite:///{tmp_path}/s.db") as app:
        job = await app.queue("q").enqueue({"seconds": 0.5}, task="slow")
        with _script(tmp_path, grace="20s") as process:
            await _line(process, "started")
            os.kill(process.pid, number)
            await _line(process, "ended")
        assert process.returncode == 0
        assert await job.result(timeout="10s") == "done"


async def test_a_second_signal_hands_back_immediately(tmp_path: Path) -> None:
    async with App(f"sqlite:///{tmp_path}/s.db") as app:
        job = await app.queue("q").enqueue({"seconds": 3600}, task="slow")
        with _script(tmp_path, grace="1h") as process:
            await _line(process, "started")
            os.kill(process.pid, signal.SIGTERM)
            await until(lambda: _stopping(app))
            os.kill(process.pid, signal.SIGTERM)
            await _line(process, "ended")
        assert process.returncode == 0
        info = await job.get()
        assert (info.state, info.failures) == (State.WAITING, 0)


async def _stopping(app: App) -> bool:
    workers = await app.queue("q").workers()
    return bool(workers) and workers[0].info["state"] == "stopping"


def _script(tmp_path: Path, *, grace: str) -> subprocess.Popen[str]:
    script = tmp_path / "worker.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), f"sqlite:///{tmp_path}/s.db", grace], stdout=subprocess.PIPE, text=True
    )


async def _line(process: subprocess.Popen[str], expected: str) -> None:
    assert process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 30)
    assert line.strip() == expected


async def test_cancelling_run_hands_back_immediately(app: App) -> None:
    started = asyncio.Event()

    @app.task
    async def endless() -> None:
        started.set()
        await asyncio.sleep(3600)

    job = await endless.enqueue()
    run = asyncio.create_task(app.worker(grace="1h").run())
    await asyncio.wait_for(started.wait(), 10)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(run, 10)
    assert await job.refresh() is State.WAITING


async def test_an_app_with_one_open_storage_beats_on_the_workers_loop(tmp_path: Path) -> None:
    storage = open_storage(f"sqlite:///{tmp_path}/one.db")
    await storage.open()
    try:
        app = App(storage)

        finish = asyncio.Event()

        @app.task
        async def slow() -> str:
            await finish.wait()
            return "kept"

        async with working(app, heartbeat="50ms") as worker:
            job = await slow.enqueue()
            for _ in range(3):
                await asyncio.to_thread(Hog(app, worker).await_beats, 3)
                await storage.shift_clock("default", 20_000)
                await storage.sweep("default")
            finish.set()
            assert await job.result(timeout="10s") == "kept"
            assert [record.id for record in await storage.workers("default")] == [worker.id]
            assert [job.stalls for job in (await storage.list_jobs("default", State.COMPLETED)).jobs] == [0]
        await app.close()
    finally:
        await storage.close()


@pytest.mark.parametrize("ignored", [True, False])
async def test_a_worker_with_an_ignored_sigint_says_how_to_stop_it(
    app: App, caplog: pytest.LogCaptureFixture, ignored: bool
) -> None:
    @app.task
    async def note() -> None: ...

    caplog.set_level("INFO", logger="penstock.worker")
    before = signal.getsignal(signal.SIGINT)
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        async with working(app):
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert ("SIGINT is ignored (inherited): stop with SIGTERM" in caplog.text) == ignored
