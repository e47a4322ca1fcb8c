"""The storage of an app: from a URL, one for every event loop, or given, for one loop only.

``chosen_store`` is the one rule for which store that is. From the highest rank to the lowest: a flag of the command
line, the code, the environment, the files that only the command line reads, the default.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

from penstock.core.display import shown, visible_in_line, without_password
from penstock.core.ids import uuid7
from penstock.errors import InvalidOption, StorageError
from penstock.hints import FOREIGN_STORES

if TYPE_CHECKING:
    from penstock.storage.base import Storage

__all__ = [
    "DEFAULT_URL",
    "Opening",
    "StoreName",
    "check_url",
    "chosen_store",
    "from_environment",
    "shown_store",
    "store_options",
]

DEFAULT_URL: Final = "sqlite:///penstock.db"


class StoreName(NamedTuple):
    """The store and the namespace that one place names, as far as it names them."""

    url: str | None = None
    namespace: str | None = None


def chosen_store(names: Iterable[StoreName]) -> tuple[str, str | None]:
    """Return the URL and the namespace that count, of ``names`` in the order of their rank.

    URL and namespace are chosen apart: the first that names one counts. A namespace in the chosen URL has the rank of
    that URL; then the namespace returned is ``None``, unless a higher rank names one.
    """
    url = namespace = None
    for name in names:
        namespace = namespace or name.namespace
        if url is None and name.url:
            url = name.url
            if namespace is None and _named_in(url):
                return url, None
        if url is not None and namespace is not None:
            break
    return url or DEFAULT_URL, namespace


def check_url(url: str) -> None:
    """Raise ``InvalidOption`` for a URL that cannot be that of a store, before anybody connects.

    It is not quoted, because it may hold a password.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise InvalidOption(
            "The first argument of App(...) is the URL of the store. What was given is not a URL: it has no scheme. "
            "Use one like sqlite:///penstock.db or valkey://host. An app has no name."
        )
    if remedy := FOREIGN_STORES.get(scheme.lower()):
        raise InvalidOption(f"{scheme}:// is not a store of Penstock. {remedy}.")


def from_environment() -> StoreName:
    """Return what ``PENSTOCK_URL`` and ``PENSTOCK_NAMESPACE`` name."""
    return StoreName(os.environ.get("PENSTOCK_URL"), os.environ.get("PENSTOCK_NAMESPACE"))


def shown_store(url: str, namespace: str | None) -> str:
    """Return the store and the namespace for a log line or a screen, without passwords.

    A file is named by its absolute path: a relative one is another file in every folder.
    """
    part = namespace or _named_in(url) or "default"
    return f"{visible_in_line(without_password(_absolute(url)))}, namespace {part}"


def store_options(named: StoreName) -> tuple[str, ...]:
    """Return the options of a command that reaches the store which the code names.

    A URL with a password is left out: the reader has to set ``PENSTOCK_URL``. No command reaches ``memory://``.
    """
    if named.url is None or named.url.startswith("memory:"):
        return ()
    namespace = ("--namespace", named.namespace) if named.namespace else ()
    has_password = without_password(named.url) != named.url
    return namespace if has_password else ("--url", _absolute(named.url), *namespace)


def _absolute(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme != "sqlite" or parts.netloc or not parts.path.strip("/"):
        return url
    path = quote(os.path.abspath(unquote(parts.path[1:])))
    return f"sqlite:///{path}?{parts.query}" if parts.query else f"sqlite:///{path}"


def _named_in(url: str) -> str:
    return parse_qs(urlsplit(url).query).get("namespace", [""])[0]


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
