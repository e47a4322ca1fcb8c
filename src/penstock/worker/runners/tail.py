"""What a command prints, on its way into the job's log: live, and never faster than the store takes it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from penstock.core.text import text_of
from penstock.worker.words import Words

if TYPE_CHECKING:
    from penstock.worker.context import JobContext
    from penstock.worker.reporter import Receipt

__all__ = ["LogTail"]

# The store keeps so many lines of a job: of more, between two reports, only the last would be left anyway.
_MOST_LINES: Final = 1000
_LONGEST_LINE: Final = 2_000
_CHUNK: Final = 64 * 1024
# How long lines are gathered; a command that prints a lot costs so many reports, no more.
_REPORT_EVERY_S: Final = 0.1


class LogTail:
    """Reads a stream to its end and logs its lines. A command is never held up by it: lines that the store cannot take
    in time are left out, the oldest first, and counted."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._lines: deque[bytes] = deque(maxlen=_MOST_LINES)
        self._rest = b""
        self._left_out = 0
        self._news = asyncio.Event()
        self._last = b""

    @property
    def last(self) -> str:
        """The last line that says something: most often why a command failed."""
        return _text(self._last).strip()

    async def follow(self, stream: asyncio.StreamReader) -> None:
        """Returns when the stream has ended and the store has what is kept of it. When it is cancelled, what was read
        until then has been reported."""
        sending = asyncio.create_task(self._send())
        try:
            while chunk := await stream.read(_CHUNK):
                self._take(chunk)
        finally:
            sending.cancel()
            if self._rest:
                self._add([self._rest])
            receipts = self._hand_over()
        await asyncio.gather(sending, return_exceptions=True)
        await _answered(receipts)

    def _take(self, chunk: bytes) -> None:
        data = self._rest + chunk
        # A command may print faster than lines can be made of it: of those that would be left out, none is made.
        *lines, self._rest = data.rsplit(b"\n", _MOST_LINES + 1)
        if len(lines) > _MOST_LINES:
            self._left_out += lines.pop(0).count(b"\n") + 1
        self._add(lines)
        if len(self._rest) > _CHUNK:
            self._add([self._rest])
            self._rest = b""
        self._news.set()

    def _add(self, lines: Sequence[bytes]) -> None:
        self._left_out += max(len(self._lines) + len(lines) - _MOST_LINES, 0)
        self._lines.extend(lines)
        self._last = next((line for line in reversed(lines) if line.strip()), self._last)

    async def _send(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await _answered(self._hand_over())
            await asyncio.sleep(_REPORT_EVERY_S)

    def _hand_over(self) -> list[Receipt]:
        lines, left_out = [_text(line) for line in self._lines], self._left_out
        self._lines.clear()
        self._left_out = 0
        return [
            self._context.pass_on(Words(log=text_of(line), log_skipped=0 if i else left_out))
            for i, line in enumerate(lines)
        ]


async def _answered(receipts: Sequence[Receipt]) -> None:
    try:
        for receipt in receipts:
            await receipt
    except Exception:
        # A lost lease or store reaches the run in another way. A line that cannot be stored must not fail it.
        pass


def _text(line: bytes) -> str:
    # Cut first: a line may be long, and a character has four bytes at most.
    text = line[: 4 * _LONGEST_LINE + 4].removesuffix(b"\r").decode("utf-8", "replace")
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]} …"
