"""Checkpoints: what was committed goes from the write-ahead log into the database file, so that the log starts over.

SQLite would do this by itself in a commit, but before 3.51.3 (3.50.7, 3.44.6) that has a race: a checkpoint reads
where the log ends, then another connection starts the log over and commits, then the checkpoint records its end of
the old log as copied, in the new one. Frames up to there are never copied: committed work is lost
(https://sqlite.org/wal.html#walresetbug). Here it cannot happen, whatever the version:

- No connection of ours checkpoints in its commits (``connect`` sees to that), only ``Checkpoints`` does.
- Only who holds the write lock can append to the log or start it over, and ``Checkpoints`` holds that lock, on the
  connection that writes, from before a checkpoint begins until after it has ended. A passive checkpoint does not
  want the lock itself, so a second connection can run it meanwhile. (The other kinds do want it, and when they
  cannot have it become a passive one without it: they are of no use here.) Lock and checkpoint are in one process:
  neither outlives the other.
- The last connection to be closed checkpoints too, but only if it gets the whole file for itself, and every
  connection that has ever read keeps a shared lock on it: nobody is there to write.

The log starts over by itself with the first commit after all of it was copied, unless somebody still reads from it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from io import FileIO
from typing import Final

from penstock.errors import StorageError
from penstock.storage.sqlite.connection import connect
from penstock.storage.sqlite.lock import begin

_DUE_FRAMES: Final = 4_000
"""How long the log becomes, in pages: 16 MiB."""

_LOOK_COMMITS: Final = 32
_LOOK_ROWS: Final = 1_000
"""How often to look: reading a file gives the interpreter's lock away, and a busy loop does not hand it back soon."""

_LOCK_S: Final = 0.25
_PATIENCE_S: Final = 0.005
_MOST_PATIENCE_S: Final = 0.1

_HEADER_BYTES: Final = 32
_FRAME_HEADER_BYTES: Final = 24


class Checkpoints:
    """The checkpoints of a database, by the process that finds them due. For whoever owns ``writing``."""

    def __init__(
        self, writing: sqlite3.Connection, path: str, *, find_loss: Callable[[], Exception | None]
    ) -> None:
        self._writing = writing
        self._copying: sqlite3.Connection | None = None
        self._path = path
        self._find_loss = find_loss
        # Not so with the other two files: closing one of them would drop the locks SQLite has on it.
        self._log = FileIO(f"{path}-wal")
        self._salts = b""
        self._due_frame = _DUE_FRAMES
        self._attempts = 0
        self._unseen_commits = 0
        self._seen_rows = 0

    def is_due(self) -> bool:
        """To be called after each commit, by this process. Never raises."""
        self._unseen_commits += 1
        rows = self._writing.total_changes
        if self._unseen_commits < _LOOK_COMMITS and rows - self._seen_rows < _LOOK_ROWS:
            return False
        self._unseen_commits, self._seen_rows = 0, rows
        try:
            return self._is_long()
        except OSError:
            return False

    def run(self) -> None:
        """Copy the log, holding the write lock. Never raises."""
        try:
            self._run()
        except (sqlite3.Error, StorageError):
            pass  # Nothing is lost by a longer log. What keeps it from being copied is met by the next commits, too.

    def make_room(self) -> None:
        """Copy the log because the disk is full, so that the next commit starts it over. Never raises.

        From now on the log gives its room back whenever it starts over: a disk that was full once may be so again.
        """
        self._writing.execute("PRAGMA journal_size_limit = 0")
        self.run()

    def close(self) -> None:
        """To be called before the connection that writes is closed."""
        self._log.close()
        if self._copying is not None:
            self._copying.close()

    def _is_long(self) -> bool:
        """Whether the log has that many frames since it started over.

        Its size does not tell: it is written anew from the beginning. The salts do: they change each time,
        and every frame has those of its time.
        """
        header = self._read(0, _HEADER_BYTES)
        page_bytes, salts = int.from_bytes(header[8:12]), header[16:24]
        if salts != self._salts:
            self._salts, self._attempts, self._due_frame = salts, 0, _DUE_FRAMES
        frame_bytes = _FRAME_HEADER_BYTES + page_bytes
        frame = self._read(_HEADER_BYTES + (self._due_frame - 1) * frame_bytes, _FRAME_HEADER_BYTES)
        return salts != b"" and frame[8:16] == salts

    def _read(self, offset: int, length: int) -> bytes:
        self._log.seek(offset)
        return self._log.read(length)

    def _run(self) -> None:
        if self._copying is None:
            self._copying = self._connect()
        begin(self._writing, timeout_s=_LOCK_S)
        try:
            frames = self._copy(self._copying)
        finally:
            self._writing.execute("ROLLBACK")
        self._attempts += 1
        # If the log cannot start over, its readers may take long: tries become rare, as it grows.
        self._due_frame = max(frames, self._due_frame) * 5 // 4

    def _connect(self) -> sqlite3.Connection:
        """Open the same file again. Another one must not be checkpointed: its write lock is not held."""
        sql = connect(self._path)
        loss = self._find_loss()
        if loss is not None:
            sql.close()
            raise loss
        return sql

    def _copy(self, sql: sqlite3.Connection) -> int:
        """Copy what can be copied; how many frames the log has. Waits for readers if it has not helped before.

        Who began to read before the last commit keeps frames from being copied, and who began before all were
        copied keeps the log from starting over; who begins later does neither. Reads are short: with the lock
        held for long enough, all that are left are of the last kind.
        """
        deadline = time.monotonic() + min(self._attempts * _PATIENCE_S, _MOST_PATIENCE_S)
        while True:
            _, frames, copied = sql.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return int(frames)
            if copied == frames:
                time.sleep(left_s)
                return int(frames)
            time.sleep(min(left_s, 0.001))
