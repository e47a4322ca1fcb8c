"""Many small files of bronze made few, and files that nobody needs removed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession

from penstock.spark.delta import DataFile, Snapshot, Table
from penstock.spark.history.folder import History
from penstock.spark.history.state import FoldState, state_of

__all__ = ["compact"]

_MANY: Final = 32
_SMALL: Final = 100_000
_FULL: Final = 1_000_000
_EVERY_S: Final = 86_400
_ORDER: Final = [(name, "ascending") for name in ("queue", "epoch", "seq")]


def compact(spark: SparkSession, history: History) -> None:
    """Put small files of bronze together once there are many. Once a day, remove files that are no longer needed.

    Raises:
        Conflict: a sync was first. Nothing was committed.
    """
    base = history.bronze.load()
    piles = [pile for pile in _piles(history, base) if len(pile) > 1]
    if sum(map(len, piles)) >= _MANY:
        task = partial(_rewrite, piles=piles, bronze=history.bronze)
        rows = spark.range(0, len(piles), 1, len(piles)).mapInArrow(task, "file binary").collect()
        made = [msgspec.msgpack.decode(row.file, type=DataFile) for row in rows]
        gone = [file for pile in piles for file in pile]
        history.bronze.commit(base, add=made, remove=gone, state=base.state or "{}", is_new=False)
    for table in (history.bronze, history.silver, history.gold, history.causes):
        _clean(table)


def _clean(table: Table) -> None:
    base = table.load()
    if base.number and _is_due(base):
        table.vacuum(base)


def _is_due(base: Snapshot) -> bool:
    """Return whether the table has commits that are older than a day, and none of a cleaning since."""
    assert base.table is not None
    horizon = (time.time() - _EVERY_S) * 1000
    recent = [commit for commit in base.table.history(100) if commit["timestamp"] > horizon]
    return len(recent) < base.table.version() + 1 and not any(
        str(commit.get("operation")).startswith("VACUUM") for commit in recent
    )


def _piles(history: History, base: Snapshot) -> Iterator[list[DataFile]]:
    """Yield small files to be put together. Those that a table has yet to read stay apart from those it has."""
    read = [
        (state_of(table.load(), FoldState) or FoldState()).bronze
        for table in (history.silver, history.gold, history.causes)
    ]
    small = [file for file in base.files if file.rows < _SMALL]
    alike: dict[tuple[bool, ...], list[DataFile]] = {}
    for file in small:
        alike.setdefault(tuple(file.number <= number for number in read), []).append(file)
    for files in alike.values():
        pile: list[DataFile] = []
        for file in files:
            pile.append(file)
            if sum(one.rows for one in pile) >= _FULL:
                yield pile
                pile = []
        if pile:
            yield pile


def _rewrite(
    batches: Iterator[pa.RecordBatch], *, piles: Sequence[Sequence[DataFile]], bronze: Table
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for index in batch.column(0).to_pylist():
            pile = piles[index]
            events = pa.concat_tables(bronze.read(file) for file in pile).sort_by(_ORDER)
            file = bronze.write(events, max(file.number for file in pile))
            yield pa.RecordBatch.from_pydict({"file": [msgspec.msgpack.encode(file)]})
