"""Delivers what queues have to say to each other: messages go from the outbox of one to the other, in their order.

Any number of couriers may be at it: a target passes over what it has applied before (lua/deliver.lua). Every
message of a queue is applied before the next one is sent, whatever their targets, because a job must be there
before anybody tells it of an end.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from itertools import groupby
from typing import Final, NamedTuple

from penstock.core.deadletter import dead_letter_job
from penstock.core.names import check_queue
from penstock.core.text import get_logger
from penstock.errors import InvalidName, StorageError
from penstock.storage.valkey.calls import Calls
from penstock.storage.valkey.codec import encode_put
from penstock.storage.valkey.jobs import decode_failure

_log = get_logger("penstock.storage")

_AT_ONCE: Final = 500
_PATIENCE_S: Final = 5.0
_SEQUENCE: Final = 16
_NEW: Final = (b"p", b"x")
_KINDS: Final = (b"p", b"l", b"d", b"x")
_DEAD: Final = struct.Struct(">xHIHIIHHHI")


class _Letter(NamedTuple):
    sequence: int
    target: str
    message: bytes
    entry: bytes


class Courier:
    """One client's. ``meet`` is awaited before the first message to a queue: it may be new."""

    def __init__(self, calls: Calls, *, meet: Callable[[str], Awaitable[None]]) -> None:
        self._calls = calls
        self._meet = meet
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()

    def send_soon(self, queue: str) -> None:
        """Deliver the queue's outbox in the background. What fails is left to the next sweep."""
        if queue in self._under_way:
            self._again.add(queue)
            return
        task = asyncio.get_running_loop().create_task(self._insist(queue))
        self._under_way[queue] = task
        task.add_done_callback(lambda _: self._under_way.pop(queue, None))

    async def send(self, queue: str) -> None:
        """The same, and wait for it, though not for ever: the message is safe, whatever becomes of this."""
        self.send_soon(queue)
        await asyncio.wait([self._under_way[queue]], timeout=_PATIENCE_S)

    async def _insist(self, queue: str) -> None:
        self._again.add(queue)
        while queue in self._again:
            self._again.discard(queue)
            try:
                await self.deliver(queue)
            except StorageError as error:
                _log.warning("queue %s: messages to other queues wait for the next sweep: %s", queue, error)
                return

    async def deliver(self, queue: str) -> int:
        """Deliver the queue's outbox, and those that fill up by that, to the end; how many messages there were."""
        count = 0
        todo = [queue]
        while todo:
            source = todo.pop()
            while letters := await self._read(source):
                for target, some in groupby(letters, key=lambda letter: letter.target):
                    if await self._hand_over(source, target, list(some)) and target not in todo:
                        todo.append(target)
                count += len(letters)
                await self._calls.call(source, "delivered", letters[-1].sequence)
        return count

    async def _read(self, source: str) -> list[_Letter]:
        while True:
            renumbered, aside, *entries = await self._calls.call(source, "undelivered", _AT_ONCE)
            if renumbered:
                _log.warning("queue %s: mended the numbers of %d messages", source, renumbered)
            if aside:
                _report_put_aside(source, aside)
            if not entries:
                return []
            letters = [letter for entry in entries if (letter := _opened(entry)) is not None]
            if len(letters) < len(entries):
                known = {letter.entry for letter in letters}
                await self._put_aside(source, [entry for entry in entries if entry not in known])
            if letters:
                return letters

    async def _hand_over(self, source: str, target: str, letters: list[_Letter]) -> bool:
        """Whether the target has something to say to that."""
        await self._meet(target)
        is_new = any(letter.message.startswith(_NEW) for letter in letters)
        args = [part for letter in letters for part in (letter.sequence, _written(letter.message, source))]
        reply = await self._calls.call(target, "deliver_new" if is_new else "deliver", source, *args)
        if isinstance(reply, int):
            return bool(reply)
        is_full, *damaged = reply
        await self._put_aside(
            source, [letter.entry for letter in letters if b"%d" % letter.sequence in damaged]
        )
        return bool(is_full)

    async def _put_aside(self, source: str, entries: list[bytes]) -> None:
        """Take messages that cannot be read out of the way of those behind them."""
        _report_put_aside(source, await self._calls.call(source, "put_aside", *entries))

    async def close(self) -> None:
        """Stop; what is not delivered stays where it is."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _report_put_aside(source: str, count: int) -> None:
    _log.error(
        "queue %s: %d messages to other queues cannot be read and were put aside. Jobs may wait for others that have "
        "ended, and jobs of flows or dead letters may be missing: look at `penstock list --state blocked`",
        source,
        count,
    )


def _written(message: bytes, source: str) -> bytes:
    """Return the message as its target takes it: a dead letter becomes a job here, where there is JSON.

    A dead letter that cannot be read stays what it is, which its target does not know.
    """
    if not message.startswith(b"x"):
        return message
    try:
        return _dead_letter(message, source)
    except (struct.error, ValueError, TypeError, StorageError):
        return message


def _dead_letter(message: bytes, source: str) -> bytes:
    i1, i2, t1, t2, failures, *lengths = _DEAD.unpack_from(message)
    parts: list[bytes] = []
    at = _DEAD.size
    for length in lengths:
        parts.append(message[at : at + length])
        at += length
    id, handled_by, task, failure = parts
    job = dead_letter_job(
        queue=source,
        id=id.decode(),
        incarnation=i1 << 32 | i2,
        task=task.decode(),
        payload=message[at:],
        failure=decode_failure(failure) if failure else None,
        failures=failures,
        failed_at_ms=t1 << 32 | t2,
        handled_by=handled_by.decode(),
    )
    return b"p" + encode_put(job)


def _opened(entry: bytes) -> _Letter | None:
    """Return the message of an entry; ``None`` if it cannot be read."""
    target, _, message = entry[_SEQUENCE:].partition(b"\0")
    if not entry[:_SEQUENCE].isdigit() or message[:1] not in _KINDS:
        return None
    try:
        return _Letter(int(entry[:_SEQUENCE]), check_queue(target.decode()), message, entry)
    except (UnicodeDecodeError, InvalidName):
        return None
