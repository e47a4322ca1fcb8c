"""``df.write.format("penstock")`` and ``writeStream``: every row a job.

A write is not atomic: what executors have put in is there, whatever becomes of the rest. It can be repeated, by Spark
or by the user: jobs carry the ``write_id`` of their save, and a known id with the same one is a duplicate.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from penstock.core.job import Enqueued, NewJob
from penstock.spark.errors import BadRow
from penstock.spark.report import WriteReport, keep_report
from penstock.spark.rows import Layout, Refused, new_jobs
from penstock.spark.store import Store

__all__ = ["PenstockWriter", "Target", "Written"]

_SHOWN: Final = 10


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where the jobs go, and how."""

    url: str
    queue: str
    layout: Layout
    batch_size: int
    write_id: str
    staged: bool
    skip_bad_rows: bool

    def named(self, write_id: str) -> Target:
        """The same for another save."""
        fields = {**self.layout.fields, "write_id": write_id}
        layout = msgspec.structs.replace(self.layout, fields=fields)
        return msgspec.structs.replace(self, write_id=write_id, layout=layout)


@dataclass
class Written(WriterCommitMessage):
    """What one task of a write has done."""

    write_id: str = ""
    accepted: int = 0
    duplicate: int = 0
    refused: int = 0
    examples: tuple[Refused, ...] = ()

    def note(self, bad: Refused) -> None:
        self.refused += 1
        if len(self.examples) < _SHOWN:
            self.examples = (*self.examples, bad)

    def count(self, answers: Sequence[Enqueued]) -> None:
        queued = sum(answer.status == "queued" for answer in answers)
        self.accepted += queued
        self.duplicate += len(answers) - queued


class PenstockWriter(DataSourceArrowWriter):
    """Of one save: made on the driver, run on the executors, committed on the driver."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Put in the jobs of one partition. Raises ``BadRow`` at the first row that cannot be one, unless such rows
        are to be skipped; the jobs of earlier batches are in by then."""
        return write_partition(iterator, self._target)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        finish(self._target, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        give_up(self._target)


def write_partition(batches: Iterator[pa.RecordBatch], target: Target) -> Written:
    """What ``PenstockWriter.write`` does. Rows are made into jobs while the store takes in those before them."""
    _settle_memory()
    written = Written(target.write_id)
    with Store(target.url) as store:
        wait_for_last: Callable[[], list[Enqueued]] = list
        try:
            for rows in _chunks(batches, target):
                jobs = _accepted(rows, target, written)
                answers, wait_for_last = (
                    wait_for_last(),
                    store.begin(store.storage.enqueue(target.queue, jobs)),
                )
                written.count(answers)
        finally:
            written.count(wait_for_last())
    return written


def _settle_memory() -> None:
    """What this process has imported stays: to look through it again and again for garbage costs more than the rows."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def _chunks(batches: Iterator[pa.RecordBatch], target: Target) -> Iterator[list[NewJob | Refused]]:
    for batch in batches:
        jobs = new_jobs(batch, target.layout)
        while chunk := list(islice(jobs, target.batch_size)):
            yield chunk


def _accepted(rows: list[NewJob | Refused], target: Target, written: Written) -> list[NewJob]:
    jobs: list[NewJob] = []
    for row in rows:
        if isinstance(row, NewJob):
            jobs.append(row)
        elif target.skip_bad_rows:
            written.note(row)
        else:
            raise BadRow(f"the row with {row.key} cannot be a job: {row.why}")
    return jobs


def finish(target: Target, messages: list[WriterCommitMessage | None]) -> None:
    """The write is whole: release its jobs if they were held back, and keep the report."""
    total = _summed(messages)
    with Store(target.url) as store:
        if target.staged:
            store.run(_unstage(store, target, keep=True))
        report = WriteReport(
            write_id=target.write_id,
            queue=target.queue,
            task=target.layout.task,
            accepted=total.accepted,
            duplicate=total.duplicate,
            refused=total.refused,
            examples=total.examples,
        )
        store.run(keep_report(store.storage, report))


def give_up(target: Target) -> None:
    """The write has failed. What was held back goes; what was not is there, and a repetition finds it."""
    if target.staged:
        with Store(target.url) as store:
            store.run(_unstage(store, target, keep=False))


async def _unstage(store: Store, target: Target, *, keep: bool) -> None:
    cursor = ""
    while True:
        done = await store.storage.unstage(target.queue, target.write_id, keep=keep, cursor=cursor)
        if not (cursor := done.cursor):
            return


def _summed(messages: list[WriterCommitMessage | None]) -> Written:
    total = Written()
    for message in messages:
        if isinstance(message, Written):
            total.accepted += message.accepted
            total.duplicate += message.duplicate
            total.refused += message.refused
            total.examples = (*total.examples, *message.examples)[:_SHOWN]
    return total
