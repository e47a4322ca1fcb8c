"""Coalescing: the calls pending in one process travel together (group commit).

While nothing is under way, a call goes out at once, by itself and in its caller's own coroutine: whoever calls
one by one pays nothing. Calls that come while one is under way gather, and go out as one batch when it returns.
The busier the process, the larger the batches; no timer is involved.
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

    ``send`` gets the items in the order they came and returns their answers in that order. A batch is bounded by
    ``max_count`` items and by ``max_bytes`` of what ``size`` says they weigh (one item always goes). An error of
    ``send`` reaches every caller of that batch. A caller that is cancelled before its item went out takes it
    back; after that its batch goes on without it.
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
        """The answer to ``item``, alone or in company."""
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

    def _send_pending(self) -> None:
        batch = self._take()
        if batch:
            self._under_way = True
            # A task, because no caller's cancellation may take the others' calls with it.
            task = asyncio.get_running_loop().create_task(self._carry(batch))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

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
        """One of them was refused, and with it all: nobody else's call may fail because of it."""
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
