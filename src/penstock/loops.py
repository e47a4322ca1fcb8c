"""One session per event loop: a connection belongs to the loop it was opened in, an app to the whole process."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from penstock.core.display import get_logger
from penstock.session import Session

if TYPE_CHECKING:
    from penstock.intake import Intake
    from penstock.storage.base import Storage

__all__ = ["PerLoop", "Sessions"]

_log = get_logger(__name__)

_OTHER_LOOP_S: Final = 5.0

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One of something for each event loop that asks. ``open`` makes it for the running one, ``end`` ends it.

    It ends by ``close()``, or with its loop: an asynchronous generator stands in for it there, and
    ``asyncio.run`` closes those of its loop before it leaves. After a fork the child begins with none.
    """

    def __init__(self, open: Callable[[], Awaitable[T]], *, end: Callable[[T], Awaitable[None]]) -> None:
        self._open = open
        self._end = end
        self._forget()
        _all.add(self)

    def _forget(self) -> None:
        self._ready: dict[asyncio.AbstractEventLoop, T] = {}
        self._opening: dict[asyncio.AbstractEventLoop, asyncio.Task[T]] = {}
        self._keepers: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}

    async def get(self) -> T:
        """The running loop's, opened if need be. Raises what opening raises; the next call tries again."""
        loop = asyncio.get_running_loop()
        ready = self._ready.get(loop)
        if ready is not None:
            return ready
        opening = self._opening.get(loop)
        if opening is None:
            opening = self._opening[loop] = loop.create_task(self._begin(loop))
            opening.add_done_callback(lambda _: self._opening.pop(loop, None))
        # Shielded: others may wait for the same connection when one of them gives up.
        return await asyncio.shield(opening)

    async def close(self) -> None:
        """End those of all loops: of this one here, of others that are running by asking them."""
        here = asyncio.get_running_loop()
        for loop, keeper in list(self._keepers.items()):
            if loop is here:
                await keeper.aclose()
            elif loop.is_running():
                await _ask_to_close(loop, keeper)
            else:
                self._drop(loop)

    def close_idle(self) -> None:
        """What synchronous code can do of ``close()``: end those of loops that run in other threads, or rest.

        The running loop's ends with that loop.
        """
        here = asyncio._get_running_loop()
        for loop, keeper in list(self._keepers.items()):
            if loop.is_closed():
                self._drop(loop)
            elif loop.is_running() and loop is not here:
                asyncio.run_coroutine_threadsafe(_close(keeper), loop).result(_OTHER_LOOP_S)
            elif here is None:
                loop.run_until_complete(_close(keeper))

    async def _begin(self, loop: asyncio.AbstractEventLoop) -> T:
        for dead in [other for other in list(self._ready) if other.is_closed()]:
            self._drop(dead)
        opened = await self._open()
        keeper = self._keep(loop, opened)
        await anext(keeper)
        self._keepers[loop] = keeper
        self._ready[loop] = opened
        return opened

    async def _keep(self, loop: asyncio.AbstractEventLoop, opened: T) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._drop(loop)
            await self._end(opened)

    def _drop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ready.pop(loop, None)
        self._keepers.pop(loop, None)


class Sessions(PerLoop[Session]):
    """The sessions of an app. ``open`` gives an open storage for the running loop."""

    def __init__(
        self,
        open: Callable[[], Awaitable[Storage]],
        *,
        intake: Intake,
        close_storage: bool,
        session: Callable[[Storage, Intake], Session] = Session,
    ) -> None:
        async def begin() -> Session:
            return session(await open(), intake)

        async def end(session: Session) -> None:
            await session.close(storage_too=close_storage)

        super().__init__(begin, end=end)


async def _close(keeper: AsyncGenerator[None, None]) -> None:
    await keeper.aclose()


async def _ask_to_close(loop: asyncio.AbstractEventLoop, keeper: AsyncGenerator[None, None]) -> None:
    asked = asyncio.run_coroutine_threadsafe(_close(keeper), loop)
    try:
        await asyncio.wait_for(asyncio.wrap_future(asked), _OTHER_LOOP_S)
    except TimeoutError:
        _log.warning("the connection of a busy event loop stays open until its loop ends: %r", loop)


_all: weakref.WeakSet[PerLoop[Any]] = weakref.WeakSet()
# The parent's connections, kept for ever in a child: to close them there would close them for the parent
# (a TLS goodbye, a lock on the file).
_inherited: list[object] = []


def _begin_afresh() -> None:
    for each in list(_all):
        _inherited.append((each._ready, each._opening, each._keepers))
        each._forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_afresh)
