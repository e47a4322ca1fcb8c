"""Notes about a job that no live worker would run, from the records of the workers."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Collection
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from penstock.cli.connect import import_app
from penstock.cli.errors import CommandLineError
from penstock.client.situation import live_workers
from penstock.core.command import COMMAND_TASK
from penstock.core.text import visible_in_line
from penstock.errors import StorageError

if TYPE_CHECKING:
    from penstock.cli.settings import Settings
    from penstock.client.app import App


async def note_on_task(app: App, queue: str, task: str) -> str:
    """Return a note if only workers of other queues know the task; empty if a worker of this queue may know it."""
    if not task or task == COMMAND_TASK or task in app.tasks:
        return ""
    workers = await _read_live(app)
    if any(_may_know(worker, task) for worker in workers if queue in worker["queues"]):
        return ""
    for worker in workers:
        if (other := _queue_of(worker, task)) not in ("", queue):
            return visible_in_line(
                f"queue {queue}: no worker knows the task {task!r}; worker {worker['id']} serves it in queue {other}: "
                f"add -q {other}, or --app MODULE:APP"
            )
    return ""


async def note_on_program(app: App, command: str, settings: Settings) -> str:
    """Return a note if the program of a command is not here, but a task has its name.

    The tasks are those of live workers, and of the configured app.
    """
    name, *_ = command.split(maxsplit=1)
    if "/" in name or shutil.which(name) is not None:
        return ""
    is_task = any(_queue_of(worker, name) for worker in await _read_live(app)) or name in _tasks_of(settings)
    if not is_task:
        return ""
    return visible_in_line(
        f"{name!r} is not a program on PATH here; for the task {name}: penstock enqueue --task {name}"
    )


def _tasks_of(settings: Settings) -> Collection[str]:
    """Return the tasks of the configured app; none if it cannot be imported."""
    if (target := settings["app"]) is None:
        return ()
    try:
        # Keep the module's own prints out of this command's output.
        with redirect_stdout(sys.stderr):
            return import_app(settings, target).tasks
    except CommandLineError:
        return ()


async def _read_live(app: App) -> list[dict[str, Any]]:
    """Return what each live worker of the store says about itself; none if the store does not answer."""
    try:
        storage = await app.connect()
        records = await asyncio.gather(*map(storage.workers, await storage.attended()))
    except StorageError:
        return []
    return [
        {"queues": [], **worker} for worker in live_workers(each for of_queue in records for each in of_queue)
    ]


def _may_know(worker: dict[str, Any], task: str) -> bool:
    """Return whether a worker knows the task, or does not say which tasks it knows."""
    tasks = worker.get("tasks")
    return tasks is None or task in tasks


def _queue_of(worker: dict[str, Any], task: str) -> str:
    """Return the queue in which a worker takes jobs of the task; empty if it does not know the task."""
    own: str | None = (worker.get("tasks") or {}).get(task)
    if own is None or not worker["queues"]:
        return ""
    return own if own in worker["queues"] else str(worker["queues"][0])
