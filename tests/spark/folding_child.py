"""Folds files in child processes that get killed: ``python -m tests.spark.folding_child FOLDER``.

Child number N is killed by SIGKILL at its Nth change of the file system. The last one survives. After each, the folder
must hold every row once, and again after ``finish_folds``.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.spark.compaction import FOLDS, finish_folds, fold

CHANGES = frozenset({"os.rename", "os.link", "os.symlink", "os.remove", "os.mkdir", "os.rmdir"})
NAMES = [f"penstock-000000000{number}-00000.parquet" for number in range(1, 5)]
NEW = "penstock-0000000004-new.parquet"


def main() -> None:
    root = Path(sys.argv[1])
    kills = 0
    while _is_killed(root / str(kills), kills):
        kills += 1
    print(kills)


def _is_killed(output: Path, at: int) -> bool:
    made = _make(output)
    child = os.fork()
    if not child:
        _die_at(at)
        fold(output, NAMES, made=made, name=NEW, check=lambda: None)
        os._exit(0)
    is_killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert _rows(output) == list(range(len(NAMES))), (at, _rows(output))
    # The one that cleans up is killed as well.
    child = os.fork()
    if not child:
        _die_at(at % 5)
        finish_folds(output)
        os._exit(0)
    os.waitpid(child, 0)
    assert _rows(output) == list(range(len(NAMES))), (at, _rows(output))
    finish_folds(output)
    assert _rows(output) == list(range(len(NAMES))), (at, _rows(output))
    assert not (output / FOLDS).exists(), at
    files = [path for path in output.iterdir() if path.name.startswith("penstock-")]
    assert not any(path.is_symlink() for path in files), at
    assert [path.name for path in files] == [NEW] or sorted(path.name for path in files) == NAMES, at
    if not is_killed:
        assert [path.name for path in files] == [NEW]
    shutil.rmtree(output)
    return is_killed


def _make(output: Path) -> Path:
    output.mkdir()
    for number, name in enumerate(NAMES):
        pq.write_table(pa.table({"n": [number]}), output / name)
    made = output / "_made.parquet"
    pq.write_table(pa.table({"n": range(len(NAMES))}), made)
    return made


def _rows(output: Path) -> list[int]:
    paths = [path for path in output.iterdir() if not path.name.startswith(("_", "."))]
    return sorted(n for path in paths for n in pq.ParquetFile(path).read()["n"].to_pylist())


def _die_at(change: int) -> None:
    seen = 0

    def count(event: str, _: object) -> None:
        nonlocal seen
        if event in CHANGES:
            if seen == change:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(count)


if __name__ == "__main__":
    main()
