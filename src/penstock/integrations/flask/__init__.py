"""Flask: an extension that is an app of Penstock, configured from ``app.config``.

::

    penstock = Penstock()


    @penstock.task(queue="mail")
    def send(user_id: int) -> str: ...  # runs inside the application context


    def create_app() -> Flask:
        web = Flask(__name__)
        web.config.from_prefixed_env()  # FLASK_PENSTOCK_URL
        penstock.init_app(web)
        return web

``flask penstock worker`` runs the jobs.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import click
from flask import Flask
from flask.cli import ScriptInfo, pass_script_info, with_appcontext

from penstock.client.app import App
from penstock.core.text import shown
from penstock.errors import InvalidOption, PenstockError
from penstock.integrations.surroundings import surround

__all__ = ["Penstock"]

PROJECT: Final = "penstock.integrations.flask.project"
"""The module that loads the application and has the app of Penstock, for other processes."""


class Penstock(App):
    """An app of Penstock whose jobs run inside the context of a Flask application.

    ``init_app`` takes the store from ``config["PENSTOCK_URL"]`` and ``config["PENSTOCK_NAMESPACE"]``; the defaults are
    those of ``App``. ``options`` are those of ``App`` besides the URL and the namespace. With an application factory,
    the last application counts.
    """

    def __init__(
        self, app: Flask | None = None, *, include: list[str] | tuple[str, ...] = (), **options: Any
    ) -> None:
        for name in ("url", "namespace"):
            if name in options:
                raise InvalidOption(
                    f"{name}={shown(options[name])} belongs in the configuration of Flask: "
                    f'app.config["PENSTOCK_{name.upper()}"].'
                )
        super().__init__(include=include, **options)
        self._flask: Flask | None = None
        self.preloaded = (PROJECT,)
        surround(self, in_thread=self._context, on_loop=self._context_on_loop)
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Use the store of ``app.config``, run jobs inside ``app``, and add ``flask penstock``.

        Call it before the first job is enqueued.

        Raises:
            InvalidOption: the URL or the namespace is not valid.
        """
        url = app.config.get("PENSTOCK_URL")
        namespace = app.config.get("PENSTOCK_NAMESPACE")
        try:
            given = App(url, namespace=namespace)
        except PenstockError as error:
            raise InvalidOption(f"the configuration of {app.name} is not valid: {error}") from error
        if (given.url, given.namespace) != (self.url, self.namespace):
            self.move_to(given.url, namespace=given.namespace)
        self.named = given.named
        self._flask = app
        app.extensions["penstock"] = self
        app.cli.add_command(penstock_command)

    @property
    def flask(self) -> Flask:
        """Return the application. Raise ``PenstockError`` before ``init_app``."""
        if self._flask is None:
            raise PenstockError(
                "this Penstock() has no Flask application: call init_app(app), or give Penstock(app)."
            )
        return self._flask

    @contextmanager
    def _context(self) -> Generator[None]:
        with self.flask.app_context():
            yield

    @asynccontextmanager
    async def _context_on_loop(self) -> AsyncGenerator[None]:
        with self.flask.app_context():
            yield


@click.command(
    "penstock",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@pass_script_info
@with_appcontext
def penstock_command(script: ScriptInfo, /, arguments: tuple[str, ...]) -> None:
    """Run a command of Penstock: worker, status, list, show, retry … See `flask penstock --help`."""
    if script.app_import_path:
        # Processes of the worker load the same application.
        os.environ["FLASK_APP"] = script.app_import_path
    os.environ.setdefault("PENSTOCK_APP", f"{PROJECT}:app")
    before = sys.argv
    sys.argv = ["penstock", *arguments]
    try:
        runpy.run_module("penstock", run_name="__main__")
    finally:
        sys.argv = before
