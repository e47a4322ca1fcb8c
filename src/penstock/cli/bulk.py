"""Thousands of jobs from a file, a pipe or a terminal, one per line."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

import click

from penstock.cli.errors import CommandLineError, ExitCode
from penstock.client.handle import enqueue_many
from penstock.client.situation import counted
from penstock.errors import InvalidInput, StorageError

if TYPE_CHECKING:
    from penstock.cli.newjobs import NewJobs
    from penstock.client.codec import JobCodec
    from penstock.core.job import NewJob


_MOST_BYTES: Final = 512 * 1024
"""Bytes per read: a few thousand lines."""

_ByQueue = dict[str, tuple["JobCodec", list["NewJob"]]]


async def read_lines(descriptor: int) -> AsyncIterator[list[bytes]]:
    """Yield all whole lines that are available; the last line may lack its newline. Can be cancelled at any time."""
    source = _Source(descriptor)
    partial: list[bytes] = []
    while chunk := await source.chunk():
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join([*partial, lines[0]])
            partial.clear()
            yield lines
        partial.append(rest)
    if last := b"".join(partial):
        yield [last]


class _Source:
    """Reads without a thread: a thread that waits for a pipe or a terminal cannot be stopped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._has_ended = False

    async def chunk(self) -> bytes:
        """Return the bytes that are available, at least one; nothing at the end."""
        if self._has_ended:
            return b""
        await self._until_readable()
        chunks = [os.read(self._descriptor, _MOST_BYTES)]
        while chunks[-1] and sum(map(len, chunks)) < _MOST_BYTES and self._is_readable():
            chunks.append(os.read(self._descriptor, _MOST_BYTES))
        # A terminal reports its end only once.
        self._has_ended = not chunks[-1]
        return b"".join(chunks)

    def _is_readable(self) -> bool:
        return bool(select.select([self._descriptor], [], [], 0)[0])

    async def _until_readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        try:
            loop.add_reader(self._descriptor, readable.set)
        except PermissionError:
            # A file on a disk is always readable.
            return
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._descriptor)


class Totals:
    """The number of lines read, of lines refused, and of jobs by the answer of the store."""

    def __init__(self) -> None:
        self.lines = 0
        self.refused = 0
        self.answers: Counter[str] = Counter()

    @property
    def jobs(self) -> int:
        return self.answers.total()


async def enqueue_lines(
    descriptor: int, jobs: NewJobs, *, keep_going: bool = False, print_ids: bool = False
) -> Totals:
    """Enqueue a job for each line that is neither empty nor a comment, a few thousand at a time.

    Raise ``CommandLineError`` at a line that is not a job: it, and the lines read with it, are not enqueued. With
    ``keep_going``, report the line on stderr and go on. With ``print_ids``, print each id once its job is stored.
    """
    totals = Totals()
    with _progress(totals) as show:
        writer = _Writer(totals, show, print_ids=print_ids)
        try:
            async for lines in read_lines(descriptor):
                await writer.put(_jobs_of(lines, jobs, totals, keep_going=keep_going))
                totals.lines += len(lines)
            await writer.settle()
        except (asyncio.CancelledError, CommandLineError) as stop:
            # Finish the batch that is being written, so that the message counts it.
            await writer.settle()
            if isinstance(stop, asyncio.CancelledError):
                click.echo(f"{counted(totals.jobs, 'job')} enqueued", err=True)
            raise
        except StorageError as error:
            if totals.jobs:
                error.add_note(f"{counted(totals.jobs, 'job')} of earlier lines were enqueued.")
            raise
    return totals


class _Writer:
    """Writes one batch while the next lines are read and checked."""

    def __init__(self, totals: Totals, show: Callable[[], None], *, print_ids: bool) -> None:
        self._totals = totals
        self._print_ids = print_ids
        self._show = show
        self._writing: asyncio.Task[None] | None = None

    async def put(self, batch: _ByQueue) -> None:
        await self.settle()
        self._writing = asyncio.create_task(self._write(batch))

    async def settle(self) -> None:
        """Wait until the batch is stored. Can be cancelled, and called again."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None
            self._show()

    async def _write(self, batch: _ByQueue) -> None:
        for source, jobs in batch.values():
            handles = await enqueue_many(source, jobs)
            self._totals.answers.update(str(handle.status) for handle in handles)
            if self._print_ids:
                click.echo("".join(f"{handle.id}\n" for handle in handles), nl=False)


def _jobs_of(lines: list[bytes], jobs: NewJobs, totals: Totals, *, keep_going: bool) -> _ByQueue:
    """Return the jobs of these lines by queue, all of them checked."""
    batch: _ByQueue = {}
    for number, text in enumerate(lines, totals.lines + 1):
        if not text.strip() or text.lstrip().startswith(b"#"):
            continue
        try:
            source, job = jobs.from_text(text)
        except InvalidInput as error:
            if not keep_going:
                raise _refused(number, error, totals) from error
            totals.refused += 1
            click.echo(f"penstock: line {number}: {error}", err=True)
        else:
            batch.setdefault(source.queue, (source, []))[1].append(job)
    return batch


def _refused(number: int, error: InvalidInput, totals: Totals) -> CommandLineError:
    before = f"The lines up to {totals.lines} were enqueued" if totals.lines else "Nothing was enqueued"
    return CommandLineError(
        f"line {number}: {error} {before}. Fix the line, or skip bad lines with --keep-going.", ExitCode.USAGE
    )


def _progress(totals: Totals) -> AbstractContextManager[Callable[[], None]]:
    """Count the jobs on a terminal, unless the user types them there."""
    is_visible = sys.stderr.isatty() and not sys.stdin.isatty()
    return _Counting(totals) if is_visible else nullcontext(lambda: None)


class _Counting:
    def __init__(self, totals: Totals) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        from penstock.cli.output import console

        self._totals = totals
        columns = (SpinnerColumn(), TextColumn("{task.completed} jobs enqueued"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Callable[[], None]:
        self._progress.start()
        return lambda: self._progress.update(self._task, completed=self._totals.jobs)

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
