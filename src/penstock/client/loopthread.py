"""The event loop thread on which synchronous code runs its calls, one per process; and the base of the sync API.

The thread starts on first use and ends at exit. A forked child starts its own.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import update_wrapper
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar, overload

from penstock.errors import PenstockError

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Q = ParamSpec("Q")

_END: Final = object()


class _LoopThread:
    def __init__(self) -> None:
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, name="penstock-sync", daemon=True)
        self._thread.start()
        self._started.wait()

    def _main(self) -> None:
        # Not asyncio.run: to end the default executor it starts a thread, which Python 3.12 refuses at exit.
        # The threads of the executor have ended by then, because concurrent.futures joins them earlier.
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._serve())
            loop.run_until_complete(_cancel_tasks())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._started.set()
        await self._stop.wait()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            # After a KeyboardInterrupt no caller waits for the answer.
            future.cancel()

    def end(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout=5)


async def _cancel_tasks() -> None:
    """Cancel the remaining tasks at the end, which closes the sessions of apps."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_thread: _LoopThread | None = None
_lock = threading.Lock()
# A forked child keeps its inherited thread object: destroying a loop that seems to run would fail.
_inherited: list[_LoopThread | None] = []


def run(coroutine: Coroutine[Any, Any, T], *, may_block_loop: bool = False) -> T:
    """Run ``coroutine`` on the loop thread and return its result. Any number of other threads may call this.

    An interrupt of the calling thread cancels the coroutine. Raise ``PenstockError`` if the calling thread runs an
    event loop: the call would block that loop, and would never return if it waited for that loop. Pass
    ``may_block_loop`` where neither matters.
    """
    global _thread
    if asyncio._get_running_loop() is not None and not may_block_loop:
        coroutine.close()
        raise PenstockError(
            "`.sync` cannot be used in a thread that runs an event loop, because the call would block the loop. "
            "Await the same method without `.sync`. In synchronous code that async code calls, run that code "
            "in a thread: await asyncio.to_thread(function)."
        )
    thread = _thread
    if thread is None or not thread.is_alive:
        with _lock:
            if _thread is None or not _thread.is_alive:
                _thread = _LoopThread()
            thread = _thread
    return thread.run(coroutine)


def _end() -> None:
    if _thread is not None:
        _thread.end()


def _reset_after_fork() -> None:
    global _thread, _lock
    _inherited.append(_thread)
    _thread = None
    _lock = threading.Lock()


atexit.register(_end)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_reset_after_fork)


class Face(Generic[T_co]):
    """The sync face of ``_target``."""

    __slots__ = ("_target",)

    def __init__(self, target: T_co) -> None:
        self._target = target

    def __repr__(self) -> str:
        return f"{self._target!r}.sync"


@overload
def as_sync(
    method: Callable[Concatenate[A, Q], Coroutine[Any, Any, B]],
) -> Callable[Concatenate[Face[A], Q], B]: ...
@overload
def as_sync(
    method: Callable[Concatenate[A, Q], Coroutine[Any, Any, B]], wrap: Callable[[B], T]
) -> Callable[Concatenate[Face[A], Q], T]: ...
def as_sync(
    method: Callable[Concatenate[A, Q], Coroutine[Any, Any, Any]], wrap: Callable[[Any], Any] | None = None
) -> Callable[Concatenate[Face[A], Q], Any]:
    """Return ``method`` for the face of its object: same arguments, without ``await``. ``wrap`` converts the result."""

    def call(face: Face[A], /, *args: Q.args, **kwargs: Q.kwargs) -> Any:
        result = run(method(face._target, *args, **kwargs))
        return result if wrap is None else wrap(result)

    return update_wrapper(call, method)


def as_sync_iterator(
    method: Callable[Concatenate[A, Q], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Face[A], Q], Generator[T, None, None]]:
    """Return ``method`` for the face of its object, as a generator. The loop thread fetches each item when needed."""

    def call(face: Face[A], /, *args: Q.args, **kwargs: Q.kwargs) -> Generator[T, None, None]:
        return _iterate(method(face._target, *args, **kwargs))

    return update_wrapper(call, method)


def _iterate(items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    async def fetch_next() -> T | object:
        return await anext(items, _END)

    async def close() -> None:
        await items.aclose()

    try:
        while (item := run(fetch_next())) is not _END:
            yield item  # type: ignore[misc]  # _END is gone
    finally:
        run(close())
