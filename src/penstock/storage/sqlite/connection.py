"""Connections to a database file: their URLs and settings, and the migration of the file to the current format."""

from __future__ import annotations

import os
import sqlite3
import time
from functools import cache
from pathlib import Path
from typing import Final, Self
from urllib.parse import parse_qsl, unquote
from uuid import uuid4

import msgspec

from penstock.core.names import check_namespace
from penstock.core.text import shown, split_url
from penstock.core.units import milliseconds
from penstock.errors import InvalidOption, StorageError, StorageReadOnly, StorageUnavailable, StorageVersion
from penstock.storage.sqlite import files, migrations, statements
from penstock.storage.sqlite.lock import begin, is_busy, translate

MEMORY: Final = ":memory:"
_DEFAULT_NAMESPACE: Final = "default"
_DEFAULT_TIMEOUT_S: Final = 30.0
_OLDEST_SQLITE: Final = (3, 37, 0)
_CACHE_KIB: Final = 65_536
_OPENING_S: Final = 5
"""Even reads wait while another process creates the file, or is the last to close it."""

_LOG_BYTES: Final = 64 * 1024 * 1024
"""The most disk space that the write-ahead log keeps when it starts over. Usually it never grows that long."""

APPLICATION_ID: Final = 0x50454E53
"""``PENS``: distinguishes a store from the databases of other programs."""

_NUMBERS_PER_S: Final = 1 << 20

_sql = statements("database")


def connect(path: str, *, timeout_s: float = 0) -> sqlite3.Connection:
    """Return a connection that does not begin transactions or checkpoints itself, and waits ``timeout_s`` for locks.

    The file must exist: ``files.create`` makes it. Raise ``StorageReadOnly`` if the file is not writable,
    ``StorageVersion`` if it is not a database.
    """
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        raise StorageVersion(
            f"SQLite {sqlite3.sqlite_version} is too old: Penstock needs 3.37 or newer."
            " Use a Python built with a newer SQLite."
        )
    _require_writable(path)
    try:
        sql = sqlite3.connect(
            path if path == MEMORY else files.file_uri(path),
            timeout=max(timeout_s, _OPENING_S),
            isolation_level=None,
            check_same_thread=False,
            uri=path != MEMORY,
        )
        try:
            _set_up(sql, timeout_s=timeout_s)
        except BaseException:
            sql.close()
            raise
    except sqlite3.Error as error:
        raise translate(error, path) from error
    return sql


def _set_up(sql: sqlite3.Connection, *, timeout_s: float) -> None:
    sql.execute("PRAGMA temp_store = MEMORY")
    sql.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    sql.execute("PRAGMA synchronous = FULL")
    sql.execute("PRAGMA wal_autocheckpoint = 0")  # See checkpoint.py.
    sql.execute(f"PRAGMA busy_timeout = {int(timeout_s * 1000)}")


def prepare(sql: sqlite3.Connection, path: str, *, timeout_s: float) -> bool:
    """Create or migrate the tables, and renew the epoch if the file was replaced by a copy.

    Return whether another process held the lock. Raise ``StorageVersion`` for data of a newer format, or of another
    program.
    """
    try:
        _use_wal(sql, path, timeout_s=timeout_s)
        has_waited = begin(sql, timeout_s=timeout_s)
        try:
            _migrate(sql, path)
            _renew_epoch(sql, path)
        except BaseException:
            sql.execute("ROLLBACK")
            raise
        sql.execute("COMMIT")
    except sqlite3.Error as error:
        raise translate(error, path) from error
    return has_waited


def check_format(sql: sqlite3.Connection, path: str) -> None:
    """Raise ``StorageVersion`` if the file's format has changed since it was opened. Call it in a transaction."""
    (version,) = sql.execute("PRAGMA user_version").fetchone()
    if version == newest_format():
        return
    if version > newest_format():
        raise too_new(path, version)
    raise StorageVersion(f"{path}: went back to format {version} while it was open. Restart this process.")


@cache
def newest_format() -> int:
    """Return the number of the format that this version uses."""
    return max(migrations())


def too_new(path: str, version: int) -> StorageVersion:
    """Return the error for a file of a newer format."""
    return StorageVersion(
        f"{path}: has format {version}, this Penstock knows up to {newest_format()}. Upgrade Penstock to use it."
    )


def _require_writable(path: str) -> None:
    if path == MEMORY:
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise StorageUnavailable(f"{path}: its directory does not exist. Create {folder}, or check the URL.")
    target = path if os.path.exists(path) else str(folder)
    if not os.access(target, os.W_OK) or not os.access(folder, os.W_OK):
        raise StorageReadOnly(
            f"{path}: is not writable. SQLite needs write permission on the file and on its directory {folder}."
        )


def _use_wal(sql: sqlite3.Connection, path: str, *, timeout_s: float) -> None:
    if path == MEMORY:
        return
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            (mode,) = sql.execute("PRAGMA journal_mode = WAL").fetchone()
            break
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() >= deadline:
                raise
            time.sleep(0.005)
    if mode != "wal":
        raise StorageError(
            f"{path}: SQLite cannot use its write-ahead log there (journal mode {mode}). Put the file on a local disk."
        )
    sql.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")


def _migrate(sql: sqlite3.Connection, path: str) -> None:
    (version,) = sql.execute("PRAGMA user_version").fetchone()
    newest = newest_format()
    if version > newest:
        raise too_new(path, version)
    if version == 0 and sql.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone():
        raise StorageVersion(f"{path}: is the database of another program. Choose another file for Penstock.")
    for number in range(version + 1, newest + 1):
        for statement in _split(migrations()[number]):
            sql.execute(statement)
        sql.execute(f"PRAGMA user_version = {number}")
    if version == 0:
        sql.execute(f"PRAGMA application_id = {APPLICATION_ID}")


def _split(script: str) -> list[str]:
    """Return the statements of a migration: ``executescript`` would commit the open transaction."""
    statements_: list[str] = []
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            statements_.append(pending)
            pending = ""
    return statements_


def _renew_epoch(sql: sqlite3.Connection, path: str) -> None:
    identity = file_identity(path)
    stored = sql.execute(_sql["identity"]).fetchone()
    if stored is None:
        sql.execute(_sql["set_meta"], ("identity", identity))
        sql.execute(_sql["set_meta"], ("epoch", uuid4().hex))
    elif stored[0] != identity:
        begin_history(sql, identity)


def highest_number(sql: sqlite3.Connection) -> int:
    """Return a number that no token of any queue exceeds."""
    return int(sql.execute(_sql["highest_number"]).fetchone()[0])


def begin_history(sql: sqlite3.Connection, identity: str, *, above: int = 0) -> None:
    """Begin a new epoch in a file that may be older than the last answers: a copy, or a backup.

    Tokens issued since then must not repeat, not even in queues that this file does not know. So all counters continue
    from a number that no queue can have reached: it grows faster with the clock than a queue can draw numbers. If the
    clock is behind, the counters still rise by ``_NUMBERS_PER_S``, and above ``above``, the highest number of the
    previous file.
    """
    by_clock = time.time_ns() * _NUMBERS_PER_S // 1_000_000_000
    first = max(max(highest_number(sql), above) + _NUMBERS_PER_S, by_clock)
    sql.execute(_sql["set_meta"], ("identity", identity))
    sql.execute(_sql["set_meta"], ("epoch", uuid4().hex))
    sql.execute(_sql["set_meta"], ("first_number", str(first)))
    sql.execute(_sql["raise_numbers"], (first,))


def file_identity(path: str) -> str:
    """Return device and inode, which differ for a copy that was restored from a backup."""
    if path == MEMORY:
        return MEMORY
    status = os.stat(path)
    return f"{status.st_dev:x}-{status.st_ino:x}"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a storage's data. ``timeout_s`` is how long a call waits for another process's lock."""

    shown: str
    path: str
    memory_name: str = ""
    namespace: str = _DEFAULT_NAMESPACE
    timeout_s: float = _DEFAULT_TIMEOUT_S

    @property
    def in_memory(self) -> bool:
        return self.path == MEMORY

    @classmethod
    def parse(cls, url: str, *, namespace: str | None = None) -> Self:
        """Read ``sqlite:///path?namespace=prod&timeout=5s`` or ``memory://name``. ``namespace`` overrides the
        URL's."""
        parts = split_url(url)
        options = _options(url, parts.query)
        chosen = namespace or options.get("namespace", _DEFAULT_NAMESPACE)
        timeout_s = (
            milliseconds(options["timeout"], what="timeout") / 1000
            if "timeout" in options
            else _DEFAULT_TIMEOUT_S
        )
        return cls(
            shown=url,
            path=MEMORY if parts.scheme == "memory" else _path(url, parts.netloc, parts.path),
            memory_name=unquote(parts.netloc + parts.path) if parts.scheme == "memory" else "",
            namespace=check_namespace(chosen),
            timeout_s=timeout_s,
        )


def _options(url: str, query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in ("namespace", "timeout"):
            raise InvalidOption(f"{shown(url)}: unknown option {shown(name)}. Use namespace or timeout.")
    return options


def _path(url: str, netloc: str, path: str) -> str:
    if netloc or not path.strip("/"):
        raise InvalidOption(
            f"{shown(url)} names no file. Use three slashes for a relative path (sqlite:///penstock.db), four for an"
            " absolute one (sqlite:////var/lib/penstock.db), memory:// for none."
        )
    if "\0" in (name := unquote(path[1:])):
        raise InvalidOption(f"{shown(url)} names no file: it contains a null character (%00).")
    return name
