"""``df.write.format("penstock")`` and ``writeStream``: every row becomes a job.

A write is not atomic: the jobs that executors have enqueued stay, even if the rest fails. Spark or the user can
repeat it: jobs carry the ``write_id`` of their save, and a row whose job has the same ``write_id`` is a duplicate.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from penstock.client.imports import find
from penstock.client.task import Task
from penstock.core.job import DAY_MS, DEFAULT_OPTIONS, Enqueued, NewJob, Options
from penstock.core.names import uuid7
from penstock.core.outcome import Complete
from penstock.errors import BadRow, InvalidOption, JobNotFound
from penstock.spark.columntypes import check_columns
from penstock.spark.rows import Layout, Refused, new_jobs
from penstock.spark.schemas import WriteOptions, namespace_of
from penstock.spark.store import Store
from penstock.storage.contract import Storage
from penstock.storage.values import Settlement, Take


def target_of(options: WriteOptions, schema: StructType, *, overwrite: bool) -> Target:
    """Return the target of a write. Check here, once, what would otherwise fail in every task.

    Raises:
        InvalidOption: the options do not fit the table, or are not supported.
        StorageError: the store does not answer.
    """
    if overwrite:
        raise InvalidOption(
            "mode('overwrite') is not supported. Use mode('append'); queue.obliterate() empties a queue."
        )
    task = find(options.task, Task) if ":" in options.task else None
    write_id = options.write_id or uuid7()
    layout = _layout(options, schema, task, write_id)
    layout.check(schema.fieldNames())
    check_columns(schema, (*layout.payload, *layout.placement.values()), key=layout.key)
    with Store(options.url):
        pass
    return Target(
        url=options.url,
        queue=options.queue or (task.queue if task else "default"),
        layout=layout,
        batch_size=options.batch_size,
        write_id=write_id,
        staged=options.release == "onCommit",
        skip_bad_rows=options.bad_rows == "skip",
    )


def _layout(options: WriteOptions, schema: StructType, task: Task[..., Any] | None, write_id: str) -> Layout:
    placement = {
        option: column
        for option, column in {
            "priority": options.priority_column,
            "delay": options.delay_column,
            "group": options.group_column,
            "cost": options.cost_column,
        }.items()
        if column
    }
    key = _names(options.key_columns)
    payload = _names(options.payload_columns) or tuple(
        name for name in schema.fieldNames() if name not in placement.values() or name in key
    )
    fields = {**(task.fields if task else {}), "write_id": write_id, "run_id": options.run_id}
    if options.release == "onCommit" and (
        "dedup" in fields or (task and task.rules and "dedup" in task.rules.computed)
    ):
        raise InvalidOption(
            f"task {options.task!r} declares unique or dedup, and a job that release='onCommit' holds back "
            "cannot have a key, which it would keep if the save were never completed. Use release='immediately'."
        )
    if options.release == "onCommit":
        fields["staged"] = True
    return Layout(
        namespace=namespace_of(options.url),
        task=task.name if task else options.task,
        key=key,
        payload=payload,
        placement=placement,
        options=_options(options, task),
        fields=fields,
        rules=task.rules if task else None,
    )


def _options(options: WriteOptions, task: Task[..., Any] | None) -> Options:
    return task.defaults if task else msgspec.structs.replace(DEFAULT_OPTIONS, task=options.task)


def _names(columns: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in columns.split(",") if name.strip())


# The report of a write is a finished job of the queue ``penstock.writes``, so it can be read like any job.


WRITES: Final = "penstock.writes"
_REPORT_OPTIONS: Final = Options(task="penstock.write", result_ttl_ms=7 * DAY_MS, max_stalls=1000)
_LEASE_MS: Final = 30_000
_MAX_EXAMPLES: Final = 10


class WriteReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a write. ``accepted`` rows became jobs. ``duplicate`` rows share their key with an existing job or
    another row, or Spark repeated their task. ``refused`` rows cannot become jobs; ``examples`` has some of them."""

    write_id: str
    queue: str
    task: str
    accepted: int
    duplicate: int
    refused: int
    examples: tuple[Refused, ...] = ()


def write_report(url: str, write_id: str) -> WriteReport:
    """Return the report of a save by its ``writeId``. Reports are kept for a week.

    Raises:
        JobNotFound: the save has not finished, or was too long ago.
    """
    with Store(url) as store:
        (job,) = store.run(store.storage.get(WRITES, [write_id]))
    if job is None:
        raise JobNotFound(
            f"no report of write {write_id!r}: it has not finished, or finished more than a week ago.",
            job_id=write_id,
        )
    return msgspec.json.decode(job.payload, type=WriteReport)


async def keep_report(storage: Storage, report: WriteReport) -> None:
    """Store the report for a week. It replaces an earlier one of the same write."""
    payload = msgspec.json.encode(report)
    await storage.remove(WRITES, [report.write_id])
    await storage.enqueue(WRITES, [NewJob(report.write_id, payload, _REPORT_OPTIONS)])
    # A claim may return reports of other writes. Complete those too: the result is the payload.
    claimed = await storage.claim(WRITES, Take(f"write-{uuid7()}", 100, _LEASE_MS))
    done = [Settlement(lease.id, lease.token, Complete(lease.payload)) for lease in claimed.leases]
    if done:
        await storage.settle(WRITES, done)


# A write on the executors, and its commit on the driver.


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The destination and settings of a write."""

    url: str
    queue: str
    layout: Layout
    batch_size: int
    write_id: str
    staged: bool
    skip_bad_rows: bool

    def named(self, write_id: str) -> Target:
        """Return the same target for another save."""
        fields = {**self.layout.fields, "write_id": write_id}
        layout = msgspec.structs.replace(self.layout, fields=fields)
        return msgspec.structs.replace(self, write_id=write_id, layout=layout)


@dataclass
class Written(WriterCommitMessage):
    """The counts of one Spark task of a write."""

    write_id: str = ""
    accepted: int = 0
    duplicate: int = 0
    refused: int = 0
    examples: tuple[Refused, ...] = ()

    def note(self, bad: Refused) -> None:
        self.refused += 1
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples = (*self.examples, bad)

    def count(self, answers: Sequence[Enqueued]) -> None:
        queued = sum(answer.status == "queued" for answer in answers)
        self.accepted += queued
        self.duplicate += len(answers) - queued


class PenstockWriter(DataSourceArrowWriter):
    """The writer of one save. Spark runs it on the executors, and commits it on the driver."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Enqueue the jobs of one partition. Raise ``BadRow`` at the first row that cannot become a job, unless bad
        rows are skipped; the jobs of earlier batches stay enqueued."""
        return write_partition(iterator, self._target)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        finish(self._target, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        give_up(self._target)


def write_partition(batches: Iterator[pa.RecordBatch], target: Target) -> Written:
    """Enqueue the jobs of one partition. While the store accepts a chunk, build the jobs of the next one."""
    _freeze_imports()
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


def _freeze_imports() -> None:
    """Exempt imported modules from garbage collection, which would cost more time than the rows."""
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
            raise BadRow(f"the row with {row.key} cannot become a job: {row.why}")
    return jobs


def finish(target: Target, messages: list[WriterCommitMessage | None]) -> None:
    """Commit the write: release staged jobs and store the report."""
    total = _summed(target.write_id, messages)
    with Store(target.url) as store:
        if target.staged:
            store.run(_unstage(store, target))
        report = WriteReport(queue=target.queue, task=target.layout.task, **vars(total))
        store.run(keep_report(store.storage, report))


def give_up(target: Target) -> None:
    """Abort the write: discard staged jobs. Other jobs stay, as duplicates for a repeated write."""
    if target.staged:
        with Store(target.url) as store:
            store.run(_unstage(store, target, discard=True))


async def _unstage(store: Store, target: Target, *, discard: bool = False) -> None:
    cursor = ""
    while True:
        done = await store.storage.unstage(target.queue, target.write_id, discard=discard, cursor=cursor)
        if not (cursor := done.cursor):
            return


def _summed(write_id: str, messages: list[WriterCommitMessage | None]) -> Written:
    total = Written(write_id)
    for message in messages:
        if isinstance(message, Written):
            total.accepted += message.accepted
            total.duplicate += message.duplicate
            total.refused += message.refused
            total.examples = (*total.examples, *message.examples)[:_MAX_EXAMPLES]
    return total


class StreamWriter(DataSourceStreamArrowWriter):
    """The writer of a stream. The query and the batch number identify a save, so a repeated batch enqueues nothing
    twice.

    Spark creates one writer for each batch, and another one to commit the batch.
    """

    def __init__(self, target: Target) -> None:
        self._target = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Enqueue the jobs of one partition of the current batch."""
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        return write_partition(iterator, self._target.named(f"{query}-{batch}"))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        target = self._named(messages)
        if target is not None:
            finish(target, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        target = self._named(messages)
        if target is not None:
            give_up(target)

    def _named(self, messages: list[WriterCommitMessage | None]) -> Target | None:
        """Return the target with the write id of the tasks; ``None`` if nothing was written."""
        for message in messages:
            if isinstance(message, Written):
                return self._target.named(message.write_id)
        return None
