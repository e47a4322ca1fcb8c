"""Proof that a worker's process has died: each worker locks a file of its own, beside the database.

The kernel drops the lock when the process ends, however it ends, and never before: a process that is suspended, or
too busy for heartbeats, keeps it. A file without a lock proves a death; a missing file proves nothing. A worker
that stops properly removes its file.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

try:
    import fcntl
except ImportError:  # Without file locks, deaths are noticed when leases expire.
    fcntl = None  # type: ignore[assignment]


_FORGOTTEN_S: Final = 2 * 3600
"""Longer than a dead worker is listed."""

_held: set[int] = set()
"""The locked files of this process. A forked child closes them, because it would keep them locked."""


class WorkerLocks:
    """The locks of the workers of one database file, as held and seen by one storage object."""

    def __init__(self, database: str) -> None:
        self._folder = Path(f"{database}-workers")
        self._own: dict[str, int] = {}

    def hold(self, worker: str) -> None:
        """Lock this worker's file until ``release``, or the end of the process. Do nothing where that is
        impossible."""
        if worker in self._own or fcntl is None:
            return
        path = self._path(worker)
        # Use another name until it is locked, because without the lock the file would prove a death.
        unlocked = path.with_suffix(f".{os.getpid()}")
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._clean_up()
            file = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        _held.add(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(unlocked, path)
        except OSError:
            _close(file)
            return
        self._own[worker] = file

    def release(self) -> None:
        """Remove the files, then unlock them: these workers have not died."""
        for worker, file in self._own.items():
            _unlink(self._path(worker))
            _close(file)
        self._own.clear()

    def look(self, workers: Iterable[str]) -> dict[str, bool]:
        """Return whether the processes of these workers live. Leave out workers without a file."""
        locks = {worker: _is_locked(self._path(worker)) for worker in workers}
        return {worker: is_locked for worker, is_locked in locks.items() if is_locked is not None}

    def _path(self, worker: str) -> Path:
        return self._folder / f"{hashlib.sha256(worker.encode()).hexdigest()[:32]}.lock"

    def _clean_up(self) -> None:
        for entry in os.scandir(self._folder):
            if time.time() - entry.stat().st_mtime > _FORGOTTEN_S and not _is_locked(Path(entry.path)):
                _unlink(Path(entry.path))


def _is_locked(path: Path) -> bool | None:
    """Return whether the file is locked; ``None`` if that is unknown."""
    if fcntl is None:
        return None
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # A shared lock, so that two observers do not mistake each other for the worker.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(file)
    return False


def _close(file: int) -> None:
    _held.discard(file)
    os.close(file)


def _unlink(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        pass


def _let_go() -> None:
    """Close the parent's files in a forked child. They stay locked while the parent has them open."""
    for file in _held:
        try:
            os.close(file)
        except OSError:
            pass
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
