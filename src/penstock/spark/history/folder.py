"""The folder of a history: its tables, its name, and which syncs are at work on it."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol
from uuid import uuid4

import msgspec

from penstock.errors import InvalidOption
from penstock.spark.history.manifest import BronzeManifest, DerivedManifest, Manifests, now_ms
from penstock.spark.publishing import refuse_pattern

__all__ = ["History", "open_history"]

_MARK: Final = "_history.json"
_DRAFT: Final = "_history.draft"
_GRACE_MS: Final = 3_600_000
_DAY_S: Final = 86_400


class _Mark(msgspec.Struct, frozen=True):
    id: str
    format: int = 1


class _Owner(msgspec.Struct, frozen=True):
    host: str
    pid: int


class _Listing(Protocol):
    @property
    def paths(self) -> set[str]: ...

    @property
    def replaced(self) -> dict[str, int]: ...


class History:
    """A history on disk. ``consumer`` is the name under which it holds back the trimming of logs."""

    def __init__(self, root: Path, id: str) -> None:
        self.root = root
        self.consumer = f"history-{id}"
        self.bronze = Manifests(root / "bronze", BronzeManifest)
        self.silver = Manifests(root / "silver", DerivedManifest)
        self.gold = Manifests(root / "gold", DerivedManifest)

    def files(self, table: str, paths: list[str]) -> list[str]:
        """What a manifest lists, as Spark wants it."""
        return [str(self.root / table / path) for path in paths]

    @contextmanager
    def running(self) -> Iterator[str]:
        """The name of a sync, which is known to be at work until the block or its process ends."""
        folder = self.root / "_syncs"
        folder.mkdir(exist_ok=True)
        sync = uuid4().hex[:16]
        path = folder / f"{sync}.lock"
        handle = _lock(path)
        try:
            yield sync
        finally:
            path.unlink(missing_ok=True)
            os.close(handle)

    def clean(self) -> int:
        """Remove files of syncs that were killed, and those that were replaced a while ago. Says how many."""
        removed = 0
        tables: dict[str, Manifests[Any]] = {"bronze": self.bronze, "silver": self.silver, "gold": self.gold}
        for table, manifests in tables.items():
            folder = self.root / table
            # Who has ended before the manifest is read has all its commits in it.
            ended = [path for path in _parquet(folder) if not self._is_running(_sync_of(folder, path))]
            removed += _remove(folder, ended, manifests.newest())
            manifests.prune()
        for path in (self.root / "_syncs").glob("*.lock"):
            self._is_running(path.stem)
        return removed

    def _is_running(self, sync: str) -> bool:
        path = self.root / "_syncs" / f"{sync}.lock"
        try:
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _may_be_elsewhere(handle):
                return True
            path.unlink(missing_ok=True)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(handle)


def open_history(path: str | Path, *, create: bool) -> History:
    """The history in a folder of this machine, or one that all machines have mounted under the same name.

    Raises:
        InvalidOption: no such folder, one with something else in it, or a path that is none of the file system.
    """
    root = _local(path)
    refuse_pattern(str(root))
    if create:
        root.mkdir(parents=True, exist_ok=True)
        # Somebody who begins it at the same time may have a draft of the mark there.
        if all(entry.name.endswith(_DRAFT) for entry in root.iterdir()):
            _put_mark(root / _MARK)
    mark = root / _MARK
    if not mark.is_file():
        raise InvalidOption(
            f"{root} is no history: it has no {_MARK}. Give a folder that history.sync has written, or, to begin "
            "one, an empty folder."
        )
    return History(root, msgspec.json.decode(mark.read_bytes(), type=_Mark).id)


def _local(path: str | Path) -> Path:
    text = str(path)
    if text.startswith("file:"):
        text = "/" + text.removeprefix("file:").lstrip("/")
    if "://" in text:
        raise InvalidOption(
            f"{text} is not in the file system. A history needs a folder whose files can be linked atomically: a local "
            "one, or one that every machine has mounted."
        )
    return Path(text).absolute()


def _put_mark(path: Path) -> None:
    draft = path.with_name(f".{uuid4().hex}{_DRAFT}")
    draft.write_bytes(msgspec.json.encode(_Mark(uuid4().hex[:12])))
    try:
        os.link(draft, path)
    except FileExistsError:
        pass  # somebody else began it at the same time
    finally:
        draft.unlink()


def _lock(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # A cleaner may have taken it for one of the dead before it was locked.
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            os.write(handle, msgspec.json.encode(_Owner(socket.gethostname(), os.getpid())))
            return handle
        os.close(handle)


def _may_be_elsewhere(handle: int) -> bool:
    """Locks need not reach other machines: one from there counts as held for a day."""
    content = os.read(handle, 1000)
    owner = msgspec.json.decode(content, type=_Owner) if content else None
    is_here = owner is None or owner.host == socket.gethostname()
    return not is_here and time.time() - os.fstat(handle).st_mtime < _DAY_S


def _parquet(folder: Path) -> Iterator[Path]:
    return folder.rglob("*.parquet") if folder.is_dir() else iter(())


def _sync_of(folder: Path, path: Path) -> str:
    return path.relative_to(folder).parts[0].split("-")[0]


def _remove(folder: Path, ended: list[Path], newest: _Listing) -> int:
    listed, horizon = newest.paths, now_ms() - _GRACE_MS
    recent = {path for path, at_ms in newest.replaced.items() if at_ms > horizon}
    gone = [path for path in ended if str(path.relative_to(folder)) not in listed | recent]
    for path in gone:
        path.unlink(missing_ok=True)
    _remove_empty(folder, {path.relative_to(folder).parts[0] for path in gone})
    return len(gone)


def _remove_empty(folder: Path, names: Set[str]) -> None:
    """Spark leaves marks of its own beside the files it wrote."""
    for name in names:
        if (folder / name).is_dir() and not any((folder / name).rglob("*.parquet")):
            shutil.rmtree(folder / name, ignore_errors=True)
