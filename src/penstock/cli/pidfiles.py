"""Pid files of background workers, with their arguments.

A worker holds a lock on its file while it runs. A file without a lock was left by a crash, even if another process has
its number by now.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from penstock.cli.errors import WrongState

_LOOK_EVERY_S: Final = 0.05
_EXIT_S: Final = 5.0
_PREFIX: Final = "PENSTOCK_"
_MODE: Final = 0o600


class Surroundings(msgspec.Struct, frozen=True):
    """The folder and the ``PENSTOCK_`` variables that a worker was started with: they decide its store."""

    folder: str
    variables: dict[str, str]

    @classmethod
    def here(cls) -> Surroundings:
        """Return the surroundings of this process. Call this before an app is imported: imports set variables."""
        ours = {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}
        return cls(str(Path.cwd()), ours)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of this process, with the ``PENSTOCK_`` variables of the worker."""
        others = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIX)}
        return others | self.variables


class PidRecord(msgspec.Struct, frozen=True):
    """The content of a pid file. ``arguments`` are those of ``penstock worker run``; ``ready``: it claims jobs.

    ``grace_ms`` is the worker's own grace, whatever the settings of the process that stops it. ``store`` is for
    display and has no password.
    """

    pid: int
    arguments: list[str]
    started_at_ms: int
    grace_ms: int
    surroundings: Surroundings
    ready: bool = False
    store: str = ""


@contextmanager
def held(
    path: Path, arguments: list[str], *, grace_ms: int, surroundings: Surroundings, store: str = ""
) -> Iterator[_Held]:
    """Hold the pid file within the block, and delete it afterwards. Raise ``WrongState`` if a live worker holds it.

    Only the owner can read the file, because URLs may contain passwords.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b", opener=private) as file:
        if not _lock(file.fileno()):
            record = read_record(path)
            holder = f"process {record.pid}" if record is not None else "another process"
            raise WrongState(
                f"{path} is the pid file of a running worker ({holder}). Stop that worker, or use another file."
            )
        now_ms = time.time_ns() // 1_000_000
        record = PidRecord(os.getpid(), arguments, now_ms, grace_ms, surroundings, store=store)
        held_file = _Held(file.fileno(), record)
        held_file.write()
        try:
            yield held_file
        finally:
            path.unlink(missing_ok=True)


class _Held:
    def __init__(self, descriptor: int, record: PidRecord) -> None:
        self._descriptor = descriptor
        self._record = record

    def write(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, msgspec.json.encode(self._record), 0)

    def tell_ready(self) -> None:
        """Record that the worker claims jobs: ``penstock worker start`` waits for it."""
        self._record = msgspec.structs.replace(self._record, ready=True)
        self.write()


def read_record(path: Path) -> PidRecord | None:
    """Return the content of a pid file; ``None`` if it does not exist or is half written."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=PidRecord)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def running(path: Path) -> PidRecord | None:
    """Return the record of the worker that holds the file; ``None`` if it no longer runs."""
    try:
        with path.open("rb") as file:
            return None if _lock(file.fileno()) else read_record(path)
    except FileNotFoundError:
        return None


def request_stop(record: PidRecord) -> None:
    """Send SIGTERM. Call this only once: a second signal makes the worker hand its jobs back."""
    _signal(record.pid, signal.SIGTERM)


def await_stop(path: Path, record: PidRecord, *, deadline: float) -> bool:
    """Wait for a worker to exit, and kill it at ``deadline``, a monotonic time. Return whether it exited by itself."""
    gracefully = True
    while running(path) is not None:
        if time.monotonic() > deadline:
            gracefully = False
            _signal(record.pid, signal.SIGKILL)
            path.unlink(missing_ok=True)
            break
        time.sleep(_LOOK_EVERY_S)
    _await_exit(record.pid)
    return gracefully


def _await_exit(pid: int) -> None:
    """Wait for the process itself: it releases its file shortly before it exits."""
    deadline = time.monotonic() + _EXIT_S
    while _signal(pid, 0) and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)


def private(path: str, flags: int) -> int:
    """Open a file for ``open(opener=...)``. If it creates the file, only the owner may read it."""
    return os.open(path, flags, _MODE)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _signal(pid: int, number: int) -> bool:
    """Send a signal. Return whether the process exists."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
