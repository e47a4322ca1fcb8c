"""Find apps and tasks by ``module:name``, which other processes use instead of pickles."""

from __future__ import annotations

import inspect
import os
import platform
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING, Final, TypeVar, cast

from penstock.core.text import shown
from penstock.errors import InvalidOption

if TYPE_CHECKING:
    from penstock.client.app import App


T = TypeVar("T")

_STANDARD_LIBRARY: Final = Path(os.__file__).parent
_PENSTOCK: Final = Path(__file__).parents[1]
_SCRIPT = "__main__"
# The name of the script in children of multiprocessing.
_SCRIPT_OF_PARENT = "__mp_main__"


class MissingModule(InvalidOption):
    """A module with that name does not exist."""


def find(target: str, kind: type[T]) -> T:
    """Return the app or task (``kind``) at ``module:name``. Raise ``InvalidOption`` if there is none."""
    noun = kind.__name__.lower()
    value = _named(target, noun)
    if not isinstance(value, kind):
        expected = "an app" if noun == "app" else "a task, which @app.task makes of a function"
        raise InvalidOption(f"{target!r} is of type {type(value).__qualname__}, not {expected}.")
    return value


def find_function(target: str) -> Callable[..., object]:
    """Return the function at ``module:name``. Raise ``InvalidOption`` if there is none."""
    found = _named(target, "function")
    if not callable(found):
        raise InvalidOption(f"{target!r} is of type {type(found).__qualname__}, not a function.")
    return cast(Callable[..., object], found)


def _named(target: str, noun: str) -> object:
    module, _, name = target.partition(":")
    try:
        found: object = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidOption(
            f"the {noun} {target!r} cannot be found on {platform.node()}: {error}. Give module:name of a name at the "
            "top level of a module that Python can import there: install it, or ship it with Spark's "
            "--py-files or spark.addArtifacts."
        ) from error
    return found


def check_module(name: object) -> str:
    """Return ``name``. Raise ``InvalidOption`` if it cannot be the full name of a module."""
    if isinstance(name, str) and (module := module_of(name)) != name:
        raise InvalidOption(f"{shown(name)} is the path of a file. Give the name of the module: {module}.")
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise InvalidOption(f"{shown(name)} is not the name of a module. Give one such as 'myproject.mail'.")
    return name


def module_of(path: str) -> str:
    """Return the name of the module in the file ``path``; return ``path`` itself if it is not the path of one."""
    stem = path.removesuffix(".py").removeprefix("./")
    parts = stem.split("/" if "/" in stem else ".")
    return ".".join(parts) if all(part.isidentifier() for part in parts) else path


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
    """Return the error that says why the module ``name`` cannot be imported, and which line of the user's failed."""
    frames = [frame for frame in extract_tb(error.__traceback__) if "importlib" not in frame.filename][1:]
    frames = [frame for frame in frames if _is_user_code(frame.filename)] or frames
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({error.filename}, line {error.lineno})"
    reason = getattr(error, "msg", None) if isinstance(error, SyntaxError) else str(error)
    return InvalidOption(f"module {name} cannot be imported: {type(error).__name__}: {reason}{where}.")


def _is_user_code(path: str) -> bool:
    """Return whether a file is neither Python's nor installed: then its author can fix it."""
    file = Path(path)
    if path.startswith("<") or not {"site-packages", "dist-packages"}.isdisjoint(file.parts):
        return False
    return not (file.is_relative_to(_STANDARD_LIBRARY) or file.is_relative_to(_PENSTOCK))


def source_of(func: Callable[..., object]) -> str:
    """Return where a function is defined: its module, and its file and line if it has them."""
    inner = inspect.unwrap(func)
    where = f"in module {getattr(inner, '__module__', _SCRIPT)}"
    code = getattr(inner, "__code__", None)
    return f"{where} ({code.co_filename}, line {code.co_firstlineno})" if code is not None else where


def locate(app: App, *, in_script: bool) -> tuple[str, str]:
    """Return the module and the name of ``app`` for other processes, preferably a module that has tasks.

    ``in_script`` allows the script itself (``__main__``), for processes that load it, too.

    Raises:
        InvalidOption: the app is not at the top level of such a module.
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
            f"other processes cannot import the app: it is {where}. Put it and its tasks at the top level of a "
            "module."
        )
    *_, module, name = min(found)
    return module, name


def is_typed_in(func: object) -> bool:
    """Return whether a function was typed in a notebook or a prompt, which other processes cannot load."""
    is_here = getattr(func, "__module__", "") == _SCRIPT
    return is_here and not hasattr(sys.modules[_SCRIPT], "__file__")


def task_modules(app: App) -> list[str]:
    """Return the modules of the app's tasks, except the script itself."""
    return sorted(_modules(app) - {_SCRIPT, _SCRIPT_OF_PARENT})


def _modules(app: App) -> set[str]:
    tasks = (*app.tasks.values(), *app.handlers.values())
    return {getattr(task.func, "__module__", _SCRIPT) for task in tasks}
