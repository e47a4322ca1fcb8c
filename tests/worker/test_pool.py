"""``processes=N``: several worker processes under one supervisor."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock import App, InvalidOption
from penstock.worker import pool
from tests.processes import is_alive
from tests.worker import pool_tasks
from tests.worker.conftest import running, until


@pytest.fixture
async def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setenv("PENSTOCK_POOL_URL", f"sqlite:///{tmp_path}/pool.db")
    module = importlib.reload(pool_tasks)
    async with module.app:
        yield module


async def test_two_processes_share_the_work_and_end_together(tasks: Any) -> None:
    worker = tasks.app.worker(processes=2, concurrency=1, grace="5s", name="twins")
    async with running(worker):
        await until(lambda: _workers(tasks.app, 2), seconds=30)
        pids: set[int] = set()
        while len(pids) < 2:
            jobs = [await tasks.whoami.enqueue() for _ in range(20)]
            pids |= {await job.result(timeout="20s") for job in jobs}
        records = await tasks.app.queue("pool").workers()
        assert {record.id[:8] for record in records} == {"twins-1-", "twins-2-"}
    assert os.getpid() not in pids
    assert await tasks.app.queue("pool").workers() == []
    assert not any(map(is_alive, pids))


async def test_a_process_that_dies_is_replaced_and_its_job_runs_again(tasks: Any) -> None:
    worker = tasks.app.worker(processes=1 + 1, concurrency=1, grace="5s")
    async with running(worker):
        await until(lambda: _known(tasks.app, 2), seconds=30)
        job = await tasks.die_once.enqueue()
        assert await job.result(timeout="30s") == 2
        # The dead one's record stays for a while. Its successor has its name, and an id of its own: under the
        # same one it would keep the leases of the dead alive for ever.
        await until(lambda: _known(tasks.app, 3), seconds=30)
        ids = [record.id for record in await tasks.app.queue("pool").workers()]
        assert len({id.rpartition("-")[0] for id in ids}) == 2


async def test_the_supervisor_takes_back_the_jobs_of_a_process_that_exits(
    tasks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks for deaths here, and the lease is 30 s: the exit alone tells."""
    worker = tasks.app.worker(processes=2, concurrency=1, grace="5s", sweep=False)
    async with running(worker):
        await until(lambda: _known(tasks.app, 2), seconds=30)
        job = await tasks.die_once.enqueue()
        assert await job.result(timeout="10s") == 2
        assert (await job.get()).stalls == 1


async def test_jobs_of_a_batch_whose_process_dies_run_again(tasks: Any) -> None:
    jobs = await tasks.die_together.enqueue_many([tasks.die_together.job(n) for n in range(3)])
    worker = tasks.app.worker(processes=2, concurrency=3, grace="5s")
    async with running(worker):
        assert all([await job.result(timeout="40s") >= 2 for job in jobs])
    infos = [await job.get() for job in jobs]
    assert all(info.stalls >= 1 and info.failures == 0 for info in infos)


async def test_burst_workers_end_by_themselves(tasks: Any) -> None:
    jobs = [await tasks.whoami.enqueue() for _ in range(20)]
    await asyncio.wait_for(tasks.app.worker(processes=2, burst=True).run(), 60)
    assert all([await job.result(timeout="10s") for job in jobs])


async def test_handlers_travel_to_the_processes(tasks: Any) -> None:
    worker = tasks.app.worker(queues=["raw"], processes=2, concurrency=1, grace="5s")
    worker.handler("raw")(tasks.handle_raw)
    async with running(worker):
        assert await tasks.app.queue("raw").call({}, wait="30s") != os.getpid()


async def test_handlers_of_batches_travel_to_the_processes(tasks: Any) -> None:
    worker = tasks.app.worker(queues=["raw"], processes=2, limit="100/s", burst=True)
    worker.handler("raw", batch=4, batch_wait="10ms")(tasks.handle_raws)
    jobs = await tasks.app.queue("raw").enqueue_many([{}] * 8)
    await asyncio.wait_for(worker.run(), 60)
    sizes = [await job.result(timeout="10s") for job in jobs]
    assert max(sizes) > 1
    assert max(sizes) <= 4


async def test_an_app_that_cannot_be_imported_is_refused() -> None:
    app = App("memory://")
    app.task(name="known")(lambda: None)
    with pytest.raises(InvalidOption, match="cannot import the app"):
        await app.worker(processes=2).run()


async def _known(app: App, count: int) -> bool:
    return len(await app.queue("pool").workers()) == count


async def _workers(app: App, count: int) -> bool:
    records = await app.queue("pool").workers()
    return len([record for record in records if record.raw.age_ms < 3000]) == count


SCRIPT = """
import asyncio
import os
import sys
from penstock import App

app = App(sys.argv[1])

@app.task(queue="pool")
async def wait_for(path: str) -> str:
    while not os.path.exists(path):
        await asyncio.sleep(0.01)
    return "done"

if __name__ == "__main__":
    app.worker(processes=2, concurrency=1, heartbeat="100ms", grace="60s").run_sync()
"""


async def test_ctrl_c_lets_the_jobs_of_all_processes_finish(tmp_path: Path) -> None:
    """The terminal signals the whole group; the children heed their supervisor alone."""
    url = f"sqlite:///{tmp_path}/p.db"
    script = tmp_path / "processes.py"
    script.write_text(SCRIPT)
    async with App(url) as app:
        flag = tmp_path / "flag"
        jobs = await app.queue("pool").enqueue_many([{"path": str(flag)}] * 2, task="wait_for")
        with subprocess.Popen([sys.executable, str(script), url], start_new_session=True) as process:
            await until(lambda: _active(app, 2), seconds=60)
            os.killpg(process.pid, signal.SIGINT)
            await until(lambda: _stopping(app, 2), seconds=60)
            flag.touch()
            assert await asyncio.to_thread(process.wait, 60) == 0
        assert [await job.result(timeout="20s") for job in jobs] == ["done", "done"]
        infos = [await job.get() for job in jobs]
        assert [info.failures + info.stalls for info in infos] == [0, 0]


async def test_a_second_stop_right_after_the_first_reaches_the_processes(
    tasks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_EXTRA_S", 3600.0)
    job = await tasks.sleep_for_ever.enqueue()
    worker = tasks.app.worker(processes=2, concurrency=1, grace="40s", heartbeat="100ms")
    run = asyncio.create_task(worker.run())
    await until(lambda: _active(tasks.app, 1), seconds=60)
    worker.stop()
    worker.stop(0)
    await asyncio.wait_for(run, 30)
    info = await job.get()
    assert (info.state, info.stalls) == ("waiting", 0)


async def test_the_processes_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/p.db"
    script = tmp_path / "processes.py"
    script.write_text(SCRIPT)
    async with App(url) as app:
        with subprocess.Popen([sys.executable, str(script), url]) as process:
            await until(lambda: _workers(app, 2), seconds=30)
            process.kill()
        await until(lambda: _known(app, 0), seconds=30)


async def _stopping(app: App, count: int) -> bool:
    records = await app.queue("pool").workers()
    return len([record for record in records if not record.info["consuming"]]) == count


async def _active(app: App, count: int) -> bool:
    return await app.queue("pool").active() == count


async def test_a_pool_is_ready_when_all_of_its_processes_are(
    tasks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed_in = tmp_path / "signed in"
    signed_in.mkdir()
    monkeypatch.setenv("PENSTOCK_POOL_SIGNED_IN", str(signed_in))
    worker = tasks.app.worker(processes=2, concurrency=1, grace="5s")
    heard: list[str] = []
    worker.on("ready", lambda event: heard.append(event.type))
    async with running(worker):
        await asyncio.wait_for(worker.ready(), 30)
        assert heard == ["ready"]
        assert len(list(signed_in.iterdir())) == 2
