"""The write-ahead log stays short, and nobody can commit while it is copied."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.job import NewJob
from penstock.storage.sqlite import checkpoint
from penstock.storage.sqlite.connection import connect
from penstock.storage.sqlite.engine import SqliteStorage
from tests.storage.sqlite.conftest import Opener, Starter

QUEUE = "shared"
DUE_FRAMES = 100
LOOK_COMMITS = 4
FRAME_BYTES = 24 + 4096
COMMIT_FRAMES = 30
"""More than one enqueue writes."""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_DUE_FRAMES", DUE_FRAMES)
    monkeypatch.setattr(checkpoint, "_LOOK_COMMITS", LOOK_COMMITS)


@pytest.fixture
def log(path: Path) -> Callable[[], int]:
    """How long the log has ever been since it was made, in frames: it is written anew from its beginning."""
    return lambda: path.with_name(f"{path.name}-wal").stat().st_size // FRAME_BYTES


def on_checkpoint(monkeypatch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Do something each time a checkpoint begins."""

    def connect_and_watch(path: str) -> sqlite3.Connection:
        sql = connect(path)
        sql.set_trace_callback(lambda statement: do() if "wal_checkpoint" in statement else None)
        return sql

    monkeypatch.setattr(checkpoint, "connect", connect_and_watch)


async def enqueue(storage: SqliteStorage, count: int, *, name: str = "job") -> None:
    for number in range(count):
        await storage.enqueue(QUEUE, [NewJob(f"{name}-{number}", bytes(2000))])


async def test_no_connection_of_ours_checkpoints_by_itself(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[sqlite3.Connection] = []
    original = sqlite3.connect

    def connect_and_keep(*arguments: object, **options: object) -> sqlite3.Connection:
        made.append(original(*arguments, **options))  # type: ignore[call-overload]
        return made[-1]

    monkeypatch.setattr(sqlite3, "connect", connect_and_keep)
    storage = await opened()
    await enqueue(storage, 100)
    await storage.counts(QUEUE)

    assert len(made) == 3, "one writes, one reads, one checkpoints"
    assert [sql.execute("PRAGMA wal_autocheckpoint").fetchone() for sql in made] == [(0,)] * 3


async def test_nobody_can_commit_while_a_checkpoint_runs(
    opened: Opener, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    other = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)

    def try_to_write() -> None:
        try:
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")
            refused.append("")
        except sqlite3.OperationalError as error:
            refused.append(str(error))

    on_checkpoint(monkeypatch, try_to_write)
    await enqueue(await opened(), 200)
    other.close()

    assert len(refused) > 2
    assert set(refused) == {"database is locked"}


async def test_the_log_starts_over_when_it_was_copied(
    opened: Opener, log: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[float] = []
    on_checkpoint(monkeypatch, lambda: begun.append(time.monotonic()))
    storage = await opened()

    await enqueue(storage, 500)

    assert log() <= DUE_FRAMES + LOOK_COMMITS * COMMIT_FRAMES
    assert 10 < len(begun) <= 500 / LOOK_COMMITS


async def test_the_log_grows_while_somebody_reads_and_starts_over_afterwards(
    opened: Opener, path: Path, log: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[float] = []
    on_checkpoint(monkeypatch, lambda: begun.append(time.monotonic()))
    monkeypatch.setattr(checkpoint, "_MOST_PATIENCE_S", 0)
    storage = await opened()
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM jobs").fetchone() == (0,)

    await enqueue(storage, 300)
    grown = log()
    tries = len(begun)
    reader.close()
    await enqueue(storage, 300, name="more")

    assert grown > 5 * DUE_FRAMES
    assert tries < 20, "rarer as it grows"
    assert log() <= 1.5 * grown
    assert (await storage.counts(QUEUE)).waiting == 600


async def test_a_log_that_grew_too_long_gives_its_room_back(
    opened: Opener, path: Path, log: Callable[[], int]
) -> None:
    storage = await opened()
    session = storage._session
    assert session is not None
    session._database.writer.sql.execute(f"PRAGMA journal_size_limit = {DUE_FRAMES * FRAME_BYTES}")
    await storage.enqueue(QUEUE, [NewJob(f"large-{i}", bytes(4000)) for i in range(1000)])
    assert log() > 1000

    await enqueue(storage, LOOK_COMMITS)

    assert log() <= DUE_FRAMES


async def test_the_log_stays_short_while_several_processes_write_and_read(
    storage: SqliteStorage, peer: Starter, log: Callable[[], int]
) -> None:
    peers = [peer("fill", f"p{i}", str(DUE_FRAMES)) for i in range(3)]

    outputs = await asyncio.gather(*(asyncio.to_thread(process.communicate) for process in peers))

    assert [len(output.splitlines()) for output, _ in outputs] == [400] * 3
    assert (await storage.counts(QUEUE)).waiting == 1200
    assert not (await storage.check(QUEUE)).problems
    # All in all they wrote more than 10,000 frames. Some reads outlast a checkpoint: then it takes another.
    assert log() < 10 * DUE_FRAMES


async def test_nothing_answered_is_lost_when_processes_die_in_checkpoints(
    storage: SqliteStorage, peer: Starter, path: Path
) -> None:
    answered: list[str] = []
    for round_ in range(5):
        doomed, other = peer("checkpoint-forever", f"a{round_}"), peer("checkpoint-forever", f"b{round_}")
        assert doomed.stdout is not None
        said = ""
        while said.count("checkpoint\n") < 3 + 2 * round_:
            said += doomed.stdout.readline()
        time.sleep(round_ * 0.0003)  # Not for something to happen: to be killed at other moments.
        for process, so_far in ((doomed, said), (other, "")):
            process.send_signal(signal.SIGKILL)
            assert process.stdout is not None
            *lines, _cut_off = (so_far + process.stdout.read()).split("\n")
            answered += [line for line in lines if line != "checkpoint"]
    jobs = await storage.get(QUEUE, answered)

    assert len(answered) > 200
    assert [id_ for id_, job in zip(answered, jobs, strict=True) if job is None] == []
    assert not (await storage.check(QUEUE)).problems
    sql = sqlite3.connect(path)
    assert sql.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    sql.close()
    page = await storage.read_events(QUEUE, after=0, limit=1_000_000)
    assert [event.seq for event in page.events] == list(range(1, page.last + 1))
