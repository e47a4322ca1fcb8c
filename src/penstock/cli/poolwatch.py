"""What the processes of a worker do: each has its own listeners, but all write to one event log, which is read here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from penstock.core.command import COMMAND_TASK, command_text
from penstock.errors import EventsLost, StorageError
from penstock.worker.recovery import connected

if TYPE_CHECKING:
    from penstock.core.event import Event
    from penstock.worker.worker import Worker

__all__ = ["followed"]

_AWAY_S: Final = 1.0
_LAST_LOOK_S: Final = 3.0


@contextmanager
def followed(
    worker: Worker, heard: Callable[[Event], None], *, with_commands: bool = False
) -> Iterator[None]:
    """Call ``heard`` with every event of the worker's processes, in a thread, until the block has ended.

    ``with_commands``: the claim of a command job has the command instead of the task's name, read from the store.

    Raises ``StorageError`` if the store is not there for as long as a worker waits for it at its start: before there
    is a process that would fail for it for ever.
    """
    follower = _Follower(worker, heard, asyncio.run(_ends(worker)), with_commands=with_commands)
    follower.start()
    try:
        yield
    finally:
        follower.stop()


async def _ends(worker: Worker) -> dict[str, int]:
    storage = await connected(worker.app, stopped=worker.is_stopping)
    async with worker.app:
        pages = {queue: await storage.read_events(queue, after=0, limit=1) for queue in worker.options.queues}
        return {queue: page.last for queue, page in pages.items()}


class _Follower(threading.Thread):
    def __init__(
        self, worker: Worker, heard: Callable[[Event], None], offsets: dict[str, int], *, with_commands: bool
    ) -> None:
        super().__init__(name="penstock-poolwatch", daemon=True)
        self._app = worker.app
        self._names = f"{worker.options.name}-"
        self._heard = heard
        self._offsets = offsets
        self._with_commands = with_commands
        self._began = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def run(self) -> None:
        asyncio.run(self._follow())

    def stop(self) -> None:
        """Returns when it has heard of the last end, or after a few seconds."""
        self._began.wait()
        if self._loop is not None and self._task is not None and self.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
            self.join(2 * _LAST_LOOK_S)

    async def _follow(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.create_task(self._read_for_ever())
        self._began.set()
        async with self._app:
            await asyncio.gather(self._task, return_exceptions=True)
            try:
                async with asyncio.timeout(_LAST_LOOK_S):
                    await self._read(follow=False)
            except (EventsLost, StorageError, TimeoutError):
                # The view is no longer looked at.
                pass

    async def _read_for_ever(self) -> None:
        while True:
            try:
                await self._read(follow=True)
            except EventsLost as lost:
                self._offsets = dict.fromkeys(self._offsets, lost.last)
            except StorageError:
                await asyncio.sleep(_AWAY_S)

    async def _read(self, *, follow: bool) -> None:
        events = self._app.events(*self._offsets, after=dict(self._offsets), follow=follow)
        async for event in events:
            self._offsets[event.queue] = event.seq
            if event.worker.startswith(self._names):
                self._heard(await self._described(event))

    async def _described(self, event: Event) -> Event:
        if not self._with_commands or event.type != "claimed" or event.task != COMMAND_TASK:
            return event
        job = await self._app.job(event.ref).get_or_none()
        return event if job is None else replace(event, task=command_text(job.raw.payload))
