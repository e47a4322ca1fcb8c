"""Delivery of messages between queues: from the outbox of one queue to the others, in order.

Any number of clients may deliver at the same time: a target skips messages that it has already applied
(lua/deliver.lua). Every message of a queue is applied before the next one is sent, whatever their targets, because a
job must exist before it can learn that a dependency has ended.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from itertools import groupby
from typing import Final, NamedTuple

from penstock.core.flow import dead_letter_job
from penstock.core.names import check_queue
from penstock.core.text import get_logger
from penstock.errors import InvalidName, StorageError
from penstock.storage.valkey.calls import Calls
from penstock.storage.valkey.jobs import decode_failure, encode_put

_log = get_logger("penstock.storage")

_BATCH: Final = 500
_PATIENCE_S: Final = 5.0
_SEQUENCE: Final = 16
_NEW: Final = (b"p", b"x")
_KINDS: Final = (b"p", b"l", b"d", b"x")
_DEAD: Final = struct.Struct(">xHIHIIHHHI")


class _Message(NamedTuple):
    sequence: int
    target: str
    content: bytes
    entry: bytes


class OutboxSender:
    """Delivers the outboxes of one client's queues. ``register`` is awaited before the first message to a queue."""

    def __init__(self, calls: Calls, *, register: Callable[[str], Awaitable[None]]) -> None:
        self._calls = calls
        self._register = register
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()

    def send_soon(self, queue: str) -> None:
        """Deliver the queue's outbox in the background. Messages that fail wait for the next sweep."""
        if queue in self._under_way:
            self._again.add(queue)
            return
        task = asyncio.get_running_loop().create_task(self._deliver_all(queue))
        self._under_way[queue] = task
        task.add_done_callback(lambda _: self._under_way.pop(queue, None))

    async def send(self, queue: str) -> None:
        """Deliver the queue's outbox, and wait a few seconds for that. The messages are safe whatever the result."""
        self.send_soon(queue)
        await asyncio.wait([self._under_way[queue]], timeout=_PATIENCE_S)

    async def _deliver_all(self, queue: str) -> None:
        self._again.add(queue)
        while queue in self._again:
            self._again.discard(queue)
            try:
                await self.deliver(queue)
            except StorageError as error:
                _log.warning("queue %s: messages to other queues wait for the next sweep: %s", queue, error)
                return

    async def deliver(self, queue: str) -> int:
        """Deliver the queue's outbox, and the outboxes that this fills. Return the number of messages."""
        count = 0
        todo = [queue]
        while todo:
            source = todo.pop()
            while messages := await self._read(source):
                for target, group in groupby(messages, key=lambda message: message.target):
                    if await self._hand_over(source, target, list(group)) and target not in todo:
                        todo.append(target)
                count += len(messages)
                await self._calls.call(source, "delivered", messages[-1].sequence)
        return count

    async def _read(self, source: str) -> list[_Message]:
        while True:
            renumbered, aside, *entries = await self._calls.call(source, "undelivered", _BATCH)
            if renumbered:
                _log.warning("queue %s: repaired the numbers of %d messages", source, renumbered)
            if aside:
                _report_put_aside(source, aside)
            if not entries:
                return []
            messages = [message for entry in entries if (message := _parse(entry)) is not None]
            if len(messages) < len(entries):
                readable = {message.entry for message in messages}
                await self._put_aside(source, [entry for entry in entries if entry not in readable])
            if messages:
                return messages

    async def _hand_over(self, source: str, target: str, messages: list[_Message]) -> bool:
        """Have the target apply messages. Return whether its own outbox is not empty."""
        await self._register(target)
        is_new = any(message.content.startswith(_NEW) for message in messages)
        args = [
            part for message in messages for part in (message.sequence, _outgoing(message.content, source))
        ]
        reply = await self._calls.call(target, "deliver_new" if is_new else "deliver", source, *args)
        if isinstance(reply, int):
            return bool(reply)
        is_full, *damaged = reply
        await self._put_aside(
            source, [message.entry for message in messages if b"%d" % message.sequence in damaged]
        )
        return bool(is_full)

    async def _put_aside(self, source: str, entries: list[bytes]) -> None:
        """Move messages that cannot be read out of the way of those behind them."""
        _report_put_aside(source, await self._calls.call(source, "put_aside", *entries))

    async def close(self) -> None:
        """Stop. Undelivered messages stay in the outbox."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _report_put_aside(source: str, count: int) -> None:
    _log.error(
        "queue %s: %d messages to other queues cannot be read and were put aside. Jobs may wait for dependencies that "
        "have ended, and jobs of flows or dead letters may be missing. Check `penstock list --state blocked`",
        source,
        count,
    )


def _outgoing(content: bytes, source: str) -> bytes:
    """Return a message as its target takes it: a dead letter becomes a job here, because that takes JSON.

    A dead letter that cannot be read stays as it is; its target does not know that kind of message.
    """
    if not content.startswith(b"x"):
        return content
    try:
        return _dead_letter(content, source)
    except (struct.error, ValueError, TypeError, StorageError):
        return content


def _dead_letter(message: bytes, source: str) -> bytes:
    i1, i2, t1, t2, failures, *lengths = _DEAD.unpack_from(message)
    parts: list[bytes] = []
    at = _DEAD.size
    for length in lengths:
        parts.append(message[at : at + length])
        at += length
    id, handled_by, task, failure = parts
    job = dead_letter_job(
        queue=source, id=id.decode(), incarnation=i1 << 32 | i2, task=task.decode(), payload=message[at:],
        failure=decode_failure(failure) if failure else None, failures=failures, failed_at_ms=t1 << 32 | t2,
        handled_by=handled_by.decode(),
    )  # fmt: skip
    return b"p" + encode_put(job)


def _parse(entry: bytes) -> _Message | None:
    """Return the message of an entry, or ``None`` if it cannot be read."""
    target, _, message = entry[_SEQUENCE:].partition(b"\0")
    if not entry[:_SEQUENCE].isdigit() or message[:1] not in _KINDS:
        return None
    try:
        return _Message(int(entry[:_SEQUENCE]), check_queue(target.decode()), message, entry)
    except (UnicodeDecodeError, InvalidName):
        return None
