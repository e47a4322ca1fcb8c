"""A write lock that is held for longer than a lease keeps all holders from extending theirs."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from penstock.core.job import Lease, NewJob
from penstock.core.outcome import Complete
from penstock.storage.bounds import CLOCK_TERM_MS
from penstock.storage.sqlite import database, lock, transaction, writer
from penstock.storage.sqlite.database import Database
from penstock.storage.sqlite.engine import SqliteStorage
from penstock.storage.sqlite.lock import protected_ms
from penstock.storage.sqlite.transaction import Transaction
from penstock.storage.sqlite.unit import Unit
from penstock.storage.values import Held, Settlement, Swept, Take
from tests.storage.sqlite.conftest import Opener
from tests.storage.sqlite.test_clock import Machine, machine

__all__ = ["machine"]

LEASE_MS = 2_000
HELD_MS = 3_000

PassTime = Callable[[int], None]


T = TypeVar("T")


class BehindLock(Protocol):
    async def __call__(
        self, call: Callable[[], Coroutine[Any, Any, T]], held_ms: int, *, asking_late_ms: int
    ) -> T: ...


class SweepBehindLock(Protocol):
    async def __call__(self, held_ms: int, *, asking_late_ms: int = 0) -> Swept: ...


@pytest.fixture
def pass_time(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> PassTime:
    """Move every clock that the engine reads."""
    for module in (database, writer, transaction):
        monkeypatch.setattr(module, "monotonic", lambda: machine.boot_ms / 1000)
    monkeypatch.setattr(lock, "read_clocks", machine.read)
    return machine.pass_time


@pytest.fixture
async def lease(storage: SqliteStorage, pass_time: PassTime) -> Lease:
    await storage.enqueue("q", [NewJob("job")])
    [lease] = (await storage.claim("q", Take("w", 1, LEASE_MS))).leases
    return lease


@pytest.fixture
def behind_lock(path: Path, pass_time: PassTime, monkeypatch: pytest.MonkeyPatch) -> BehindLock:
    """Make a call while another process holds the write lock, some time after that process took it."""

    async def make(call: Callable[[], Coroutine[Any, Any, T]], held_ms: int, *, asking_late_ms: int) -> T:
        waiting, loop = asyncio.Event(), asyncio.get_running_loop()

        def noted_begin(sql: sqlite3.Connection, **options: Any) -> bool:
            loop.call_soon_threadsafe(waiting.set)
            return lock.begin(sql, **options)

        monkeypatch.setattr(writer, "begin", noted_begin)
        holder = sqlite3.connect(path, isolation_level=None)
        try:
            holder.execute("BEGIN IMMEDIATE")
            pass_time(asking_late_ms)
            calling = asyncio.create_task(call())
            await waiting.wait()
            pass_time(held_ms - asking_late_ms)
        finally:
            holder.close()
        return await calling

    return make


@pytest.fixture
def sweep_behind_lock(storage: SqliteStorage, behind_lock: BehindLock) -> SweepBehindLock:
    """Sweep while another process holds the write lock for some milliseconds."""

    async def sweep(held_ms: int, *, asking_late_ms: int = 0) -> Swept:
        return await behind_lock(lambda: storage.sweep("q"), held_ms, asking_late_ms=asking_late_ms)

    return sweep


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
        assert protected_ms(other.writer.sql) == (HELD_MS + 100, 100)
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


async def test_a_sweep_that_asks_for_the_lock_late_leaves_them_too(
    storage: SqliteStorage, lease: Lease, sweep_behind_lock: SweepBehindLock
) -> None:
    assert (await sweep_behind_lock(HELD_MS, asking_late_ms=HELD_MS - 100)).rescued == 0


async def test_a_sweep_after_another_call_that_asked_late_leaves_them_too(
    storage: SqliteStorage, lease: Lease, behind_lock: BehindLock
) -> None:
    """The call changes its queue, so the file was last written just now."""
    await behind_lock(lambda: storage.enqueue("q", [NewJob("other")]), HELD_MS, asking_late_ms=HELD_MS - 100)
    assert (await storage.sweep("q")).rescued == 0


async def test_a_process_that_asks_late_to_open_the_file_leaves_them_too(
    path: Path, machine: Machine, lease: Lease, pass_time: PassTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_time(HELD_MS)
    monkeypatch.setattr(database, "prepare", lambda *_, **__: True)
    other = Database("other", str(path), timeout_s=5)
    try:
        other.writer._transaction(machine.boot_ms / 1000, has_waited=False)
        assert protected_ms(other.writer.sql) == (HELD_MS, 0)
    finally:
        other.writer.close()
        other.exchange.close()


async def test_a_call_that_was_suspended_before_it_looked_leaves_them_too(
    storage: SqliteStorage, lease: Lease, pass_time: PassTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = Transaction.unit

    def unit_after_sleep(transaction: Transaction, namespace: str, queue: str) -> Unit:
        pass_time(HELD_MS)
        return unit(transaction, namespace, queue)

    monkeypatch.setattr(Transaction, "unit", unit_after_sleep)
    assert (await storage.sweep("q")).rescued == 0


async def test_an_earlier_record_of_the_same_lock_is_not_cut_short(
    storage: SqliteStorage, lease: Lease, path: Path, pass_time: PassTime, sweep_behind_lock: SweepBehindLock
) -> None:
    await sweep_behind_lock(HELD_MS)
    with closing(sqlite3.connect(path)) as sql, sql:
        lock.write_long_lock(sql, since_s=1.5, until_s=0)
        assert protected_ms(sql) == (HELD_MS, 0)


async def test_a_later_record_of_an_earlier_lock_is_left_out(
    storage: SqliteStorage, lease: Lease, path: Path, pass_time: PassTime, sweep_behind_lock: SweepBehindLock
) -> None:
    await sweep_behind_lock(HELD_MS)
    with closing(sqlite3.connect(path)) as sql, sql:
        lock.write_long_lock(sql, since_s=9, until_s=5)
        assert protected_ms(sql) == (HELD_MS, 0)


async def test_a_record_that_cannot_be_read_counts_for_nothing(storage: SqliteStorage, path: Path) -> None:
    with closing(sqlite3.connect(path)) as sql, sql:
        sql.execute("INSERT INTO meta (name, value) VALUES ('locked', 'x')")
        assert protected_ms(sql) == (0, 0)


async def test_leases_go_on_with_what_was_left_of_them_when_the_lock_was_taken(
    storage: SqliteStorage, lease: Lease, pass_time: PassTime, sweep_behind_lock: SweepBehindLock
) -> None:
    assert (await sweep_behind_lock(HELD_MS)).wait_ms == 0
    pass_time(LEASE_MS - 1)
    assert (await storage.sweep("q")).rescued == 0
    pass_time(1)
    assert (await storage.sweep("q")).rescued == 1


async def test_a_lease_that_ran_out_before_the_lock_was_taken_is_rescued(
    storage: SqliteStorage, lease: Lease, pass_time: PassTime, sweep_behind_lock: SweepBehindLock
) -> None:
    pass_time(LEASE_MS)
    await storage.enqueue("q", [NewJob("other")])
    assert (await sweep_behind_lock(HELD_MS)).rescued == 1


async def test_a_short_wait_for_the_lock_changes_nothing(
    storage: SqliteStorage, lease: Lease, pass_time: PassTime, sweep_behind_lock: SweepBehindLock
) -> None:
    pass_time(LEASE_MS - 50)
    await storage.enqueue("q", [NewJob("other")])
    assert (await sweep_behind_lock(100)).rescued == 1


async def test_one_long_wait_after_another_does_not_put_rescues_off_for_good(
    lease: Lease, sweep_behind_lock: SweepBehindLock
) -> None:
    rescued = [(await sweep_behind_lock(1_500)).rescued for _ in range(24)]
    assert sum(rescued) == 1
    assert rescued.index(1) * 1_500 in range(LEASE_MS + CLOCK_TERM_MS - 1_500, LEASE_MS + CLOCK_TERM_MS)
