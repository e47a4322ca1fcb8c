"""From settings to an app, and from an id to the queue its job is in."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cli.errors import CommandLineError, ExitCode, NotFound
from penstock.errors import InvalidOption
from penstock.importing import MissingModule, check_module, import_named

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.cli.settings import Settings
    from penstock.info import JobInfo
    from penstock.task import Task

__all__ = [
    "find_job",
    "import_app",
    "import_task",
    "is_local",
    "open_app",
    "queues_of",
    "refuse_missing_file",
    "run_app",
    "run_with_app",
    "shared_store",
]

T = TypeVar("T")


def run_with_app(
    settings: Settings,
    work: Callable[[App], Awaitable[T]],
    *,
    create: bool = False,
    patience_s: float | None = None,
) -> T:
    """Connect, do ``work``, and let go of everything, also when it is interrupted.

    Without ``create`` a store in a file that is not there yet is refused rather than made: who only looks is most
    likely in the wrong folder. Raises ``TimeoutError`` after ``patience_s``, if that is given.
    """
    app = open_app(settings)
    if not create:
        refuse_missing_file(app.url)
    return run_app(app, lambda: work(app), patience_s=patience_s)


def run_app(app: App, work: Callable[[], Awaitable[T]], *, patience_s: float | None = None) -> T:
    """Connect ``app``, do ``work``, and let go of everything, also when it is interrupted."""

    async def connected() -> T:
        async with asyncio.timeout(patience_s), app:
            return await work()

    return asyncio.run(connected())


def open_app(settings: Settings) -> App:
    """An app for the store that the settings name, without tasks. It is not connected yet."""
    from penstock.app import App

    url: str = settings["url"]
    if url.startswith("memory:"):
        raise CommandLineError(
            "memory:// is gone when this command ends. Use sqlite:///penstock.db, or a server.",
            ExitCode.USAGE,
        )
    return App(
        url,
        namespace=settings["namespace"],
        attempts=settings["attempts"],
        backoff=settings["backoff"],
        timeout=settings["timeout"],
        result_ttl=settings["result_ttl"],
        failure_ttl=settings["failure_ttl"],
        priority=settings["priority"],
    )


def import_app(settings: Settings, target: str, *, include: Sequence[str] = ()) -> App:
    """The app that ``module:name`` means, imported with the working directory on the path, as are the modules with its
    tasks: those that its code includes, and ``include``.

    Its store and its namespace are its own; an app that names none in its code has those of the settings, and
    ``--url`` and ``--namespace`` go before both.
    """
    from penstock.app import App

    found = _imported(
        settings, target, otherwise="neither a command nor an app", example="myproject.jobs:app"
    )
    if not isinstance(found, App):
        raise NotFound(
            f"{target} is no app, but of type {type(found).__name__}. Name what App(...) was given to."
        )
    _put_in_its_place(settings, found)
    with _told_as_ours():
        found.load(*include)
    return found


def import_task(settings: Settings, target: str) -> Task[..., Any]:
    """The task that ``module:name`` means, in the same way."""
    from penstock.task import Task

    found = _imported(settings, target, otherwise="no task", example="myproject.jobs:send")
    if not isinstance(found, Task):
        raise NotFound(
            f"{target} is no task, but of type {type(found).__name__}. Name a function with @app.task."
        )
    _put_in_its_place(settings, found.app)
    with _told_as_ours():
        found.app.load()
    return found


def _put_in_its_place(settings: Settings, app: App) -> None:
    url, namespace = settings.setting("url"), settings.setting("namespace")
    store = str(url.value) if url.origin.kind == "flag" else app.url
    part = app.namespace
    if namespace.value is not None and (part is None or namespace.origin.kind == "flag"):
        part = str(namespace.value)
    if (store, part) != (app.url, app.namespace):
        app.move_to(store, namespace=part)


def _imported(settings: Settings, target: str, *, otherwise: str, example: str) -> object:
    module, colon, name = target.partition(":")
    if not module or not colon or not name:
        raise CommandLineError(
            f"{target!r} names {otherwise}. Give the module and the name in it: {example}", ExitCode.USAGE
        )
    url = settings.setting("url")
    if url.origin.kind != "default":
        os.environ["PENSTOCK_URL"] = str(url.value)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    with _told_as_ours():
        found: object = import_named(check_module(module))
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


@contextmanager
def _told_as_ours() -> Iterator[None]:
    """Give the errors of importing a module the exit codes of the command line."""
    try:
        yield
    except MissingModule as error:
        raise NotFound(str(error)) from error
    except InvalidOption as error:
        if error.__cause__ is None:
            raise
        raise CommandLineError(f"{error} Add --debug for the traceback.") from error


def is_local(url: str) -> bool:
    """Whether the store is a file on this machine, whose users may run what they like here anyway."""
    return url.startswith("sqlite:")


def refuse_missing_file(url: str) -> None:
    """Raise ``NotFound`` if the store is a file that does not exist."""
    if not is_local(url):
        return
    from penstock.storage.sqlite.address import Address

    path = Path(Address.parse(url).path)
    if not path.exists():
        raise NotFound(
            f"there is no store {path.absolute()}. It is made by the first `penstock enqueue`, or give --url."
        )


def shared_store(settings: Settings) -> str:
    """The URL of the store that the settings name, as other processes are to open it. It is there, and answers."""
    from penstock.spark.store import shared_url

    app = open_app(settings)
    run_with_app(settings, lambda connected: connected.queues())
    return shared_url(app)


async def queues_of(app: App, queue: str | None) -> list[str]:
    """The queue that was asked for, or all there are."""
    from penstock.core.names import check_queue

    return await app.queues() if queue is None else [check_queue(queue)]


async def find_job(app: App, id: str, queue: str | None) -> JobInfo:
    """The job of that id, in the queue that was named or in whichever has it."""
    names = await queues_of(app, queue)
    found = [job for name in names if (job := await app.queue(name).get_or_none(id)) is not None]
    if not found:
        where = "any queue" if queue is None else f"queue {queue!r}"
        raise NotFound(f"there is no job {id!r} in {where}: it never was, or it is no longer kept.")
    if len(found) > 1:
        several = ", ".join(job.queue for job in found)
        raise CommandLineError(
            f"several queues have a job {id!r}: {several}. Say which by --queue.", ExitCode.USAGE
        )
    return found[0]
