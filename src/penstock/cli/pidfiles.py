"""Pid files: who runs detached, with which arguments. A file is its worker's as long as that holds a lock on it,
so one that was left behind by a crash is known as such, whatever its number means by now.
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
    """Where a worker was started, as far as it finds its store by that: the folder, and our variables."""

    folder: str
    variables: dict[str, str]

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this process. To be asked before an app is imported, for which variables are set."""
        ours = {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}
        return cls(str(Path.cwd()), ours)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of this process, with our variables as they were there."""
        others = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIX)}
        return others | self.variables


class PidRecord(msgspec.Struct, frozen=True):
    """What a pid file says. ``arguments`` are those of ``penstock worker``; ``ready`` once it claims jobs.

    ``grace_ms`` is how long the worker lets its jobs finish, whatever the settings of who stops it. ``store`` is shown
    to people, without a password.
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
    """The pid file is ours until the block ends, and gone then. Raises ``WrongState`` if a live worker has it.

    Others may not read it: it says URLs, which may have passwords.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b", opener=private) as file:
        if not _lock(file.fileno()):
            record = read_record(path)
            who = f"process {record.pid}" if record is not None else "another process"
            raise WrongState(
                f"{path} is the pid file of a worker that runs ({who}). Stop that one, or use another file."
            )
        now_ms = time.time_ns() // 1_000_000
        record = PidRecord(os.getpid(), arguments, now_ms, grace_ms, surroundings, store=store)
        mine = _Held(file.fileno(), record)
        mine.write()
        try:
            yield mine
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
        """Whoever started us has been waiting for this."""
        self._record = msgspec.structs.replace(self._record, ready=True)
        self.write()


def read_record(path: Path) -> PidRecord | None:
    """What the file says; ``None`` if it is not there, or was only half written."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=PidRecord)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def running(path: Path) -> PidRecord | None:
    """The record of the worker that has the file; ``None`` if there is none any more."""
    try:
        with path.open("rb") as file:
            return None if _lock(file.fileno()) else read_record(path)
    except FileNotFoundError:
        return None


def tell_to_end(record: PidRecord) -> None:
    """SIGTERM. Once only: the second takes away its grace."""
    _signal(record.pid, signal.SIGTERM)


def await_end(path: Path, record: PidRecord, *, deadline: float) -> bool:
    """SIGKILL if it still runs at the ``deadline``, by the monotonic clock; whether it ended without that."""
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
    """It lets go of its file a moment before it is gone."""
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
    """Whether there was such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
