"""The event loop thread on which synchronous code runs its calls, one per process.

It starts on first use and ends at exit. A forked child starts its own.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from penstock.errors import PenstockError

T = TypeVar("T")


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


def _begin_afresh() -> None:
    global _thread, _lock
    _inherited.append(_thread)
    _thread = None
    _lock = threading.Lock()


atexit.register(_end)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_afresh)
