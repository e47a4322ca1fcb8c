"""The setting ``PENSTOCK``, and the app that it describes.

- ``URL``: the store; the default is that of ``App``.
- ``APP``: your own app, as ``"shop.jobs:app"``. Without it, Penstock makes one.
- ``OPTIONS``: the options of the app that Penstock makes, as ``App(...)`` takes them.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, NamedTuple

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import close_old_connections

from penstock.client.app import App
from penstock.client.imports import find
from penstock.client.session import StoreName, check_url
from penstock.core.text import shown
from penstock.errors import PenstockError
from penstock.integrations.surroundings import surround
from penstock.worker.worker import Worker

_KEYS: Final = ("URL", "APP", "OPTIONS")

PROJECT: Final = "penstock.integrations.django.project"
"""The module that sets Django up and has the app, for other processes."""


class Problem(NamedTuple):
    """An error in the settings, with its remedy."""

    id: str
    message: str
    remedy: str


def problems() -> list[Problem]:
    """Return what is wrong with the setting ``PENSTOCK``."""
    given = getattr(settings, "PENSTOCK", {})
    if not isinstance(given, Mapping):
        example = 'PENSTOCK = {"URL": "valkey://localhost"}'
        return [Problem("E001", f"PENSTOCK must be a dictionary, got {shown(given)}.", f"Write {example}.")]
    found = [
        Problem("E002", f"PENSTOCK has an unknown key {shown(key)}.", f"Use {', '.join(_KEYS)}.")
        for key in given
        if key not in _KEYS
    ]
    return found + [
        problem
        for problem in (_problem_of_url(given), _problem_of_options(given), _problem_of_app(given))
        if problem
    ]


def _problem_of_url(given: Mapping[str, Any]) -> Problem | None:
    url = given.get("URL")
    if url is None:
        return None
    remedy = 'Give the URL of a store, such as "sqlite:///penstock.db" or "valkey://localhost".'
    if not isinstance(url, str) or not url:
        return Problem("E003", f"PENSTOCK['URL'] must be a text, got {shown(url)}.", remedy)
    try:
        check_url(url)
        App(url)
    except PenstockError as error:
        return Problem("E003", f"PENSTOCK['URL'] is not valid: {error}", remedy)
    return None


def _problem_of_options(given: Mapping[str, Any]) -> Problem | None:
    options = given.get("OPTIONS", {})
    remedy = 'Give the options of App(...), such as {"attempts": 5, "result_ttl": "7d"}.'
    if not isinstance(options, Mapping):
        return Problem("E004", f"PENSTOCK['OPTIONS'] must be a dictionary, got {shown(options)}.", remedy)
    if options and given.get("APP") is not None:
        return Problem(
            "E004",
            "PENSTOCK has OPTIONS, which are for the app that Penstock makes, and an APP of yours.",
            "Move the options into the code of the app: App(...).",
        )
    if "url" in options:
        return Problem("E004", "PENSTOCK['OPTIONS'] has the key 'url'.", "Use PENSTOCK['URL'].")
    try:
        App(**options)
    except (PenstockError, TypeError) as error:
        return Problem("E004", f"PENSTOCK['OPTIONS'] is not valid: {error}", remedy)
    return None


def _problem_of_app(given: Mapping[str, Any]) -> Problem | None:
    target = given.get("APP")
    if target is None:
        return None
    remedy = 'Give the module and the name of an App, such as "shop.jobs:app".'
    if not isinstance(target, str):
        return Problem("E005", f"PENSTOCK['APP'] must be a text, got {shown(target)}.", remedy)
    try:
        find(target, App)
    except PenstockError as error:
        return Problem("E005", f"PENSTOCK['APP'] is not valid: {error}", remedy)
    return None


_lock: Final = threading.RLock()
_apps: Final[list[App]] = []
worker_ids: Final[dict[App, str]] = {}
"""The id of the last worker in this process of each app that was set up."""


def get_app() -> App:
    """Return the app of the settings: your own, or one that the first call makes.

    Raises:
        ImproperlyConfigured: the settings are not valid.
    """
    with _lock:
        if not _apps:
            _apps.append(_made())
        return _apps[0]


def _made() -> App:
    found = problems()
    if found:
        raise ImproperlyConfigured(" ".join(f"{message} {remedy}" for _, message, remedy in found))
    given = getattr(settings, "PENSTOCK", {})
    url, target = given.get("URL"), given.get("APP")
    if target is None:
        app = App(url, **given.get("OPTIONS", {}))
    else:
        app = find(target, App)
        if url is not None:
            app.named = StoreName(url, app.named.namespace)
            app.move_to(url, namespace=app.named.namespace)
    if app not in worker_ids:
        _set_up(app)
    return app


def _set_up(app: App) -> None:
    """Give the jobs of ``app`` what Django needs."""
    worker_ids[app] = ""

    @app.on_start
    def note(worker: Worker) -> None:
        worker_ids[app] = worker.id

    surround(app, in_thread=fresh_connections, on_loop=fresh_connections_async)
    app.preloaded = (*app.preloaded, PROJECT)


def _forget(*, setting: str, **other: object) -> None:
    """Read the settings again when a test overrides them."""
    if setting == "PENSTOCK":
        with _lock:
            _apps.clear()


setting_changed.connect(_forget)


# Jobs are to workers what requests are to servers: a connection that is too old or broken is closed around each.


@contextmanager
def fresh_connections() -> Generator[None]:
    """Close old connections to databases before and after a job, in the thread that runs it."""
    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()


@asynccontextmanager
async def fresh_connections_async() -> AsyncGenerator[None]:
    """Close old connections around a job on the loop: in the thread that Django runs its queries in."""
    close = sync_to_async(close_old_connections)
    await close()
    try:
        yield
    finally:
        await close()
