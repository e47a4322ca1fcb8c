"""A disk that is full, and has room again: nothing that could be written is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from penstock.core.job import NewJob
from penstock.errors import StorageFull
from penstock.storage.sqlite import checkpoint
from penstock.storage.sqlite.engine import SqliteStorage

MIB = 1024 * 1024

WORK_OFF = """
import asyncio, resource, sys
from penstock.core.job import NewJob
from penstock.storage import open_storage

async def main():
    storage = open_storage(sys.argv[1])
    await storage.open()
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
    for number in range(200):
        await storage.enqueue("q", [NewJob(f"job-{number}-{i}", bytes(5000)) for i in range(10)])
        await storage.drain("q")
    assert (await storage.check("q")).problems == {}
    await storage.close()

asyncio.run(main())
"""


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    folder = tmp_path / "volume"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
async def storage(small_volume: Path) -> AsyncIterator[SqliteStorage]:
    storage = SqliteStorage.from_url(f"sqlite:///{small_volume}/penstock.db")
    await storage.open()
    yield storage
    await storage.close()


def fill(volume: Path, *, leave: int) -> Path:
    """Take all of the disk but ``leave`` bytes."""
    ballast = volume / "ballast"
    free = os.statvfs(volume)
    ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - leave))
    return ballast


async def overfill(storage: SqliteStorage) -> int:
    """Enqueue until the disk is full; return how many jobs there are."""
    for number in range(10_000):
        try:
            await storage.enqueue("q", [NewJob(f"job-{number}", bytes(20_000))])
        except StorageFull:
            return number
    raise AssertionError("the disk was never full")


async def test_calls_are_accepted_again_as_soon_as_there_is_room(
    storage: SqliteStorage, small_volume: Path
) -> None:
    ballast = fill(small_volume, leave=2 * MIB)
    count = await overfill(storage)
    with pytest.raises(StorageFull, match="Free disk space"):
        await storage.enqueue("q", [NewJob("large", bytes(500_000))])
    assert (await storage.counts("q")).waiting == count

    ballast.unlink()

    (answer,) = await storage.enqueue("q", [NewJob("large", bytes(500_000))])
    assert answer.status == "queued"
    assert (await storage.counts("q")).waiting == count + 1
    assert (await storage.check("q")).problems == {}


async def test_room_that_jobs_leave_behind_is_used_again(storage: SqliteStorage, small_volume: Path) -> None:
    """The disk stays full; all that helps is to copy the log into the pages that are free in the file."""
    await storage.enqueue("q", [NewJob(f"job-{i}", bytes(20_000)) for i in range(100)])
    await copied(storage)
    fill(small_volume, leave=MIB)
    (log,) = small_volume.glob("*-wal")
    for number in range(100):
        await storage.drain("q")
        await storage.enqueue("q", [NewJob(f"more-{number}-{i}", bytes(20_000)) for i in range(20)])

    assert (await storage.counts("q")).waiting == 20
    assert log.stat().st_size < 4 * MIB


async def copied(storage: SqliteStorage) -> None:
    """Have the log copied into the file."""
    checkpoints = storage._opened._database.writer._checkpoints
    assert isinstance(checkpoints, checkpoint.Checkpoints)
    checkpoints.run()


def test_a_limit_on_the_size_of_files_is_met_in_the_same_way(tmp_path: Path) -> None:
    """The log reaches the limit again and again, the file never does. This needs no rights."""
    ended = subprocess.run(
        [sys.executable, "-c", WORK_OFF, f"sqlite:///{tmp_path}/penstock.db"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
