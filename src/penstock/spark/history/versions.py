"""Versions of a history's tables as folders of links, for whoever can only be told of a folder: views of a catalog.

``catalog/silver-12`` has exactly the files that the twelfth manifest of silver lists. They are links, so that nothing
is copied, and a version stays whole for as long as its folder, whatever is cleaned up elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final
from uuid import uuid4

from penstock.spark.history.folder import History

__all__ = ["forget_versions", "put_version"]

_FOLDER: Final = "catalog"
_NAME: Final = re.compile(r"([a-z]+)-(\d+)")
_GRACE_S: Final = 3600


def put_version(history: History, name: str, number: int, files: Sequence[Path]) -> Path:
    """The folder of a version; it is there as a whole, or not."""
    root = history.root / _FOLDER
    target = root / f"{name}-{number}"
    if target.is_dir():
        return target
    draft = root / f".{name}-{number}-{uuid4().hex}"
    draft.mkdir(parents=True)
    for count, file in enumerate(files):
        os.link(file, draft / f"part-{count:06}.parquet")
    try:
        draft.rename(target)
    except OSError:
        shutil.rmtree(draft)
        if not target.is_dir():
            raise
    return target


def forget_versions(history: History) -> None:
    """Remove versions that were replaced a while ago, and what was left half-made."""
    root, horizon = history.root / _FOLDER, time.time() - _GRACE_S
    if not root.is_dir():
        return
    made: dict[str, list[int]] = {}
    for path in root.iterdir():
        if found := _NAME.fullmatch(path.name):
            made.setdefault(found[1], []).append(int(found[2]))
        elif path.stat().st_mtime < horizon:
            shutil.rmtree(path, ignore_errors=True)
    for name, numbers in made.items():
        numbers.sort()
        for number, later in pairwise(numbers):
            if (root / f"{name}-{later}").stat().st_mtime < horizon:
                shutil.rmtree(root / f"{name}-{number}", ignore_errors=True)
