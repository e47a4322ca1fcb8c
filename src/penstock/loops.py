"""One session per event loop: a storage belongs to the loop it was opened in, an app to the whole process."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Final

from penstock.session import Session

if TYPE_CHECKING:
    from penstock.intake import Intake
    from penstock.storage.base import Storage

__all__ = ["Sessions"]

_log = logging.getLogger(__name__)

_OTHER_LOOP_S: Final = 5.0


class Sessions:
    """The sessions of an app by event loop. ``open`` gives an open storage for the running one.

    A session ends by ``close()``, or with its loop: an asynchronous generator stands in for it there, and
    ``asyncio.run`` closes those of its loop before it leaves. After a fork the child begins with none.
    """

    def __init__(
        self, open: Callable[[], Awaitable[Storage]], *, intake: Intake, close_storage: bool
    ) -> None:
        self._open = open
        self._intake = intake
        self._close_storage = close_storage
        self._forget()
        _all.add(self)

    def _forget(self) -> None:
        self._ready: dict[asyncio.AbstractEventLoop, Session] = {}
        self._opening: dict[asyncio.AbstractEventLoop, asyncio.Task[Session]] = {}
        self._keepers: dict[asyncio.AbstractEventLoop, AsyncGenerator[None, None]] = {}

    async def get(self) -> Session:
        """The running loop's session, opened if need be. Raises what opening raises; the next call tries again."""
        loop = asyncio.get_running_loop()
        session = self._ready.get(loop)
        if session is not None:
            return session
        opening = self._opening.get(loop)
        if opening is None:
            opening = self._opening[loop] = loop.create_task(self._begin(loop))
            opening.add_done_callback(lambda _: self._opening.pop(loop, None))
        # Shielded: others may wait for the same connection when one of them gives up.
        return await asyncio.shield(opening)

    async def close(self) -> None:
        """End the sessions of all loops: of this one here, of others that are running by asking them."""
        here = asyncio.get_running_loop()
        for loop, keeper in list(self._keepers.items()):
            if loop is here:
                await keeper.aclose()
            elif loop.is_running():
                await _ask_to_close(loop, keeper)
            else:
                self._drop(loop)

    async def _begin(self, loop: asyncio.AbstractEventLoop) -> Session:
        for dead in [other for other in list(self._ready) if other.is_closed()]:
            self._drop(dead)
        session = Session(await self._open(), self._intake)
        keeper = self._keep(loop, session)
        await anext(keeper)
        self._keepers[loop] = keeper
        self._ready[loop] = session
        return session

    async def _keep(self, loop: asyncio.AbstractEventLoop, session: Session) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._drop(loop)
            await session.close(storage_too=self._close_storage)

    def _drop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ready.pop(loop, None)
        self._keepers.pop(loop, None)


async def _ask_to_close(loop: asyncio.AbstractEventLoop, keeper: AsyncGenerator[None, None]) -> None:
    async def close() -> None:
        await keeper.aclose()

    asked = asyncio.run_coroutine_threadsafe(close(), loop)
    try:
        await asyncio.wait_for(asyncio.wrap_future(asked), _OTHER_LOOP_S)
    except TimeoutError:
        _log.warning("the connection of a busy event loop stays open until its loop ends: %r", loop)


_all: weakref.WeakSet[Sessions] = weakref.WeakSet()
# The parent's connections, kept for ever in a child: to close them there would close them for the parent
# (a TLS goodbye, a lock on the file).
_inherited: list[object] = []


def _begin_afresh() -> None:
    for sessions in list(_all):
        _inherited.append((sessions._ready, sessions._opening, sessions._keepers))
        sessions._forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_afresh)
