"""Apps and queues of a command: settings lead to an app, and names to what they stand for."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.cli.errors import CommandLineError, InvalidUsage, NotFound
from penstock.cli.synonyms import did_you_mean
from penstock.client.imports import MissingModule, check_module, import_named, module_of
from penstock.client.session import StoreName, chosen_store, from_environment
from penstock.client.situation import CommandContext, command_context
from penstock.core.names import check_queue
from penstock.core.text import visible_in_line
from penstock.errors import InvalidOption
from penstock.storage import open_storage
from penstock.storage.values import QueueSettings

if TYPE_CHECKING:
    from penstock.cli.settings import Settings, Value
    from penstock.client.app import App
    from penstock.client.queue import Queue
    from penstock.client.task import Task


T = TypeVar("T")
K = TypeVar("K", "App", "Task[..., Any]")

_EXAMPLES: Final = {"App": "app", "Task": "send"}
_PLACEHOLDER: Final = "MODULE:APP"
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
    """Connect, do ``work``, and disconnect, also on an interrupt.

    Without ``create``, raise ``NotFound`` for a store in a file that does not exist: a command that only reads is most
    likely run in the wrong folder. Raise ``TimeoutError`` after ``patience_s``.
    """
    app = open_app(settings)
    if not create:
        refuse_missing_file(app.url)
    return run_app(app, lambda: work(app), patience_s=patience_s)


def run_app(
    app: App, work: Callable[[], Awaitable[T]], *, patience_s: float | None = None, connect: bool = True
) -> T:
    """Connect ``app``, do ``work``, and disconnect, also on an interrupt. See ``run_with_app``.

    Without ``connect``, the first call of ``work`` that needs the store connects.
    """

    async def connected() -> T:
        async with asyncio.timeout(patience_s):
            try:
                if connect:
                    await app.connect()
                return await work()
            finally:
                await app.close()

    return run_on_loop(connected())


def run_on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` as ``asyncio.run()`` does, and raise ``KeyboardInterrupt`` for each Ctrl-C."""
    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        # asyncio loses a Ctrl-C that comes before it runs the task.
        raise KeyboardInterrupt from None


def open_app(settings: Settings) -> App:
    """Return an app without tasks for the configured store, not connected yet.

    If an app is configured, this is the store of that app. From here on, printed commands repeat the options that
    chose the store.
    """
    from penstock.client.app import App
    from penstock.client.options import DEFAULTS

    command_context.set(_command_context(settings))
    url, namespace = chosen_store([_flags(settings), code_names(settings), *_below_code(settings)])
    if (setting := settings.setting("url")).value == url and setting.origin.kind == "saved":
        _check_saved_url(url, setting.origin.place)
    if url.startswith("memory:"):
        raise InvalidUsage(
            "memory:// is gone when this command ends. Use sqlite:///penstock.db, or a server."
        )
    defaults: Any = {each.key.name: each.value for each in settings.all() if each.key.name in DEFAULTS}
    return App(url, namespace=namespace, **defaults)


def _check_saved_url(url: str, file: str) -> None:
    """Raise ``CommandLineError``, which names the file, if no engine takes a saved URL."""
    try:
        open_storage(url)
    except InvalidOption as error:
        raise InvalidUsage(f"{file}: {error}") from error


def _command_context(settings: Settings) -> CommandContext:
    """Return the app, and the options that a printed command must repeat to reach the same store."""
    given, below = settings.flags.given, _below_code(settings)
    by_itself = settings["app"] is None and chosen_store([StoreName(), *below]) == chosen_store(
        [_flags(settings), *below]
    )
    words = [(f"--{name}", given[name]) for name in ("url", "namespace") if name in given and not by_itself]
    options = tuple(word for pair in words for word in pair)
    return CommandContext(
        options,
        settings["app"] or "",
        names_app="app" in given,
        defines=lambda task: settings["app"] is None or _defines(settings, task),
    )


def _defines(settings: Settings, task: str) -> bool:
    """Return whether the configured app defines a task; false if it cannot be imported."""
    try:
        with redirect_stdout(sys.stderr), _import_errors():
            app = _imported_app(settings, settings["app"])
            app.load()
    except (CommandLineError, InvalidOption):
        return False
    return task in app.tasks


def code_names(settings: Settings) -> StoreName:
    """Return the store and the namespace that the code of the configured app names, if any.

    The app is not imported if flags name both. Raise ``CommandLineError`` if the import fails.
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
    """Import the app ``module:name`` with the working directory on the path, and move it to the configured store.

    The modules with its tasks are imported too: those that its code includes, and ``include``.
    """
    app = _imported_app(settings, target)
    _move_to_store(settings, app)
    with _import_errors():
        app.load(*include)
    return app


def import_task(settings: Settings, target: str) -> Task[..., Any]:
    """Import the task ``module:name`` as ``import_app`` imports an app."""
    from penstock.client.task import Task

    task = _imported(settings, target, Task, otherwise="is not a task")
    _move_to_store(settings, task.app)
    with _import_errors():
        task.app.load()
    return task


def _imported_app(settings: Settings, target: str) -> App:
    from penstock.client.app import App

    # Before the import, which sets the variables of the environment.
    url = settings.setting("url")
    app = _imported(settings, target, App, otherwise="is neither a command nor an app")
    if url.origin.kind == "environment" and app.named.url not in (None, url.value):
        _note_ignored_url(target)
    return app


@cache
def _note_ignored_url(target: str) -> None:
    """Say once that the store of the app's code is used, not that of the environment."""
    note = (
        f"PENSTOCK_URL is ignored: the app {target} names another store. Give --url for that of PENSTOCK_URL"
    )
    print(visible_in_line(note), file=sys.stderr)


def _move_to_store(settings: Settings, app: App) -> None:
    """Move ``app`` to the configured store if its code has led it to another one."""
    command_context.set(_command_context(settings))
    url, namespace = chosen_store([_flags(settings), app.named, *_below_code(settings)])
    if (url, namespace) != chosen_store([app.named, from_environment()]):
        app.move_to(url, namespace=namespace)


def _flags(settings: Settings) -> StoreName:
    return StoreName(settings.flags.given.get("url"), settings.flags.given.get("namespace"))


def _below_code(settings: Settings) -> list[StoreName]:
    """Return the stores that count only if the code names none: of the environment, and of the project's files."""
    return [
        StoreName(_text(values.get("url")), _text(values.get("namespace")))
        for values in settings.below_flags()
    ]


def _text(value: Value) -> str | None:
    return None if value is None else str(value)


def _imported(settings: Settings, target: str, kind: type[K], *, otherwise: str) -> K:
    """Import the app or task (``kind``) that ``module:name`` stands for."""
    module, name = _module_and_name(target, kind, otherwise=otherwise)
    home = _imported_module(settings, module)
    value: object = home
    for part in name.split("."):
        value = getattr(value, part, None)
    if isinstance(value, kind):
        return value
    candidates = [f"{module}:{other}" for other, member in vars(home).items() if isinstance(member, kind)]
    candidates += _apps_below(module) if kind.__name__ == "App" and not candidates else []
    remedy = f"Did you mean {' or '.join(candidates[:3])}?" if candidates else _REMEDIES[kind.__name__]
    if value is None:
        raise NotFound(f"module {module} has no {kind.__name__.lower()} {name!r}. {remedy}")
    noun = "an app" if kind.__name__ == "App" else "a task"
    raise NotFound(f"{target} is not {noun}, but of type {type(value).__name__}. {remedy}")


def _module_and_name(target: str, kind: type[K], *, otherwise: str) -> tuple[str, str]:
    """Return the two parts of ``module:name``. Raise ``CommandLineError`` for another form, with the right one."""
    module, _, name = target.partition(":")
    example = f"{module_of(module) or 'myproject.jobs'}:{name or _EXAMPLES[kind.__name__]}"
    if target == _PLACEHOLDER:
        error = f"{target} stands for your app. Give its module and its variable, such as jobs:app"
    elif name and module_of(module) != module:
        error = f"{module} is the path of a file. Give the module and the name in it: {example}"
    elif not module or not name:
        example = next(iter(_apps_below(module)), example) if kind.__name__ == "App" else example
        error = f"{target!r} {otherwise}. Give the module and the name in it, such as {example}"
    else:
        return module, name
    raise InvalidUsage(error)


def _apps_below(package: str) -> list[str]:
    """Search a package of this folder for apps without importing it, and return them as ``module:name``."""
    folder = Path(*package.split(".")) if package else Path()
    apps = []
    for file in sorted(folder.glob("*.py")) if (folder / "__init__.py").is_file() else ():
        with suppress(OSError, UnicodeDecodeError):
            names = re.findall(
                r"^(\w+)(?:: *[\w.]+)? *= *(?:penstock\.)?App\(", file.read_text("utf-8"), re.MULTILINE
            )
            module = package if file.stem == "__init__" else f"{package}.{file.stem}"
            apps += [f"{module}:{name}" for name in names]
    return apps


def _imported_module(settings: Settings, name: str) -> ModuleType:
    folders = [Path.cwd()] if settings.flags.given.get("app") else [Path.cwd(), settings.project.root]
    for folder in reversed(folders):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    for key in ("url", "namespace"):
        # For code that reads the environment itself, and for other apps of these modules.
        if (setting := settings.setting(key)).origin.kind != "default":
            os.environ[f"PENSTOCK_{key.upper()}"] = str(setting.value)
    with _import_errors():
        return import_named(check_module(name))


@contextmanager
def _import_errors() -> Iterator[None]:
    """Turn the errors of an import into errors of the command line."""
    try:
        yield
    except MissingModule as error:
        raise NotFound(str(error)) from error
    except InvalidOption as error:
        if error.__cause__ is None:
            raise
        raise CommandLineError(f"{error} Add --debug for the traceback.") from error


def is_local(url: str) -> bool:
    """Return whether the store is a file on this machine: anyone who can write to it can run commands here anyway."""
    return url.startswith("sqlite:")


def _missing_file(url: str) -> Path | None:
    """Return the file of the store, if it is a file and does not exist."""
    if not is_local(url):
        return None
    from penstock.storage.sqlite.connection import Address

    path = Path(Address.parse(url).path).absolute()
    return None if path.exists() else path


def note_on_second_store(url: str) -> str:
    """Return a note if a new store is created although a parent folder has one of its name; else an empty string."""
    if (path := _missing_file(url)) is None:
        return ""
    folder = next((folder for folder in path.parent.parents if os.path.isfile(folder / path.name)), None)
    note = f"created the store {path} (there is another one in {folder})" if folder else ""
    return visible_in_line(note)


def refuse_missing_file(url: str) -> None:
    """Raise ``NotFound`` if the store is a file that does not exist."""
    if (path := _missing_file(url)) is not None:
        raise NotFound(
            f"the store {path} does not exist. The first `penstock enqueue` creates it. If your app has "
            "another store, name the app (--app myproject.jobs:app) or the store (--url)."
        )


def shared_store(settings: Settings, *queues: str) -> str:
    """Return the URL of the configured store for other processes.

    Raise an error if the store does not answer, and ``NotFound`` if one of ``queues`` does not exist.
    """
    from penstock.spark.store import shared_url

    app = open_app(settings)
    run_with_app(settings, lambda connected: queues_of(connected, *queues))
    return shared_url(app)


_INTERNAL: Final = "penstock.output."
"""The queues that guard the outputs of Spark begin with this."""


async def queues_of(app: App, *named: str | None) -> list[str]:
    """Return the named queues, or all queues if none is named. Raise ``NotFound`` for a queue that does not exist."""
    known = await app.queues()
    names = list(dict.fromkeys(check_queue(name) for name in named if name is not None))
    for name in names:
        if name not in known and not await _is_set_up(app, app.queue(name)):
            raise NotFound(f"the queue {name!r} does not exist. {meant_queue(name, known)}")
    return names or known


def meant_queue(name: str, known: Sequence[str]) -> str:
    """Return a sentence with the queues that an unknown name may mean, without internal ones."""
    visible = [each for each in known if not each.startswith(_INTERNAL)]
    return did_you_mean(name, visible, otherwise="" if visible else "The store has no queues yet.")


async def queues_with_rules(app: App, queue: str | None, settings: Settings) -> list[str]:
    """Return the queues whose limits and budgets to show: the default queue may have them before its first job."""
    default = [settings["queue"]] if queue is None else []
    return sorted({*await queues_of(app, queue), *default})


async def refuse_unknown_queue(app: App, queue: str | None, *, to: str) -> None:
    """Raise ``NotFound`` for a queue that does not exist. Its message says how ``to`` do it before the first job."""
    try:
        await queues_of(app, queue)
    except NotFound as error:
        raise NotFound(f"{error} Add --create to {to} a queue before its first job.") from None


async def _is_set_up(app: App, queue: Queue) -> bool:
    """Return whether a queue without jobs has a pause, a limit, a budget, a scheduler or a worker."""
    if await queue.limits() or await queue.schedulers() or await queue.workers():
        return True
    if await queue.budgets() or await queue.settings() != QueueSettings():
        return True
    [state] = (await (await app.connect()).groups(queue.name, keys=[""])).groups
    return state.why in ("paused", "asked") or any([True async for _ in queue.groups()])
