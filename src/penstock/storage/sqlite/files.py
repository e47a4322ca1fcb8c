"""The files of a database: their permissions, identity, and other users.

A database has three files: itself, its write-ahead log (``-wal``) and the index of that (``-shm``). SQLite finds
the last two by name, so they can outlive a database that was deleted or replaced, and be mistaken for those of its
successor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
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
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _PRIVATE))
    except OSError:
        pass  # It exists, or SQLite reports why it cannot be opened.


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
                f"{path}: another process uses it ({error.strerror}). Stop all workers and programs that have it open."
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
