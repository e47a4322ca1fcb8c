"""Lines of a file, a pipe or a terminal, as they come."""

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
from penstock.client.bulk import enqueue_many
from penstock.errors import InvalidInput, StorageError

if TYPE_CHECKING:
    from penstock.cli.newjobs import NewJobs
    from penstock.client.codec import JobCodec
    from penstock.core.job import NewJob


_MOST_BYTES: Final = 512 * 1024
"""How much is read at a time, if so much is there: some thousand lines."""


async def read_lines(descriptor: int) -> AsyncIterator[list[bytes]]:
    """Whole lines, all that are there at a time; a last one may have no end. May be cancelled while nothing comes."""
    source = _Source(descriptor)
    unended: list[bytes] = []
    while chunk := await source.chunk():
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join([*unended, lines[0]])
            unended.clear()
            yield lines
        unended.append(rest)
    if last := b"".join(unended):
        yield [last]


class _Source:
    """Reads without a thread, which could not be stopped while it waits for a pipe or for somebody who types."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._has_ended = False

    async def chunk(self) -> bytes:
        """What is there, at least a byte of it; nothing at the end."""
        if self._has_ended:
            return b""
        await self._until_readable()
        chunks = [os.read(self._descriptor, _MOST_BYTES)]
        while chunks[-1] and sum(map(len, chunks)) < _MOST_BYTES and self._is_readable():
            chunks.append(os.read(self._descriptor, _MOST_BYTES))
        # A terminal tells its end once only.
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
            # A file on a disk, which can always be read.
            return
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._descriptor)


# Thousands of jobs from a file or a pipe, a line each.


_ByQueue = dict[str, tuple["JobCodec", list["NewJob"]]]


class Totals:
    """How many lines were read, what was answered to their jobs, and how many lines were passed over as no jobs."""

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
    """Put in a job for each line that is neither empty nor a comment, as they come, some thousand at a time.

    Raise ``CommandLineError`` at a line that is not a job: it, and the lines read with it, are not enqueued. With
    ``keep_going``, report such a line on stderr and go on. With ``print_ids``, print each id once its job is stored.
    """
    totals = Totals()
    with _progress(totals) as show:
        writer = _Writer(totals, show, print_ids=print_ids)
        try:
            async for lines in read_lines(descriptor):
                made = _made(lines, jobs, totals, keep_going=keep_going)
                await writer.put(made)
                totals.lines += len(lines)
            await writer.settle()
        except (asyncio.CancelledError, CommandLineError) as stop:
            # What is under way goes in: how many are in has to be true when it is told.
            await writer.settle()
            if isinstance(stop, asyncio.CancelledError):
                click.echo(f"{totals.jobs} jobs are in", err=True)
            raise
        except StorageError as error:
            if totals.jobs:
                error.add_note(f"So had {totals.jobs} of the lines before them.")
            raise
    return totals


class _Writer:
    """Has one batch under way: the next lines are read and checked while it is written."""

    def __init__(self, totals: Totals, show: Callable[[], None], *, print_ids: bool) -> None:
        self._totals = totals
        self._print_ids = print_ids
        self._show = show
        self._writing: asyncio.Task[None] | None = None

    async def put(self, made: _ByQueue) -> None:
        await self.settle()
        self._writing = asyncio.create_task(self._write(made))

    async def settle(self) -> None:
        """Returns when all that was put is in. May be cancelled, and called again."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None
            self._show()

    async def _write(self, made: _ByQueue) -> None:
        for source, jobs in made.values():
            handles = await enqueue_many(source, jobs)
            self._totals.answers.update(str(handle.status) for handle in handles)
            if self._print_ids:
                click.echo("".join(f"{handle.id}\n" for handle in handles), nl=False)


def _made(lines: list[bytes], jobs: NewJobs, totals: Totals, *, keep_going: bool) -> _ByQueue:
    """The jobs of these lines by queue; all of them are checked before the first is written."""
    made: _ByQueue = {}
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
            made.setdefault(source.queue, (source, []))[1].append(job)
    return made


def _refused(number: int, error: InvalidInput, totals: Totals) -> CommandLineError:
    before = f"The lines up to {totals.lines} are in, none after them" if totals.lines else "Nothing is in"
    return CommandLineError(
        f"line {number}: {error} {before}. Mend the line, or pass over such by --keep-going.", ExitCode.USAGE
    )


def _progress(totals: Totals) -> AbstractContextManager[Callable[[], None]]:
    """On a terminal, a line that counts; else nothing, so that logs stay readable. Nor where somebody types."""
    shown = sys.stderr.isatty() and not sys.stdin.isatty()
    return _Counting(totals) if shown else nullcontext(lambda: None)


class _Counting:
    def __init__(self, totals: Totals) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        from penstock.cli.output import console

        self._totals = totals
        columns = (SpinnerColumn(), TextColumn("{task.completed} jobs put in"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Callable[[], None]:
        self._progress.start()
        return lambda: self._progress.update(self._task, completed=self._totals.jobs)

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
