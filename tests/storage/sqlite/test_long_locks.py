"""A write lock that is held for longer than a lease keeps all holders from extending theirs."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from penstock.core.job import Lease, NewJob
from penstock.core.outcome import Complete
from penstock.storage.sqlite import connection, database, writer
from penstock.storage.sqlite.connection import locked_ms
from penstock.storage.sqlite.database import Database
from penstock.storage.sqlite.engine import SqliteStorage
from penstock.storage.sqlite.transaction import Transaction
from penstock.storage.values import Held, Settlement, Swept, Take
from tests.storage.sqlite.conftest import Opener
from tests.storage.sqlite.test_clock import Machine, machine

__all__ = ["machine"]

LEASE_MS = 2_000
HELD_MS = 3_000

PassTime = Callable[[int], None]
SweepBehindLock = Callable[[int], Awaitable[Swept]]


@pytest.fixture
def pass_time(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> PassTime:
    """Move every clock that the engine reads."""
    monkeypatch.setattr(writer, "monotonic", lambda: machine.boot_ms / 1000)
    monkeypatch.setattr(connection, "wall_ms", lambda: machine.wall_ms)
    return machine.pass_time


@pytest.fixture
async def lease(storage: SqliteStorage, pass_time: PassTime) -> Lease:
    await storage.enqueue("q", [NewJob("job")])
    [lease] = (await storage.claim("q", Take("w", 1, LEASE_MS))).leases
    return lease


@pytest.fixture
def sweep_behind_lock(
    storage: SqliteStorage, path: Path, pass_time: PassTime, monkeypatch: pytest.MonkeyPatch
) -> SweepBehindLock:
    """Sweep while another process holds the write lock for some milliseconds."""
    begin = connection.begin

    async def sweep_for(held_ms: int) -> Swept:
        waiting, loop = asyncio.Event(), asyncio.get_running_loop()

        def noted_begin(sql: sqlite3.Connection, *, timeout_s: float) -> None:
            loop.call_soon_threadsafe(waiting.set)
            begin(sql, timeout_s=timeout_s)

        monkeypatch.setattr(writer, "begin", noted_begin)
        holder = sqlite3.connect(path, isolation_level=None)
        try:
            holder.execute("BEGIN IMMEDIATE")
            sweeping = asyncio.create_task(storage.sweep("q"))
            await waiting.wait()
            pass_time(held_ms)
        finally:
            holder.close()
        return await sweeping

    return sweep_for


async def test_a_sweep_that_waited_for_the_lock_leaves_leases_to_their_holders(
    storage: SqliteStorage, lease: Lease, sweep_behind_lock: SweepBehindLock
) -> None:
    assert (await sweep_behind_lock(HELD_MS)).rescued == 0
    await storage.settle("q", [Settlement(lease.id, lease.token, Complete(b"1"))])
    assert (await storage.counts("q")).completed == 1


async def test_a_process_that_comes_after_such_a_wait_leaves_them_too(
    storage: SqliteStorage, path: Path, lease: Lease, pass_time: PassTime, sweep_behind_lock: SweepBehindLock
) -> None:
    await sweep_behind_lock(HELD_MS)
    pass_time(100)
    other = Database("other", str(path), timeout_s=5)
    try:
        assert locked_ms(other.writer.sql) == HELD_MS + 100
    finally:
        other.writer.close()
        other.exchange.close()


async def test_a_sweep_right_after_such_a_wait_leaves_them_too(
    storage: SqliteStorage, lease: Lease, pass_time: PassTime, sweep_behind_lock: SweepBehindLock
) -> None:
    await sweep_behind_lock(HELD_MS)
    pass_time(100)
    assert (await storage.sweep("q")).rescued == 0
    held = [Held(lease.id, lease.token)]
    assert await storage.extend("q", held, worker="w", lease_ms=LEASE_MS) == ["extended"]


async def test_a_process_that_was_suspended_with_the_lock_leaves_them_too(
    storage: SqliteStorage, lease: Lease, pass_time: PassTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = Transaction.flush

    def flush_and_sleep(transaction: Transaction) -> None:
        flush(transaction)
        pass_time(HELD_MS)

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "flush", flush_and_sleep)
        await storage.enqueue("q", [NewJob("other")])
    assert (await storage.sweep("q")).rescued == 0


async def test_a_process_that_waited_for_the_lock_to_open_the_file_leaves_them_too(
    opened: Opener, machine: Machine, pass_time: PassTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await opened()
    await first.enqueue("q", [NewJob("job")])
    await first.claim("q", Take("w", 1, LEASE_MS))
    await first.close()
    asked_at = machine.boot_ms / 1000
    monkeypatch.setattr(database, "monotonic", lambda: asked_at)
    pass_time(HELD_MS)
    assert (await (await opened()).sweep("q")).rescued == 0


async def test_the_next_sweep_rescues_jobs_whose_holder_does_not_come_back(
    storage: SqliteStorage, lease: Lease, pass_time: PassTime, sweep_behind_lock: SweepBehindLock
) -> None:
    assert (await sweep_behind_lock(HELD_MS)).wait_ms == 0
    pass_time(800)
    assert (await storage.sweep("q")).rescued == 1


async def test_a_lease_that_ran_out_before_the_lock_was_taken_is_rescued(
    lease: Lease, pass_time: PassTime, sweep_behind_lock: SweepBehindLock
) -> None:
    pass_time(LEASE_MS)
    assert (await sweep_behind_lock(HELD_MS)).rescued == 1


async def test_a_short_wait_for_the_lock_changes_nothing(
    lease: Lease, pass_time: PassTime, sweep_behind_lock: SweepBehindLock
) -> None:
    pass_time(LEASE_MS - 50)
    assert (await sweep_behind_lock(100)).rescued == 1


async def test_one_long_wait_after_another_does_not_put_rescues_off_for_good(
    lease: Lease, pass_time: PassTime, sweep_behind_lock: SweepBehindLock
) -> None:
    pass_time(LEASE_MS - 50)
    assert (await sweep_behind_lock(1_500)).rescued == 0
    assert (await sweep_behind_lock(1_500)).rescued == 1
