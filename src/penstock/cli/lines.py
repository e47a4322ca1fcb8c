"""Lines of a file, a pipe or a terminal, as they come."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import AsyncIterator
from typing import Final

__all__ = ["read_lines"]

_MOST_BYTES: Final = 512 * 1024
"""How much is read at a time, if so much is there: some thousand lines."""


async def read_lines(descriptor: int) -> AsyncIterator[list[bytes]]:
    """Whole lines, all that are there at a time; a last one may have no end. May be cancelled while nothing comes."""
    source = _Source(descriptor)
    unended: list[bytes] = []
    while chunk := await source.chunk():
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join([*unended, lines[0]])
            unended.clear()
            yield lines
        unended.append(rest)
    if last := b"".join(unended):
        yield [last]


class _Source:
    """Reads without a thread, which could not be stopped while it waits for a pipe or for somebody who types."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._has_ended = False

    async def chunk(self) -> bytes:
        """What is there, at least a byte of it; nothing at the end."""
        if self._has_ended:
            return b""
        await self._until_readable()
        chunks = [os.read(self._descriptor, _MOST_BYTES)]
        while chunks[-1] and sum(map(len, chunks)) < _MOST_BYTES and self._is_readable():
            chunks.append(os.read(self._descriptor, _MOST_BYTES))
        # A terminal tells its end once only.
        self._has_ended = not chunks[-1]
        return b"".join(chunks)

    def _is_readable(self) -> bool:
        return bool(select.select([self._descriptor], [], [], 0)[0])

    async def _until_readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        try:
            loop.add_reader(self._descriptor, readable.set)
        except PermissionError:
            # A file on a disk, which can always be read.
            return
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._descriptor)
