"""Backups: consistent while others write, restored by one rename, and known as another history."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import penstock
from penstock.core.job import NewJob
from penstock.core.lifecycle import State
from penstock.core.outcome import Complete
from penstock.errors import InvalidOption, StorageDamaged, StorageUnavailable, StorageVersion
from penstock.storage.sqlite.engine import SqliteStorage
from penstock.storage.values import Settlement, Take
from tests.storage.sqlite.conftest import Opener, Starter


async def ids(storage: SqliteStorage, queue: str = "q") -> list[str]:
    return [job.id for job in (await storage.list_jobs(queue, State.WAITING, limit=10_000)).jobs]


async def tokens(storage: SqliteStorage, count: int) -> list[int]:
    """Claim and complete that many jobs."""
    leases = (await storage.claim("q", Take("w", count, 60_000))).leases
    await storage.settle("q", [Settlement(lease.id, lease.token, Complete()) for lease in leases])
    return [lease.token for lease in leases]


async def test_a_restored_store_is_as_it_was_and_has_another_epoch(
    opened: Opener, url: str, path: Path, tmp_path: Path
) -> None:
    storage = await opened()
    await storage.enqueue("q", [NewJob("a", b"payload")])
    penstock.backup(url, tmp_path / "copy")
    await storage.enqueue("q", [NewJob("b")])
    epoch = (await storage.read_events("q", after=0)).epoch
    await storage.close()

    penstock.restore(url, tmp_path / "copy")

    storage = await opened()
    assert await ids(storage) == ["a"]
    page = await storage.read_events("q", after=0)
    assert page.epoch != epoch
    assert page.last == 1
    assert (await storage.check("q")).problems == {}
    assert (await storage.enqueue("q", [NewJob("b")]))[0].status == "queued"
    await storage.close()
    reopened = await opened()
    assert (await reopened.read_events("q", after=0)).epoch == page.epoch


async def test_nobody_works_on_a_restored_store_and_its_leases_have_ended(
    opened: Opener, url: str, tmp_path: Path
) -> None:
    """Whether the backup is restored at once or hours later, when the clock has run on without a call."""
    storage = await opened()
    await storage.enqueue("q", [NewJob("a")])
    [held] = (await storage.claim("q", Take("w", 1, 3_600_000))).leases
    await storage.extend("q", [], worker="w", lease_ms=3_600_000, info=b"{}")
    penstock.backup(url, tmp_path / "copy")
    await storage.close()

    penstock.restore(url, tmp_path / "copy")

    storage = await opened()
    assert await storage.workers("q") == []
    await storage.shift_clock("q", 7_200_000, jump=True)
    assert (await storage.sweep("q")).rescued == 1
    [again] = (await storage.claim("q", Take("v", 1, 60_000))).leases
    assert (again.id, again.run) == ("a", 2)
    assert again.token > held.token
    assert (await storage.check("q")).problems == {}


async def test_no_token_comes_back_however_often_a_backup_is_restored(
    opened: Opener, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock stands still before our time: the counters must rise by what the store itself has reached."""
    monkeypatch.setattr("penstock.storage.sqlite.connection.time.time_ns", lambda: 0)
    storage = await opened()
    penstock.backup(url, tmp_path / "copy")
    seen: list[int] = []
    for number in range(3):
        await storage.enqueue("q", [NewJob(f"{number}-{i}") for i in range(5)])
        seen += await tokens(storage, 5)
        await storage.close()
        penstock.restore(url, tmp_path / "copy")
        storage = await opened()

    assert len(set(seen)) == 15
    assert seen == sorted(seen)


async def test_a_backup_copied_by_hand_gets_a_new_epoch(
    opened: Opener, url: str, path: Path, tmp_path: Path
) -> None:
    storage = await opened()
    await storage.enqueue("q", [NewJob("a"), NewJob("b")])
    epoch = (await storage.read_events("q", after=0)).epoch
    penstock.backup(url, tmp_path / "copy")
    (token,) = await tokens(storage, 1)
    await storage.close()

    path.write_bytes((tmp_path / "copy").read_bytes())  # The file keeps its device and inode.

    storage = await opened()
    assert (await storage.read_events("q", after=0)).epoch != epoch
    assert await tokens(storage, 1) > [token]


async def test_a_backup_is_consistent_while_other_processes_write(
    opened: Opener, url: str, tmp_path: Path, peer: Starter
) -> None:
    writers = [peer("enqueue-forever", name) for name in ("one", "two")]
    accepted: set[str] = set()
    for number in range(5):
        for writer in writers:
            assert writer.stdout is not None
            accepted |= {writer.stdout.readline().strip() for _ in range(20)}
        copy = tmp_path / f"copy-{number}"
        penstock.backup(url, copy)

        storage = await opened(f"sqlite:///{copy}")
        assert accepted <= set(await ids(storage, "shared"))
        assert (await storage.check("shared")).problems == {}
        await storage.close()


async def test_a_restore_is_refused_while_another_process_uses_the_store(
    opened: Opener, url: str, path: Path, tmp_path: Path, peer: Starter
) -> None:
    storage = await opened()
    await storage.enqueue("q", [NewJob("a")])
    penstock.backup(url, tmp_path / "copy")
    await storage.enqueue("q", [NewJob("b")])
    await storage.close()
    idle = peer("work-off", "idle")
    assert idle.stdout is not None
    assert idle.stdout.readline() == "ready\n"
    inode = path.stat().st_ino

    with pytest.raises(StorageUnavailable, match="another process uses it"):
        penstock.restore(url, tmp_path / "copy")

    assert path.stat().st_ino == inode
    idle.kill()
    idle.wait()
    assert await ids(await opened()) == ["a", "b"]


async def test_a_restore_is_refused_while_this_process_uses_the_store(
    opened: Opener, url: str, tmp_path: Path
) -> None:
    storage = await opened()
    penstock.backup(url, tmp_path / "copy")

    with pytest.raises(StorageUnavailable, match="this process has it open"):
        penstock.restore(url, tmp_path / "copy")

    assert (await storage.enqueue("q", [NewJob("a")]))[0].status == "queued"


async def test_a_process_that_waited_for_the_store_during_a_restore_uses_the_restored_one(
    opened: Opener, url: str, path: Path, peer: Starter, tmp_path: Path
) -> None:
    """It has opened the old file by then. The rename must not leave it there."""
    storage = await opened()
    await storage.enqueue("q", [NewJob("a")])
    await storage.close()
    penstock.backup(url, tmp_path / "copy")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA journal_mode = DELETE")
    holder.execute("BEGIN EXCLUSIVE")
    waiting = peer("enqueue-once", "b")
    await_open(path, waiting.pid)

    (tmp_path / "copy").replace(path)
    holder.execute("ROLLBACK")
    holder.close()

    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "ready\n"
    waiting.communicate("\n", timeout=60)
    storage = await opened()
    assert await ids(storage, "shared") == ["b"]
    assert await ids(storage) == ["a"]


def await_open(path: Path, pid: int) -> None:
    """Wait until the process has opened the file."""
    deadline = time.monotonic() + 30
    while str(path) not in {file.path for file in psutil.Process(pid).open_files()}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_a_damaged_store_can_be_restored(opened: Opener, url: str, path: Path, tmp_path: Path) -> None:
    storage = await opened()
    await storage.enqueue("q", [NewJob("a")])
    penstock.backup(url, tmp_path / "copy")
    await storage.close()
    content = path.read_bytes()
    path.write_bytes(content[:4096] + os.urandom(len(content) - 4096))

    penstock.restore(url, tmp_path / "copy")

    storage = await opened()
    assert await ids(storage) == ["a"]
    assert (await storage.check("q")).problems == {}


async def test_a_backup_is_restored_to_a_place_without_a_store(
    opened: Opener, url: str, tmp_path: Path
) -> None:
    storage = await opened()
    await storage.enqueue("q", [NewJob("a")])
    penstock.backup(url, tmp_path / "copy")
    elsewhere = f"sqlite:///{tmp_path}/elsewhere.db"

    penstock.restore(elsewhere, tmp_path / "copy")

    assert await ids(await opened(elsewhere)) == ["a"]


async def test_a_log_left_over_from_a_crash_does_not_reach_the_restored_store(
    opened: Opener, url: str, path: Path, tmp_path: Path, peer: Starter
) -> None:
    storage = await opened()
    await storage.enqueue("q", [NewJob("a")])
    penstock.backup(url, tmp_path / "copy")
    await storage.close()
    writer = peer("enqueue-forever", "name")
    assert writer.stdout is not None
    for _ in range(50):
        writer.stdout.readline()
    writer.kill()
    writer.wait()
    assert Path(f"{path}-wal").exists()

    penstock.restore(url, tmp_path / "copy")

    storage = await opened()
    assert await ids(storage) == ["a"]
    assert await ids(storage, "shared") == []
    assert (await storage.check("q")).problems == {}


async def test_a_file_that_exists_is_overwritten_only_if_asked(
    storage: SqliteStorage, url: str, path: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.write_text("precious")

    with pytest.raises(InvalidOption, match="exists"):
        penstock.backup(url, copy)
    assert copy.read_text() == "precious"
    with pytest.raises(InvalidOption, match="is the store itself"):
        penstock.backup(url, path, overwrite=True)
    penstock.backup(url, copy, overwrite=True)

    assert copy.read_bytes().startswith(b"SQLite format 3")


@pytest.mark.usefixtures("storage")
def test_a_backup_can_be_read_by_its_owner_only_and_leaves_nothing_beside_it(
    url: str, tmp_path: Path
) -> None:
    target = tmp_path / "backups"
    target.mkdir()
    program = "import os, sys, penstock; os.umask(0); penstock.backup(*sys.argv[1:])"
    subprocess.run([sys.executable, "-c", program, url, str(target / "copy")], check=True)

    assert [(file.name, file.stat().st_mode & 0o777) for file in target.iterdir()] == [("copy", 0o600)]


async def test_a_restored_store_has_the_mode_of_the_one_before(
    opened: Opener, url: str, path: Path, tmp_path: Path
) -> None:
    await (await opened()).close()
    path.chmod(0o660)
    penstock.backup(url, tmp_path / "copy")

    penstock.restore(url, tmp_path / "copy")

    assert path.stat().st_mode & 0o777 == 0o660


@pytest.mark.parametrize("kind", ["text", "foreign", "newer", "damaged", "missing"])
async def test_a_file_that_is_not_a_backup_is_refused_and_the_store_stays(
    opened: Opener, url: str, tmp_path: Path, kind: str
) -> None:
    storage = await opened()
    await storage.enqueue("q", [NewJob("a", bytes(100_000))])
    copy = tmp_path / "copy"
    penstock.backup(url, copy)
    await storage.close()
    expected: dict[str, tuple[type[Exception], str]] = {
        "text": (InvalidOption, "is not a backup"),
        "foreign": (StorageVersion, "not a store of Penstock"),
        "newer": (StorageVersion, "Upgrade Penstock"),
        "damaged": (StorageDamaged, "damaged"),
        "missing": (InvalidOption, "is not a file"),
    }
    spoil(copy, kind)

    error, words = expected[kind]
    with pytest.raises(error, match=words):
        penstock.restore(url, copy)

    assert await ids(await opened()) == ["a"]
    assert {file.name for file in tmp_path.iterdir()} <= {
        "copy",
        "penstock.db",
        "penstock.db-wal",
        "penstock.db-shm",
    }


def spoil(copy: Path, kind: str) -> None:
    match kind:
        case "text":
            copy.write_text("a letter to my aunt\n" * 100)
        case "damaged":
            content = copy.read_bytes()
            copy.write_bytes(content[:8192] + bytes(len(content) - 8192))
        case "missing":
            copy.unlink()
        case _:
            statement = "PRAGMA application_id = 1" if kind == "foreign" else "PRAGMA user_version = 999"
            with sqlite3.connect(copy) as sql:
                sql.execute(statement)
            sql.close()


async def test_a_file_of_something_else_is_not_replaced(url: str, path: Path, tmp_path: Path) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    async with penstock.App(other):
        penstock.backup(other, tmp_path / "copy")
    path.write_text("a letter to my aunt\n" * 100)
    before = path.read_bytes()

    with pytest.raises(StorageVersion, match="not a SQLite database"):
        penstock.restore(url, tmp_path / "copy")

    assert path.read_bytes() == before


def test_a_store_that_does_not_exist_has_no_backup(url: str, path: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailable, match="does not exist"):
        penstock.backup(url, tmp_path / "copy")

    assert not path.exists()


@pytest.mark.parametrize(
    ("url", "words"),
    [("memory://", "in memory"), ("valkey://host", "RDB"), ("rediss+cluster://host", "append-only")],
)
def test_stores_without_a_file_say_what_to_use(url: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=words):
        penstock.backup(url, tmp_path / "copy")
    with pytest.raises(InvalidOption, match=words):
        penstock.restore(url, tmp_path / "copy")
