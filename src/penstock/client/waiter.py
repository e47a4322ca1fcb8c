"""Waits for jobs to finish: one subscription per event loop and queue serves all callers.

The store keeps messages for a listener for a minute. One task listens while callers wait, and a little longer, so
that it is ready for the next call. After an error, or a pause in which messages may have been lost, it asks for
all jobs again (``watch``).
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.core.names import uuid7
from penstock.core.text import get_logger
from penstock.errors import JobNotFound, PenstockError, StorageError
from penstock.storage.coalesce import Coalescer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.storage.contract import Storage
    from penstock.storage.values import Finished


_log = get_logger(__name__)

_LISTEN_MS: Final = 10_000
# The interval at which the listener asks for all jobs again: half the time for which the store keeps messages.
_REWATCH_S: Final = 30.0
_LONGEST_DELAY_S: Final = 5.0
_MOST_WATCHED: Final = 500


class ResultWait:
    """The wait of one caller for one job. ``within_ms`` is its time limit.

    It ignores messages about earlier incarnations of the id. Until it knows which one to wait for, it keeps the newest
    message. ``gaps`` is the number of pauses of the listener so far, in which messages may have been lost.
    """

    __slots__ = ("_newest", "_since", "future", "gaps", "id", "within_ms")

    def __init__(self, id: str, *, gaps: int = 0) -> None:
        self.id = id
        self.gaps = gaps
        self.within_ms: int | None = None
        self.future: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        self._since: int | None = None
        self._newest: Finished | None = None

    @property
    def begun(self) -> bool:
        """Return whether it knows the incarnation to wait for."""
        return self._since is not None

    def begin(self, since: int) -> None:
        """Set the first incarnation to wait for, and process a message that arrived earlier."""
        self._since = since
        if self._newest is not None:
            self.receive(self._newest)

    def receive(self, finished: Finished) -> None:
        """Process a message about this id."""
        if self._since is None:
            if self._newest is None or self._newest.incarnation <= finished.incarnation:
                self._newest = finished
        elif finished.incarnation >= self._since and not self.future.done():
            self.future.set_result(finished)

    def refuse(self, error: PenstockError) -> None:
        """Fail the wait."""
        if not self.future.done():
            self.future.set_exception(error)


class Waiter:
    """The waits of one event loop on one queue. ``listener`` is its name in the store."""

    __slots__ = (
        "_expected",
        "_gaps",
        "_listening",
        "_queue",
        "_storage",
        "_watched_at",
        "_watches",
        "listener",
    )

    def __init__(self, storage: Storage, queue: str) -> None:
        self.listener = uuid7()
        self._storage = storage
        self._queue = queue
        self._expected: dict[str, list[ResultWait]] = {}
        self._listening: asyncio.Task[None] | None = None
        self._watched_at = 0.0
        self._gaps = 0
        self._watches: Coalescer[str, Finished | JobNotFound | None] = Coalescer(
            self._watch, size=len, max_count=_MOST_WATCHED
        )

    def expect(self, id: str) -> ResultWait:
        """Subscribe to the end of a job. The caller must ``forget`` it afterwards."""
        expected = ResultWait(id, gaps=self._gaps)
        self._expected.setdefault(id, []).append(expected)
        if self._listening is None or self._listening.done():
            self._watched_at = asyncio.get_running_loop().time()
            self._listening = asyncio.get_running_loop().create_task(self._listen())
            self._listening.add_done_callback(self._ended)
        return expected

    def forget(self, expected: ResultWait) -> None:
        """End the wait of a caller. The job continues."""
        same_id = self._expected.get(expected.id, [])
        if expected in same_id:
            same_id.remove(expected)
            if not same_id:
                del self._expected[expected.id]
        if expected.future.done() and not expected.future.cancelled():
            expected.future.exception()  # avoids the warning that it was never retrieved

    async def begin(self, expected: ResultWait, since: int) -> None:
        """Begin to wait for a job that was enqueued with ``notify``. Ask for it if a message may be lost."""
        expected.begin(since)
        if expected.gaps != self._gaps:
            await self.watch(expected)

    async def watch(self, expected: ResultWait) -> None:
        """Ask for the end of a job that was enqueued without ``notify``. Concurrent calls are sent together.

        Raises:
            JobNotFound: the store does not know the id.
        """
        if not expected.begun:
            expected.begin(0)
        answer = await self._watches.call(expected.id)
        if isinstance(answer, JobNotFound):
            raise answer
        if answer is not None:
            expected.receive(answer)

    async def close(self) -> None:
        """Stop listening, and fail the remaining waits."""
        task, self._listening = self._listening, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._refuse_all("the app was closed during a wait for a result. The job continues.")

    async def _listen(self) -> None:
        delay_s = 0.0
        while True:
            try:
                await self._watch_again_if_due()
                messages = await self._storage.listen(self._queue, self.listener, timeout_ms=_LISTEN_MS)
                self._deliver(messages)
                if not messages:
                    if not self._expected:
                        return
                    await self._sweep()
                # Let the callers continue before the next system call.
                await asyncio.sleep(0)
                delay_s = 0.0
            except StorageError as error:
                delay_s = min(delay_s * 2 or 0.05, _LONGEST_DELAY_S)
                _log.warning(
                    "queue %s: listening for results failed, trying again in %.2f s: %s",
                    self._queue,
                    delay_s,
                    error,
                )
                self._watched_at = -math.inf
                self._gaps += 1
                await asyncio.sleep(delay_s)

    async def _sweep(self) -> None:
        """Run time-based maintenance: without a worker, nothing else ends jobs whose ttl has passed."""
        with suppress(StorageError):  # The next call to listen reports it.
            await self._storage.sweep(self._queue)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fail all waits after an unexpected error of the listener, so that none of them hangs."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("queue %s: listening for results failed", self._queue, exc_info=error)
            self._refuse_all(f"listening for results failed: {error!r}. The jobs continue.")

    def _refuse_all(self, message: str) -> None:
        for expected in [wait for waits in self._expected.values() for wait in waits]:
            expected.refuse(StorageError(message))

    def _deliver(self, messages: Sequence[Finished]) -> None:
        for finished in messages:
            for expected in self._expected.get(finished.id, ()):
                expected.receive(finished)

    async def _watch_again_if_due(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._watched_at < _REWATCH_S:
            return
        # The store does not know ids that are just being enqueued; ``begin`` asks for them.
        open_ids = [
            id
            for id, same_id in self._expected.items()
            if any(wait.begun and not wait.future.done() for wait in same_id)
        ]
        for start in range(0, len(open_ids), _MOST_WATCHED):
            ids = open_ids[start : start + _MOST_WATCHED]
            for id, answer in zip(ids, await self._watch(ids), strict=True):
                for expected in self._expected.get(id, ()):
                    if isinstance(answer, JobNotFound):
                        expected.refuse(answer)
                    elif answer is not None:
                        expected.receive(answer)
        self._watched_at = now

    async def _watch(self, ids: list[str]) -> list[Finished | JobNotFound | None]:
        try:
            return [*await self._storage.watch(self._queue, ids, listener=self.listener)]
        except JobNotFound as error:
            if len(ids) == 1:
                return [error]
        # One unknown id fails the whole call, so ask for each.
        return [answer for id in ids for answer in await self._watch([id])]
