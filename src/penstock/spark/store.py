"""A store for code without an event loop: Spark calls data sources, readers and writers from plain threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from penstock.client.app import App
from penstock.errors import InvalidOption
from penstock.storage import open_storage
from penstock.storage.contract import Storage

T = TypeVar("T")


class Store:
    """A storage with a loop of its own, for one thread. Use in a ``with`` block, which connects and closes it.

    In a thread that runs a loop already, as the main thread of a notebook does, the loop gets a thread of its own.
    """

    def __init__(self, url: str) -> None:
        self.storage: Storage = open_storage(url)
        self._runner = asyncio.Runner()
        self._thread = ThreadPoolExecutor(1, "penstock-store") if _is_in_loop() else None

    def __enter__(self) -> Store:
        try:
            self.run(self.storage.open())
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.run(self.storage.close())
        finally:
            self._close()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The answer to one call of the storage, or to several that are gathered."""
        return self._apart(lambda: self._finish(call))

    def begin(self, call: Coroutine[Any, Any, T]) -> Callable[[], T]:
        """Have a call on its way, and go on: the store works on it meanwhile. Gives what waits for its answer, which is
        to be called before the store is closed."""
        task = self._apart(lambda: self._send(call))
        return lambda: self._apart(lambda: self._finish(task))

    def _finish(self, call: Coroutine[Any, Any, T] | asyncio.Task[T]) -> T:
        # Not by the runner itself, which for the sake of Ctrl-C makes a text of every answer, however large.
        return self._runner.get_loop().run_until_complete(call)

    def _send(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        loop = self._runner.get_loop()
        task = loop.create_task(call)
        loop.run_until_complete(_few_turns())
        return task

    def _apart(self, call: Callable[[], T]) -> T:
        """Return the answer of the call, made in the thread of the loop if that is another one."""
        return call() if self._thread is None else self._thread.submit(call).result()

    def _close(self) -> None:
        self._apart(self._runner.close)
        if self._thread is not None:
            self._thread.shutdown()


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _few_turns() -> None:
    """Of the loop: one in which a call is made up, one in which it is sent, one to spare."""
    for _ in range(3):
        await asyncio.sleep(0)


def shared_url(app: App) -> str:
    """The URL of the app's store, as executors are to open it. Raises as ``url_for_executors``."""
    url = url_for_executors(app.url)
    if app.namespace is None:
        return url
    parts = urlsplit(url)
    query = [(name, value) for name, value in parse_qsl(parts.query) if name != "namespace"]
    return parts._replace(query=urlencode([*query, ("namespace", app.namespace)])).geturl()


def url_for_executors(url: str) -> str:
    """The same store for processes in other folders: the path of a SQLite file is made absolute.

    Raises:
        InvalidOption: a store in the memory of this process, which no other can open.
    """
    parts = urlsplit(url)
    if parts.scheme == "memory":
        raise InvalidOption(
            f"{url} is in the memory of this process, and Spark runs in others. Use sqlite:///path."
        )
    if parts.scheme != "sqlite" or parts.netloc or not parts.path.strip("/"):
        return url
    path = quote(str(Path(unquote(parts.path[1:])).absolute()))
    return f"sqlite:///{path}?{parts.query}" if parts.query else f"sqlite:///{path}"
