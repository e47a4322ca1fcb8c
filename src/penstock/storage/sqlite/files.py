"""The files of a database: their permissions, identity and other users, and the locks of its workers.

A database has three files: itself, its write-ahead log (``-wal``) and the index of that (``-shm``). SQLite finds
the last two by name, so they can outlive a database that was deleted or replaced, and be mistaken for those of its
successor.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, TypeAlias
from urllib.parse import quote

from penstock.errors import StorageUnavailable

Identity: TypeAlias = tuple[int, int]
"""Device and inode. No other file has the same while the file is open."""

_PRIVATE: Final = 0o600

# The bytes that SQLite locks. In WAL mode a connection that has read holds a shared lock on them until it
# closes.
_FIRST_SHARED_BYTE: Final = 0x40000002
_SHARED_BYTES: Final = 510


def create(path: str) -> None:
    """Create the file, readable by its owner only, if it does not exist. SQLite gives the other files its mode."""
    with suppress(OSError):  # It exists, or SQLite reports why it cannot be opened.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _PRIVATE))


def remove(path: str | Path) -> None:
    """Remove a file if it exists and if that is possible."""
    with suppress(OSError):
        os.unlink(path)


def file_uri(path: str, *, mode: Literal["ro", "rw"] = "rw") -> str:
    """Return a URI with which SQLite opens the file but never creates it."""
    return f"file:{quote(os.fsencode(path))}?mode={mode}"


def identity_of(path: str) -> Identity | None:
    """Return the identity of the file at ``path``; ``None`` if it does not exist or cannot be reached."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def side_files(path: str) -> tuple[str, str]:
    """Return the paths of the write-ahead log and its index."""
    return f"{path}-wal", f"{path}-shm"


STOP_OTHERS: Final = (
    "Stop all programs that have it open, such as `penstock worker`, `penstock top`, or your own."
)
"""The remedy if a call needs the file for itself."""


@contextmanager
def exclusive(path: str) -> Iterator[None]:
    """Keep every other process from using the file. Raise ``StorageUnavailable`` if one has it open.

    This process must have no connection to it: closing the file here would drop the locks of that connection.
    """
    import fcntl

    with open(path, "r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, _SHARED_BYTES, _FIRST_SHARED_BYTE)
        except OSError as error:
            raise StorageUnavailable(
                f"{path}: another process uses it ({error.strerror}). {STOP_OTHERS}"
            ) from error
        yield


def remove_left_over(path: str, left_over: set[Identity | None]) -> None:
    """Remove a write-ahead log, or its index, of the file that was at ``path`` before.

    SQLite would apply them to the new file and damage it. ``left_over`` identifies them. Raise
    ``StorageUnavailable`` if a process has opened the new file with them.
    """
    stale = [name for name in side_files(path) if identity_of(name) in left_over]
    if stale:
        with exclusive(path):
            for name in stale:
                os.unlink(name)


try:
    import fcntl
except ImportError:  # Without file locks, deaths are noticed when leases expire.
    fcntl = None  # type: ignore[assignment]


_FORGOTTEN_S: Final = 2 * 3600
"""Longer than a dead worker is listed."""

_held: set[int] = set()
"""The locked files of this process. A forked child closes them, because it would keep them locked."""


class WorkerLocks:
    """Proof that a worker's process has died: each worker locks a file of its own, beside the database.

    The kernel drops the lock when the process ends, however it ends, and never before: a process that is suspended, or
    too busy for heartbeats, keeps it. A file without a lock proves a death; a missing file proves nothing. A worker
    that stops properly removes its file.
    """

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
            remove(self._path(worker))
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
                remove(entry.path)


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


def _let_go() -> None:
    """Close the parent's files in a forked child. They stay locked while the parent has them open."""
    for file in _held:
        with suppress(OSError):
            os.close(file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
