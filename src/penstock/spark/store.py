"""A store for code without an event loop: Spark calls data sources, readers and writers from plain threads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

from penstock.app import App
from penstock.errors import InvalidOption
from penstock.storage import open_storage
from penstock.storage.base import Storage

__all__ = ["Store", "shared_url"]

T = TypeVar("T")


class Store:
    """A storage with a loop of its own, for one thread. Use in a ``with`` block, which connects and closes it."""

    def __init__(self, url: str) -> None:
        self.storage: Storage = open_storage(url)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Store:
        try:
            self.run(self.storage.open())
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.run(self.storage.close())
        finally:
            self._runner.close()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The answer to one call of the storage, or to several that are gathered."""
        return self._runner.run(call)


def shared_url(app: App) -> str:
    """The URL of the app's store, as executors are to open it. Raises ``InvalidOption`` for one they cannot reach."""
    if app.url.startswith("memory:"):
        raise InvalidOption(
            "the app's store is in the memory of this process, where Spark's workers cannot reach it. Use "
            "sqlite:///penstock.db, or a Valkey server."
        )
    if app.namespace is None:
        return app.url
    parts = urlsplit(app.url)
    query = [(name, value) for name, value in parse_qsl(parts.query) if name != "namespace"]
    return parts._replace(query=urlencode([*query, ("namespace", app.namespace)])).geturl()
