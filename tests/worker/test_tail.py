"""What a command prints, on its way into the job's log."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import Future
from typing import Any, cast

import pytest

from penstock.errors import StorageError
from penstock.worker.context import JobContext
from penstock.worker.reporter import JobUpdate, Receipt
from penstock.worker.runners import command
from penstock.worker.runners.command import LogTail
from tests.worker.conftest import until


class Log:
    """Takes lines as a job's context does."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.skipped = 0

    def pass_on(self, update: JobUpdate) -> Receipt:
        self.lines.append(update.log or "")
        self.skipped += update.log_skipped
        return Receipt()


async def tailed(*chunks: bytes) -> tuple[LogTail, list[str]]:
    tail, log = await tailed_log(*chunks)
    assert log.skipped == 0
    return tail, log.lines


async def tailed_log(*chunks: bytes) -> tuple[LogTail, Log]:
    log, stream = Log(), asyncio.StreamReader(limit=2**30)
    tail = LogTail(cast(JobContext, log))
    for chunk in chunks:
        stream.feed_data(chunk)
    stream.feed_eof()
    await tail.follow(stream)
    return tail, log


async def test_lines_come_as_they_were_printed_wherever_a_read_cuts_them() -> None:
    tail, lines = await tailed(b"one\ntw", b"o\r\n\n", b"caf\xe9\nlast")

    assert lines == ["one", "two", "", "caf�", "last"]
    assert tail.last == "last"


async def test_of_a_million_lines_the_newest_are_kept_and_the_others_counted() -> None:
    tail, log = await tailed_log(b"".join(b"%d\n" % n for n in range(1_000_000)))

    assert log.lines == [str(n) for n in range(999_000, 1_000_000)]
    assert log.skipped == 999_000
    assert tail.last == "999999"


async def test_exactly_as_many_lines_as_are_kept_are_all_there() -> None:
    _, lines = await tailed(b"".join(b"%d\n" % n for n in range(1000)))

    assert lines == [str(n) for n in range(1000)]


async def test_a_line_without_an_end_is_cut() -> None:
    _, lines = await tailed("ü".encode() * 3_000 + b"\nnext")

    assert lines == ["ü" * 2_000 + " …", "next"]


async def test_a_tail_that_is_cancelled_has_reported_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_REPORT_EVERY_S", 3600)
    log, stream = Log(), asyncio.StreamReader()
    tail = LogTail(cast(JobContext, log))
    following = asyncio.create_task(tail.follow(stream))
    stream.feed_data(b"one\n")
    await until(lambda: log.lines == ["one"])
    stream.feed_data(b"two\nrest")
    await until(lambda: tail.last == "two")
    assert log.lines == ["one"]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)

    assert following.cancelled()
    assert log.lines == ["one", "two", "rest"]


async def test_a_receipt_without_a_waiter_may_be_refused_silently() -> None:
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))
    future: Future[None] = Future()

    async def wait(receipt: Receipt) -> None:
        await receipt

    waiting = asyncio.create_task(wait(Receipt(future)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    future.set_exception(StorageError("the disk is full"))
    for _ in range(5):
        await asyncio.sleep(0)
    del waiting, future
    gc.collect()
    assert heard == []
