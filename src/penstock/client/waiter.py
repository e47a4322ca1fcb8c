"""Waiting for the ends of jobs: one subscription per client and queue serves everybody who waits.

The store keeps news for a listener for a minute. One task listens while anybody waits (and a little longer, so
that the next call finds it listening). After an error, or a pause of our own that was long enough to lose
news, it asks for all of them again (``watch``).
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
# Ends are asked for again this often even if nothing seems wrong: half of what the store keeps news for.
_REWATCH_S: Final = 30.0
_LONGEST_REST_S: Final = 5.0
_WATCH_AT_ONCE: Final = 500


class Expected:
    """One caller's wait for the end of one job. ``since`` is the incarnation it began to wait in: news of an
    earlier life of the id are not for it. Until that is known, the newest news are kept. ``within_ms`` is how long the
    caller waits at most."""

    __slots__ = ("_news", "_since", "future", "gaps", "id", "within_ms")

    def __init__(self, id: str, *, gaps: int = 0) -> None:
        self.id = id
        self.gaps = gaps
        self.within_ms: int | None = None
        self.future: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        self._since: int | None = None
        self._news: Finished | None = None

    @property
    def begun(self) -> bool:
        """Whether the store is known to have the job."""
        return self._since is not None

    def begin(self, since: int) -> None:
        """Say which incarnation is waited for; what came in too early is looked at now."""
        self._since = since
        if self._news is not None:
            self.tell(self._news)

    def tell(self, finished: Finished) -> None:
        """News of this id."""
        if self._since is None:
            if self._news is None or self._news.incarnation <= finished.incarnation:
                self._news = finished
        elif finished.incarnation >= self._since and not self.future.done():
            self.future.set_result(finished)

    def refuse(self, error: PenstockError) -> None:
        """There will be no news."""
        if not self.future.done():
            self.future.set_exception(error)


class Waiter:
    """The waits of one event loop on one queue. ``listener`` is the name the store knows it by."""

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
        self._expected: dict[str, list[Expected]] = {}
        self._listening: asyncio.Task[None] | None = None
        self._watched_at = 0.0
        self._gaps = 0
        self._watches: Coalescer[str, Finished | JobNotFound | None] = Coalescer(
            self._watch, size=len, max_count=_WATCH_AT_ONCE
        )

    def expect(self, id: str) -> Expected:
        """Subscribe to the end of ``id``. Whoever calls this must ``forget`` it."""
        expected = Expected(id, gaps=self._gaps)
        self._expected.setdefault(id, []).append(expected)
        if self._listening is None or self._listening.done():
            self._watched_at = asyncio.get_running_loop().time()
            self._listening = asyncio.get_running_loop().create_task(self._listen())
            self._listening.add_done_callback(self._ended)
        return expected

    def forget(self, expected: Expected) -> None:
        """The caller waits no longer. The job is left alone."""
        same_id = self._expected.get(expected.id, [])
        if expected in same_id:
            same_id.remove(expected)
            if not same_id:
                del self._expected[expected.id]
        if expected.future.done() and not expected.future.cancelled():
            expected.future.exception()  # seen: nobody is to be warned of it

    async def begin(self, expected: Expected, since: int) -> None:
        """The job that was enqueued with ``notify`` is in. Looks after it if news may have been lost meanwhile."""
        expected.begin(since)
        if expected.gaps != self._gaps:
            await self.watch(expected)

    async def watch(self, expected: Expected) -> None:
        """Have the store tell of this job, which was enqueued without ``notify``. Many at once travel together.

        Raises:
            JobNotFound: the store does not know the id.
        """
        if not expected.begun:
            expected.begin(0)
        answer = await self._watches.call(expected.id)
        if isinstance(answer, JobNotFound):
            raise answer
        if answer is not None:
            expected.tell(answer)

    async def close(self) -> None:
        """Stop listening; those who still wait are told."""
        task, self._listening = self._listening, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._refuse_all("the app was closed while a result was being waited for. The job is left alone.")

    async def _listen(self) -> None:
        rest_s = 0.0
        while True:
            try:
                await self._watch_again_if_due()
                news = await self._storage.listen(self._queue, self.listener, timeout_ms=_LISTEN_MS)
                self._deliver(news)
                if not news:
                    if not self._expected:
                        return
                    await self._sweep()
                # Those who were told go on first: asking for more is a system call, and they may be in a hurry.
                await asyncio.sleep(0)
                rest_s = 0.0
            except StorageError as error:
                rest_s = min(rest_s * 2 or 0.05, _LONGEST_REST_S)
                _log.warning(
                    "queue %s: listening for results failed, again in %.2f s: %s", self._queue, rest_s, error
                )
                self._watched_at = -math.inf
                self._gaps += 1
                await asyncio.sleep(rest_s)

    async def _sweep(self) -> None:
        """Have time-based maintenance done: without a worker, nobody else ends a job whose ttl has passed."""
        with suppress(StorageError):  # The next call to listen tells about a store that is away.
            await self._storage.sweep(self._queue)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """An error that nobody foresaw: better to say so than to let everybody wait for ever."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("queue %s: listening for results ended", self._queue, exc_info=error)
            self._refuse_all(f"listening for results failed: {error!r}. The jobs are left alone.")

    def _refuse_all(self, message: str) -> None:
        for expected in [one for same_id in self._expected.values() for one in same_id]:
            expected.refuse(StorageError(message))

    def _deliver(self, news: Sequence[Finished]) -> None:
        for finished in news:
            for expected in self._expected.get(finished.id, ()):
                expected.tell(finished)

    async def _watch_again_if_due(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._watched_at < _REWATCH_S:
            return
        # An id that is just being enqueued would be unknown; whoever enqueues it looks after it (begin).
        open_ids = [
            id
            for id, same_id in self._expected.items()
            if any(one.begun and not one.future.done() for one in same_id)
        ]
        for start in range(0, len(open_ids), _WATCH_AT_ONCE):
            ids = open_ids[start : start + _WATCH_AT_ONCE]
            for id, answer in zip(ids, await self._watch(ids), strict=True):
                for expected in self._expected.get(id, ()):
                    if isinstance(answer, JobNotFound):
                        expected.refuse(answer)
                    elif answer is not None:
                        expected.tell(answer)
        self._watched_at = now

    async def _watch(self, ids: list[str]) -> list[Finished | JobNotFound | None]:
        try:
            return [*await self._storage.watch(self._queue, ids, listener=self.listener)]
        except JobNotFound as error:
            if len(ids) == 1:
                return [error]
        # One unknown id spoils the call for all: ask for each.
        return [answer for id in ids for answer in await self._watch([id])]
