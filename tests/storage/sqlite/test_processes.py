"""Several processes on one file: they wake each other, share the jobs, and may die at any time."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.core.job import NewJob
from penstock.storage.sqlite import writer
from penstock.storage.sqlite.connection import file_identity
from penstock.storage.sqlite.engine import SqliteStorage
from penstock.storage.sqlite.lock import TURN_FILE, begin
from penstock.storage.sqlite.wake import signal_directory
from penstock.storage.values import Held, Take
from tests.storage.sqlite.conftest import Opener, Starter

QUEUE = "shared"


async def test_processes_claim_disjoint_jobs(storage: SqliteStorage, peer: Starter) -> None:
    ids = {f"job-{i}" for i in range(600)}
    await storage.enqueue(QUEUE, [NewJob(id_) for id_ in ids])
    peers = [peer("work-off", f"worker-{i}") for i in range(3)]
    for process in peers:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

    outputs = await asyncio.gather(*(asyncio.to_thread(process.communicate, "go\n") for process in peers))

    done = [line for output, _ in outputs for line in output.splitlines()]
    assert sorted(done) == sorted(ids)
    assert [process.returncode for process in peers] == [0, 0, 0]
    counts = await storage.counts(QUEUE)
    assert (counts.completed, counts.open) == (600, 0)


async def test_a_wait_is_woken_by_another_process(storage: SqliteStorage, peer: Starter) -> None:
    process = peer("enqueue-once", "job")
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    waiting = asyncio.create_task(storage.wait(QUEUE, timeout_ms=30_000))
    await asyncio.sleep(0)
    process.stdin.write("go\n")
    process.stdin.flush()

    assert await waiting
    woken_at = time.monotonic()

    asked_at = float(process.stdout.readline())
    assert woken_at - asked_at < 25, "woken by the timeout, not by the signal"
    assert (await storage.counts(QUEUE)).waiting == 1


async def test_every_enqueue_that_was_answered_survives_the_death_of_its_process(
    storage: SqliteStorage, peer: Starter
) -> None:
    processes = [peer("enqueue-forever", f"p{i}") for i in range(2)]
    answered: list[str] = []
    for name, process in zip(("p0", "p1"), processes, strict=True):
        assert process.stdout is not None
        said = "".join(process.stdout.readline() for _ in range(200))
        process.send_signal(signal.SIGKILL)
        # Not communicate(): it reads past what readline() has buffered, and would begin in the middle of a line.
        *ids, _cut_off = (said + process.stdout.read()).split("\n")
        assert ids == [f"{name}-{n // 5}-{n % 5}" for n in range(len(ids))]
        answered += ids

    jobs = await storage.get(QUEUE, answered)

    assert len(answered) >= 400
    assert [id_ for id_, job in zip(answered, jobs, strict=True) if job is None] == []
    assert not (await storage.check(QUEUE)).problems
    page = await storage.read_events(QUEUE, after=0, limit=1_000_000)
    assert [event.seq for event in page.events] == list(range(1, page.last + 1))


async def test_a_forked_child_starts_afresh(storage: SqliteStorage, opened: Opener) -> None:
    await storage.enqueue(QUEUE, [NewJob("parent")])
    pid = os.fork()
    if pid == 0:
        os._exit(_in_child(storage))

    _, status = await asyncio.to_thread(os.waitpid, pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    jobs = await storage.get(QUEUE, ["parent", "child"])
    assert [job.state if job else None for job in jobs] == ["active", "waiting"]
    (answer,) = await storage.enqueue(QUEUE, [NewJob("after")])
    assert answer.status == "queued"


def _in_child(storage: SqliteStorage) -> int:
    async def use() -> None:
        claimed = await storage.claim(QUEUE, Take("child", 1, 60_000))
        assert [lease.id for lease in claimed.leases] == ["parent"]
        await storage.enqueue(QUEUE, [NewJob("child")])
        await storage.close()

    try:
        # The parent's loop is running in this thread, as far as the child knows.
        asyncio.events._set_running_loop(None)
        asyncio.run(use())
    except BaseException:
        return 1
    return 0


async def test_the_socket_of_a_dead_process_is_taken_away(storage: SqliteStorage, path: Path) -> None:
    folder = signal_directory(file_identity(str(path)))
    assert folder is not None
    dead = folder / "999999-dead.1.w"
    _bind_and_leave(dead)
    assert dead.exists()

    await storage.enqueue(QUEUE, [NewJob("a")])

    deadline = time.monotonic() + 30
    while dead.exists():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def _bind_and_leave(path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(str(path))


async def test_nothing_is_left_in_the_signal_directory_after_close(opened: Opener, path: Path) -> None:
    storage = await opened()
    assert not await storage.wait(QUEUE, timeout_ms=1)
    folder = signal_directory(file_identity(str(path)))
    assert folder is not None
    assert len([path for path in folder.iterdir() if path.name != TURN_FILE]) == 1

    await storage.close()

    assert not folder.exists()


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_a_process_suspended_in_a_transaction_costs_no_other_process_its_leases(
    storage: SqliteStorage, peer: Starter, monkeypatch: pytest.MonkeyPatch, is_waiting: bool
) -> None:
    """The sweep asks for the lock when the lease has run out already, or when the lock is free again."""
    process = peer("enqueue-suspended", "other")
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    await storage.enqueue(QUEUE, [NewJob("job")])
    [lease] = (await storage.claim(QUEUE, Take("w", 1, 2_000))).leases
    run_out_ms = (await storage.clock(QUEUE)).now_ms + 2_000
    process.stdin.write("go\n")
    process.stdin.flush()
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED)
    while (await storage.clock(QUEUE)).now_ms < run_out_ms:
        await asyncio.sleep(0.01)

    refused = threading.Event()

    def noted_begin(sql: sqlite3.Connection, **options: Any) -> bool:
        refused.set()
        return begin(sql, **options)

    monkeypatch.setattr(writer, "begin", noted_begin)
    if is_waiting:
        sweeping = asyncio.create_task(storage.sweep(QUEUE))
        await asyncio.to_thread(refused.wait)
    os.kill(process.pid, signal.SIGCONT)
    if not is_waiting:
        assert await asyncio.to_thread(process.wait) == 0
        sweeping = asyncio.create_task(storage.sweep(QUEUE))

    assert (await sweeping).rescued == 0
    held = [Held(lease.id, lease.token)]
    assert await storage.extend(QUEUE, held, worker="w", lease_ms=2_000) == ["extended"]
