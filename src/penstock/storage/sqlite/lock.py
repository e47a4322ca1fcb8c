"""SQLite's errors as Penstock's; and the write lock: waiting for it in turn, and remembering long locks.

SQLite does not queue waiting processes: they try again and again, and chance decides. Under load a process can lose
until its leases run out. So a process that has waited for some time announces it in a ``Turn``, a few bytes that
all processes share, and the others let it go first.

A process that is suspended inside a transaction stops all others from writing, and so from extending leases. A
process that had to wait writes the time of such a *long lock* into the file, and sweeps take it into account.
"""

from __future__ import annotations

import mmap
import os
import sqlite3
import struct
from pathlib import Path
from time import monotonic, sleep
from typing import Final, NamedTuple

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
from penstock.storage.bounds import CLOCK_TERM_MS
from penstock.storage.sqlite import statements
from penstock.storage.sqlite.clock import Reading, read_clocks

_PRIMARY = 0xFF
_TURN_MS: Final = 500
"""The time in which lease holders get the lock after a long lock."""
_PATIENCE_S: Final = 0.02
"""A process that has waited this long goes first. Shorter waits are left to chance, which costs less."""
_SEEN_S: Final = 0.05
"""A process that has not renewed its claim for this long is suspended or dead."""
_EAGER_S: Final = 0.0002
_SLOWEST_S: Final = 0.002
_cell: Final = struct.Struct("dd")
_sql = statements("database")


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & _PRIMARY


def is_busy(error: sqlite3.Error) -> bool:
    """Return whether another connection holds the lock."""
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_full(error: Exception) -> bool:
    """Return whether the disk may be full. SQLite reports a quota, or a limit on file sizes, as a failed write."""
    return isinstance(error, sqlite3.Error) and (
        _code(error) == sqlite3.SQLITE_FULL
        or getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_IOERR_WRITE
    )


def translate(error: Exception, path: str) -> Exception:
    """Return Penstock's error for one of SQLite's. Other errors stay as they are."""
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
                f"{path}: is not writable ({error}). Give this user write permission on the file and its directory."
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return StorageUnavailable(
                f"{path}: another process held the database's lock for too long ({error}). Repeat the call. If this"
                " continues, look for a process that has left a transaction open."
            )
        case sqlite3.SQLITE_CANTOPEN:
            return StorageUnavailable(
                f"{path}: cannot be opened ({error}). Check that its directory exists and is readable."
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


LONG_S: Final = 1.0
"""The duration from which a lock counts as long: it may keep leases from being extended."""

TURN_FILE: Final = "turn"
"""The name of the file with the bytes of a ``Turn``."""


# The write lock


class Turn:
    """The process that goes first: since when it has waited, and when it last said so, by the monotonic clock.

    Processes write to it without a lock. If two of them collide, the wrong one goes first, and the next attempt
    corrects that.
    """

    def __init__(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(file).st_size < _cell.size:
                # Write the bytes: on a full disk, writing to a hole through the mapping would kill the
                # process.
                os.pwrite(file, bytes(_cell.size), 0)
            self._cell = mmap.mmap(file, _cell.size)
        finally:
            os.close(file)

    def is_mine(self, asked_at: float) -> bool:
        """Return whether no other process has waited for longer than one that asked for the lock at ``asked_at``."""
        first_at, seen_at = _cell.unpack_from(self._cell)
        return first_at >= asked_at or not 0 <= monotonic() - seen_at < _SEEN_S

    def claim(self, asked_at: float) -> None:
        """Go first from now on. Call it again before others take this process for dead."""
        _cell.pack_into(self._cell, 0, asked_at, monotonic())

    def give_up(self, asked_at: float) -> None:
        """Stop waiting, with the lock or without it."""
        if _cell.unpack_from(self._cell)[0] == asked_at:
            _cell.pack_into(self._cell, 0, 0.0, 0.0)


def open_turn(folder: Path | None) -> Turn | None:
    """Return the ``Turn`` of a database whose processes share a folder; ``None`` where that is impossible."""
    try:
        return None if folder is None else Turn(folder / TURN_FILE)
    except (OSError, ValueError):
        return None


def begin(sql: sqlite3.Connection, *, timeout_s: float, turn: Turn | None = None) -> bool:
    """Start a transaction that may write. Return whether another process had the lock, or went first.

    SQLite's own busy handler sleeps up to 100 ms at a time; short sleeps keep several processes going. Raise
    SQLite's error if the lock is not free within ``timeout_s``.
    """
    asked_at = monotonic()
    try:
        return _begin(sql, asked_at, timeout_s=timeout_s, turn=turn)
    finally:
        if turn is not None:
            turn.give_up(asked_at)


def _begin(sql: sqlite3.Connection, asked_at: float, *, timeout_s: float, turn: Turn | None) -> bool:
    pause_s = waited_s = 0.0
    while True:
        is_mine = turn is None or turn.is_mine(asked_at)
        if is_mine or waited_s >= timeout_s:
            try:
                sql.execute("BEGIN IMMEDIATE")
                return waited_s > 0
            except sqlite3.OperationalError as error:
                if waited_s >= timeout_s or not is_busy(error):
                    raise
        pause_s = min(pause_s * 1.5 + _EAGER_S, _SLOWEST_S)
        if turn is not None and is_mine and waited_s >= _PATIENCE_S:
            turn.claim(asked_at)
            pause_s = _EAGER_S
        sleep(pause_s)
        waited_s = monotonic() - asked_at


class _Window(NamedTuple):
    """A time in which no process could write, by the boot clock or, on systems without one, the wall clock."""

    since_ms: int
    until_ms: int


def quiet_s(sql: sqlite3.Connection) -> float:
    """Return for how long no queue of the file has changed, give or take two seconds; 0 if unknown."""
    clocks = read_clocks()
    (written_ms,) = sql.execute(_sql["last_write"], (clocks.boot,)).fetchone()
    return 0.0 if written_ms is None or not clocks.boot else max(0, clocks.boot_ms - written_ms) / 1000


def write_long_lock(sql: sqlite3.Connection, *, since_s: float, until_s: float) -> None:
    """Record that no process could write from ``since_s`` ago until ``until_s`` ago.

    If lease holders had no turn between this time and the recorded one, merge the two.
    """
    clocks = read_clocks()
    now_ms = _now_ms(clocks)
    new = _Window(now_ms - round(since_s * 1000), now_ms - round(until_s * 1000))
    old = _read(sql, clocks)
    if old is not None and new.until_ms + _TURN_MS <= old.since_ms:
        return
    if old is not None and new.since_ms < old.until_ms + _TURN_MS:
        new = _Window(min(old.since_ms, new.since_ms), max(old.until_ms, new.until_ms))
    sql.execute(_sql["set_meta"], ("locked", f"{clocks.boot} {new.since_ms} {new.until_ms}"))


def protected_ms(sql: sqlite3.Connection) -> tuple[int, int]:
    """Return the range of expiry, in milliseconds ago, within which an expired lease is left to its holder.

    A long lock extends the leases that ran out during it by its length, up to one term. Their holders have at least
    one turn after it, unless such locks continue for longer than a term. (0, 0) means that there are no such
    leases.
    """
    clocks = read_clocks()
    window = _read(sql, clocks)
    if window is None:
        return 0, 0
    now_ms = _now_ms(clocks)
    had_turn = now_ms - window.until_ms >= _TURN_MS
    span_ms = min(window.until_ms - window.since_ms, CLOCK_TERM_MS) if had_turn else CLOCK_TERM_MS
    most = min(now_ms - window.since_ms, span_ms)
    least = max(0, now_ms - window.until_ms)
    return (most, least) if most > least else (0, 0)


def _now_ms(clocks: Reading) -> int:
    return clocks.boot_ms if clocks.boot else clocks.wall_ms


def _read(sql: sqlite3.Connection, clocks: Reading) -> _Window | None:
    """Return the last long lock of this boot of the machine."""
    row = sql.execute(_sql["locked"]).fetchone()
    if row is None:
        return None
    try:
        boot, since_ms, until_ms = map(int, str(row[0]).split())
    except ValueError:
        return None
    return _Window(since_ms, until_ms) if boot == clocks.boot and since_ms <= until_ms else None
