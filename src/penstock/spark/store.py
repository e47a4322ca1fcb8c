"""Blocking access to a store. Spark calls data sources, readers and writers from plain threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlencode

from penstock.client.app import App
from penstock.core.text import split_url
from penstock.errors import InvalidOption
from penstock.storage import open_storage
from penstock.storage.contract import Storage

T = TypeVar("T")


class Store:
    """A storage with its own event loop, for one thread. A ``with`` block connects and closes it.

    If the thread already runs a loop, as the main thread of a notebook does, the new loop runs in another thread.
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

    def __exit__(self, *_: object) -> None:
        try:
            self.run(self.storage.close())
        finally:
            self._close()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the answer to a storage call, or to several calls that are gathered."""
        return self._in_loop_thread(lambda: self._finish(call))

    def begin(self, call: Coroutine[Any, Any, T]) -> Callable[[], T]:
        """Start a call and return immediately, while the store works on it. Return a function that waits for the
        answer; call it before the store closes."""
        task = self._in_loop_thread(lambda: self._send(call))
        return lambda: self._in_loop_thread(lambda: self._finish(task))

    def _finish(self, call: Coroutine[Any, Any, T] | asyncio.Task[T]) -> T:
        # Avoid the runner's ``run``: to handle Ctrl-C, it builds the repr of every answer, however large.
        return self._runner.get_loop().run_until_complete(call)

    def _send(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        loop = self._runner.get_loop()
        task = loop.create_task(call)
        loop.run_until_complete(_turn_loop())
        return task

    def _in_loop_thread(self, call: Callable[[], T]) -> T:
        """Run the call in the loop's thread and return its answer."""
        return call() if self._thread is None else self._thread.submit(call).result()

    def _close(self) -> None:
        self._in_loop_thread(self._runner.close)
        if self._thread is not None:
            self._thread.shutdown()


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _turn_loop() -> None:
    """Run the loop three times: once to build a call, once to send it, once to spare."""
    for _ in range(3):
        await asyncio.sleep(0)


def shared_url(app: App) -> str:
    """Return the URL of the app's store for executors. Raise as ``url_for_executors`` does."""
    url = url_for_executors(app.url)
    if app.namespace is None:
        return url
    parts = split_url(url)
    query = [(name, value) for name, value in parse_qsl(parts.query) if name != "namespace"]
    return parts._replace(query=urlencode([*query, ("namespace", app.namespace)])).geturl()


def url_for_executors(url: str) -> str:
    """Return the URL of the same store for processes in other folders. The path of a SQLite file becomes absolute.

    Raises:
        InvalidOption: the store is in the memory of this process, where no other process can open it.
    """
    parts = split_url(url)
    if parts.scheme == "memory":
        raise InvalidOption(
            f"{url} is in the memory of this process, but Spark runs in others. Use sqlite:///path."
        )
    if parts.scheme != "sqlite" or parts.netloc or not parts.path.strip("/"):
        return url
    path = quote(str(Path(unquote(parts.path[1:])).absolute()))
    return f"sqlite:///{path}?{parts.query}" if parts.query else f"sqlite:///{path}"
