"""Put the small files of an output together, so that a driver that is killed loses no row and doubles none.

A folder of Parquet files has no commit that replaces several files at once. One symbolic link can be replaced at once,
however, so every file that changes becomes a link that leads through it: ``output/NAME`` leads to ``FOLD/now/NAME``,
and ``now`` leads to ``before`` or ``after``. Both hold every name. In ``before`` the small files have their rows, and
the new file is empty; in ``after`` it is the other way round. Each step shows readers the same rows, and the one that
turns ``now`` around changes all files together. Then the links become files again, and empty files go.

Every step moves a file out of ``FOLD/links``. A run that removes that folder stops any other run that is still at it.
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

# Spark passes over names that begin with an underscore.
FOLDS: Final = "_penstock_folds"
# An output keeps this many small files at most once a run has ended.
_MANY: Final = 16
_SMALL: Final = 8 << 20
_FULL: Final = 64 << 20
_ATTEMPTS: Final = 10


class Moved(msgspec.Struct, frozen=True):
    """The names of the files that are ``gone`` from an output, and of those that were ``made`` of them."""

    gone: list[str]
    made: list[str]


def piles(sizes: Mapping[str, int]) -> list[list[str]]:
    """Return which files to put together: none, unless there are many small ones. ``sizes`` are in bytes."""
    small = sorted(name for name, size in sizes.items() if size < _SMALL)
    found: list[list[str]] = []
    filled = _FULL
    for name in small if len(small) > _MANY else ():
        if filled + sizes[name] > _FULL:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += sizes[name]
    return [pile for pile in found if len(pile) > 1]


def fold(output: Path, names: Sequence[str], *, made: Path, name: str, check: Callable[[], None]) -> None:
    """Replace the files ``names`` of an output by ``made``, which has the same rows, under a new ``name``.

    ``check`` raises if the output is no longer ours. A file system without links raises ``OSError``. In both cases
    nothing has changed.
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
    """Finish what runs that were killed have begun, or undo it."""
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
    """Make files of the links that lead into a fold, and remove it. Another run may be doing the same."""
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
        pass  # another run has a fold in it, or has removed it


def _remove(folder: Path) -> None:
    """Remove a folder to which somebody else may be adding files."""
    for _ in range(_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
    raise OSError(f"{folder} cannot be removed")
