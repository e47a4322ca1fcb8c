"""What is in the tables of a history, as numbered files of which the newest counts.

Every table has a folder ``_manifests``. A manifest is whole: it lists every file of the table. It is written under a
temporary name, made durable, and then linked to the next number, which exactly one writer can do. So a reader sees
the table before a commit or after it, and two writers never both win.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar
from uuid import uuid4

import msgspec

from penstock.errors import InvalidOption
from penstock.spark.durable import make_durable

__all__ = [
    "BronzeManifest",
    "Conflict",
    "DataFile",
    "DerivedManifest",
    "EpochChange",
    "Loss",
    "Manifests",
    "Place",
    "Range",
    "now_ms",
]

FORMAT: Final = 1
_NAME: Final = re.compile(r"(\d{10})\.json")
_KEPT: Final = 100
# Far longer than any commit takes: a number that is taken away must not be taken again by somebody slow.
_KEPT_MS: Final = 7 * 86_400_000

_encode = msgspec.json.Encoder().encode


class Conflict(Exception):
    """Somebody else has committed since the table was read. Nothing was committed; begin again."""


class Range(msgspec.Struct, frozen=True, kw_only=True, rename={"first": "from", "last": "to"}):
    """Events ``first`` to ``last`` of a queue, both included."""

    queue: str
    epoch: str
    first: int
    last: int


class DataFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of bronze. ``types`` counts its events by type; its events, and the runs that they end, fall between
    ``from_ms`` and ``to_ms``; its jobs were enqueued on ``days``."""

    path: str
    rows: int
    bytes: int
    ranges: tuple[Range, ...]
    from_ms: int
    to_ms: int
    written_at_ms: int
    days: tuple[str, ...] = ()
    types: dict[str, int] = {}
    has_groups: bool = False


class Loss(msgspec.Struct, frozen=True, kw_only=True, rename={"first": "from", "last": "to"}):
    """Events that were trimmed before they could be read."""

    queue: str
    epoch: str
    first: int
    last: int
    found_at_ms: int


class EpochChange(msgspec.Struct, frozen=True, kw_only=True):
    """The store went back in time. Up to ``common`` both epochs tell the same; the events of ``before`` from there up
    to ``read`` happened, but the store no longer knows of them."""

    queue: str
    before: str
    after: str
    common: int
    read: int
    found_at_ms: int


class Place(msgspec.Struct, frozen=True):
    """The last event of a queue that a table holds."""

    epoch: str
    seq: int


class BronzeManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of bronze. ``epochs`` has those of a queue in their order. ``replaced``: files that a compaction has
    made superfluous, which are kept for a while for those who are still reading them."""

    number: int = 0
    format: int = FORMAT
    sync: str = ""
    written_at_ms: int = 0
    places: dict[str, Place] = {}
    epochs: dict[str, tuple[str, ...]] = {}
    files: tuple[DataFile, ...] = ()
    losses: tuple[Loss, ...] = ()
    changes: tuple[EpochChange, ...] = ()
    replaced: dict[str, int] = {}

    @property
    def paths(self) -> set[str]:
        return {file.path for file in self.files}


class DerivedManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of silver or gold: for each day the files of each of its tables. ``places``, ``losses`` and ``changes``
    say how much of bronze is in it."""

    number: int = 0
    format: int = FORMAT
    sync: str = ""
    written_at_ms: int = 0
    bronze: int = 0
    places: dict[str, Place] = {}
    losses: int = 0
    changes: int = 0
    days: dict[str, dict[str, tuple[str, ...]]] = {}
    replaced: dict[str, int] = {}

    @property
    def paths(self) -> set[str]:
        return {path for tables in self.days.values() for paths in tables.values() for path in paths}

    def of(self, table: str, days: list[str] | None = None) -> list[str]:
        """The files of a table, in the order of the days; of some days only, if they are given."""
        chosen = sorted(self.days) if days is None else sorted(set(days) & self.days.keys())
        return [path for day in chosen for path in self.days[day].get(table, ())]


class _Manifest(Protocol):
    @property
    def number(self) -> int: ...

    @property
    def format(self) -> int: ...


M = TypeVar("M", bound=_Manifest)


class Manifests(Generic[M]):
    """The manifests of one table, in a folder that any number of processes may write to."""

    def __init__(self, table: Path, kind: type[M]) -> None:
        self._folder = table / "_manifests"
        self._kind = kind

    def newest(self) -> M:
        """The table as it is now; of a new table, an empty manifest with the number 0.

        Raises:
            InvalidOption: it was written by a newer version.
        """
        numbers = self._numbers()
        return self.at(numbers[-1]) if numbers else self._kind()

    def at(self, number: int) -> M:
        """The table as it was by that manifest; 0 is that of a new one.

        Raises:
            FileNotFoundError: it is no longer kept.
            InvalidOption: it was written by a newer version.
        """
        if not number:
            return self._kind()
        path = self._folder / f"{number:010}.json"
        found = msgspec.json.decode(path.read_bytes(), type=self._kind)
        if found.format > FORMAT:
            raise InvalidOption(
                f"{path} has the format {found.format}, this version knows {FORMAT}: upgrade Penstock."
            )
        return found

    def commit(self, manifest: M) -> None:
        """Make it the newest. It must have the number after the newest that it was made from.

        Raises:
            Conflict: the number is taken.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f".{uuid4().hex}"
        with draft.open("xb") as file:
            file.write(_encode(manifest))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, self._folder / f"{manifest.number:010}.json")
        except FileExistsError:
            raise Conflict(f"manifest {manifest.number} of {self._folder.parent.name} is taken") from None
        finally:
            draft.unlink()
        make_durable(self._folder)

    def prune(self) -> None:
        """Remove manifests that are long superseded, and drafts that nobody finished."""
        horizon = time.time() - _KEPT_MS / 1000
        old = [self._folder / f"{number:010}.json" for number in self._numbers()[:-_KEPT]]
        for path in [*old, *self._folder.glob(".*")]:
            if path.exists() and path.stat().st_mtime < horizon:
                path.unlink(missing_ok=True)

    def _numbers(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        found = (_NAME.fullmatch(name) for name in os.listdir(self._folder))
        return sorted(int(match[1]) for match in found if match)


def now_ms() -> int:
    """The time of this machine."""
    return time.time_ns() // 1_000_000
