"""Checkpoints: copy committed pages from the write-ahead log to the database file, so that the log starts over.

SQLite would do this during commits, but before 3.51.3 (3.50.7, 3.44.6) that has a race: a checkpoint reads where
the log ends, then another connection starts the log over and commits, then the checkpoint marks its end of the old
log as copied, in the new one. Frames up to there are never copied: committed work is lost
(https://sqlite.org/wal.html#walresetbug). The following rules exclude it with every version:

- Our connections do not checkpoint when they commit (see ``connect``). Only ``Checkpoints`` does.
- Only the holder of the write lock can append to the log or start it over. ``Checkpoints`` holds that lock, on the
  connection that writes, from before a checkpoint begins until after it ends. A passive checkpoint does not need the
  lock, so a second connection can run it meanwhile. (The other kinds need it, and without it become passive: they are
  of no use here.) Lock and checkpoint are in one process: neither outlives the other.
- The last connection to close checkpoints too, but only if it has the whole file to itself. Every connection that has
  ever read keeps a shared lock on the file, so no writer is left then.

The log starts over with the first commit after all of it was copied, unless a reader still uses it.
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
"""The length in pages at which the log is due for a checkpoint: 16 MiB."""

_LOOK_COMMITS: Final = 32
_LOOK_ROWS: Final = 1_000
"""Commits and rows between checks of the log. A check reads the file, which releases the interpreter's lock, and a busy
loop is slow to return it."""

_LOCK_S: Final = 0.25
_PATIENCE_S: Final = 0.005
_MOST_PATIENCE_S: Final = 0.1

_HEADER_BYTES: Final = 32
_FRAME_HEADER_BYTES: Final = 24


class Checkpoints:
    """The checkpoints of a database, run by the process that finds them due. Used by the owner of ``writing``."""

    def __init__(
        self, writing: sqlite3.Connection, path: str, *, find_loss: Callable[[], Exception | None]
    ) -> None:
        self._writing = writing
        self._copying: sqlite3.Connection | None = None
        self._path = path
        self._find_loss = find_loss
        # Only the log can be opened: closing either of the other files would drop SQLite's locks on it.
        self._log = FileIO(f"{path}-wal")
        self._salts = b""
        self._due_frame = _DUE_FRAMES
        self._attempts = 0
        self._unseen_commits = 0
        self._seen_rows = 0

    def is_due(self) -> bool:
        """Return whether a checkpoint is due. Call it after each commit of this process. Never raises."""
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
            pass  # A longer log loses nothing, and the next commits report what prevents the copy.

    def make_room(self) -> None:
        """Copy the log because the disk is full, so that the next commit starts it over. Never raises.

        From then on the log returns its space whenever it starts over, because the disk may fill up again.
        """
        self._writing.execute("PRAGMA journal_size_limit = 0")
        self.run()

    def close(self) -> None:
        """Close the files. Call it before closing the connection that writes."""
        self._log.close()
        if self._copying is not None:
            self._copying.close()

    def _is_long(self) -> bool:
        """Return whether the log has ``_due_frame`` frames since it started over.

        Its size does not show that, because it is overwritten from the beginning. The salts do: they change each
        time, and every frame carries those of its time.
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
        # If the log cannot start over, readers may take long: attempts become rarer as it grows.
        self._due_frame = max(frames, self._due_frame) * 5 // 4

    def _connect(self) -> sqlite3.Connection:
        """Open the same file again. Another file must not be checkpointed, because its write lock is not held."""
        sql = connect(self._path)
        loss = self._find_loss()
        if loss is not None:
            sql.close()
            raise loss
        return sql

    def _copy(self, sql: sqlite3.Connection) -> int:
        """Copy the frames that can be copied, and return the number of frames in the log.

        A reader from before the last commit keeps frames from being copied; a reader from before the whole log was
        copied keeps it from starting over; later readers do neither. Reads are short, so while the lock is held,
        the first two kinds end. Wait for them longer after each attempt that did not help.
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
