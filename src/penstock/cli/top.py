"""``penstock top``: the whole of it on one screen, and keys to act."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.connect import run_with_app
from penstock.cli.errors import CommandLineError, ExitCode
from penstock.cli.flags import Flags
from penstock.cli.jobview import BRIEF, SPARE, brief
from penstock.cli.output import at_terminal, console, fitted, rich_table, span
from penstock.cli.parameters import command, every_option
from penstock.cli.settings import Settings
from penstock.cli.status import read_status, read_workers

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from penstock.app import App
    from penstock.info import JobInfo

__all__ = ["top"]

_KEYS: Final = "↑↓ choose  p pause/resume its queue  P all queues  r retry  c cancel  x remove  q quit"
_MOST_QUEUES, _MOST_WORKERS, _FEWEST_JOBS = 8, 4, 3
# Of a table: its title, its header, the line under it, and an empty one behind.
_FRAME_LINES: Final = 4
_HEAD_LINES: Final = 4
_ARROWS: Final = {b"\x1b[A": "k", b"\x1b[B": "j", b"\x1bOA": "k", b"\x1bOB": "j"}


@command("top")
@every_option
@click.pass_obj
def top(flags: Flags, /, *, every: float) -> None:
    """Queues, rates, workers, running jobs and recent failures on one screen, with keys to act.

    \b
      up, down    choose a job: those that run, then those that failed last, then those that wait
      r           have it run again
      c           cancel it
      x           remove it
      p           pause its queue, or resume it
      P           pause all queues, or resume them
      q           leave
    """
    if not at_terminal() or not sys.stdin.isatty():
        raise CommandLineError(
            "top needs a terminal. For a pipe there is: penstock status --watch", ExitCode.USAGE
        )
    settings = Settings(flags)
    run_with_app(settings, lambda app: _Screen(app, settings["queue"]).run(every))


class _Screen:
    """What is shown, and what was chosen on it."""

    def __init__(self, app: App, default_queue: str) -> None:
        self._app = app
        self._default_queue = default_queue
        self._queues: list[dict[str, Any]] = []
        self._jobs: list[JobInfo] = []
        self._chosen: tuple[str, str] | None = None
        """Queue and id: rows come and go, and keys are meant for the job that was looked at."""
        self._row = 0
        """Where it was seen last."""
        self._said = ""
        self._pressed: asyncio.Queue[str] = asyncio.Queue()

    async def run(self, every: float) -> None:
        """Until ``q`` or Ctrl-C; the terminal is as it was afterwards, however it ends."""
        from rich.live import Live

        loop = asyncio.get_running_loop()
        with _keys_at_once(), Live(console=console(), screen=True, auto_refresh=False) as live:
            loop.add_reader(sys.stdin.fileno(), self._read_keys)
            try:
                while True:
                    live.update(await self._drawn(live.console), refresh=True)
                    if await self._act(every):
                        return
            finally:
                loop.remove_reader(sys.stdin.fileno())

    def _read_keys(self) -> None:
        typed = os.read(sys.stdin.fileno(), 64)
        for key in [_ARROWS[typed]] if typed in _ARROWS else typed.decode("utf-8", "replace"):
            self._pressed.put_nowait(key)

    async def _act(self, every: float) -> bool:
        """Do what the next key says, if one comes in time; whether it says to leave."""
        try:
            key = await asyncio.wait_for(self._pressed.get(), every)
        except TimeoutError:
            return False
        match key:
            case "q" | "\x03" | "\x04":
                return True
            case "j":
                self._move(1)
            case "k":
                self._move(-1)
            case "P":
                await self._pause_all()
            case "p" | "r" | "c" | "x":
                await self._do(key)
            case _:
                pass
        return False

    def _marked(self) -> JobInfo | None:
        """The chosen job, if it is still listed."""
        return next((job for job in self._jobs if _place(job) == self._chosen), None)

    def _move(self, step: int) -> None:
        """Choose the next job or the one before; where the chosen one was, if it is gone."""
        self._choose(self._row + step if self._marked() else self._row)

    def _choose(self, row: int) -> None:
        if self._jobs:
            self._row = min(max(row, 0), len(self._jobs) - 1)
            self._chosen = _place(self._jobs[self._row])

    def _follow(self) -> None:
        """Set the row to where the chosen job is now; choose one if none was."""
        if self._chosen is None:
            self._choose(self._row)
        places = [_place(job) for job in self._jobs]
        if self._chosen in places:
            self._row = places.index(self._chosen)

    async def _pause_all(self) -> None:
        """Resume all if all are paused, else pause those that are not."""
        resume = all(row["paused"] for row in self._queues)
        for row in self._queues:
            queue = self._app.queue(row["queue"])
            await (queue.resume() if resume else queue.pause())
        self._said = f"all queues {'resumed' if resume else 'paused'}"

    async def _do(self, key: str) -> None:
        job = self._marked()
        if job is None:
            gone, self._chosen = self._chosen, None
            if self._jobs and gone is not None:
                self._said = f"{gone[1]} is no longer here, so nothing was done: choose another"
            else:
                self._said = "there is no job to choose"
            return
        queue = self._app.queue(job.queue)
        match key:
            case "p":
                paused = (await queue.counts()).paused
                await (queue.resume() if paused else queue.pause())
                self._said = f"{job.queue} {'resumed' if paused else 'paused'}"
            case "r":
                self._said = f"{job.id}: {(await queue.retry(job.id))[job.id]}"
            case "c":
                self._said = f"{job.id}: {(await queue.cancel(job.id))[job.id]}"
            case _:
                self._said = f"{job.id}: {(await queue.remove(job.id))[job.id]}"

    async def _drawn(self, screen: Console) -> RenderableType:
        """All of it, as much as there is room for: the jobs get what the queues and workers leave."""
        from rich.console import Group
        from rich.text import Text

        told = await read_status(self._app, None, default_queue=self._default_queue)
        workers = await read_workers(self._app, None, default_queue=self._default_queue)
        self._queues = told["queues"]
        queues = _busiest(self._queues)
        room = screen.height - _HEAD_LINES - 3 * _FRAME_LINES - len(queues) - len(workers[:_MOST_WORKERS])
        names = [row["queue"] for row in self._queues]
        self._jobs = await self._chosen_from(names, most=max(room, _FEWEST_JOBS))
        self._follow()
        marked = self._marked()
        jobs = [("▶" if job is marked else " ", *brief(job)) for job in self._jobs]
        return Group(
            Text.assemble(("penstock top  ", "bold"), (_KEYS, "dim"), f"\n{self._said}\n"),
            _table(screen, "queues", _QUEUE_COLUMNS, [_queue_row(row) for row in queues], _QUEUE_SPARE),
            _table(screen, "workers", _WORKER_COLUMNS, [_worker_row(w) for w in workers[:_MOST_WORKERS]], ()),
            _table(screen, "active, failed, waiting", ("", *BRIEF), jobs, SPARE),
        )

    async def _chosen_from(self, queues: list[str], *, most: int) -> list[JobInfo]:
        """Jobs that run, then those that failed last, then those that wait."""
        found: list[JobInfo] = []
        for state in ("active", "failed", "waiting"):
            for name in queues:
                left = most - len(found)
                if left > 0:
                    listed = self._app.queue(name).list_jobs(state, limit=left, reverse=state == "failed")
                    found += [job async for job in listed]
        return found


def _place(job: JobInfo) -> tuple[str, str]:
    return job.queue, job.id


_QUEUE_COLUMNS: Final = (
    "queue",
    "waiting",
    "active",
    "scheduled",
    "blocked",
    "failed",
    "oldest",
    "done/min",
    "",
)


_QUEUE_SPARE: Final = ("blocked", "scheduled", "oldest", "done/min")
_WORKER_COLUMNS: Final = ("worker", "state", "running", "seen")


def _busiest(queues: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with the most to do, if not all of them can be shown; in their old order."""
    most = sorted(queues, key=lambda row: -(row["active"] + row["waiting"] + row["failed"]))[:_MOST_QUEUES]
    return [row for row in queues if row in most]


def _table(
    screen: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], spare: Sequence[str]
) -> RenderableType:
    from rich.console import Group

    fitting = fitted(columns, rows, width=screen.width, spare=spare if rows else ())
    return Group(rich_table(*fitting, title=title, width=screen.width), "")


def _queue_row(row: dict[str, Any]) -> tuple[Any, ...]:
    counts = (row[name] for name in ("waiting", "active", "scheduled", "blocked", "failed"))
    oldest = span(row["oldest_waiting_ms"]) if row["waiting"] else ""
    return row["queue"], *counts, oldest, row["completed_per_minute"], "paused" if row["paused"] else ""


def _worker_row(worker: dict[str, Any]) -> tuple[str, ...]:
    running = f"{worker['active']}/{worker['concurrency']}"
    return worker["worker"], worker["state"], running, f"{span(worker['seen_ms_ago'])} ago"


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Keys come as they are pressed, and are not shown; Ctrl-C stays a signal."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
