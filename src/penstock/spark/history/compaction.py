"""Many small files of bronze made few: a sync every minute would leave half a million of them in a year."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace
from pyspark.sql import SparkSession

from penstock.spark.durable import make_durable
from penstock.spark.history.eventfiles import write_table
from penstock.spark.history.folder import History
from penstock.spark.history.manifest import BronzeManifest, DataFile, now_ms

__all__ = ["compact"]

_MANY: Final = 64
_SMALL: Final = 100_000
_FULL: Final = 1_000_000
_REMEMBERED_MS: Final = 2 * 3_600_000


def compact(spark: SparkSession, history: History, *, sync: str) -> BronzeManifest | None:
    """Put small files together once there are many, and commit that. The same events are in the table before and after.

    Raises:
        Conflict: a sync was first. Nothing was committed.
    """
    base = history.bronze.newest()
    small = [file for file in base.files if file.rows < _SMALL]
    if len(small) < _MANY:
        return None
    piles = list(_piles(small))
    folder = history.root / "bronze"
    task = partial(
        _rewrite, piles=[[file.path for file in pile] for pile in piles], folder=str(folder), sync=sync
    )
    rows = spark.range(0, len(piles), 1, len(piles)).mapInArrow(task, "file binary").collect()
    made = [msgspec.msgpack.decode(row.file, type=DataFile) for row in rows]
    make_durable(folder)
    now = now_ms()
    gone = {file.path for file in small}
    recent = {path: at_ms for path, at_ms in base.replaced.items() if at_ms > now - _REMEMBERED_MS}
    manifest = replace(
        base,
        number=base.number + 1,
        sync=sync,
        written_at_ms=now,
        files=(*(file for file in base.files if file.path not in gone), *made),
        replaced={**recent, **dict.fromkeys(sorted(gone), now)},
    )
    history.bronze.commit(manifest)
    return manifest


def _piles(files: Sequence[DataFile]) -> Iterator[list[DataFile]]:
    pile: list[DataFile] = []
    rows = 0
    for file in sorted(files, key=lambda file: file.to_ms):
        pile.append(file)
        rows += file.rows
        if rows >= _FULL:
            yield pile
            pile, rows = [], 0
    if pile:
        yield pile


def _rewrite(
    batches: Iterator[pa.RecordBatch], *, piles: Sequence[Sequence[str]], folder: str, sync: str
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            tables = [pq.ParquetFile(Path(folder) / path).read() for path in piles[number]]
            table = pa.concat_tables(tables).sort_by(
                [("queue", "ascending"), ("epoch", "ascending"), ("seq", "ascending")]
            )
            file = write_table(table, Path(folder), f"{sync}-c{number:04}")
            yield pa.RecordBatch.from_pydict({"file": [msgspec.msgpack.encode(file)]})
