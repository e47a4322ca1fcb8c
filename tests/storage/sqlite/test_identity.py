"""A file that is deleted, replaced or migrated while a process uses it: nothing is answered into the void."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.job import NewJob
from penstock.core.lifecycle import State
from penstock.errors import StorageReplaced, StorageUnavailable, StorageVersion
from penstock.storage.sqlite.engine import SqliteStorage
from penstock.storage.values import Take
from tests.storage.sqlite.conftest import Opener, Starter


def copy_of(path: Path) -> Path:
    """A consistent copy, in one file."""
    copy = path.with_suffix(".copy")
    source, target = sqlite3.connect(path), sqlite3.connect(copy)
    source.backup(target)
    source.close()
    target.close()
    return copy


def delete(path: Path) -> None:
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        name.unlink(missing_ok=True)


def replace_only_the_file(path: Path, copy: Path) -> None:
    """What `mv copy.db penstock.db` does: the write-ahead log of the old file stays, and looks like the new one's."""
    copy.replace(path)


def replace_all_files(path: Path, copy: Path) -> None:
    delete(path)
    copy.replace(path)


def overwrite_with_cp(path: Path, copy: Path) -> None:
    delete(path)
    shutil.copy(copy, path)


async def test_no_job_is_accepted_into_a_deleted_file(storage: SqliteStorage, path: Path) -> None:
    await storage.enqueue("q", [NewJob("a")])
    delete(path)

    with pytest.raises(
        StorageReplaced, match=r"was deleted while this process used it. This call changed nothing"
    ):
        await storage.enqueue("q", [NewJob("b")])

    assert not path.exists()


async def test_a_deleted_file_is_not_created_again_behind_the_operators_back(
    storage: SqliteStorage, path: Path
) -> None:
    delete(path)

    for _ in range(3):
        with pytest.raises(StorageReplaced):
            await storage.enqueue("q", [NewJob("a")])
        with pytest.raises(StorageReplaced):
            await storage.counts("q")

    assert not path.exists()


async def test_a_storage_goes_on_once_the_file_is_back(storage: SqliteStorage, path: Path) -> None:
    await storage.enqueue("q", [NewJob("a")])
    copy = copy_of(path)
    delete(path)
    with pytest.raises(StorageReplaced):
        await storage.enqueue("q", [NewJob("b")])

    copy.replace(path)

    (answer,) = await storage.enqueue("q", [NewJob("b")])
    assert answer.status == "queued"
    assert (await storage.counts("q")).waiting == 2


@pytest.mark.parametrize("swap", [replace_only_the_file, replace_all_files, overwrite_with_cp])
async def test_no_job_is_accepted_into_a_replaced_file_and_the_next_call_uses_the_new_one(
    storage: SqliteStorage, path: Path, swap: Callable[[Path, Path], None]
) -> None:
    await storage.enqueue("q", [NewJob("a")])
    copy = copy_of(path)
    await storage.enqueue("q", [NewJob(f"later-{i}", bytes(3000)) for i in range(50)])
    epoch = (await storage.read_events("q", after=0)).epoch
    swap(path, copy)

    with pytest.raises(StorageReplaced, match="was replaced by another file"):
        await storage.enqueue("q", [NewJob("b")])
    (answer,) = await storage.enqueue("q", [NewJob("b")])

    assert answer.status == "queued"
    page = await storage.read_events("q", after=0)
    assert page.epoch != epoch
    assert {job.id for job in (await storage.list_jobs("q", State.WAITING)).jobs} == {"a", "b"}
    assert (await storage.check("q")).problems == {}
    await storage.close()
    with sqlite3.connect(path) as sql:
        assert sql.execute("SELECT id FROM jobs ORDER BY id").fetchall() == [("a",), ("b",)]
    sql.close()


async def test_no_token_comes_back_in_a_copy_that_takes_the_files_place(
    storage: SqliteStorage, path: Path
) -> None:
    copies = [copy_of(path).rename(path.with_suffix(f".{i}")) for i in range(2)]
    tokens: list[int] = []
    for copy in (None, *copies):  # The same backup twice: the queue is unknown in it each time.
        if copy is not None:
            copy.replace(path)
            with pytest.raises(StorageReplaced):
                await storage.counts("q")
        await storage.enqueue("q", [NewJob(f"job-{i}") for i in range(3)])
        tokens += [lease.token for lease in (await storage.claim("q", Take("w", 3, 1000))).leases]

    assert len(set(tokens)) == 9
    assert tokens == sorted(tokens)
    assert tokens[-1] < 2**53


async def test_a_read_notices_a_replaced_file_as_well(storage: SqliteStorage, path: Path) -> None:
    copy = copy_of(path)
    await storage.enqueue("q", [NewJob("a")])
    copy.replace(path)

    with pytest.raises(StorageReplaced):
        await storage.counts("q")

    assert (await storage.counts("q")).waiting == 0


async def test_a_lost_file_is_an_outage_for_callers_that_retry(storage: SqliteStorage, path: Path) -> None:
    delete(path)

    with pytest.raises(StorageUnavailable):
        await storage.claim("q", Take("worker", 1, 1000), wait_ms=1000)


async def test_every_storage_of_the_process_moves_to_the_new_file(opened: Opener, path: Path) -> None:
    one, other = await opened(), await opened()
    copy = copy_of(path)
    copy.replace(path)
    with pytest.raises(StorageReplaced):
        await one.enqueue("q", [NewJob("a")])

    await one.enqueue("q", [NewJob("a")])
    await other.enqueue("q", [NewJob("b")])

    assert (await one.counts("q")).waiting == 2
    assert one._opened._database is other._opened._database


async def test_a_worker_is_known_to_live_after_its_file_was_replaced(
    storage: SqliteStorage, path: Path
) -> None:
    await storage.enqueue("q", [NewJob("a")])
    await storage.claim("q", Take("w", 1, 60_000))
    await storage.announce("q", "w", lost=lambda: None)
    locks = storage._opened.locks
    assert locks is not None
    copy_of(path).replace(path)
    with pytest.raises(StorageReplaced):
        await storage.counts("q")

    await storage.counts("q")

    assert locks.look(["w"]) == {"w": True}
    await storage.close()
    assert locks.look(["w"]) == {}


async def test_letting_go_of_a_replaced_file_leaves_the_new_ones_log_alone(
    opened: Opener, path: Path, peer: Starter
) -> None:
    old = await opened()
    await old.enqueue("q", [NewJob("a")])
    delete(path)
    process = peer("enqueue-forever", "name")
    assert process.stdout is not None
    process.stdout.readline()

    await old.close()

    assert Path(f"{path}-wal").exists()
    said = {process.stdout.readline().strip() for _ in range(20)}
    process.kill()
    process.wait()
    new = await opened()
    assert all(await new.get("shared", sorted(said)))


async def test_a_log_left_over_is_not_removed_while_another_process_uses_the_new_file(
    opened: Opener, path: Path, peer: Starter
) -> None:
    old = await opened()
    copy = copy_of(path)
    copy.replace(path)
    process = peer("work-off", "name")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(StorageReplaced):
        await old.enqueue("q", [NewJob("a")])

    with pytest.raises(StorageReplaced, match="another process uses it"):
        await old.enqueue("q", [NewJob("a")])

    process.kill()
    process.wait()
    (answer,) = await old.enqueue("q", [NewJob("a")])
    assert answer.status == "queued"


async def test_an_old_process_writes_nothing_into_a_file_of_a_newer_format(
    storage: SqliteStorage, path: Path
) -> None:
    await storage.enqueue("q", [NewJob("a")])
    with sqlite3.connect(path) as sql:
        sql.execute("PRAGMA user_version = 999")
    sql.close()

    for _ in range(2):
        with pytest.raises(StorageVersion, match=r"format 999.*Upgrade Penstock"):
            await storage.enqueue("q", [NewJob("b")])
        with pytest.raises(StorageVersion, match=r"format 999.*Upgrade Penstock"):
            await storage.counts("q")

    with sqlite3.connect(path) as sql:
        assert sql.execute("SELECT id FROM jobs").fetchall() == [("a",)]
    sql.close()


OPEN_AND_LIST = """
import asyncio, os, sys
from penstock.core.job import NewJob
from penstock.core.lifecycle import State
from penstock.storage import open_storage

async def main():
    storage = open_storage(sys.argv[1])
    await storage.open()
    await storage.enqueue("q", [NewJob("a")])
    print(*sorted(f"{name}:{os.stat(name).st_mode & 0o777:o}" for name in os.listdir() if ".db" in name))
    await storage.close()

before = os.umask(0)
asyncio.run(main())
assert os.umask(before) == 0, "somebody changed the umask"
"""


def list_modes(folder: Path) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", OPEN_AND_LIST, "sqlite:///penstock.db"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout.split()


def test_only_the_owner_can_read_the_files_whatever_the_umask(tmp_path: Path) -> None:
    assert list_modes(tmp_path) == ["penstock.db-shm:600", "penstock.db-wal:600", "penstock.db:600"]


def test_the_mode_of_a_file_that_exists_is_kept(tmp_path: Path) -> None:
    os.close(os.open(tmp_path / "penstock.db", os.O_CREAT | os.O_WRONLY, 0o640))

    assert list_modes(tmp_path) == ["penstock.db-shm:640", "penstock.db-wal:640", "penstock.db:640"]
