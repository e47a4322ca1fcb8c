"""A worker whose process dies gives up its jobs within seconds; one that merely looks dead keeps them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock import App, uuid7
from penstock.core.event import Event
from penstock.storage.contract import Storage
from penstock.worker.sweeper import DeathWatch
from tests.servers import ValkeyServer
from tests.worker.conftest import until, working
from tests.worker.mortal import QUEUE

PROMISED_MS = 5_000


@pytest.fixture(params=["sqlite", "valkey", pytest.param("cluster", marks=pytest.mark.cluster)])
async def app(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[App]:
    match request.param:
        case "sqlite":
            url = f"sqlite:///{tmp_path}/jobs.db"
        case "valkey":
            url = f"{request.getfixturevalue('valkey_url')}?namespace=deaths-{uuid7()}"
        case _:
            url = f"{request.getfixturevalue('cluster_url')}?namespace=deaths-{uuid7()}"
    async with App(url) as app:
        yield app


@asynccontextmanager
async def victim(app: App, *options: str, task: str = "hang") -> AsyncIterator[subprocess.Popen[bytes]]:
    """A worker in another process that has a job, and has announced itself."""
    process = subprocess.Popen([sys.executable, "-m", "tests.worker.mortal", app.url, *options])
    try:
        storage = await app.connect()
        await until(lambda: storage.lives(QUEUE), seconds=60)
        await app.queue(QUEUE).enqueue({}, id="job", task=task)
        await first_event(app, "claimed")
        yield process
    finally:
        process.kill()
        process.wait()


async def first_event(app: App, kind: str) -> Event:
    async with asyncio.timeout(40):
        async for event in app.queue(QUEUE).events(types=kind, id="job"):
            return event
    raise AssertionError("events do not end")


async def is_overdue(storage: Storage, *, ms: int) -> bool:
    [worker] = await storage.workers(QUEUE)
    return worker.age_ms > ms


@pytest.mark.timeout(120)
async def test_the_job_of_a_killed_worker_comes_back_within_five_seconds(app: App) -> None:
    async with victim(app) as process, working(app, queues=[QUEUE], grace="30s") as rescuer:
        rescuer.pause()
        process.kill()
        killed_at_ms = time.time_ns() // 1_000_000

        stalled = await first_event(app, "stalled")

        assert stalled.at_ms - killed_at_ms <= PROMISED_MS
        job = await app.queue(QUEUE).job("job").get()
        assert job.stalls == 1


@pytest.mark.timeout(120)
async def test_a_killed_worker_is_shown_as_dead_and_rescued_once(app: App) -> None:
    storage = await app.connect()
    watch = DeathWatch(storage, [QUEUE])
    async with victim(app) as process:
        [before] = await app.queue(QUEUE).workers()
        process.kill()
        process.wait()

        await until(watch.run_once, seconds=30)

        [after] = await app.queue(QUEUE).workers()
        assert (before.id, before.dead, after.dead) == (after.id, False, True)
        assert await watch.run_once() == 0
        assert (await app.queue(QUEUE).counts()).waiting == 1


@pytest.mark.timeout(120)
async def test_a_suspended_worker_is_never_taken_for_dead(app: App) -> None:
    storage = await app.connect()
    watch = DeathWatch(storage, [QUEUE])
    async with victim(app, "200ms") as process:
        os.kill(process.pid, signal.SIGSTOP)
        await until(lambda: is_overdue(storage, ms=2_000))

        rescued = [await watch.run_once() for _ in range(3)]

        [worker] = await app.queue(QUEUE).workers()
        assert (rescued, worker.dead) == ([0, 0, 0], False)
        assert (await app.queue(QUEUE).counts()).active == 1


@pytest.mark.timeout(120)
async def test_a_worker_that_holds_the_gil_is_never_taken_for_dead(app: App) -> None:
    storage = await app.connect()
    watch = DeathWatch(storage, [QUEUE])
    async with victim(app, "200ms", task="hog"):
        await until(lambda: is_overdue(storage, ms=2_000))

        rescued = [await watch.run_once() for _ in range(3)]

        [worker] = await app.queue(QUEUE).workers()
        assert (rescued, worker.dead) == ([0, 0, 0], False)
        assert (await app.queue(QUEUE).counts()).active == 1


@pytest.mark.timeout(120)
async def test_a_worker_that_stops_takes_its_announcement_back(app: App) -> None:
    storage = await app.connect()
    async with victim(app) as process:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 30)

    assert await storage.lives(QUEUE) == {}
    assert await app.queue(QUEUE).workers() == []


async def test_a_server_that_closes_idle_connections_does_not_make_a_suspended_worker_look_dead() -> None:
    with ValkeyServer("timeout 1") as server:
        async with App(server.url) as app, victim(app, "200ms") as process:
            storage = await app.connect()
            os.kill(process.pid, signal.SIGSTOP)
            await until(lambda: is_overdue(storage, ms=4_000))

            assert await DeathWatch(storage, [QUEUE]).run_once() == 0
            assert list((await storage.lives(QUEUE)).values()) == [True]


async def test_a_worker_whose_connection_is_cut_announces_the_new_one_immediately() -> None:
    with ValkeyServer() as server:
        async with App(server.url) as app, victim(app) as process:
            storage, client = await app.connect(), server.client()
            [key] = client.keys("*:lives")
            [announced] = client.hvals(key)

            client.client_kill_filter(_id=str(announced).split()[1])
            await until(lambda: client.hvals(key) != [announced], seconds=3)

            assert process.poll() is None
            assert list((await storage.lives(QUEUE)).values()) == [True]
            assert (await app.queue(QUEUE).counts()).active == 1


async def test_without_the_right_to_list_clients_nothing_is_proven() -> None:
    with ValkeyServer() as server:
        server.client().execute_command("ACL", "SETUSER", "default", "-client|list")
        async with App(server.url) as app, victim_unannounced(app) as process:
            process.kill()
            process.wait()
            storage = await app.connect()
            assert await storage.lives(QUEUE) == {}
            assert await DeathWatch(storage, [QUEUE]).run_once() == 0


@asynccontextmanager
async def victim_unannounced(app: App) -> AsyncIterator[subprocess.Popen[bytes]]:
    await app.queue(QUEUE).enqueue({}, id="job", task="hang")
    process = subprocess.Popen([sys.executable, "-m", "tests.worker.mortal", app.url])
    try:
        await first_event(app, "claimed")
        yield process
    finally:
        process.kill()
        process.wait()


async def test_what_an_earlier_run_of_the_server_knew_proves_nothing() -> None:
    with ValkeyServer() as server:
        async with App(server.url) as app:
            storage = await app.connect()
            await app.queue(QUEUE).enqueue({}, id="job")
            client = server.client()
            [key] = client.keys("*:meta")
            client.hset(str(key).replace(":meta", ":lives"), "worker", f"{'0' * 40} 123456")

            assert await storage.lives(QUEUE) == {}


def test_a_forked_child_does_not_keep_its_dead_parent_alive(tmp_path: Path) -> None:
    from penstock.storage.sqlite.files import WorkerLocks

    database = str(tmp_path / "jobs.db")
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        WorkerLocks(database).hold("worker")
        if os.fork() == 0:
            os.write(writer, f"{os.getpid()}\n".encode())
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    child = int(os.read(reader, 20))
    try:
        assert WorkerLocks(database).look(["worker", "nobody"]) == {"worker": False}
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_that_is_held_is_seen_and_one_released_leaves_no_trace(tmp_path: Path) -> None:
    from penstock.storage.sqlite.files import WorkerLocks

    locks, others = (WorkerLocks(str(tmp_path / "jobs.db")) for _ in range(2))
    locks.hold("worker")

    assert others.look(["worker"]) == locks.look(["worker"]) == {"worker": True}
    locks.release()
    assert others.look(["worker"]) == {}
    assert list((tmp_path / "jobs.db-workers").iterdir()) == []
