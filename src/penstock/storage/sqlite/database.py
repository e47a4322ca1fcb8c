"""A database of this process: one writer and one exchange, shared by all storage objects that opened it.

After a fork the child starts afresh. What it inherited is kept but never touched: even closing an inherited
connection would drop the locks of the parent's.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TypeVar

from penstock.errors import StorageError, StorageReplaced, StorageUnavailable
from penstock.storage.sqlite import files
from penstock.storage.sqlite.checkpoint import Checkpoints
from penstock.storage.sqlite.connection import MEMORY, check_format, connect, file_identity, prepare
from penstock.storage.sqlite.deliver import deliver
from penstock.storage.sqlite.lives import WorkerLocks
from penstock.storage.sqlite.lock import open_turn, translate
from penstock.storage.sqlite.queuerow import any_text
from penstock.storage.sqlite.repair import is_damage, mend_all, repeat_mended
from penstock.storage.sqlite.transaction import Transaction
from penstock.storage.sqlite.unit import Unit
from penstock.storage.sqlite.wake import POLL_S, Bell, Exchange, signal_directory
from penstock.storage.sqlite.writer import Calls, Writer

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


# What a storage object holds while it is open: its share of a database, on its event loop.


Answer = TypeVar("Answer")


class Session:
    """One loop's use of a database. Reads have a connection of their own, and run at once on the loop's thread."""

    def __init__(self, database: Database, namespace: str, *, timeout_s: float) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self._database = database
        self._namespace = namespace
        self._calls = Calls(database.writer, self.loop)
        self._bell = Bell(database.exchange, self.loop)
        self._reader: sqlite3.Connection | None = None
        self.locks = None if database.in_memory else WorkerLocks(database.path)
        if not database.in_memory:
            self._reader = _reader(database, timeout_s=timeout_s)

    @property
    def is_lost(self) -> bool:
        """Return whether the file was deleted or replaced."""
        return self._database.loss is not None

    def reopened(self, *, timeout_s: float) -> Session:
        """Return a session on the file that took the place. Raise ``StorageReplaced`` if there is none."""
        session = Session(self._database.reopen(timeout_s=timeout_s), self._namespace, timeout_s=timeout_s)
        session.locks, self.locks = self.locks, None  # Its workers live on.
        self.close()
        return session

    def close(self) -> None:
        """End the waits, let go of the database."""
        self.closed = True
        if self.locks is not None:
            self.locks.release()
        self._calls.close(self._database.loss)
        self._bell.close()
        if self._reader is not None:
            self._reader.close()
        self._database.release()

    def write(
        self, queue: str, verb: Callable[[Unit], Answer], *, weight: int = 1, ids: Sequence[str] = ()
    ) -> asyncio.Future[Answer]:
        """Run a verb on a queue in the next group; done when it is committed. ``ids``: the jobs it is about."""

        def attempt(transaction: Transaction, mended: int = 0) -> Answer:
            unit = transaction.unit(self._namespace, queue)
            unit.mended = mended
            answer = verb(unit)
            if unit.outbox:
                deliver(transaction, unit)
            transaction.accept(unit)
            return answer

        def work(transaction: Transaction) -> Answer:
            try:
                return attempt(transaction)
            except Exception as error:
                if not is_damage(error):
                    raise
                place = (self._namespace, queue)
                return repeat_mended(transaction, place, attempt, error=error, ids=ids)

        return self._calls.submit(work, weight=weight)

    def mend(self, queue: str, *, weight: int) -> asyncio.Future[dict[str, int]]:
        """Put all damaged records of a queue aside, and rebuild its indexes; how much there was of each."""
        return self._calls.submit(
            lambda transaction: mend_all(transaction, (self._namespace, queue)), weight=weight
        )

    async def read(self, look: Callable[[sqlite3.Connection], Answer]) -> Answer:
        """See one committed state of the database. In memory there is one connection, so it takes its turn."""
        sql = self._reader
        if sql is None:
            return await self._calls.submit(lambda transaction: _look(look, transaction.sql))
        loss = self._database.find_loss()
        if loss is not None:
            raise loss
        try:
            sql.execute("BEGIN")
            try:
                check_format(sql, self._database.path)
                return _look(look, sql)
            finally:
                sql.execute("COMMIT")
        except sqlite3.Error as error:
            raise translate(error, self._database.path) from error

    async def until(
        self,
        kind: str,
        queue: str,
        look: Callable[[], Awaitable[Answer]],
        *,
        timeout_ms: int,
        signalled: Answer | None = None,
    ) -> Answer:
        """Look until there is something, sleeping between signals; what was seen last when the time is over.

        With ``signalled``, a signal is as good as a sight: that is then the answer.
        """
        address = f"{self._namespace}/{queue}"
        deadline = self.loop.time() + timeout_ms / 1000
        while True:
            signal = self._bell.expect(kind, address)
            try:
                found = await look()
                left_s = deadline - self.loop.time()
                if found or left_s <= 0 or self.closed:
                    return found
                sleep_s = left_s if self._bell.hears(kind) else min(left_s, POLL_S)
                await asyncio.wait([signal], timeout=sleep_s)
                if signalled is not None and signal.done():
                    return signalled
            except asyncio.CancelledError:
                if signal.done():
                    self._bell.ring(kind, address)
                raise
            finally:
                self._bell.forget(kind, address, signal)
            if self.closed:
                return found


def _reader(database: Database, *, timeout_s: float) -> sqlite3.Connection:
    try:
        sql = connect(database.path, timeout_s=timeout_s)
        sql.execute("PRAGMA query_only = ON")
        loss = database.find_loss()
        if loss is not None:  # What was opened is perhaps another file than the one that is written to.
            sql.close()
            raise loss
        return sql
    except BaseException:
        database.release()
        raise


def _look(look: Callable[[sqlite3.Connection], Answer], sql: sqlite3.Connection) -> Answer:
    """Look, and once more if a text is not UTF-8: damaged jobs are shown as such."""
    try:
        return look(sql)
    except sqlite3.OperationalError as error:
        if not is_damage(error):
            raise
        with any_text(sql):
            return look(sql)
