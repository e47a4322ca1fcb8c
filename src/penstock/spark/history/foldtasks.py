"""What executors do for silver: events of whole files to rows of jobs, and rows of jobs to jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.spark.history.cuts import Cut, apply_cuts
from penstock.spark.history.eventfiles import write_durably
from penstock.spark.history.events import Placing
from penstock.spark.history.folding import ARROW, jobs_of, merged, strips
from penstock.spark.history.manifest import DataFile

__all__ = ["FoldedFiles", "fold_files", "fold_jobs", "piles_of"]

_PILE: Final = 250_000
_BATCH: Final = 20_000


class FoldedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files of bronze, a pile for each task. ``combine``: as few rows as can be; otherwise one for each event."""

    folder: str
    piles: list[list[str]]
    placing: Placing
    combine: bool


def piles_of(files: Iterable[DataFile]) -> list[list[str]]:
    """As many files in a pile as are worth a task, and fit into its memory."""
    piles: list[list[str]] = []
    room = 0
    for file in files:
        if file.rows > room or not piles:
            piles.append([])
            room = _PILE
        piles[-1].append(file.path)
        room -= file.rows
    return piles


def fold_files(batches: Iterator[pa.RecordBatch], *, files: FoldedFiles) -> Iterator[pa.RecordBatch]:
    """For the numbers of piles: their events as rows of silver."""
    for batch in batches:
        for number in batch.column(0).to_pylist():
            paths = [Path(files.folder) / path for path in files.piles[number]]
            events = pa.concat_tables(pq.ParquetFile(path).read() for path in paths)
            rows = strips(files.placing.placed(events))
            yield from (merged(rows) if files.combine else rows).to_batches(_BATCH)


def fold_jobs(
    batches: Iterator[pa.RecordBatch], *, cuts: Sequence[Cut], folder: str
) -> Iterator[pa.RecordBatch]:
    """For all rows of some jobs: the jobs, in a file for each day that some were enqueued on. Yields days and files.

    A task that Spark repeats writes other files; only those that it hands over count.
    """
    found = list(batches)
    if not found:
        return
    # The session may have another time zone, or longer texts.
    rows = pa.Table.from_batches(found).cast(ARROW)
    jobs = jobs_of(apply_cuts(rows, list(cuts)) if cuts else rows)
    days = pc.cast(jobs["enqueued_at"], pa.date32())
    for day in pc.unique(days).to_pylist():
        of_day = jobs.filter(pc.equal(days, pa.scalar(day, pa.date32())))
        path = f"day={day}/{uuid4().hex}.parquet"
        write_durably(of_day, Path(folder) / path)
        yield pa.RecordBatch.from_pydict({"day": [str(day)], "path": [path]})
