"""What SQLite's errors mean to a caller."""

from __future__ import annotations

import sqlite3

from penstock.errors import (
    PenstockError,
    StorageDamaged,
    StorageError,
    StorageFull,
    StorageReadOnly,
    StorageRefused,
    StorageUnavailable,
    StorageVersion,
)

__all__ = ["is_busy", "is_full", "translate"]

_PRIMARY = 0xFF


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & _PRIMARY


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another connection holds the lock."""
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_full(error: Exception) -> bool:
    """Return whether the disk may be full. A quota, or a limit on the size of files, is a failed write to SQLite."""
    return isinstance(error, sqlite3.Error) and (
        _code(error) == sqlite3.SQLITE_FULL
        or getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_WRITE
    )


def translate(error: Exception, path: str) -> Exception:
    """The error to raise for one of SQLite's; errors of our own stay as they are."""
    if isinstance(error, PenstockError) or not isinstance(error, sqlite3.Error):
        return error
    match _code(error):
        case sqlite3.SQLITE_FULL:
            return StorageFull(
                f"{path}: no room to write ({error}). This write was rolled back. Free disk space or raise the quota,"
                " then repeat it."
            )
        case sqlite3.SQLITE_READONLY:
            return StorageReadOnly(
                f"{path}: may not be written ({error}). Give this user write permission on the file and its directory."
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StorageUnavailable(
                f"{path}: another process held the database's lock for too long ({error}). Repeat the call; if it"
                " goes on, look for a process with a transaction left open."
            )
        case sqlite3.SQLITE_CANTOPEN:
            return StorageUnavailable(
                f"{path}: cannot be opened ({error}). Check that its directory exists and may be read."
            )
        case sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
            return StorageRefused(f"{path}: access was refused ({error}). Check the file's owner and mode.")
        case sqlite3.SQLITE_NOTADB:
            return StorageVersion(
                f"{path}: is not a SQLite database ({error}). Check the URL. If it is a store that is damaged,"
                " stop all workers, move the file away, and restore a backup (`penstock restore`)."
            )
        case sqlite3.SQLITE_CORRUPT:
            return StorageDamaged(
                f"{path}: pages of the file are damaged ({error}). Stop all workers, then restore a backup"
                f" (`penstock restore`). Without a backup, recover what can be read into another file:"
                f" `sqlite3 {path} .recover > found.sql && sqlite3 new.db < found.sql`. This needs a sqlite3 program"
                " with the command .recover: that of sqlite.org has it, that of Debian does not."
            )
        case _:
            return StorageError(f"{path}: {error}")
