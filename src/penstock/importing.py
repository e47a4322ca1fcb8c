"""How another process finds an app or a task: as ``module:name``, never by pickling it."""

from __future__ import annotations

import platform
import sys
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from penstock.core.display import shown
from penstock.errors import InvalidOption

if TYPE_CHECKING:
    from penstock.app import App

__all__ = ["MissingModule", "check_module", "find", "import_named", "locate", "task_modules"]

T = TypeVar("T")

_SCRIPT = "__main__"
# What multiprocessing calls the script in its children: nobody else knows that name.
_SCRIPT_OF_PARENT = "__mp_main__"


class MissingModule(InvalidOption):
    """No module of that name can be found."""


def find(target: str, kind: type[T]) -> T:
    """The app or task (``kind``) at ``module:name``. Raises ``InvalidOption`` if there is none."""
    noun = kind.__name__.lower()
    module, _, name = target.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidOption(
            f"the {noun} {target!r} cannot be found on {platform.node()}: {error}. Give module:name of what stands at "
            "the top of a module, and see that Python finds the module there: install it, or ship it with Spark's "
            "--py-files or spark.addArtifacts."
        ) from error
    if not isinstance(found, kind):
        wanted = "an app" if noun == "app" else "a task, which @app.task makes of a function"
        raise InvalidOption(f"{target!r} is of type {type(found).__qualname__}, not {wanted}.")
    return found


def check_module(name: object) -> str:
    """Return ``name``. Raise ``InvalidOption`` if it cannot be the full name of a module."""
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise InvalidOption(f"{shown(name)} is not the name of a module. Give one such as 'myproject.mail'.")
    return name


def import_named(name: str) -> ModuleType:
    """Import the module ``name``.

    Raises:
        MissingModule: there is no such module.
        InvalidOption: importing the module raises. The message says why, and where.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _import_failed(name, error) from error
        raise MissingModule(
            f"module {shown(error.name)} is neither in {Path.cwd()} nor on Python's path."
        ) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(name, error) from error


def _import_failed(name: str, error: BaseException) -> InvalidOption:
    """Return the error that says why the module ``name`` cannot be imported, and where it went wrong."""
    frames = [frame for frame in extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({error.filename}, line {error.lineno})"
    reason = getattr(error, "msg", None) if isinstance(error, SyntaxError) else str(error)
    return InvalidOption(f"module {name} cannot be imported: {type(error).__name__}: {reason}{where}.")


def locate(app: App, *, in_script: bool) -> tuple[str, str]:
    """The module and the name under which another process finds ``app``: with its tasks, if it can be. ``in_script``
    says whether the script itself will do (as ``__main__``), for processes that load it, too.

    Raises:
        InvalidOption: it stands at the top of no such module.
    """
    with_tasks = _modules(app)
    found = [
        (module not in with_tasks, module != _SCRIPT, module, name)
        for module, loaded in list(sys.modules.items())
        for name, value in list(getattr(loaded, "__dict__", {}).items())
        if value is app and module != _SCRIPT_OF_PARENT and (in_script or module != _SCRIPT)
    ]
    if not found:
        where = "made inside a function" if in_script else "in the script itself, or made inside a function"
        raise InvalidOption(
            f"the app is at the top of no module that other processes can import: it is {where}. Put it and its tasks "
            "into a module of their own."
        )
    *_, module, name = min(found)
    return module, name


def task_modules(app: App) -> list[str]:
    """The modules that the app's tasks are in, but for the script itself."""
    return sorted(_modules(app) - {_SCRIPT, _SCRIPT_OF_PARENT})


def _modules(app: App) -> set[str]:
    return {getattr(task.func, "__module__", _SCRIPT) for task in app.tasks.values()}
