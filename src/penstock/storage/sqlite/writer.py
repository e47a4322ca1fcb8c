"""Group commit: all calls that are pending when the database is free share one transaction and one fsync.

A ``Writer`` belongs to a database of this process: it has the connection that writes, and a thread. A ``Calls``
belongs to a storage object and its event loop: it gathers calls, and runs them all when the writer is free.

A thread beside a busy event loop waits for the interpreter's lock after every statement, up to 5 ms each. So a
small group runs on the loop's own thread, without a pause and without waiting, and only the commit (the fsync) goes
to the writer's thread. Large groups, and those that find the database locked by another process, run on the
writer's thread entirely.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, Final, TypeVar

from penstock.errors import StorageUnavailable
from penstock.storage.sqlite.checkpoint import Checkpoints
from penstock.storage.sqlite.connection import MEMORY, check_format
from penstock.storage.sqlite.links import LINKS
from penstock.storage.sqlite.lock import LONG_S, Turn, begin, is_full, quiet_s, translate, write_long_lock
from penstock.storage.sqlite.transaction import Signal, Transaction

Answer = TypeVar("Answer")
Work = Callable[[Transaction], Any]

_GROUP_CALLS: Final = 256
_GROUP_WEIGHT: Final = 20_000
_INLINE_WEIGHT: Final = 2_000
"""The most jobs in a group that may hold up an event loop: some tens of milliseconds."""


class _Call:
    __slots__ = ("answer", "error", "future", "weight", "work")

    def __init__(self, work: Work, weight: int, future: asyncio.Future[Any]) -> None:
        self.work = work
        self.weight = weight
        self.future = future
        self.answer: Any = None
        self.error: Exception | None = None


class _Group:
    """Calls of one loop that share a transaction. ``transaction`` is set once they have run.

    ``guarded``: a call failed, so all run again, each behind a savepoint. ``apart``: SQLite gave up their
    transaction because of a call, so each gets its own. ``asked_at``: when they asked for the lock. ``has_waited``:
    another process held it then.
    """

    __slots__ = ("apart", "asked_at", "calls", "guarded", "has_waited", "loop", "transaction")

    def __init__(self, loop: asyncio.AbstractEventLoop, calls: list[_Call]) -> None:
        self.asked_at = monotonic()
        self.has_waited = False
        self.loop = loop
        self.calls = calls
        self.transaction: Transaction | None = None
        self.guarded = False
        self.apart = False

    @property
    def has_run(self) -> bool:
        """Return whether the calls have their answers, or must run apart."""
        return self.transaction is not None or self.apart

    @property
    def weight(self) -> int:
        return sum(call.weight for call in self.calls)

    def refuse(self, error: Exception) -> None:
        for call in self.calls:
            call.error = error

    def deliver(self) -> None:
        """Answer the callers. Call it on the loop's thread."""
        for call in self.calls:
            if call.future.done():
                continue
            if call.error is not None:
                call.future.set_exception(call.error)
            else:
                call.future.set_result(call.answer)


class Writer:
    """The connection of this process that writes to a database, and the thread that commits.

    ``on_commit`` receives the signals of every commit, on any thread. ``find_loss`` is called on the loop's thread
    before a group is answered: it returns an error if the calls did not reach the store. ``asked_at`` is when this
    process began to open the database, by the monotonic clock, and ``has_waited`` whether another process held the
    lock then.
    """

    def __init__(
        self,
        sql: sqlite3.Connection,
        path: str,
        *,
        timeout_s: float,
        on_commit: Callable[[set[Signal]], None],
        find_loss: Callable[[], Exception | None],
        checkpoints: Checkpoints | None,
        turn: Turn | None,
        asked_at: float,
        has_waited: bool,
    ) -> None:
        self.commits = 0
        self.sql = sql
        self._path = path
        self._timeout_s = timeout_s
        self._on_commit = on_commit
        self._find_loss = find_loss
        self._checkpoints = checkpoints
        self._option_keys: dict[bytes, int] = {}
        self._long_lock: tuple[float, float] | None = None
        self._turn = turn
        self._held_at = 0.0
        self._note_lock(self._locked_at(asked_at, has_waited=has_waited))
        self._free = threading.Lock()
        self._lined_up: deque[Calls] = deque()
        self._inbox: SimpleQueue[_Group | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def acquire(self, calls: Calls) -> bool:
        """Take the connection, or queue up to be woken when it is free."""
        if self._free.acquire(blocking=False):
            return True
        self._lined_up.append(calls)
        # It may have become free in between, with no owner left to wake us.
        return self._free.acquire(blocking=False)

    def line_up(self, calls: Calls) -> None:
        """Queue up to be woken when the connection is free again. Its owner calls this before ``run``."""
        self._lined_up.append(calls)

    def run(self, group: _Group) -> None:
        """Run and commit a group, then release the connection, which the caller has acquired."""
        if group.weight <= _INLINE_WEIGHT:
            self._run_inline(group)
        if group.transaction is not None and self._path == MEMORY:
            self._complete(group, deliver=group.deliver)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="penstock-sqlite", daemon=True)
            self._thread.start()
        self._inbox.put(group)

    def close(self) -> None:
        """End the thread and close the connection, after the group under way. It cannot be acquired any more."""
        self._free.acquire()
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()
        if self._checkpoints is not None:
            self._checkpoints.close()
        self.sql.close()

    def _work(self) -> None:
        while (group := self._inbox.get()) is not None:
            self._complete(group, deliver=partial(_call_soon, group.loop, partial(self._deliver, group)))

    def _deliver(self, group: _Group) -> None:
        """Answer the callers of a group. Runs on the loop's thread, where checking the file waits for no other
        thread."""
        loss = self._find_loss()
        if loss is not None:
            group.refuse(loss)
        group.deliver()

    def _run_inline(self, group: _Group) -> None:
        """Run the calls here, unless another process holds the lock; the thread then does the rest."""
        try:
            while not group.has_run:
                if self._turn is not None and not self._turn.is_mine(group.asked_at):
                    group.has_waited = True
                    return
                self.sql.execute("BEGIN IMMEDIATE")
                self._run_calls(group)
        except sqlite3.Error:
            group.has_waited = True
            return
        except BaseException as interrupt:
            group.refuse(self._interrupted(interrupt))
            self._roll_back()
            group.deliver()
            self._release()
            raise

    def _complete(self, group: _Group, *, deliver: Callable[[], None]) -> None:
        """Commit or refuse a group, then let the next have the connection.

        Calls have their answers once they have run. A group that was not committed is refused before anything else
        can fail, so that these answers are never delivered.
        """
        signals: set[Signal] = set()
        checkpoints, is_due = self._checkpoints, False
        try:
            while not group.has_run:
                group.has_waited |= begin(self.sql, timeout_s=self._timeout_s, turn=self._turn)
                self._run_calls(group)
            signals = self._commit_group(group)
            is_due = checkpoints is not None and checkpoints.is_due()
        except Exception as error:
            group.refuse(translate(error, self._path))
            self._roll_back()
        except BaseException as interrupt:
            group.refuse(self._interrupted(interrupt))
            self._roll_back()
            raise
        finally:
            deliver()
            if checkpoints is not None and is_due:
                checkpoints.run()
            self._release()
        if signals:
            self._on_commit(signals)

    def _commit_group(self, group: _Group) -> set[Signal]:
        if not group.apart:
            try:
                return self._commit(group.transaction)
            except sqlite3.Error as error:
                if not is_full(error):
                    raise
                self._roll_back()
        return self._run_apart(group)

    def _run_calls(self, group: _Group) -> None:
        """Run all calls of a group in the open transaction; roll it back if one fails.

        Few calls fail, and a savepoint costs two statements per call. So the first attempt uses none.
        """
        run = self._run_call if group.guarded else _run_bare
        try:
            transaction = self._transaction(group.asked_at, has_waited=group.has_waited)
            for call in group.calls:
                run(transaction, call)
            transaction.flush()
        except Exception:
            self._roll_back()
            group.apart, group.guarded = group.guarded, True
        else:
            group.transaction = transaction

    def _transaction(self, asked_at: float, *, has_waited: bool) -> Transaction:
        """Return the shared state of the open transaction. Raise ``StorageVersion`` if the format has changed."""
        if self._path != MEMORY:
            check_format(self.sql, self._path)
        if self._long_lock is not None:
            since_s, until_s = (monotonic() - at for at in self._long_lock)
            write_long_lock(self.sql, since_s=since_s, until_s=until_s)
        locked_at = self._locked_at(asked_at, has_waited=has_waited)
        return Transaction(self.sql, self._option_keys, LINKS, locked_at=locked_at)

    def _locked_at(self, asked_at: float, *, has_waited: bool) -> float:
        """Return since when no process has been able to write, except the one that held the lock before us.

        It took the lock before we asked for it, but after the file was last written, and after we last held it.
        """
        now = monotonic()
        if not has_waited or now - self._held_at < LONG_S:
            return asked_at
        return min(asked_at, max(self._held_at, now - quiet_s(self.sql)))

    def _note_lock(self, locked_at: float) -> None:
        """Remember for the next transaction that no other process has been able to write since ``locked_at``."""
        self._held_at = monotonic()
        if self._held_at - locked_at >= LONG_S:
            self._long_lock = (locked_at, self._held_at)

    def _run_call(self, transaction: Transaction, call: _Call) -> None:
        """Run a call so that its failure leaves nothing behind and does not affect the others."""
        if call.future.cancelled():
            return  # A claim without a caller would lease jobs to no worker.
        self.sql.execute("SAVEPOINT call")
        try:
            call.error = None
            call.answer = call.work(transaction)
        except Exception as error:
            if not self.sql.in_transaction or is_full(error):
                raise
            self.sql.execute("ROLLBACK TO call")
            transaction.forget()
            call.error = translate(error, self._path)
        self.sql.execute("RELEASE call")

    def _run_apart(self, group: _Group) -> set[Signal]:
        """Run each call in its own transaction. The first one that finds the disk full gets a second attempt."""
        signals: set[Signal] = set()
        checkpoints = self._checkpoints
        for call in group.calls:
            error = self._run_alone(call, signals)
            if error is not None and is_full(error) and checkpoints is not None:
                checkpoints.make_room()
                checkpoints = None
                self._run_alone(call, signals)
        return signals

    def _run_alone(self, call: _Call, signals: set[Signal]) -> Exception | None:
        """Run and commit a call, and add its signals. Return the error that prevented the commit."""
        asked_at = monotonic()
        try:
            has_waited = begin(self.sql, timeout_s=self._timeout_s, turn=self._turn)
            transaction = self._transaction(asked_at, has_waited=has_waited)
            self._run_call(transaction, call)
            transaction.flush()
            signals |= self._commit(transaction)
        except Exception as error:
            call.error = translate(error, self._path)
            self._roll_back()
            return error
        return None

    def _commit(self, transaction: Transaction | None) -> set[Signal]:
        assert transaction is not None
        transaction.note_lock()
        self.sql.execute("COMMIT")
        self.commits += 1
        self._long_lock = None
        self._note_lock(transaction.locked_at)
        return transaction.signals

    def _roll_back(self) -> None:
        self._option_keys.clear()
        if self.sql.in_transaction:
            try:
                self.sql.execute("ROLLBACK")
            except sqlite3.Error:
                pass  # No transaction can begin before this succeeds, and the next attempt repeats it.

    def _interrupted(self, interrupt: BaseException) -> StorageUnavailable:
        return StorageUnavailable(
            f"{self._path}: the call was interrupted by {interrupt!r}. Check whether it took effect, then repeat it."
        )

    def _release(self) -> None:
        self._free.release()
        while self._lined_up:
            self._lined_up.popleft().wake()


def _run_bare(transaction: Transaction, call: _Call) -> None:
    if not call.future.cancelled():
        call.answer = call.work(transaction)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Run ``callback`` on the loop's thread. A closed loop has no waiting callers."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        pass


class Calls:
    """The calls of one storage object, gathered until the writer is free. Used on its loop's thread only."""

    def __init__(self, writer: Writer, loop: asyncio.AbstractEventLoop) -> None:
        self._writer = writer
        self._loop = loop
        self._pending: deque[_Call] = deque()
        self._flush_due = False

    def submit(self, work: Callable[[Transaction], Answer], *, weight: int = 1) -> asyncio.Future[Answer]:
        """Run ``work`` in a transaction; the future is done once that is committed. ``weight`` is the number of
        jobs."""
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._pending.append(_Call(work, weight, future))
        self._schedule()
        return future

    def close(self, reason: Exception | None = None) -> None:
        """Refuse the calls that have not started."""
        group = _Group(self._loop, list(self._pending))
        self._pending.clear()
        group.refuse(reason or StorageUnavailable("The storage was closed before the call ran."))
        group.deliver()

    def wake(self) -> None:
        """Run the pending calls: the connection is free. Call it from any thread."""
        _call_soon(self._loop, self._schedule)

    def _schedule(self) -> None:
        # Not immediately: callers that were just answered may make more calls, which join this group.
        if self._pending and not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._pending and self._writer.acquire(self):
            group = _Group(self._loop, self._take())
            if self._pending:
                self._writer.line_up(self)
            self._writer.run(group)

    def _take(self) -> list[_Call]:
        calls: list[_Call] = []
        weight = 0
        while self._pending and len(calls) < _GROUP_CALLS and weight < _GROUP_WEIGHT:
            call = self._pending.popleft()
            weight += call.weight
            calls.append(call)
        return calls
