"""The app's connections: one per event loop, closed with it, made anew after a fork."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock import App, InvalidName, InvalidOption, JobHandle, StorageError, StorageUnavailable
from penstock.client.session import DEFAULT_URL
from penstock.storage import open_storage


def run_script(script: str, *arguments: str) -> str:
    """Run a program of its own with warnings as errors, and give what it printed."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return run.stdout


def test_the_url_comes_from_the_code_then_the_environment_then_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_URL", "memory://of-the-environment")
    assert App("memory://of-the-code").url == "memory://of-the-code"
    assert App().url == "memory://of-the-environment"
    monkeypatch.delenv("PENSTOCK_URL")
    assert App().url == DEFAULT_URL


def test_making_an_app_connects_to_nothing(tmp_path: Path) -> None:
    App(f"sqlite:///{tmp_path}/jobs.db")

    assert list(tmp_path.iterdir()) == []


async def test_unnamed_memory_is_each_app_s_own() -> None:
    async with App("memory://") as one, App("memory://") as other:
        await one.queue("mail").enqueue("x")

        assert await one.queue("mail").open() == 1
        assert await other.queue("mail").open() == 0


async def test_namespaces_keep_apps_apart_in_one_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with App(url, namespace="one") as one, App(url, namespace="two") as two, App(url) as plain:
        await one.queue("mail").enqueue("x")

        assert [await app.queue("mail").open() for app in (one, two, plain)] == [1, 0, 0]
        assert (await one.queues(), await two.queues()) == (["mail"], [])


@pytest.mark.parametrize("namespace", ["", "a/b", "{x}"])
def test_a_bad_namespace_is_refused(namespace: str) -> None:
    with pytest.raises(InvalidName, match="namespace"):
        App("memory://", namespace=namespace)


@pytest.mark.parametrize("name", ["", "a b", "x/y", "{x}", "-x", "x" * 101])
def test_a_bad_queue_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidName, match="queue name"):
        App("memory://").queue(name)
    with pytest.raises(InvalidName, match="queue name"):
        App("memory://").task(queue=name)


@pytest.mark.parametrize("size", [0, -1, "much", "1 XB", True, 1.5])
def test_a_bad_size_is_refused(size: object) -> None:
    with pytest.raises(InvalidOption, match="max_payload"):
        App("memory://", max_payload=size)  # type: ignore[arg-type]


async def test_a_wrong_url_is_an_error_when_it_is_first_used() -> None:
    with pytest.raises(InvalidOption, match="sqlite"):
        await App("sqlit:///x").connect()
    with pytest.raises(StorageError):
        await App("sqlite:////nowhere/at/all/jobs.db").connect()


async def test_a_connection_that_failed_is_tried_again(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/later/jobs.db")
    with pytest.raises(StorageError):
        await app.queue("mail").enqueue("x")

    (tmp_path / "later").mkdir()

    assert (await app.queue("mail").enqueue("x")).status == "queued"
    await app.close()


async def test_first_uses_at_the_same_time_share_one_connection() -> None:
    app = App("memory://")

    storages = await asyncio.gather(*(app.connect() for _ in range(10)))

    assert len({id(storage) for storage in storages}) == 1
    await app.close()


async def test_a_closed_app_connects_anew() -> None:
    app = App("memory://")
    first = await app.connect()
    await app.queue("mail").enqueue("x")

    await app.close()
    await app.close()

    assert await app.connect() is not first
    assert await app.queue("mail").open() == 1, "what is in memory outlives the connection"
    await app.close()


async def test_a_storage_that_is_given_stays_the_caller_s() -> None:
    storage = open_storage("memory://")
    await storage.open()

    async with App(storage) as app:
        assert await app.connect() is storage
        await app.queue("mail").enqueue("x")

    assert (await storage.counts("mail")).waiting == 1
    await storage.close()


async def test_a_storage_that_is_given_serves_its_own_loop_only() -> None:
    storage = open_storage("memory://")
    await storage.open()
    app = App(storage)
    await app.connect()

    with pytest.raises(StorageError, match="another event loop"):
        await asyncio.to_thread(app.queue("mail").sync.enqueue, "x")
    await storage.close()


@pytest.mark.parametrize("engine", ["memory", "sqlite"])
def test_asyncio_run_may_be_called_twice_and_closes_what_it_opened(engine: str, tmp_path: Path) -> None:
    app = App("memory://" if engine == "memory" else f"sqlite:///{tmp_path}/jobs.db")
    queue = app.queue("mail")
    handles: list[JobHandle[object]] = []

    async def first() -> None:
        handles.append(await queue.enqueue("x"))
        task = asyncio.create_task(handles[0].result())
        await asyncio.sleep(0.01)
        task.cancel()

    async def second() -> str:
        job = await queue.claim_one(wait=0)
        assert job is not None
        await job.complete("done")
        return str(await handles[0].result(timeout="5s"))

    asyncio.run(first())
    assert app._sessions._ready == {}, "closed with its loop"
    assert asyncio.run(second()) == "done"


def test_loops_in_several_threads_share_one_app(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db")
    errors: list[BaseException] = []

    async def fill(name: str) -> None:
        await asyncio.gather(*(app.queue("mail").enqueue(n, id=f"{name}-{n}") for n in range(50)))

    def thread(name: str) -> None:
        try:
            asyncio.run(fill(name))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=thread, args=(f"t{n}",)) for n in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert errors == []
    assert app.sync.queue("mail").open() == 200
    app.sync.close()


async def test_close_ends_the_connections_of_other_loops_too() -> None:
    app = App("memory://")
    await app.connect()
    await asyncio.to_thread(app.queue("mail").sync.enqueue, "x")
    assert len(app._sessions._ready) == 2

    await app.close()

    assert app._sessions._ready == {}


FORK = """
import asyncio, os, sys
from penstock import App

app = App(sys.argv[1])
queue = app.queue("mail")
queue.sync.enqueue("sync parent", id="sp")

async def parent():
    await queue.enqueue("async parent", id="ap")
    child = os.fork()
    if child == 0:
        try:
            queue.sync.enqueue("sync child", id="sc")
            asyncio.run(in_child())
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert status == 0, status
    await queue.enqueue("async parent again", id="ap2")

async def in_child():
    handle = await queue.enqueue("async child", id="ac")
    assert handle.status == "queued"
    assert (await queue.enqueue("x", id="ap")).status == "duplicate"

asyncio.run(parent())
queue.sync.enqueue("sync parent again", id="sp2")
print(*sorted(info.payload for info in queue.sync.list_jobs("waiting")), sep=", ")
app.sync.close()
"""
FORKED = "async child, async parent, async parent again, sync child, sync parent, sync parent again\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork_parent_and_child_have_connections_of_their_own(tmp_path: Path) -> None:
    assert run_script(FORK, f"sqlite:///{tmp_path}/jobs.db") == FORKED


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork_parent_and_child_have_connections_of_their_own_on_valkey(valkey_url: str) -> None:
    assert run_script(FORK, f"{valkey_url}?namespace=client-fork-{os.getpid()}") == FORKED


LEFT_OPEN = """
import asyncio, sys
from penstock import App

app = App(sys.argv[1])
app.queue("mail").sync.enqueue("x")
asyncio.run(app.queue("mail").enqueue("y"))
try:
    app.queue("mail").sync.job("nobody").result(timeout="5s")
except LookupError:
    print(app.queue("mail").sync.open())
"""


def test_a_script_that_closes_nothing_ends_without_a_word(tmp_path: Path) -> None:
    assert run_script(LEFT_OPEN, f"sqlite:///{tmp_path}/jobs.db") == "2\n"
    assert run_script(LEFT_OPEN, "memory://") == "2\n"


def test_a_script_that_closes_nothing_ends_without_a_word_on_valkey(valkey_url: str) -> None:
    assert run_script(LEFT_OPEN, f"{valkey_url}?namespace=client-left-{os.getpid()}") == "2\n"


async def test_a_missing_server_has_its_own_error() -> None:
    with pytest.raises(StorageUnavailable):
        await App("valkey://127.0.0.1:1").connect()


async def test_an_app_is_moved_to_another_store_before_it_connects(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/own.db")
    app.move_to(f"sqlite:///{tmp_path}/other.db", namespace="part")
    async with app:
        await app.queue("q").enqueue({}, id="x")
    assert not (tmp_path / "own.db").exists()
    async with App(f"sqlite:///{tmp_path}/other.db", namespace="part") as there:
        assert (app.url, app.namespace) == (there.url, "part")
        assert await there.queue("q").waiting() == 1
        given = App(await there.connect())
        given.move_to(f"sqlite:///{tmp_path}/third.db")
        async with given:
            assert await given.queue("q").get_or_none("x") is None
        assert await there.queue("q").waiting() == 1
