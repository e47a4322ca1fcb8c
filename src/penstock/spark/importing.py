"""How another process finds an app: by the name of a module that has it, never by pickling it."""

from __future__ import annotations

import platform
import sys
from importlib import import_module

from penstock.app import App
from penstock.errors import InvalidOption

__all__ = ["app_target", "find_app", "task_modules"]


def app_target(app: App) -> str:
    """``module:name`` of the app: in a module that has tasks of it, if there is one.

    Raises:
        InvalidOption: it is at the top of no module that others can import.
    """
    with_tasks = task_modules(app)
    found = [
        (module not in with_tasks, module, name)
        for module, loaded in list(sys.modules.items())
        for name, value in list(getattr(loaded, "__dict__", {}).items())
        if value is app and module != "__main__"
    ]
    if not found:
        raise InvalidOption(
            "the app is at the top of no module that other processes can import: it is in the script itself, or made "
            "inside a function. Put it and its tasks into a module of their own."
        )
    _, module, name = min(found)
    return f"{module}:{name}"


def task_modules(app: App) -> list[str]:
    """The modules that the app's tasks are in, but for the script itself."""
    modules = {getattr(task.func, "__module__", "__main__") for task in app.tasks.values()}
    return sorted(modules - {"__main__"})


def find_app(target: str) -> App:
    """The app at ``module:name``. Raises ``InvalidOption`` if there is none."""
    module, _, name = target.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidOption(
            f"the app {target!r} cannot be found on {platform.node()}: {error}. Install its module where Spark runs, "
            "or ship it (--py-files, spark.addArtifacts)."
        ) from error
    if not isinstance(found, App):
        raise InvalidOption(f"{target!r} is a {type(found).__qualname__}, not an app.")
    return found
