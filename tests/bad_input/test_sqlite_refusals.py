"""Files that SQLite cannot use, or no longer: each a class of its own, nothing half-written."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock import App, StorageFull, StorageReadOnly, StorageVersion
from penstock.storage.sqlite.engine import SqliteStorage
from tests.bad_input.conftest import QUEUE, assert_says, refused

NOBODY = 65534


def app_on(path: Path) -> App:
    return App(f"sqlite:///{path}")


async def put_one(path: Path) -> None:
    async with app_on(path) as app:
        await app.queue(QUEUE).enqueue("known", id="known")


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Root may write everywhere, so as root be nobody for a while."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


async def test_a_read_only_file_is_refused_and_left_as_it_is() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        path = Path(folder, "jobs.db")
        await put_one(path)
        path.chmod(0o444)
        Path(folder).chmod(0o555)
        before = path.read_bytes()
        with ordinary_user(), pytest.raises(StorageReadOnly) as caught:
            await app_on(path).connect()
        assert_says(caught.value, str(path), "is not writable", "write permission")
        assert path.read_bytes() == before
        Path(folder).chmod(0o755)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a letter to my aunt\n" * 100, ("is not a SQLite database", "Check the URL")),
        (None, ("the database of another program", "another file for Penstock")),
    ],
    ids=["no database", "another's database"],
)
async def test_a_file_that_is_not_ours_is_refused_and_left_as_it_is(
    content: bytes | None, words: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "jobs.db"
    if content is None:
        with sqlite3.connect(path) as sql:
            sql.execute("CREATE TABLE theirs (a)")
        sql.close()
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(StorageVersion) as caught:
        await app_on(path).connect()
    assert_says(caught.value, str(path), *words)
    if content is not None:
        assert path.read_bytes() == before


async def test_a_file_of_a_newer_penstock_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    await put_one(path)
    with sqlite3.connect(path) as sql:
        sql.execute("PRAGMA user_version = 999")
    sql.close()
    with pytest.raises(StorageVersion) as caught:
        await app_on(path).connect()
    assert_says(caught.value, "has format 999", "knows up to", "Upgrade Penstock")


async def test_a_full_disk_refuses_whole_calls_and_takes_them_once_there_is_room(tmp_path: Path) -> None:
    async with app_on(tmp_path / "jobs.db") as app:
        queue = app.queue(QUEUE)
        await queue.enqueue("known", id="known")
        storage = await app.connect()
        assert isinstance(storage, SqliteStorage)
        assert storage._session is not None
        sql = storage._session._database.writer.sql
        (pages,) = sql.execute("PRAGMA page_count").fetchone()
        sql.execute(f"PRAGMA max_page_count = {pages + 10}")
        words = ("no room", "This write was rolled back", "Free disk space")
        async with refused(app, StorageFull, *words):
            await queue.enqueue("x" * 1_000_000)
        async with refused(app, StorageFull, *words):
            await queue.enqueue_many(["small", *["x" * 20_000] * 5, "small"])
        sql.execute("PRAGMA max_page_count = 1000000")
        assert (await queue.enqueue("x" * 1_000_000)).status == "queued"
        assert (await queue.check()).problems == {}
