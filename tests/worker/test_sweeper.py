"""The sweeper, alone and inside a worker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import App, State
from penstock.core.job import NewJob
from penstock.storage.contract import Storage
from penstock.storage.values import Swept, Take
from penstock.worker.sweeper import Sweeper, main
from tests.worker.conftest import until, working


async def _abandon(storage: Storage, queue: str) -> None:
    """A job whose worker vanished a minute ago."""
    await storage.enqueue(queue, [NewJob("lost")])
    await storage.claim(queue, Take("gone", 1, 1000))
    await storage.shift_clock(queue, 60_000)


async def test_one_sweep_rescues_jobs_of_all_queues(app: App) -> None:
    storage = await app.connect()
    await _abandon(storage, "a")
    await _abandon(storage, "b")
    swept = await Sweeper(storage).run_once()
    assert {queue: result.rescued for queue, result in swept.items()} == {"a": 1, "b": 1}
    assert (await storage.counts("a")).waiting == 1


async def test_only_the_named_queues_are_swept(app: App) -> None:
    storage = await app.connect()
    await _abandon(storage, "a")
    await _abandon(storage, "b")
    assert list(await Sweeper(storage, ["a"]).run_once()) == ["a"]
    assert (await storage.counts("b")).active == 1


async def test_two_sweepers_do_the_work_once(app: App) -> None:
    storage = await app.connect()
    await _abandon(storage, "a")
    both = await asyncio.gather(Sweeper(storage).run_once(), Sweeper(storage).run_once())
    assert sum(swept["a"].rescued for swept in both) == 1
    (job,) = await storage.get("a", ["lost"])
    assert job is not None
    assert job.stalls == 1


async def test_a_worker_rescues_the_jobs_of_one_that_vanished(app: App) -> None:
    @app.task
    async def echo(n: int) -> int:
        return n

    storage = await app.connect()
    job = await echo.enqueue(5)
    await storage.claim("default", Take("gone", 1, 200))
    async with working(app):
        assert await job.result(timeout="20s") == 5
    info = await job.get()
    assert (info.stalls, info.runs) == (1, 2)


def test_the_rest_is_until_the_next_thing_falls_due_within_bounds() -> None:
    sweeper = Sweeper(None, [], interval="5s")  # type: ignore[arg-type]
    assert sweeper._rest_s({}) == 5
    assert sweeper._rest_s({"a": Swept(wait_ms=3000), "b": Swept()}) == 3
    assert sweeper._rest_s({"a": Swept(wait_ms=10)}) == 1
    assert sweeper._rest_s({"a": Swept(wait_ms=60_000)}) == 5
    assert sweeper._rest_s({"a": Swept(more=True)}) < 1


async def test_it_runs_alone_and_ends_at_a_signal(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    async with App(url) as app:
        storage = await app.connect()
        await _abandon(storage, "a")
        command = [sys.executable, "-m", "penstock.worker.sweeper", "--url", url, "--interval", "100ms"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            await until(lambda: _waiting(storage))
            os.kill(process.pid, signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 20) == 0
        (job,) = await storage.get("a", ["lost"])
        assert job is not None
        assert job.state is State.WAITING


def test_without_a_url_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
    with pytest.raises(SystemExit):
        main([])
    assert "--url is missing" in capsys.readouterr().err


async def _waiting(storage: Storage) -> bool:
    return (await storage.counts("a")).waiting == 1


async def test_the_log_tells_once_that_a_clock_is_off(app: App, caplog: pytest.LogCaptureFixture) -> None:
    storage = await app.connect()
    await storage.enqueue("a", [NewJob("1")])
    await storage.shift_clock("a", -3 * 3_600_000, jump=True)
    await storage.enqueue("a", [NewJob("2")])
    sweeper = Sweeper(storage)
    for _ in range(2):
        sweeper._clocks_at = -1e9
        await sweeper._check_clocks(["a"])
    ours, theirs = [record.getMessage() for record in caplog.records if record.name == "penstock.sweeper"]
    assert ours.startswith("the time of queue 'a' is ")
    assert ours.endswith(" ahead of the store's clock")
    assert theirs.startswith("the store's clock (queue 'a') is ")
    assert theirs.endswith(" behind this machine's")
