"""Queue time on SQLite: the machine's boot clock measures it, not the wall clock of whoever calls."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import pytest

from penstock.core.job import DAY_MS, HOUR_MS, NewJob
from penstock.core.lifecycle import State
from penstock.core.outcome import Fail, Failure
from penstock.storage.sqlite import queuerow
from penstock.storage.sqlite.clock import Reading, read_clocks
from penstock.storage.sqlite.engine import SqliteStorage
from penstock.storage.values import Held, Settlement, Take
from tests.storage.sqlite.conftest import Opener

MINUTE_MS = 60_000


class Machine:
    """A machine whose clocks stand still until they are moved. Processes may see wall clocks of their own."""

    def __init__(self) -> None:
        self.wall_ms = read_clocks().wall_ms
        self.boot_ms = HOUR_MS
        self.boot = 1

    def read(self) -> Reading:
        return Reading(self.wall_ms, self.boot_ms, self.boot)

    def pass_time(self, ms: int) -> None:
        self.wall_ms += ms
        self.boot_ms += ms

    def reboot(self, *, off_ms: int) -> None:
        self.wall_ms += off_ms
        self.boot_ms = 1_000
        self.boot += 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(queuerow, "read_clocks", machine.read)
    return machine


async def now_of(storage: SqliteStorage) -> int:
    return (await storage.clock("q")).now_ms


async def fail_one(storage: SqliteStorage) -> None:
    await storage.enqueue("q", [NewJob("failed")])
    [lease] = (await storage.claim("q", Take("w", 1, 30_000))).leases
    fail = Fail(Failure("Boom", "it went off"), final=True)
    await storage.settle("q", [Settlement(lease.id, lease.token, fail)])


def test_this_machine_has_a_boot_clock() -> None:
    first, second = read_clocks(), read_clocks()
    assert first.boot == second.boot
    assert first.boot_ms <= second.boot_ms


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no boot clock")
def test_the_wall_clock_has_no_part_in_the_boot_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
    reading = read_clocks()
    assert reading.wall_ms == 0
    assert before <= reading.boot_ms <= time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


@pytest.mark.parametrize("ms", [5_000, 3 * HOUR_MS, 3650 * DAY_MS, -5_000, -3 * HOUR_MS, -3650 * DAY_MS])
async def test_a_wrong_wall_clock_has_no_part_in_queue_time(
    storage: SqliteStorage, machine: Machine, ms: int
) -> None:
    await storage.enqueue("q", [NewJob("job", delay_ms=MINUTE_MS)])
    before = await now_of(storage)
    machine.wall_ms += ms
    machine.pass_time(10_000)
    await storage.enqueue("q", [NewJob("other")])
    machine.wall_ms -= ms
    machine.pass_time(10_000)
    await storage.sweep("q")
    assert abs(await now_of(storage) - before - 20_000) <= 200
    assert (await storage.counts("q")).scheduled == 1
    machine.pass_time(40_200)
    assert (await storage.sweep("q")).promoted == 1


async def test_time_counts_while_the_machine_sleeps(storage: SqliteStorage, machine: Machine) -> None:
    await storage.enqueue("q", [NewJob("job", delay_ms=HOUR_MS)])
    machine.pass_time(HOUR_MS)
    assert (await storage.sweep("q")).promoted == 1


async def test_records_that_the_boot_clock_proves_expired_are_deleted_immediately(
    storage: SqliteStorage, machine: Machine
) -> None:
    await fail_one(storage)
    machine.pass_time(31 * DAY_MS)
    assert (await storage.sweep("q")).pruned == 1


async def test_after_a_reboot_the_wall_clock_says_what_has_passed(
    storage: SqliteStorage, machine: Machine
) -> None:
    await storage.enqueue("q", [NewJob("job", delay_ms=HOUR_MS)])
    before = await now_of(storage)
    machine.reboot(off_ms=2 * HOUR_MS)
    assert await now_of(storage) == before + 2 * HOUR_MS
    assert (await storage.sweep("q")).promoted == 1


async def test_a_reboot_with_a_wrong_clock_deletes_nothing(storage: SqliteStorage, machine: Machine) -> None:
    await fail_one(storage)
    machine.reboot(off_ms=31 * DAY_MS)
    assert (await storage.sweep("q")).pruned == 0
    machine.wall_ms -= 31 * DAY_MS
    machine.pass_time(HOUR_MS)
    assert (await storage.sweep("q")).pruned == 0
    assert [job.id for job in (await storage.list_jobs("q", State.FAILED)).jobs] == ["failed"]


async def test_a_reboot_with_a_clock_in_the_past_does_not_stop_time(
    storage: SqliteStorage, machine: Machine
) -> None:
    await storage.enqueue("q", [NewJob("job", delay_ms=MINUTE_MS)])
    before = await now_of(storage)
    machine.reboot(off_ms=-3650 * DAY_MS)
    await storage.enqueue("q", [NewJob("other")])
    assert await now_of(storage) == before
    machine.pass_time(MINUTE_MS + 1_000)
    assert (await storage.sweep("q")).promoted == 1


async def test_heartbeats_of_an_unchanged_queue_are_not_a_gap(
    storage: SqliteStorage, machine: Machine
) -> None:
    await storage.enqueue("q", [NewJob("dead"), NewJob("alive")])
    dead, alive = (await storage.claim("q", Take("w", 2, 30_000))).leases
    rescued = 0
    for _ in range(4):
        machine.pass_time(8_000)
        rescued += (await storage.sweep("q")).rescued
        await storage.extend("q", [Held(alive.id, alive.token)], worker="w", lease_ms=30_000)
    assert rescued == 1
    assert dead.id == "dead"


async def test_a_file_of_an_earlier_format_that_stands_still_goes_on(
    opened: Opener, path: Path, machine: Machine
) -> None:
    storage = await opened()
    await storage.enqueue("q", [NewJob("job", delay_ms=MINUTE_MS)])
    before = await now_of(storage)
    await storage.close()
    with sqlite3.connect(path) as sql:
        sql.execute("UPDATE queues SET clock_ms = 0, boot_ms = 0, boot = 0, clock_marks = ''")
    sql.close()
    machine.wall_ms -= 3 * HOUR_MS
    again = await opened()
    await again.enqueue("q", [NewJob("other")])
    machine.pass_time(5_000)
    assert before + 4_900 <= await now_of(again) <= before + 5_000
