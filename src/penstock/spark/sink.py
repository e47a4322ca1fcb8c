"""From the options of a write to where its jobs go."""

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
from penstock.errors import InvalidOption, JobNotFound
from penstock.spark.columntypes import check_columns
from penstock.spark.errors import BadRow
from penstock.spark.options import WriteOptions, namespace_of
from penstock.spark.rows import Layout, Refused, new_jobs
from penstock.spark.store import Store
from penstock.storage.contract import Storage
from penstock.storage.values import Settlement, Take


def target_of(given: WriteOptions, schema: StructType, *, overwrite: bool) -> Target:
    """Raises ``InvalidOption`` for what does not fit the table, or cannot be done; ``StorageError`` for a store that
    does not answer: better here, once, than in every task. Nothing is written."""
    if overwrite:
        raise InvalidOption(
            "mode('overwrite') would empty a queue. Use mode('append'), and queue.obliterate() for that."
        )
    task = find(given.task, Task) if ":" in given.task else None
    write_id = given.write_id or uuid7()
    layout = _layout(given, schema, task, write_id)
    layout.check(schema.fieldNames())
    check_columns(schema, (*layout.payload, *layout.placement.values()), key=layout.key)
    with Store(given.url):
        pass
    return Target(
        url=given.url,
        queue=given.queue or (task.queue if task else "default"),
        layout=layout,
        batch_size=given.batch_size,
        write_id=write_id,
        staged=given.release == "onCommit",
        skip_bad_rows=given.bad_rows == "skip",
    )


def _layout(given: WriteOptions, schema: StructType, task: Task[..., Any] | None, write_id: str) -> Layout:
    placement = {
        option: column
        for option, column in {
            "priority": given.priority_column,
            "delay": given.delay_column,
            "group": given.group_column,
            "cost": given.cost_column,
        }.items()
        if column
    }
    key = _names(given.key_columns)
    payload = _names(given.payload_columns) or tuple(
        name for name in schema.fieldNames() if name not in placement.values() or name in key
    )
    fields: dict[str, Any] = {"write_id": write_id, "run_id": given.run_id}
    if given.release == "onCommit":
        fields["staged"] = True
    return Layout(
        namespace=namespace_of(given.url),
        task=task.name if task else given.task,
        key=key,
        payload=payload,
        placement=placement,
        options=_treatment(given, task),
        fields=fields,
    )


def _treatment(given: WriteOptions, task: Task[..., Any] | None) -> Options:
    return task.defaults if task else msgspec.structs.replace(DEFAULT_OPTIONS, task=given.task)


def _names(columns: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in columns.split(",") if name.strip())


# The report of a write, kept in the store as a finished job of the queue ``penstock.writes``.
#
# So it is read like any job: by id, by ``spark.read``, from the command line.


WRITES: Final = "penstock.writes"
_KEPT: Final = Options(task="penstock.write", result_ttl_ms=7 * DAY_MS, max_stalls=1000)
_LEASE_MS: Final = 30_000


class WriteReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a table's rows. ``accepted``: jobs put in. ``duplicate``: rows whose job was there already, or is
    that of an equal key; a task that Spark repeats finds its own. ``refused``: rows that cannot be jobs, with some
    ``examples``."""

    write_id: str
    queue: str
    task: str
    accepted: int
    duplicate: int
    refused: int
    examples: tuple[Refused, ...] = ()


def write_report(url: str, write_id: str) -> WriteReport:
    """The report of a save by its ``writeId``, for a week.

    Raises:
        JobNotFound: there is none: the save has not ended, or it was too long ago.
    """
    with Store(url) as store:
        (job,) = store.run(store.storage.get(WRITES, [write_id]))
    if job is None:
        raise JobNotFound(
            f"there is no report of a write {write_id!r}: it has not ended, or ended more than a week ago.",
            job_id=write_id,
        )
    return msgspec.json.decode(job.payload, type=WriteReport)


async def keep_report(storage: Storage, report: WriteReport) -> None:
    """Keep it for a week; a later one of the same write takes its place."""
    payload = msgspec.json.encode(report)
    await storage.remove(WRITES, [report.write_id])
    await storage.enqueue(WRITES, [NewJob(report.write_id, payload, _KEPT)])
    # Whoever finishes a report, its result is its payload: there is no telling which one a claim brings.
    claimed = await storage.claim(WRITES, Take(f"write-{uuid7()}", 100, _LEASE_MS))
    done = [Settlement(lease.id, lease.token, Complete(lease.payload)) for lease in claimed.leases]
    if done:
        await storage.settle(WRITES, done)


# ``df.write.format("penstock")`` and ``writeStream``: every row a job.
#
# A write is not atomic: what executors have put in is there, whatever becomes of the rest. It can be
# repeated, by Spark or by the user: jobs carry the ``write_id`` of their save, and a known id with the
# same one is a duplicate.


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


# ``writeStream.format("penstock")``: every row of every micro-batch a job, once, however often a batch is
# repeated.


class StreamWriter(DataSourceStreamArrowWriter):
    """Made anew for every batch, and again to commit it: the save is named by query and batch, which Spark repeats."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """As ``PenstockWriter.write``, under the name of the batch that is under way."""
        context = TaskContext.get()
        assert context is not None, "executors have one"
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
        """The target under the name that the tasks wrote under; ``None`` if there was nothing to write."""
        for message in messages:
            if isinstance(message, Written):
                return self._target.named(message.write_id)
        return None
