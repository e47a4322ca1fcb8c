"""Proof that a worker's process has died: each worker holds a lock on a file of its own, beside the database.

The kernel drops the lock when the process ends, however it ends, and never before: a process that is suspended, or
too busy to beat, keeps it. A file without a lock is proof of death; no file says nothing. A worker that ends
properly takes its file away.
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
except ImportError:  # No such locks here: deaths are noticed by their leases.
    fcntl = None  # type: ignore[assignment]


_FORGOTTEN_S: Final = 2 * 3600
"""Longer than a dead worker is shown."""

_held: set[int] = set()
"""The locked files of this process. A child that is forked lets go of them: it would keep them locked."""


class WorkerLocks:
    """The locks of the workers of one database file, as one storage object holds and sees them."""

    def __init__(self, database: str) -> None:
        self._folder = Path(f"{database}-workers")
        self._own: dict[str, int] = {}

    def hold(self, worker: str) -> None:
        """Lock this worker's file until ``release``, or the end of the process. Do nothing where that cannot be."""
        if worker in self._own or fcntl is None:
            return
        path = self._path(worker)
        # Under another name until it is locked: without the lock it would be proof of a death.
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
        """Take the files away, then let go of them: these workers have not died."""
        for worker, file in self._own.items():
            _unlink(self._path(worker))
            _close(file)
        self._own.clear()

    def look(self, workers: Iterable[str]) -> dict[str, bool]:
        """Return whether the processes of these workers live, of those that have a file."""
        found = {worker: _is_locked(self._path(worker)) for worker in workers}
        return {worker: locked for worker, locked in found.items() if locked is not None}

    def _path(self, worker: str) -> Path:
        return self._folder / f"{hashlib.sha256(worker.encode()).hexdigest()[:32]}.lock"

    def _clean_up(self) -> None:
        for entry in os.scandir(self._folder):
            if time.time() - entry.stat().st_mtime > _FORGOTTEN_S and not _is_locked(Path(entry.path)):
                _unlink(Path(entry.path))


def _is_locked(path: Path) -> bool | None:
    """Return none where nobody can tell."""
    if fcntl is None:
        return None
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Shared, so that two that look at once do not take each other for the worker.
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
    """Close the parent's files in a forked child. They stay locked for as long as the parent has them open."""
    for file in _held:
        try:
            os.close(file)
        except OSError:
            pass
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
