"""Thousands of jobs from a file or a pipe, a line each."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import IO, TYPE_CHECKING, Any, Final

from penstock.bulk import enqueue_many
from penstock.cli.errors import CommandLineError, ExitCode
from penstock.errors import InvalidInput, StorageError

if TYPE_CHECKING:
    from penstock.cli.newjobs import NewJobs
    from penstock.core.job import NewJob
    from penstock.source import Source

__all__ = ["Totals", "enqueue_lines"]

_LINES_BYTES: Final = 512 * 1024
"""How much is read at a time: some thousand lines."""


class Totals:
    """How many lines were read, and what was answered to their jobs."""

    def __init__(self) -> None:
        self.lines = 0
        self.answers: Counter[str] = Counter()

    @property
    def jobs(self) -> int:
        return self.answers.total()


async def enqueue_lines(stream: IO[bytes], jobs: NewJobs) -> Totals:
    """Put in a job for each line that is not empty, as they come, some thousand at a time.

    Raises ``CommandLineError`` at a line that is no job: it, and those read with it, are not in.
    """
    totals = Totals()
    with _progress(totals) as show:
        try:
            await _enqueue_all(stream, jobs, totals, show)
        except StorageError as error:
            error.add_note(f"(besides {totals.jobs} of the lines before them).")
            raise
    return totals


async def _enqueue_all(stream: IO[bytes], jobs: NewJobs, totals: Totals, show: Callable[[], None]) -> None:
    writing = None
    while lines := await asyncio.to_thread(stream.readlines, _LINES_BYTES):
        try:
            made = _made(lines, jobs, totals)
        finally:
            # Also before a bad line is told of: that those before it are in has to be true.
            if writing is not None:
                _count(await writing, totals)
                show()
        # The next lines are read and checked while these are written.
        writing = asyncio.create_task(_write(made))
        totals.lines += len(lines)
    if writing is not None:
        _count(await writing, totals)
        show()


def _made(lines: list[bytes], jobs: NewJobs, totals: Totals) -> dict[str, tuple[Source, list[NewJob]]]:
    """The jobs of these lines by queue; all of them are checked before the first is written."""
    made: dict[str, tuple[Source, list[NewJob]]] = {}
    for number, text in enumerate(lines, totals.lines + 1):
        if not text.strip():
            continue
        try:
            source, job = jobs.from_text(text)
        except InvalidInput as error:
            raise CommandLineError(
                f"line {number}: {error} The lines before {totals.lines + 1} are in, none from there on.",
                ExitCode.USAGE,
            ) from error
        made.setdefault(source.queue, (source, []))[1].append(job)
    return made


async def _write(made: dict[str, tuple[Source, list[NewJob]]]) -> list[Any]:
    return [handle for source, jobs in made.values() for handle in await enqueue_many(source, jobs)]


def _count(handles: Iterable[Any], totals: Totals) -> None:
    totals.answers.update(handle.status for handle in handles)


def _progress(totals: Totals) -> AbstractContextManager[Callable[[], None]]:
    """On a terminal, a line that counts; else nothing, so that logs stay readable."""
    return _Counting(totals) if sys.stderr.isatty() else nullcontext(lambda: None)


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
