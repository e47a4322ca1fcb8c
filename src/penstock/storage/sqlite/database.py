"""A database of this process: one writer and one exchange, shared by all storage objects that opened it.

After a fork the child starts afresh. What it inherited is kept but never touched: even closing an inherited
connection would drop the locks of the parent's.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from penstock.errors import StorageError, StorageReplaced, StorageUnavailable
from penstock.storage.sqlite import files
from penstock.storage.sqlite.checkpoint import Checkpoints
from penstock.storage.sqlite.connection import MEMORY, connect, file_identity, prepare
from penstock.storage.sqlite.lock import open_turn
from penstock.storage.sqlite.wake import Exchange, signal_directory
from penstock.storage.sqlite.writer import Writer

__all__ = ["Database", "closed_here", "keep_untouched", "open_database"]

_guard = threading.Lock()
_open: dict[str, Database] = {}
_inherited: list[object] = []


class Database:
    """One file, or one named database in memory. Made by ``open_database``."""

    def __init__(self, name: str, path: str, *, timeout_s: float, create: bool = True) -> None:
        asked_at = monotonic()
        self.name = name
        self.path = path
        self.users = 0
        self.loss: StorageReplaced | None = None
        self._file: files.Identity | None = None
        if path == MEMORY:
            (sql, has_waited), checkpoints = _prepared(path, timeout_s=timeout_s), None
        else:
            if create:
                files.create(path)
            self._file, sql, has_waited = _opened(path, timeout_s=timeout_s)
            checkpoints = self._checkpoints(sql)
            self._side_files = {files.identity_of(name) for name in files.side_files(path)} - {None}
        folder = None if path == MEMORY else signal_directory(file_identity(path))
        self.exchange = Exchange(folder, alone=path == MEMORY)
        self.writer = Writer(
            sql,
            path,
            timeout_s=timeout_s,
            on_commit=self.exchange.publish,
            find_loss=self.find_loss,
            checkpoints=checkpoints,
            turn=open_turn(folder),
            asked_at=asked_at,
            has_waited=has_waited,
        )

    def _checkpoints(self, sql: sqlite3.Connection) -> Checkpoints:
        try:
            return Checkpoints(sql, self.path, find_loss=self.find_loss)
        except BaseException:
            sql.close()
            raise

    @property
    def in_memory(self) -> bool:
        return self.path == MEMORY

    def find_loss(self) -> StorageReplaced | None:
        """Return why this database is of no use any more, if the path does not lead to the file that is open.

        Ask after a commit and before answering: nobody else would ever see what was committed.
        """
        if self._file is None or self.loss is not None:
            return self.loss
        try:
            status = os.stat(self.path)
            if (status.st_dev, status.st_ino) == self._file:
                return None
            what = "was replaced by another file"
        except FileNotFoundError:
            what = "was deleted"
        except OSError as error:
            what = f"cannot be reached any more ({error.strerror})"
        self.loss = StorageReplaced(
            f"{self.path}: {what} while this process used it. Nothing of this call is in the store. Repeat it once"
            " the file is in place."
        )
        with _guard:
            if _open.get(self.name) is self:
                del _open[self.name]
        return self.loss

    def reopen(self, *, timeout_s: float) -> Database:
        """Return the database that took the place of a lost one. Raise ``StorageReplaced`` if there is none."""
        assert self.loss is not None
        with _guard:
            database = _open.get(self.name)
            if database is None:
                try:
                    files.remove_left_over(self.path, self._side_files)
                    database = Database(self.name, self.path, timeout_s=timeout_s, create=False)
                except (OSError, StorageUnavailable) as error:
                    raise StorageReplaced(f"{self.loss} It cannot be opened again yet: {error}") from error
                _open[self.name] = database
            database.users += 1
            return database

    def release(self) -> None:
        """Close it after its last user. A named one in memory stays: its data would be gone."""
        with _guard:
            self.users -= 1
            if self.users or (self.in_memory and self.name):
                return
            if _open.get(self.name) is self:
                del _open[self.name]
        self.writer.close()
        self.exchange.close()


def _opened(path: str, *, timeout_s: float) -> tuple[files.Identity, sqlite3.Connection, bool]:
    """Open the file that is at ``path`` after it was prepared: it may be replaced while we wait for a lock.

    Return whether we had to wait as well.
    """
    while True:
        before = files.identity_of(path)
        try:
            sql, has_waited = _prepared(path, timeout_s=timeout_s)
        except StorageError:
            if files.identity_of(path) == before:
                raise
            continue
        if before is not None and files.identity_of(path) == before:
            return before, sql, has_waited
        sql.close()


def _prepared(path: str, *, timeout_s: float) -> tuple[sqlite3.Connection, bool]:
    sql = connect(path)
    try:
        has_waited = prepare(sql, path, timeout_s=timeout_s)
    except BaseException:
        sql.close()
        raise
    return sql, has_waited


def open_database(path: str, *, memory_name: str = "", timeout_s: float) -> Database:
    """The database of that path, or of that name in memory; an unnamed one in memory is nobody else's."""
    if path == MEMORY and not memory_name:
        database = Database("", MEMORY, timeout_s=timeout_s)
        database.users = 1
        return database
    name = f"{MEMORY}{memory_name}" if path == MEMORY else str(Path(path).resolve())
    with _guard:
        database = _open.get(name) or Database(name, path if path == MEMORY else name, timeout_s=timeout_s)
        _open[name] = database
        database.users += 1
        return database


@contextmanager
def closed_here(path: str) -> Iterator[None]:
    """Keep this process from opening the file. Raise ``StorageUnavailable`` if it has it open."""
    with _guard:
        if path in _open:
            raise StorageUnavailable(f"{path}: this process has it open. Close the apps that use it first.")
        yield


def keep_untouched(inherited: object) -> None:
    """Keep what a forked child must not use, nor close by dropping it."""
    _inherited.append(inherited)


def _start_afresh() -> None:
    """In a forked child: forget the parent's databases, and a guard that another thread may have held."""
    global _guard, _open
    _inherited.extend(_open.values())
    _open = {}
    _guard = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
