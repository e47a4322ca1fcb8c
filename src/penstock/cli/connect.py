"""From settings to an app."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.cli.errors import CommandLineError, ExitCode, NotFound
from penstock.cli.synonyms import did_you_mean
from penstock.client.imports import MissingModule, check_module, import_named, module_of
from penstock.client.session import StoreName, chosen_store, from_environment
from penstock.client.situation import CommandContext, command_context
from penstock.core.names import check_queue
from penstock.errors import InvalidOption
from penstock.storage.values import QueueSettings

if TYPE_CHECKING:
    from penstock.cli.settings import Settings, Value
    from penstock.client.app import App
    from penstock.client.queue import Queue
    from penstock.client.task import Task


T = TypeVar("T")
K = TypeVar("K", "App", "Task[..., Any]")

_EXAMPLES: Final = {"App": "app", "Task": "send"}
_REMEDIES: Final = {
    "App": "Name the variable that App(...) is assigned to.",
    "Task": "Name a function with @app.task.",
}


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

    try:
        return asyncio.run(connected())
    except asyncio.CancelledError:
        # asyncio forgets a Ctrl-C that comes while it prepares to run.
        raise KeyboardInterrupt from None


def open_app(settings: Settings) -> App:
    """An app without tasks, for the store that counts here. It is not connected yet.

    With an app configured, that is the store of the app. From here on, commands that answers name repeat the options
    which chose the store.
    """
    from penstock.client.app import App

    command_context.set(_command_context(settings))
    url, namespace = chosen_store([_flags(settings), code_names(settings), *_below_code(settings)])
    if url.startswith("memory:"):
        raise CommandLineError(
            "memory:// is gone when this command ends. Use sqlite:///penstock.db, or a server.",
            ExitCode.USAGE,
        )
    return App(
        url,
        namespace=namespace,
        attempts=settings["attempts"],
        backoff=settings["backoff"],
        timeout=settings["timeout"],
        result_ttl=settings["result_ttl"],
        failure_ttl=settings["failure_ttl"],
        priority=settings["priority"],
    )


def _command_context(settings: Settings) -> CommandContext:
    """Return the options that chose the store, and the app. An option that changes nothing is left out."""
    given, below = settings.flags.given, _below_code(settings)
    by_itself = settings["app"] is None and chosen_store([StoreName(), *below]) == chosen_store(
        [_flags(settings), *below]
    )
    words = [(f"--{name}", given[name]) for name in ("url", "namespace") if name in given and not by_itself]
    options = tuple(word for pair in words for word in pair)
    return CommandContext(options, settings["app"] or "", names_app="app" in given)


def code_names(settings: Settings) -> StoreName:
    """Return the store and the namespace that the code of the configured app names, if there is one.

    The app is not imported if flags name both. Raises ``CommandLineError`` if it cannot be.
    """
    target, flags = settings["app"], _flags(settings)
    if target is None or (flags.url and flags.namespace):
        return StoreName()
    try:
        # Keep the module's own prints out of this command's output.
        with redirect_stdout(sys.stderr):
            return _imported_app(settings, target).named
    except CommandLineError as error:
        if settings.flags.given.get("app"):
            raise
        raise CommandLineError(
            f"{error} The app {target} ({settings.setting('app').origin}) names the store of this command. "
            "To go without it, give --url and --namespace.",
            error.exit_code,
        ) from error


def import_app(settings: Settings, target: str, *, include: Sequence[str] = ()) -> App:
    """The app that ``module:name`` means, imported with the working directory on the path, as are the modules with its
    tasks: those that its code includes, and ``include``. Its store is the one that counts here.
    """
    found = _imported_app(settings, target)
    _put_in_its_place(settings, found)
    with _told_as_ours():
        found.load(*include)
    return found


def import_task(settings: Settings, target: str) -> Task[..., Any]:
    """The task that ``module:name`` means, in the same way."""
    from penstock.client.task import Task

    found = _imported(settings, target, Task, otherwise="no task")
    _put_in_its_place(settings, found.app)
    with _told_as_ours():
        found.app.load()
    return found


def _imported_app(settings: Settings, target: str) -> App:
    from penstock.client.app import App

    return _imported(settings, target, App, otherwise="neither a command nor an app")


def _put_in_its_place(settings: Settings, app: App) -> None:
    """Have ``app`` use the store that counts here, if that is not the one it has chosen itself."""
    command_context.set(_command_context(settings))
    counts = chosen_store([_flags(settings), app.named, *_below_code(settings)])
    if counts != chosen_store([app.named, from_environment()]):
        app.move_to(counts[0], namespace=counts[1])


def _flags(settings: Settings) -> StoreName:
    return StoreName(settings.flags.given.get("url"), settings.flags.given.get("namespace"))


def _below_code(settings: Settings) -> list[StoreName]:
    """Return what ranks below the code: the environment, and the files of the project."""
    return [StoreName(_text(v.get("url")), _text(v.get("namespace"))) for v in settings.below_flags()]


def _text(value: Value) -> str | None:
    return None if value is None else str(value)


def _imported(settings: Settings, target: str, kind: type[K], *, otherwise: str) -> K:
    """Import what ``module:name`` means, which must be an app or a task (``kind``)."""
    module, colon, name = target.partition(":")
    if not module or not colon or not name:
        example = f"{module_of(module) or 'myproject.jobs'}:{name or _EXAMPLES[kind.__name__]}"
        example = next(iter(_apps_below(module)), example) if kind.__name__ == "App" else example
        raise CommandLineError(
            f"{target!r} names {otherwise}. Give the module and the name in it, such as {example}",
            ExitCode.USAGE,
        )
    home = _imported_module(settings, module)
    found: object = home
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, kind):
        return found
    there = [f"{module}:{each}" for each, value in vars(home).items() if isinstance(value, kind)]
    there += _apps_below(module) if kind.__name__ == "App" and not there else []
    remedy = f"Did you mean {' or '.join(there[:3])}?" if there else _REMEDIES[kind.__name__]
    if found is None:
        raise NotFound(f"module {module} has no {kind.__name__.lower()} {name!r}. {remedy}")
    wanted = "an app" if kind.__name__ == "App" else "a task"
    raise NotFound(f"{target} is not {wanted}, but of type {type(found).__name__}. {remedy}")


def _apps_below(package: str) -> list[str]:
    """Return what look like apps in the modules of a package in this folder, as ``module:name``, unimported."""
    folder = Path(*package.split(".")) if package else Path()
    found = []
    for file in sorted(folder.glob("*.py")) if (folder / "__init__.py").is_file() else ():
        with suppress(OSError, UnicodeDecodeError):
            names = re.findall(
                r"^(\w+)(?:: *[\w.]+)? *= *(?:penstock\.)?App\(", file.read_text("utf-8"), re.MULTILINE
            )
            module = package if file.stem == "__init__" else f"{package}.{file.stem}"
            found += [f"{module}:{name}" for name in names]
    return found


def _imported_module(settings: Settings, name: str) -> ModuleType:
    folders = [Path.cwd()] if settings.flags.given.get("app") else [Path.cwd(), settings.project.root]
    for folder in reversed(folders):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    for key in ("url", "namespace"):
        # For code that reads the environment itself, and for other apps of these modules.
        if (setting := settings.setting(key)).origin.kind != "default":
            os.environ[f"PENSTOCK_{key.upper()}"] = str(setting.value)
    with _told_as_ours():
        return import_named(check_module(name))


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
            f"the store {path.absolute()} does not exist. The first `penstock enqueue` makes it. If your app has "
            "another store, name the app (--app myproject.jobs:app) or the store (--url)."
        )


def shared_store(settings: Settings) -> str:
    """The URL of the store that the settings name, as other processes are to open it. It is there, and answers."""
    from penstock.spark.store import shared_url

    app = open_app(settings)
    run_with_app(settings, lambda connected: connected.queues())
    return shared_url(app)


async def queues_of(app: App, *named: str | None) -> list[str]:
    """Return the queues that were named, or all queues if none was. Raises ``NotFound`` for one that does not exist."""
    known = await app.queues()
    names = list(dict.fromkeys(check_queue(name) for name in named if name is not None))
    for name in names:
        if name not in known and not await _is_set_up(app, app.queue(name)):
            otherwise = "" if known else "The store has no queue yet."
            meant = did_you_mean(name, known, otherwise=otherwise)
            raise NotFound(f"the queue {name!r} does not exist. {meant}")
    return names or known


async def queues_with_rules(app: App, queue: str | None, settings: Settings) -> list[str]:
    """Return the queues whose limits and budgets to show. They may be set before the first job of the default queue."""
    default = [settings["queue"]] if queue is None else []
    return sorted({*await queues_of(app, queue), *default})


async def refuse_unknown_queue(app: App, queue: str | None, *, to: str) -> None:
    """Raise ``NotFound`` with the way ``to`` do it for a queue that has no jobs yet."""
    try:
        await queues_of(app, queue)
    except NotFound as error:
        raise NotFound(f"{error} Add --create to {to} a queue before its first job.") from None


async def _is_set_up(app: App, queue: Queue) -> bool:
    """Return whether anything is known of a queue that never had a job: a pause, a limit, a scheduler, a worker."""
    if await queue.limits() or await queue.schedulers() or await queue.workers():
        return True
    if await queue.budgets() or await queue.settings() != QueueSettings():
        return True
    [itself] = (await (await app.connect()).groups(queue.name, keys=[""])).groups
    return itself.why in ("paused", "asked") or any([True async for _ in queue.groups()])
