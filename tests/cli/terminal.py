"""``penstock`` at a terminal: a pty with somebody who reads the screen and presses keys."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from types import TracebackType

from tests.cli.conftest import Shell, script

__all__ = ["Terminal"]

_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[()][A-Z0-9]|[=>])")


class Terminal:
    """Runs a command in a terminal of 120 by 40, or so many ``columns`` and ``lines``.

    What it has written is ``text``, without the escapes.
    """

    def __init__(
        self,
        shell: Shell,
        *arguments: str,
        columns: int = 120,
        lines: int = 40,
        command: list[str] | None = None,
    ) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        size = {"COLUMNS": str(columns), "LINES": str(lines)}
        environment = shell.environment | {"TERM": "xterm-256color"} | size
        self.process = subprocess.Popen(
            [*(command or script()), *arguments],
            cwd=shell.folder,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            # So that Ctrl-C, typed, is a signal.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )
        os.close(theirs)
        self._ours = ours
        self._raw = ""
        # A read may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def descriptor(self) -> int:
        return self._ours

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)

    @property
    def text(self) -> str:
        return _ESCAPES.sub("", self._raw)

    @property
    def raw(self) -> str:
        return self._raw

    def read_until(self, words: str, *, seconds: float = 30) -> str:
        """All that was written until ``words`` were; from then on only what comes later is looked at."""
        self._await(words, seconds=seconds)
        seen, self._raw = self.text, ""
        return seen

    def read_raw_until(self, words: str) -> str:
        """The same, with all escapes."""
        self._await(words, seconds=30)
        seen, self._raw = self._raw, ""
        return seen

    def _await(self, words: str, *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < deadline, f"{words!r} did not come:\n{self.text[-3000:]}"
            self._read(0.1)

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def wait(self, *, seconds: float = 30) -> int:
        """Its exit code. What it writes meanwhile is read, or it could not go on."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text[-3000:]
            self._read(0.05)
        self._read(0)
        return self.process.returncode

    def _read(self, seconds: float) -> None:
        if select.select([self._ours], [], [], seconds)[0]:
            try:
                self._raw += self._decoder.decode(os.read(self._ours, 65536))
            except OSError:
                # The other end is closed: the process has ended.
                time.sleep(seconds)
