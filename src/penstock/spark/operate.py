"""Verbs that executors apply to the jobs of a table: ``penstock.spark.retry`` and ``cancel`` by id, and what
``archive`` does with the rows of its journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Literal, TypeAlias

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, StructField, StructType

from penstock.core.job import Job
from penstock.core.names import check_queue
from penstock.errors import InvalidInput
from penstock.spark.schemas import schema_of
from penstock.spark.store import Store, url_for_executors
from penstock.spark.tasks import Batches, Mapper, chunks, counted
from penstock.storage.contract import Storage
from penstock.storage.values import Unchanged

_Verb: TypeAlias = Literal["retry", "cancel"]

_CHUNK: Final = 1000


class Retried(msgspec.Struct, frozen=True, kw_only=True):
    """Counts by outcome. ``not_failed`` jobs are open or completed."""

    retried: int = 0
    not_failed: int = 0
    not_found: int = 0


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """Counts by outcome. ``cancelled`` jobs had not started. ``requested`` jobs are running, and receive the request.
    The others had finished, or do not exist."""

    cancelled: int = 0
    requested: int = 0
    completed: int = 0
    failed: int = 0
    already_cancelled: int = 0
    not_found: int = 0


def retry(df: DataFrame, url: str, queue: str, *, id: str = "id") -> Retried:
    """Retry the failed and cancelled jobs whose ids are in the column ``id``. Each id counts once.

    A repeated call does not change jobs that are already waiting. If Spark repeats a task, jobs that its first attempt
    retried count as ``not_failed``.

    Raises:
        InvalidInput: the table has no such column, or an id is null.
        StorageError: the store does not answer.
    """
    return Retried(**_operate(df, url, queue, id, "retry"))


def cancel(df: DataFrame, url: str, queue: str, *, id: str = "id") -> Cancelled:
    """Cancel the jobs whose ids are in the column ``id``; each id counts once. The call can be repeated.

    Raises:
        InvalidInput: the table has no such column, or an id is null.
        StorageError: the store does not answer.
    """
    return Cancelled(**_operate(df, url, queue, id, "cancel"))


def _operate(df: DataFrame, url: str, queue: str, id: str, verb: _Verb) -> dict[str, int]:
    check_queue(queue)
    url = url_for_executors(url)
    if id not in df.columns:
        raise InvalidInput(
            f"the table has no column {id!r}. Its columns are: {', '.join(df.columns)}. Set id='...'."
        )
    with Store(url):
        pass
    ids = df.select(F.col(f"`{id}`").cast("string").alias("id")).distinct()
    if not ids.where("id IS NULL").isEmpty():
        raise InvalidInput(
            f"column {id!r} has nulls, which identify no job. Filter them out: df.where('{id} IS NOT NULL'). No job "
            "was changed."
        )
    return counted(ids, _operator(url, queue, verb))


def _operator(url: str, queue: str, verb: _Verb) -> Callable[[Batches], Counter[str]]:
    def operate(batches: Batches) -> Counter[str]:
        answers: Counter[str] = Counter()
        with Store(url) as store:
            for chunk in chunks(batches, _CHUNK):
                answers += store.run(_answers(store.storage, queue, verb, chunk.column("id").to_pylist()))
        return answers

    return operate


async def _answers(storage: Storage, queue: str, verb: _Verb, ids: Sequence[str]) -> Counter[str]:
    call: Callable[[str, Sequence[str]], Awaitable[Sequence[str]]]
    call = storage.retry if verb == "retry" else storage.cancel
    return Counter(await call(queue, ids))


# Rows of an archive's journal

_Verdict: TypeAlias = Literal["same", "changed", "gone", "torn"]

_VALUES: Final = {"payload": "payload_bytes", "result": "result_bytes"}
COLUMNS: Final = StructType(
    [*schema_of("jobs").fields, *(StructField(name, BinaryType()) for name in _VALUES.values())]
)
# Small, because a Valkey server is blocked during a call.
_CHUNK_OF_ARCHIVE: Final = 200


class ArchiveSource(msgspec.Struct, frozen=True, kw_only=True):
    """The queue of the jobs. A job that only ``consumer`` holds can be removed."""

    url: str
    queue: str
    consumer: str = ""


def count_verdicts(rows: DataFrame, source: ArchiveSource) -> Counter[str]:
    """Compare the rows with their jobs, and return the number of rows by verdict.

    ``same``: the row equals its job. ``torn``: it differs, although the job has not changed state. ``changed``: the
    job has changed since. ``gone``: the job does not exist, or its id belongs to another job.
    """

    def compare(batches: Batches) -> Counter[str]:
        verdicts: Counter[str] = Counter()
        with Store(source.url) as store:
            for chunk in chunks(batches, _CHUNK_OF_ARCHIVE):
                verdicts.update(_verdicts(store, source, chunk))
        return verdicts

    return counted(rows, compare)


def drop_torn(source: ArchiveSource) -> Mapper:
    """Return a mapper that drops torn rows."""

    def keep(batches: Batches) -> Batches:
        with Store(source.url) as store:
            for chunk in chunks(batches, _CHUNK_OF_ARCHIVE):
                is_intact = [verdict != "torn" for verdict in _verdicts(store, source, chunk)]
                yield chunk.filter(pa.array(is_intact, pa.bool_()))

    return keep


def remove_jobs(source: ArchiveSource) -> Mapper:
    """Return a mapper that removes each job that has not changed since its row was copied, and keeps the rows whose
    jobs are no longer in the store.

    Spark may repeat the task: jobs that an earlier attempt removed are gone, so it keeps their rows.
    """

    def remove(batches: Batches) -> Batches:
        with Store(source.url) as store:
            for chunk in chunks(batches, _CHUNK_OF_ARCHIVE):
                gone = store.run(_remove(store, source, _read(chunk)))
                yield _drop_copied_bytes(chunk.filter(pa.array(gone, pa.bool_())))

    return remove


async def _remove(store: Store, source: ArchiveSource, jobs: list[Unchanged]) -> list[bool]:
    """Remove the jobs that have not changed. Return, for each job, whether it is gone now."""
    answers = await store.storage.remove_unchanged(source.queue, jobs, consumer=source.consumer)
    gone = [answer in ("removed", "not_found") for answer in answers]
    changed = [n for n, answer in enumerate(answers) if answer == "changed"]
    if changed:
        # A retried job is still the same job. If its id belongs to a new incarnation, the copied job is gone
        # for good.
        now = await store.storage.get(source.queue, [jobs[n].id for n in changed])
        for n, job in zip(changed, now, strict=True):
            gone[n] = job is None or job.incarnation != jobs[n].incarnation
    return gone


def _verdicts(store: Store, source: ArchiveSource, rows: pa.RecordBatch) -> list[_Verdict]:
    jobs = store.run(store.storage.get(source.queue, rows.column("id").to_pylist()))
    return [_verdict(job, *row) for job, row in zip(jobs, _copies(rows), strict=True)]


def _verdict(job: Job | None, copy: Unchanged, payload: bytes | None, result: bytes | None) -> _Verdict:
    if job is None or job.incarnation != copy.incarnation:
        return "gone"
    if job.finished_at_ms != copy.finished_at_ms:
        return "changed"
    return "same" if (job.payload, job.result) == (payload, result) else "torn"


def _copies(rows: pa.RecordBatch) -> Iterator[tuple[Unchanged, bytes | None, bytes | None]]:
    values = (rows.column(name).to_pylist() for name in _VALUES.values())
    return zip(_read(rows), *values, strict=True)


def _read(rows: pa.RecordBatch) -> list[Unchanged]:
    micros = rows.column("finished_at").cast(pa.int64()).to_pylist()
    keys = zip(rows.column("id").to_pylist(), rows.column("incarnation").to_pylist(), micros, strict=True)
    return [Unchanged(id, incarnation, at // 1000) for id, incarnation, at in keys]


def _drop_copied_bytes(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Clear the bytes of each value that the text column also holds, unchanged."""
    for text, raw in _VALUES.items():
        pairs = zip(rows.column(text).to_pylist(), rows.column(raw).to_pylist(), strict=True)
        stored = [None if copy is not None and copy.encode() == value else value for copy, value in pairs]
        at = rows.schema.get_field_index(raw)
        rows = rows.set_column(at, rows.schema.field(at), pa.array(stored, rows.schema.field(at).type))
    return rows
