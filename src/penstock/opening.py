"""How an app comes by its storage: from a URL, one for every event loop, or given, for one loop only."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock.core.display import shown
from penstock.core.ids import uuid7
from penstock.errors import InvalidOption, StorageError

if TYPE_CHECKING:
    from penstock.storage.base import Storage

__all__ = ["Opening"]


class Opening:
    """Made of the ``url`` of an app, or of an open storage, which stays its giver's to close (``is_ours`` is false)."""

    def __init__(self, given: str | Storage, *, namespace: str | None) -> None:
        self._storage = None if isinstance(given, str) else _checked_storage(given)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._namespace = namespace
        self.url = _shared_by_loops(given) if isinstance(given, str) else given.url
        self.is_ours = self._storage is None

    async def open(self) -> Storage:
        """A storage for the running loop, opened. Raises ``StorageError``, and ``InvalidOption`` for a URL that names
        no engine."""
        if self._storage is not None:
            return self._given(self._storage)
        from penstock.storage import open_storage

        options = {} if self._namespace is None else {"namespace": self._namespace}
        storage = open_storage(self.url, **options)
        await storage.open()
        return storage

    def _given(self, storage: Storage) -> Storage:
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise StorageError(
                "the storage this app was given belongs to another event loop, where the app was used before. "
                "Give the app a URL instead: then every loop gets a connection of its own."
            )
        self._loop = loop
        return storage


def _checked_storage(given: Storage) -> Storage:
    if not hasattr(given, "capabilities"):
        raise InvalidOption(
            f"url={shown(given)} is of type {type(given).__qualname__}, and no store. "
            "Give a URL such as 'sqlite:///penstock.db', or an open storage."
        )
    return given


def _shared_by_loops(url: str) -> str:
    """An unnamed ``memory://`` gets a name, or every loop of the app would have a store to itself."""
    parts = urlsplit(url)
    if parts.scheme == "memory" and not parts.netloc and parts.path in ("", "/"):
        return parts._replace(netloc=f"app-{uuid7()}").geturl()
    return url
