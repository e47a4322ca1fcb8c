"""Which files are accepted, and what is said of those that are not."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

from penstock.core.job import Extras, NewJob
from penstock.errors import InvalidOption, StorageReadOnly, StorageUnavailable, StorageVersion
from penstock.storage.sqlite.engine import SqliteStorage
from tests.storage.sqlite.conftest import Opener


async def test_data_is_there_when_the_file_is_opened_again(opened: Opener) -> None:
    storage = await opened()
    await storage.enqueue("q", [NewJob("a", b"payload")])
    epoch = (await storage.read_events("q", after=0)).epoch
    await storage.close()

    again = await opened()

    (job,) = await again.get("q", ["a"])
    assert job
    assert job.payload == b"payload"
    assert (await again.read_events("q", after=0)).epoch == epoch


async def test_the_file_is_durable_and_in_wal_mode(storage: SqliteStorage) -> None:
    session = storage._session
    assert session is not None
    sql = session._database.writer.sql

    assert sql.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert sql.execute("PRAGMA synchronous").fetchone() == (2,)


async def test_a_copy_that_takes_the_files_place_has_another_epoch(opened: Opener, path: Path) -> None:
    storage = await opened()
    await storage.enqueue("q", [NewJob("a")])
    epoch = (await storage.read_events("q", after=0)).epoch
    await storage.close()
    shutil.copy(path, path.with_suffix(".backup"))
    path.with_suffix(".backup").replace(path)

    restored = await opened()

    page = await restored.read_events("q", after=0)
    assert page.epoch != epoch
    assert page.last == 1


async def test_a_newer_format_is_refused(opened: Opener, path: Path) -> None:
    storage = await opened()
    await storage.close()
    with sqlite3.connect(path) as sql:
        sql.execute("PRAGMA user_version = 999")
    sql.close()

    with pytest.raises(StorageVersion, match=r"format 999.*Upgrade Penstock"):
        await opened()


async def test_a_database_of_something_else_is_refused(opened: Opener, path: Path) -> None:
    with sqlite3.connect(path) as sql:
        sql.execute("CREATE TABLE theirs (a)")
    sql.close()

    with pytest.raises(StorageVersion, match="the database of another program"):
        await opened()


async def test_a_file_that_is_not_a_database_is_refused(opened: Opener, path: Path) -> None:
    path.write_text("this is a letter to my aunt\n" * 100)

    with pytest.raises(StorageVersion, match="not a SQLite database"):
        await opened()


async def test_a_directory_that_does_not_exist_is_named(opened: Opener, tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailable, match="directory does not exist"):
        await opened(f"sqlite:///{tmp_path}/missing/penstock.db")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
async def test_a_file_without_write_permission_is_refused(opened: Opener, path: Path) -> None:
    await (await opened()).close()
    path.chmod(0o444)

    with pytest.raises(StorageReadOnly, match="write permission"):
        await opened()


async def test_a_database_that_became_read_only_refuses_writes_and_still_reads(
    storage: SqliteStorage,
) -> None:
    await storage.enqueue("q", [NewJob("a")])
    session = storage._session
    assert session is not None
    session._database.writer.sql.execute("PRAGMA query_only = ON")

    with pytest.raises(StorageReadOnly, match="write permission"):
        await storage.enqueue("q", [NewJob("b")])

    assert (await storage.counts("q")).waiting == 1


async def test_a_lock_held_for_too_long_is_an_error_and_the_call_can_be_repeated(
    opened: Opener, path: Path
) -> None:
    storage = await opened(f"sqlite:///{path}?timeout=50ms")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")

    with pytest.raises(StorageUnavailable, match="lock"):
        await storage.enqueue("q", [NewJob("a")])
    holder.execute("ROLLBACK")
    holder.close()

    (answer,) = await storage.enqueue("q", [NewJob("a")])
    assert answer.status == "queued"


async def test_a_file_that_another_process_is_about_to_make_is_waited_for(opened: Opener, path: Path) -> None:
    maker = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    maker.execute("BEGIN EXCLUSIVE")
    done = threading.Timer(0.2, maker.execute, ["ROLLBACK"])
    done.start()

    storage = await opened()

    done.join()
    maker.close()
    (answer,) = await storage.enqueue("q", [NewJob("a")])
    assert answer.status == "queued"


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("sqlite://penstock.db", "three slashes"),
        ("sqlite:///", "three slashes"),
        ("sqlite:///penstock.db?colour=red", "unknown option 'colour'"),
        ("sqlite:///penstock.db?timeout=soon", "timeout"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused(bad: str, why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        SqliteStorage.from_url(bad)


async def test_unnamed_databases_in_memory_are_private_and_named_ones_are_shared(opened: Opener) -> None:
    private, other = await opened("memory://"), await opened("memory://")
    named, same = await opened("memory://test-files"), await opened("memory://test-files")

    await private.enqueue("q", [NewJob("a")])
    await named.enqueue("q", [NewJob("b")])

    assert await other.get("q", ["a"]) == [None]
    (job,) = await same.get("q", ["b"])
    assert job is not None


async def test_check_finds_and_mends_what_does_not_fit(storage: SqliteStorage) -> None:
    await storage.enqueue("q", [NewJob(f"job-{i}") for i in range(4)])
    session = storage._session
    assert session is not None
    sql = session._database.writer.sql
    sql.execute("DELETE FROM payloads WHERE job = 1")
    sql.execute("DELETE FROM jobs WHERE id = 'job-1'")
    sql.execute("INSERT INTO waiters VALUES (999, 'nobody')")

    found = await storage.check("q", repair=True)

    assert dict(found.problems) == {
        "payloads_without_job": 1,
        "waiters_without_job": 1,
        "damaged_jobs": 1,
    }
    assert found.repaired
    assert not (await storage.check("q")).problems
    counts = await storage.counts("q")
    assert (counts.waiting, counts.failed) == (2, 1)


async def test_check_mends_holds_and_signals_without_a_job(storage: SqliteStorage) -> None:
    await storage.enqueue("q", [NewJob("a", extras=Extras(holds={"ledger": 60_000}))])
    await storage.cancel("q", ["a"])
    session = storage._session
    assert session is not None
    sql = session._database.writer.sql
    sql.execute("INSERT INTO holds VALUES (1, 'ledger', 1, 'ghost', 999)")
    sql.execute("INSERT INTO signals VALUES (999, 1, 'go', x'00')")

    found = await storage.check("q", repair=True)

    assert dict(found.problems) == {"holds_without_job": 1, "signals_without_job": 1}
    assert not (await storage.check("q")).problems
    assert [job.id for job in (await storage.held("q", "ledger")).jobs] == ["a"]


async def test_a_path_may_have_characters_that_mean_something_in_a_uri(
    opened: Opener, tmp_path: Path
) -> None:
    path = tmp_path / "50% of #1? ü&mode=ro.db"

    storage = await opened(f"sqlite:///{quote(str(path))}")
    await storage.enqueue("q", [NewJob("a")])

    assert path.exists()
    assert (await storage.counts("q")).waiting == 1


@pytest.mark.filterwarnings("error::ResourceWarning")
async def test_a_file_that_is_refused_is_closed(opened: Opener, path: Path) -> None:
    path.write_text("this is a letter to my aunt\n" * 100)
    with pytest.raises(StorageVersion):
        await opened()

    assert str(path) not in {file.path for file in psutil.Process().open_files()}
