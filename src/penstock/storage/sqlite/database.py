"""The databases of this process: one writer and one exchange each, shared by all storage objects that opened it.

After a fork the child starts afresh. It keeps what it inherited but never touches it: even closing an inherited
connection would drop the parent's locks.
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
from penstock.storage.sqlite.files import WorkerLocks
from penstock.storage.sqlite.links import deliver
from penstock.storage.sqlite.lock import open_turn, translate
from penstock.storage.sqlite.queuerow import View, any_text
from penstock.storage.sqlite.repair import is_damage, mend_all, repeat_mended
from penstock.storage.sqlite.transaction import Transaction
from penstock.storage.sqlite.unit import Unit
from penstock.storage.sqlite.wake import POLL_S, Bell, Exchange, signal_directory
from penstock.storage.sqlite.writer import Calls, Writer

_guard = threading.Lock()
_open: dict[str, Database] = {}
_inherited: list[object] = []


class Database:
    """One file, or one named database in memory. ``open_database`` makes it."""

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
            sql, path, timeout_s=timeout_s, on_commit=self.exchange.publish, find_loss=self.find_loss,
            checkpoints=checkpoints, turn=open_turn(folder), asked_at=asked_at, has_waited=has_waited,
        )  # fmt: skip

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
        """Return the error for a file that was deleted or replaced; ``None`` while the path leads to the open file.

        Call it after a commit and before answering: no other process could ever see what was committed.
        """
        if self._file is None or self.loss is not None:
            return self.loss
        try:
            status = os.stat(self.path)
            if (status.st_dev, status.st_ino) == self._file:
                return None
            fate = "was replaced by another file"
        except FileNotFoundError:
            fate = "was deleted"
        except OSError as error:
            fate = f"can no longer be reached ({error.strerror})"
        self.loss = StorageReplaced(
            f"{self.path}: {fate} while this process used it. This call changed nothing in the store. Repeat it once"
            " the file is in place."
        )
        with _guard:
            if _open.get(self.name) is self:
                del _open[self.name]
        return self.loss

    def reopen(self, *, timeout_s: float) -> Database:
        """Return the database that replaced a lost one. Raise ``StorageReplaced`` if there is none."""
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
        """Close the database after its last user. A named one in memory stays, or its data would be lost."""
        with _guard:
            self.users -= 1
            if self.users or (self.in_memory and self.name):
                return
            if _open.get(self.name) is self:
                del _open[self.name]
        self.writer.close()
        self.exchange.close()


def _opened(path: str, *, timeout_s: float) -> tuple[files.Identity, sqlite3.Connection, bool]:
    """Open the file at ``path``, and open it again if it was replaced while we waited for a lock.

    Return its identity, the connection, and whether we had to wait.
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
    """Return the database of that path, or of that name in memory. An unnamed one in memory is not shared."""
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
    """Keep this process from opening the file. Raise ``StorageUnavailable`` if it is open."""
    with _guard:
        if path in _open:
            raise StorageUnavailable(f"{path}: this process has it open. Close the apps that use it first.")
        yield


def keep_untouched(inherited: object) -> None:
    """Keep an object that a forked child must neither use nor close."""
    _inherited.append(inherited)


def _start_afresh() -> None:
    """Forget the parent's databases in a forked child, and a guard that another thread may have held."""
    global _guard, _open
    _inherited.extend(_open.values())
    _open = {}
    _guard = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)


# A session is the share of a database that an open storage object holds, on its event loop.


Answer = TypeVar("Answer")


class Session:
    """One loop's use of a database. Reads have their own connection, and run immediately on the loop's thread."""

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
        """Return a session on the file that replaced the lost one. Raise ``StorageReplaced`` if there is none."""
        session = Session(self._database.reopen(timeout_s=timeout_s), self._namespace, timeout_s=timeout_s)
        session.locks, self.locks = self.locks, None  # Its workers live on.
        self.close()
        return session

    def close(self) -> None:
        """End the waits and release the database."""
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
        """Run a verb on a queue in the next group. The future is done once that is committed. ``ids`` are the verb's
        jobs."""

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
        """Quarantine all damaged records of a queue, and rebuild its indexes. Return the number of problems by
        kind."""
        return self._calls.submit(
            lambda transaction: mend_all(transaction, (self._namespace, queue)), weight=weight
        )

    @property
    def reads_beside(self) -> bool:
        """Return whether reads need not wait for the writer: all but those of a database in memory."""
        return self._reader is not None

    async def read(self, queue: str, look: Callable[[View], Answer]) -> Answer:
        """Run ``look`` on one committed state of a queue. In memory it waits for the only connection."""
        sql = self._reader
        if sql is None:
            return await self._calls.submit(lambda transaction: self._look(queue, look, transaction.sql))
        loss = self._database.find_loss()
        if loss is not None:
            raise loss
        try:
            sql.execute("BEGIN")
            try:
                check_format(sql, self._database.path)
                return self._look(queue, look, sql)
            finally:
                sql.execute("COMMIT")
        except sqlite3.Error as error:
            raise translate(error, self._database.path) from error

    def _look(self, queue: str, look: Callable[[View], Answer], sql: sqlite3.Connection) -> Answer:
        """Run ``look``, and repeat it leniently if a text is not UTF-8, so that damaged jobs can be shown."""
        try:
            return look(View(sql, self._namespace, queue))
        except sqlite3.OperationalError as error:
            if not is_damage(error):
                raise
            with any_text(sql):
                return look(View(sql, self._namespace, queue))

    async def until(
        self,
        kind: str,
        queue: str,
        look: Callable[[], Awaitable[Answer]],
        *,
        timeout_ms: int,
        signalled: Answer | None = None,
    ) -> Answer:
        """Call ``look`` after each signal until it returns something or the time is over. Return its last result.

        With ``signalled``, return that as soon as a signal comes.
        """
        address = f"{self._namespace}/{queue}"
        deadline = self.loop.time() + timeout_ms / 1000
        while True:
            signal = self._bell.expect(kind, address)
            try:
                seen = await look()
                left_s = deadline - self.loop.time()
                if seen or left_s <= 0 or self.closed:
                    return seen
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
                return seen


def _reader(database: Database, *, timeout_s: float) -> sqlite3.Connection:
    try:
        sql = connect(database.path, timeout_s=timeout_s)
        sql.execute("PRAGMA query_only = ON")
        loss = database.find_loss()
        if loss is not None:  # This connection may have opened another file than the writer did.
            sql.close()
            raise loss
        return sql
    except BaseException:
        database.release()
        raise
