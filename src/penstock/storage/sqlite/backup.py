"""Copies of a store: ``backup`` writes one to a file while workers run, ``restore`` replaces the store with one."""

from __future__ import annotations

import os
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Final, Literal

from penstock.errors import InvalidOption, StorageDamaged, StorageError, StorageUnavailable, StorageVersion
from penstock.storage.sqlite import files
from penstock.storage.sqlite.connection import (
    APPLICATION_ID,
    Address,
    begin_history,
    file_identity,
    highest_number,
    newest_format,
    too_new,
)
from penstock.storage.sqlite.database import closed_here
from penstock.storage.sqlite.lock import is_busy, translate

_WAIT_S: Final = 1.0


def backup(url: str, file: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a consistent copy of the store to ``file``, readable by its owner only, while workers and producers run.

    The copy includes every call that was answered before this one began. Raise ``InvalidOption`` if the file exists
    and ``overwrite`` is false, or if the store is not a SQLite file; ``StorageUnavailable`` if the store does not
    exist.
    """
    path, target = _store(url), Path(file)
    if not os.path.exists(path):
        raise StorageUnavailable(f"{path}: does not exist. Check the URL.")
    if target.exists() and not overwrite:
        raise InvalidOption(
            f"{target} exists. Choose another name, or overwrite it with overwrite=True (--force)."
        )
    if files.identity_of(path) == files.identity_of(str(target)):
        raise InvalidOption(f"{target} is the store itself. Choose another name for the backup.")
    with _draft(target) as draft:
        with _translated(path), closing(_open(path)) as source:
            _copy(source, draft, path=path)
        with _translated(str(draft)), closing(_open(str(draft))) as sql:
            # A copy that someone moves into the store's place by hand is then recognised.
            sql.execute("UPDATE meta SET value = '' WHERE name = 'identity'")
        os.replace(draft, target)


def restore(url: str, file: str | os.PathLike[str]) -> None:
    """Replace the store atomically with a copy of the backup ``file``.

    Readers of events notice a new epoch, and no fencing token repeats. Raise ``StorageUnavailable`` if a process
    uses the store, ``InvalidOption`` or ``StorageVersion`` if the file is not a backup or a newer Penstock made it,
    ``StorageDamaged`` if it is damaged; the store is unchanged then.
    """
    path = _store(url)
    if not Path(file).is_file():
        raise InvalidOption(f"{file} is not a file. Name a file that `penstock backup` has written.")
    with Path(file).open("rb") as opened:
        if opened.read(16) != b"SQLite format 3\0":
            raise InvalidOption(f"{file} is not a backup. Name a file that `penstock backup` has written.")
    with _draft(Path(path)) as draft:
        with _translated(str(file)), closing(_open(str(file), mode="ro")) as source:
            _refuse_damaged(source, str(file))
            _copy(source, draft, path=str(file))
        with _out_of_use(path) as highest:
            with _translated(str(draft)), closing(_open(str(draft))) as sql:
                sql.execute("BEGIN IMMEDIATE")
                begin_history(sql, file_identity(str(draft)), above=highest)
                _forget_workers(sql)
                sql.execute("COMMIT")
            _keep_owner_and_mode(path, draft)
            for name in files.side_files(path):
                Path(name).unlink(missing_ok=True)
            os.replace(draft, path)


def _forget_workers(sql: sqlite3.Connection) -> None:
    """Forget the workers of the backup and end their leases: no process holds them, so the jobs run again
    immediately."""
    sql.execute("DELETE FROM workers")
    sql.execute("UPDATE jobs SET lease_until = 1 WHERE state = 'active'")


def _store(url: str) -> str:
    scheme = url.partition("://")[0].lower()
    if scheme == "sqlite":
        return str(Path(Address.parse(url).path).resolve())
    if scheme == "memory":
        raise InvalidOption("A store in memory ends with its process and has no backup. Use sqlite:///path.")
    raise InvalidOption(
        f"{scheme}:// is a server and makes its own backups. Copy its RDB file after BGSAVE, or its append-only files"
        " (appendonly yes), and put them back while the server is stopped."
    )


@contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """Yield a private file beside ``target``. It is durable when the block ends, and removed unless it was moved."""
    if not target.parent.is_dir():
        raise StorageUnavailable(
            f"{target}: its directory does not exist. Create {target.parent}, or check the path."
        )
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    os.close(descriptor)
    draft = Path(name)
    try:
        yield draft
        _flush(target.parent)
    finally:
        for left in (name, *files.side_files(name), f"{name}-journal"):
            Path(left).unlink(missing_ok=True)


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise translate(error, path) from error


def _open(path: str, *, mode: Literal["ro", "rw"] = "rw") -> sqlite3.Connection:
    """Open an existing file. As in all our connections, commits do not checkpoint."""
    sql = sqlite3.connect(files.file_uri(path, mode=mode), uri=True, isolation_level=None, timeout=_WAIT_S)
    try:
        sql.execute("PRAGMA wal_autocheckpoint = 0")
    except BaseException:
        sql.close()
        raise
    return sql


def _copy(source: sqlite3.Connection, draft: Path, *, path: str) -> None:
    """Copy everything committed so far at once: in several steps, a commit in between would restart the copy."""
    _refuse_foreign(source, path)
    (version,) = source.execute("PRAGMA user_version").fetchone()
    if version > newest_format():
        raise too_new(path, version)
    with closing(_open(str(draft))) as target:
        source.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")  # One file, without a log beside it.


def _refuse_foreign(sql: sqlite3.Connection, path: str) -> None:
    (application,) = sql.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        raise StorageVersion(f"{path}: is not a store of Penstock. Check the path.")


def _refuse_damaged(sql: sqlite3.Connection, path: str) -> None:
    (problem,) = sql.execute("PRAGMA quick_check(1)").fetchone()
    if problem != "ok":
        raise StorageDamaged(f"{path}: is damaged ({problem}). Use another backup.")


@contextmanager
def _out_of_use(path: str) -> Iterator[int]:
    """Keep every process out of the store, with its log checkpointed. Yield the highest number that the store has
    reached."""
    with ExitStack() as stack:
        stack.enter_context(closed_here(path))
        highest = 0
        if os.path.exists(path):
            highest = _end_log(path)
            stack.enter_context(files.exclusive(path))
        yield highest


def _end_log(path: str) -> int:
    try:
        with closing(_open(path)) as sql:
            _refuse_foreign(sql, path)
            highest = highest_number(sql)
            sql.execute("PRAGMA journal_mode = DELETE")  # This works only for the sole user of the file.
            return highest
    except sqlite3.DatabaseError as error:
        if is_busy(error):
            raise StorageUnavailable(
                f"{path}: another process uses it ({error}). {files.STOP_OTHERS}"
            ) from error
        known = translate(error, path)
        if isinstance(known, StorageDamaged) or type(known) is StorageError:
            return 0  # The store cannot be read, which is the reason to restore it.
        raise known from error


def _keep_owner_and_mode(path: str, draft: Path) -> None:
    """Give the restored store the owner and mode of the previous one."""
    if os.path.exists(path):
        before = os.stat(path)
        try:
            os.chown(draft, before.st_uid, before.st_gid)
        except PermissionError:
            return
        draft.chmod(stat.S_IMODE(before.st_mode))
