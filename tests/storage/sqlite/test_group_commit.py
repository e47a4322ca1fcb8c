"""Calls that are pending together share a transaction; one that fails does not spoil the others."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from typing import Any

import pytest

from penstock.core.job import NewJob
from penstock.core.outcome import Complete
from penstock.errors import JobNotFound, StorageError, StorageFull, StorageUnavailable
from penstock.storage.sqlite.engine import SqliteStorage
from penstock.storage.sqlite.writer import Writer
from penstock.storage.values import Settlement, Take
from tests.storage.sqlite.conftest import Opener

BIG = b"x" * 200_000


def writer_of(storage: SqliteStorage) -> Writer:
    session = storage._session
    assert session is not None
    return session._database.writer


def allow_pages(storage: SqliteStorage, more: int) -> None:
    """Let the database grow by so many pages: a disk that is nearly full."""
    sql = writer_of(storage).sql
    (count,) = sql.execute("PRAGMA page_count").fetchone()
    sql.execute(f"PRAGMA max_page_count = {count + more}")


class Failing:
    """A connection on which some statements raise, once each, without being executed."""

    def __init__(self, sql: sqlite3.Connection, errors: dict[str, BaseException]) -> None:
        self._sql = sql
        self._errors = errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sql, name)

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        error = self._errors.pop(statement, None)
        if error is not None:
            raise error
        return self._sql.execute(statement, *values)


def fail_once(storage: SqliteStorage, **errors: BaseException) -> None:
    """Have the writer's next ``COMMIT`` or ``ROLLBACK`` raise this."""
    writer = writer_of(storage)
    setattr(writer, "sql", Failing(writer.sql, dict(errors)))  # noqa: B010 (mypy knows what it is not)


async def test_calls_that_are_pending_together_are_committed_once(storage: SqliteStorage) -> None:
    before = writer_of(storage).commits

    answers = await asyncio.gather(*(storage.enqueue("q", [NewJob(f"job-{i}")]) for i in range(100)))

    assert [answer.status for (answer,) in answers] == ["queued"] * 100
    assert writer_of(storage).commits - before == 1
    page = await storage.read_events("q", after=0)
    assert [event.id for event in page.events] == [f"job-{i}" for i in range(100)]


async def test_a_single_call_is_committed_immediately(storage: SqliteStorage) -> None:
    before = writer_of(storage).commits

    await storage.enqueue("q", [NewJob("a")])
    await storage.enqueue("q", [NewJob("b")])

    assert writer_of(storage).commits - before == 2


async def test_a_large_group_runs_on_the_thread_and_gives_the_same_answers(storage: SqliteStorage) -> None:
    answers = await storage.enqueue("q", [NewJob(f"job-{i}") for i in range(5_000)])

    assert {answer.status for answer in answers} == {"queued"}
    assert (await storage.counts("q")).waiting == 5_000


async def test_a_call_that_fails_leaves_the_others_of_its_group_alone(storage: SqliteStorage) -> None:
    before = writer_of(storage).commits

    first, refused, last = await asyncio.gather(
        storage.enqueue("q", [NewJob("a")]),
        storage.watch("q", ["a", "unknown"], listener="me"),
        storage.enqueue("q", [NewJob("b")]),
        return_exceptions=True,
    )

    assert isinstance(refused, JobNotFound)
    assert not isinstance(first, BaseException)
    assert not isinstance(last, BaseException)
    assert (first[0].incarnation, last[0].incarnation) == (1, 2)
    assert writer_of(storage).commits - before == 1


async def test_a_call_that_is_refused_wakes_no_counter(storage: SqliteStorage) -> None:
    await storage.enqueue("q", [NewJob("a")])
    await storage.claim("q", Take("w", 1, 60_000))

    with pytest.raises(StorageError, match="active"):
        await storage.obliterate("q")

    assert (await storage.counts("q")).active == 1
    assert (await storage.read_events("q", after=0)).last == 2


async def test_a_full_disk_refuses_the_call_that_needs_room_and_serves_the_others(
    storage: SqliteStorage,
) -> None:
    await storage.enqueue("q", [NewJob("here")])
    allow_pages(storage, 20)

    big, small = await asyncio.gather(
        storage.enqueue("q", [NewJob("big", BIG)]),
        storage.claim("q", Take("w", 1, 60_000)),
        return_exceptions=True,
    )

    assert isinstance(big, StorageFull)
    assert not isinstance(small, BaseException)
    assert [lease.id for lease in small.leases] == ["here"]
    assert await storage.get("q", ["big"]) == [None]
    assert not (await storage.check("q")).problems


async def test_after_the_disk_was_full_the_same_call_succeeds(storage: SqliteStorage) -> None:
    allow_pages(storage, 10)
    with pytest.raises(StorageFull, match="Free disk space"):
        await storage.enqueue("q", [NewJob("big", BIG)])
    allow_pages(storage, 1_000)

    (answer,) = await storage.enqueue("q", [NewJob("big", BIG)])

    assert (answer.status, answer.incarnation) == ("queued", 1)


async def test_what_was_not_begun_when_the_storage_closes_is_refused(opened: Opener) -> None:
    storage = await opened()
    call = asyncio.ensure_future(storage.enqueue("q", [NewJob("a")]))
    await asyncio.sleep(0)

    await storage.close()

    with pytest.raises(StorageUnavailable, match="closed"):
        await call
    with pytest.raises(StorageError, match="not open"):
        await storage.counts("q")


async def test_two_storages_of_one_process_share_the_writer(opened: Opener) -> None:
    one, other = await opened(), await opened(namespace="other")

    await asyncio.gather(one.enqueue("q", [NewJob("a")]), other.enqueue("q", [NewJob("a")]))

    assert writer_of(one) is writer_of(other)
    assert (await one.counts("q")).waiting == (await other.counts("q")).waiting == 1


async def test_storages_of_several_loops_share_a_database(url: str, storage: SqliteStorage) -> None:
    async def in_another_loop() -> None:
        other = SqliteStorage.from_url(url)
        await other.open()
        for i in range(20):
            await other.enqueue("q", [NewJob(f"other-{i}")])
        await other.close()

    thread = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(in_another_loop())))
    for i in range(20):
        await storage.enqueue("q", [NewJob(f"mine-{i}")])
    await thread

    assert (await storage.counts("q")).waiting == 40
    page = await storage.read_events("q", after=0)
    assert [event.seq for event in page.events] == list(range(1, 41))


async def test_a_call_cancelled_before_its_turn_is_not_made(storage: SqliteStorage) -> None:
    await storage.enqueue("q", [NewJob("a")])
    call = asyncio.ensure_future(storage.claim("q", Take("w", 1, 60_000)))
    await asyncio.sleep(0)
    call.cancel()

    await asyncio.gather(call, return_exceptions=True)

    assert call.cancelled()
    assert (await storage.counts("q")).active == 0


@pytest.mark.parametrize("other", ["memory://", None])
async def test_a_call_is_refused_though_neither_its_commit_nor_its_rollback_works(
    opened: Opener, other: str | None
) -> None:
    storage = await opened(other)
    await storage.enqueue("q", [NewJob("before")])
    failure = sqlite3.OperationalError("disk I/O error")
    fail_once(storage, COMMIT=failure, ROLLBACK=failure)

    with pytest.raises(StorageError, match="disk I/O error"):
        await storage.enqueue("q", [NewJob("a")])

    # The transaction is still open: no other call may slip into it, and one of the next ends it.
    for i in range(3):
        await asyncio.gather(storage.enqueue("q", [NewJob(f"after-{i}")]), return_exceptions=True)
    jobs = await storage.get("q", ["before", "a", "after-2"])
    assert [job is not None for job in jobs] == [True, False, True]
    assert not (await storage.check("q")).problems


def test_an_interrupted_commit_confirms_no_call() -> None:
    calls: list[asyncio.Future[str]] = []
    sql: list[sqlite3.Connection] = []
    storage = SqliteStorage.from_url("memory://")

    async def interrupted() -> None:
        await storage.open()
        sql.append(writer_of(storage).sql)
        fail_once(storage, COMMIT=KeyboardInterrupt())
        assert storage._session is not None
        calls.append(storage._session.write("q", lambda step: "done"))
        await calls[0]

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())

    assert isinstance(calls[0].exception(), StorageUnavailable)
    sql[0].close()  # Python 3.13 warns of connections that nobody closed.


async def test_calls_are_answered_though_no_file_descriptor_is_left_to_signal_with(
    storage: SqliteStorage, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    folder = writer_of(storage)._on_commit.__self__.folder  # type: ignore[attr-defined]
    (folder / "999999-other.1.w").touch()
    with monkeypatch.context() as patched:
        patched.setattr("penstock.storage.sqlite.wake.socket.socket", none_left)
        async with asyncio.timeout(10):
            await storage.enqueue("q", [NewJob("a")])
            await storage.enqueue("q", [NewJob("b")])
            assert await storage.wait("q", timeout_ms=0)
    (folder / "999999-other.1.w").unlink()

    assert (await storage.counts("q")).waiting == 2


async def test_news_that_were_read_in_a_group_with_a_failing_call_are_not_lost(opened: Opener) -> None:
    """Such a group is run twice, and in memory reads are part of it."""
    storage = await opened("memory://")
    await storage.enqueue("q", [NewJob("a")])
    await storage.watch("q", ["a"], listener="me")
    (lease,) = (await storage.claim("q", Take("w", 1, 1000))).leases
    await storage.settle("q", [Settlement(lease.id, lease.token, Complete())])

    found, failed = await asyncio.gather(
        storage.listen("q", "me", timeout_ms=0),
        storage.watch("q", ["unknown"], listener="me"),
        return_exceptions=True,
    )

    assert isinstance(failed, JobNotFound)
    assert isinstance(found, list)
    assert [news.id for news in found] == ["a"]


async def test_watching_jobs_that_have_ended_does_not_take_the_writer(storage: SqliteStorage) -> None:
    await storage.enqueue("mail", [NewJob("a"), NewJob("b")])
    [lease] = (await storage.claim("mail", Take("worker", 1, 60_000))).leases
    await storage.settle("mail", [Settlement("a", lease.token, Complete(b"done"))])
    before = writer_of(storage).commits

    [ended] = await storage.watch("mail", ["a"], listener="l")
    assert ended is not None
    assert ended.result == b"done"
    assert writer_of(storage).commits == before

    both = await storage.watch("mail", ["a", "b"], listener="l")
    assert both == [ended, None]
    assert writer_of(storage).commits == before + 1
