"""What a command prints, on its way into the job's log: live, and never faster than the store takes it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.errors import LeaseLost, StorageError

if TYPE_CHECKING:
    from penstock.worker.context import JobContext

__all__ = ["LogTail"]

# The store keeps so many lines of a job: of more, between two reports, only the last would be left anyway.
_MOST_LINES: Final = 1000
_LONGEST_LINE: Final = 2_000
_CHUNK: Final = 64 * 1024
# How long lines are gathered; a command that prints a lot costs so many reports, no more.
_REPORT_EVERY_S: Final = 0.1


class LogTail:
    """Reads a stream to its end and logs its lines. A command is never held up by it: what the store cannot take in
    time is left out, the oldest first, and a line says how much."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._rest = b""
        self._left_out = 0
        self._news = asyncio.Event()
        self.last = ""
        """The last line that says something: most often why a command failed."""

    async def follow(self, stream: asyncio.StreamReader) -> None:
        """Returns when the stream has ended and the store has what is kept of it."""
        sending = asyncio.create_task(self._send())
        try:
            while chunk := await stream.read(_CHUNK):
                self._take(chunk)
            if self._rest:
                self._add(self._rest)
        except BaseException:
            sending.cancel()
            raise
        self._news.set()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await self._report()

    def _take(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._add(line)
        if len(self._rest) > _CHUNK:
            self._add(self._rest)
            self._rest = b""
        self._news.set()

    def _add(self, line: bytes) -> None:
        text = line.removesuffix(b"\r").decode("utf-8", "replace")
        text = text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]} …"
        self._left_out += len(self._lines) == _MOST_LINES
        self._lines.append(text)
        if text.strip():
            self.last = text.strip()

    async def _send(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await self._report()
            await asyncio.sleep(_REPORT_EVERY_S)

    async def _report(self) -> None:
        lines, left_out = list(self._lines), self._left_out
        self._lines.clear()
        self._left_out = 0
        if left_out:
            lines[0] = f"… {left_out + 1} lines left out …"
        receipts = [self._context.log(line) for line in lines]
        try:
            for receipt in receipts:
                await receipt
        except (LeaseLost, StorageError):
            # The run is told of both in another way; its output has nowhere to go.
            pass
