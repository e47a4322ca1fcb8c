"""What a storage object holds while it is open: its share of a database, on its event loop."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from penstock.storage.sqlite.connection import check_format, connect
from penstock.storage.sqlite.database import Database
from penstock.storage.sqlite.deliver import deliver
from penstock.storage.sqlite.failures import translate
from penstock.storage.sqlite.lives import WorkerLocks
from penstock.storage.sqlite.mend import is_damage, mend_all, repeat_mended
from penstock.storage.sqlite.queuerow import any_text
from penstock.storage.sqlite.step import Step
from penstock.storage.sqlite.transaction import Transaction
from penstock.storage.sqlite.wake import POLL_S, Bell
from penstock.storage.sqlite.writer import Calls

__all__ = ["Session"]

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
        self, queue: str, verb: Callable[[Step], Answer], *, weight: int = 1, ids: Sequence[str] = ()
    ) -> asyncio.Future[Answer]:
        """Run a verb on a queue in the next group; done when it is committed. ``ids``: the jobs it is about."""

        def attempt(transaction: Transaction, mended: int = 0) -> Answer:
            step = transaction.step(self._namespace, queue)
            step.mended = mended
            answer = verb(step)
            if step.outbox:
                deliver(transaction, step)
            transaction.accept(step)
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
