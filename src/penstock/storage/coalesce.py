"""Coalescing: the pending calls of one process are sent together (group commit).

If no call is running, a call is sent immediately, alone and in its caller's coroutine, so sequential callers pay
nothing. Calls that arrive in the meantime wait, and are sent as one batch when it returns. The busier the process, the
larger the batches. There is no timer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from penstock.errors import InvalidInput

MAX_COUNT: Final = 1000
MAX_BYTES: Final = 4 * 1024 * 1024

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Coalescer(Generic[Item, Answer]):
    """Turns single calls into batched ones. Belongs to one event loop.

    ``send`` takes the items in order of arrival and returns their answers in that order. A batch holds up to
    ``max_count`` items and ``max_bytes`` as measured by ``size``, but at least one item. An error of ``send``
    reaches every caller of the batch. A caller that is cancelled before its item is sent withdraws it. After that, the
    batch continues without the caller.
    """

    __slots__ = ("_batches", "_max_bytes", "_max_count", "_pending", "_send", "_size", "_under_way")

    def __init__(
        self,
        send: Callable[[list[Item]], Awaitable[list[Answer]]],
        *,
        size: Callable[[Item], int],
        max_count: int = MAX_COUNT,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._send = send
        self._size = size
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._pending: deque[tuple[Item, asyncio.Future[Answer]]] = deque()
        self._under_way = False
        self._batches: set[asyncio.Task[None]] = set()

    async def call(self, item: Item) -> Answer:
        """Send ``item``, alone or in a batch, and return its answer."""
        if self._under_way:
            future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            self._pending.append((item, future))
            return await future
        self._under_way = True
        try:
            return (await self._send([item]))[0]
        finally:
            self._under_way = False
            if self._pending:
                self._send_pending()

    def submit(self, item: Item) -> asyncio.Future[Answer]:
        """Send ``item`` with the others of this turn of the loop, and return the future of its answer."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._pending.append((item, future))
        if not self._under_way:
            self._under_way = True
            loop.call_soon(self._send_pending)
        return future

    def _send_pending(self) -> None:
        batch = self._take()
        if batch:
            self._under_way = True
            # A task, so that cancelling one caller does not cancel the others' calls.
            task = asyncio.get_running_loop().create_task(self._carry(batch))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)
        else:
            self._under_way = False

    def _take(self) -> list[tuple[Item, asyncio.Future[Answer]]]:
        batch: list[tuple[Item, asyncio.Future[Answer]]] = []
        weight = 0
        while self._pending and len(batch) < self._max_count:
            item, future = self._pending[0]
            if not future.cancelled():
                weight += self._size(item)
                if batch and weight > self._max_bytes:
                    break
                batch.append((item, future))
            self._pending.popleft()
        return batch

    async def _carry_each(self, batch: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        """Send the items one by one, because one of them was refused and must not fail the others."""
        for item, future in batch:
            try:
                [answer] = await self._send([item])
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(answer)

    async def _carry(self, batch: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._send([item for item, _ in batch])
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:
            if isinstance(error, InvalidInput) and len(batch) > 1:
                await self._carry_each(batch)
                return
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
        finally:
            self._under_way = False
            if self._pending:
                self._send_pending()
