"""``penstock top``: the whole of it on one screen, and keys to act."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.connect import run_with_app
from penstock.cli.errors import CommandLineError, ExitCode
from penstock.cli.flags import Flags
from penstock.cli.jobview import brief
from penstock.cli.output import at_terminal, console, rich_table, span
from penstock.cli.parameters import command
from penstock.cli.settings import Settings
from penstock.cli.status import read_status, read_workers

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.app import App
    from penstock.info import JobInfo

__all__ = ["top"]

_KEYS: Final = "up/down choose   p pause or resume its queue   r retry   c cancel   x remove   q quit"
_MOST_JOBS: Final = 12
_ARROWS: Final = {b"\x1b[A": "k", b"\x1b[B": "j", b"\x1bOA": "k", b"\x1bOB": "j"}


@command("top")
@click.option(
    "--every", type=click.FloatRange(0.1), default=1.0, show_default=True, help="How often, in seconds."
)
@click.pass_obj
def top(flags: Flags, /, *, every: float) -> None:
    """Queues, rates, workers, running jobs and recent failures on one screen, with keys to act.

    \b
      up, down    choose a job            r    have it run again
      p           pause or resume         c    cancel it
                  the queue of it         x    remove it
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
        self._jobs: list[JobInfo] = []
        self._chosen = 0
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
                    live.update(await self._drawn(), refresh=True)
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
                self._chosen += 1
            case "k":
                self._chosen -= 1
            case "p" | "r" | "c" | "x":
                await self._do(key)
            case _:
                pass
        return False

    async def _do(self, key: str) -> None:
        if not self._jobs:
            self._said = "there is no job to choose"
            return
        job = self._jobs[self._chosen]
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

    async def _drawn(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        told = await read_status(self._app, None, default_queue=self._default_queue)
        workers = await read_workers(self._app, None, default_queue=self._default_queue)
        self._jobs = await self._chosen_from([row["queue"] for row in told["queues"]])
        self._chosen = min(max(self._chosen, 0), max(len(self._jobs) - 1, 0))
        rows = [("▶" if at == self._chosen else " ", *brief(job)) for at, job in enumerate(self._jobs)]
        return Group(
            Text.assemble(("penstock top  ", "bold"), (_KEYS, "dim"), f"\n{self._said}"),
            rich_table(_QUEUE_COLUMNS, [_queue_row(row) for row in told["queues"]], title="queues"),
            rich_table(
                ("worker", "state", "running", "seen"), [_worker_row(w) for w in workers[:6]], title="workers"
            ),
            rich_table(
                ("", "id", "queue", "state", "what", "tries", "when", "why"), rows, title="active and failed"
            ),
        )

    async def _chosen_from(self, queues: list[str]) -> list[JobInfo]:
        """Jobs that run, then those that failed last."""
        found: list[JobInfo] = []
        for state in ("active", "failed", "waiting"):
            for name in queues:
                left = _MOST_JOBS - len(found)
                if left > 0:
                    listed = self._app.queue(name).list_jobs(state, limit=left, reverse=state == "failed")
                    found += [job async for job in listed]
        return found


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
