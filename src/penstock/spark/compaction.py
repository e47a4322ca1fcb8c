"""Crash-safe merging of small files in an output. A killed driver neither loses nor duplicates rows.

A folder of Parquet files has no atomic commit for several files, but a symbolic link can be replaced atomically. So
every affected file becomes a link: ``output/NAME`` points to ``FOLD/now/NAME``, and ``now`` points to ``before`` or
``after``. Both hold every name. In ``before`` the small files have their rows and the new file is empty; in ``after``
it is the other way round. Readers see the same rows at each step, and switching ``now`` changes all files together.
Then the links become files again, and the empty files are removed.

Every step moves a file out of ``FOLD/links``. Removing that folder stops any other run that still works on the fold.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec
import pyarrow.parquet as pq

from penstock.spark.delta import make_durable

# Spark ignores names that begin with an underscore.
FOLDS: Final = "_penstock_folds"
# The maximum number of small files in an output after a run.
_MANY: Final = 16
_SMALL: Final = 8 << 20
_FULL: Final = 64 << 20
_ATTEMPTS: Final = 10


class Moved(msgspec.Struct, frozen=True):
    """The names of files that were removed (``gone``), and of those that replace them (``made``)."""

    gone: list[str]
    made: list[str]


def piles(sizes: Mapping[str, int]) -> list[list[str]]:
    """Return groups of small files to merge; none if there are few small files. ``sizes`` are in bytes."""
    small = sorted(name for name, size in sizes.items() if size < _SMALL)
    groups: list[list[str]] = []
    filled = _FULL
    for name in small if len(small) > _MANY else ():
        if filled + sizes[name] > _FULL:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += sizes[name]
    return [pile for pile in groups if len(pile) > 1]


def fold(output: Path, names: Sequence[str], *, made: Path, name: str, check: Callable[[], None]) -> None:
    """Replace the files ``names`` of an output with ``made``, which has the same rows, under a new ``name``.

    ``check`` raises if this process no longer holds the output. A file system without links raises ``OSError``. In both
    cases nothing has changed.
    """
    own = output / FOLDS / uuid4().hex
    try:
        _prepare(output, own, names, made=made, name=name)
        check()
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)
        raise
    for link in (name, *names):
        os.replace(own / "links" / link, output / link)
    make_durable(output)
    os.replace(own / "links" / "now", own / "now")
    make_durable(own)
    _finish(output, own)


def finish_folds(output: Path) -> None:
    """Finish or undo the merges of killed runs."""
    folder = output / FOLDS
    if folder.is_dir():
        for own in sorted(folder.iterdir()):
            _finish(output, own)
        _remove_empty(folder)


def _prepare(output: Path, own: Path, names: Sequence[str], *, made: Path, name: str) -> None:
    before, after, links = (own / part for part in ("before", "after", "links"))
    for folder in (before, after, links):
        folder.mkdir(parents=True)
    empty = own / "empty"
    pq.write_table(pq.read_schema(made).empty_table(), empty)
    os.link(made, after / name)
    os.link(empty, before / name)
    for small in names:
        os.link(output / small, before / small)
        os.link(empty, after / small)
    for link in (name, *names):
        (links / link).symlink_to(f"{FOLDS}/{own.name}/now/{link}")
    (links / "now").symlink_to("after")
    (own / "now").symlink_to("before")
    for path in (empty, made, before, after, links, own, own.parent):
        make_durable(path)


def _finish(output: Path, own: Path) -> None:
    """Replace the links to a fold with files, and remove the fold. Another run may be doing the same."""
    _remove(own / "links")
    if (own / "now").is_symlink():
        try:
            for path in sorted((own / "now").resolve().iterdir()):
                _settle(output / path.name, path, own)
        except FileNotFoundError:
            return
        make_durable(output)
    _remove(own)
    _remove_empty(own.parent)


def _settle(link: Path, path: Path, own: Path) -> None:
    if not link.is_symlink():
        return
    if path.samefile(own / "empty"):
        link.unlink(missing_ok=True)
        return
    moved = own / path.name
    try:
        os.link(path, moved)
    except FileExistsError:
        pass
    os.replace(moved, link)


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        pass  # another run has a fold in it, or has already removed it


def _remove(folder: Path) -> None:
    """Remove a folder to which another process may be adding files."""
    for _ in range(_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
    raise OSError(f"{folder} cannot be removed")
