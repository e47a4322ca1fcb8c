"""A store for code without an event loop: Spark calls data sources, readers and writers from plain threads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from penstock.storage import open_storage
from penstock.storage.base import Storage

__all__ = ["Store"]

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
