"""What stands between commands and the terminal: control characters in anything they print become escapes.

``guarded()`` puts a guard in front of stdout and stderr while a command runs. So no command has to think of it, and
no new one can forget it. Two kinds of output go past the guard: rich's, through ``penstock.cli.output.console()``,
which escapes what is not rich's own styling; and the output of the user's own code, within ``unguarded()``.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from penstock.core.display import visible

__all__ = ["ReaderGone", "guarded", "raw", "unguarded"]


class ReaderGone(Exception):
    """The program that reads the output has ended. Not an ``OSError``, of which click would make exit code 1."""


class _Guard(io.TextIOBase):
    """A text stream that shows control characters as escapes. Bytes for its ``buffer`` take the same way."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.buffer = _GuardedBuffer(self)

    def write(self, text: str, /) -> int:
        shown = visible(text)
        try:
            self.stream.write(shown)
        except UnicodeEncodeError:
            # The terminal is not in UTF-8.
            encoding = self.stream.encoding
            self.stream.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        except BrokenPipeError as error:
            raise ReaderGone from error
        return len(text)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        try:
            self.stream.flush()
        except BrokenPipeError as error:
            raise ReaderGone from error

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.stream.errors


class _GuardedBuffer(io.RawIOBase):
    """For click, which writes bytes here, and text where the terminal is not in UTF-8."""

    def __init__(self, guard: _Guard) -> None:
        self._guard = guard

    def write(self, data: Any, /) -> int:
        self._guard.write(bytes(data).decode("utf-8", "replace"))
        return len(data)

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        self._guard.flush()


def raw(stream: TextIO | _Guard | None) -> TextIO:
    """Return what is behind the guard of ``stream``. One that was closed before the start (``>&-``) takes nothing."""
    if stream is None:
        return open(os.devnull, "w")  # open until the process ends
    return stream.stream if isinstance(stream, _Guard) else stream


@contextmanager
def guarded() -> Iterator[None]:
    """Guard stdout and stderr within the block."""
    with _replaced(_Guard(raw(sys.stdout)), _Guard(raw(sys.stderr))):
        yield


@contextmanager
def unguarded() -> Iterator[None]:
    """Leave stdout and stderr to the user's own code within the block: it may style what it prints."""
    with _replaced(raw(sys.stdout), raw(sys.stderr)):
        yield


@contextmanager
def _replaced(out: TextIO | _Guard, err: TextIO | _Guard) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
