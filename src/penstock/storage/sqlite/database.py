"""A database of this process: one writer and one exchange, shared by all storage objects that opened it.

After a fork the child starts afresh. What it inherited is kept but never touched: even closing an inherited
connection would drop the locks of the parent's.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from penstock.storage.sqlite.checkpoint import Checkpoints
from penstock.storage.sqlite.connection import MEMORY, connect, file_identity, prepare
from penstock.storage.sqlite.wake import Exchange, signal_directory
from penstock.storage.sqlite.writer import Writer

__all__ = ["Database", "keep_untouched", "open_database"]

_guard = threading.Lock()
_open: dict[str, Database] = {}
_inherited: list[object] = []


class Database:
    """One file, or one named database in memory. Made by ``open_database``."""

    def __init__(self, name: str, path: str, *, timeout_s: float) -> None:
        self.name = name
        self.path = path
        self.users = 0
        sql = connect(path)
        try:
            prepare(sql, path, timeout_s=timeout_s)
            checkpoints = None if path == MEMORY else Checkpoints(sql, path)
        except BaseException:
            sql.close()
            raise
        folder = None if path == MEMORY else signal_directory(file_identity(path))
        self.exchange = Exchange(folder, alone=path == MEMORY)
        self.writer = Writer(
            sql, path, timeout_s=timeout_s, on_commit=self.exchange.publish, checkpoints=checkpoints
        )

    @property
    def in_memory(self) -> bool:
        return self.path == MEMORY

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
