"""Putting the rows of a run in, from the executors: and taking back those that are not to be done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import LongType, StructField, StructType

from penstock.core.annex import Annex
from penstock.core.job import Conflict, NewJob, Options
from penstock.core.lifecycle import OPEN, State
from penstock.options import placed
from penstock.spark.store import Store
from penstock.spark.tables.collect import KEY_HEADER, has_begun
from penstock.spark.tables.snapshot import fingerprint_in

__all__ = ["Batch", "cancel_rows", "enqueue_rows"]

_HOLD_MS: Final = 30 * 86_400_000
# A Valkey server does nothing else during a call: 200 new rows take it 2 ms, rows that it knows up to 7 ms.
_CHUNK: Final = 200
_COUNT: Final = StructType([StructField("count", LongType())])
_ARROW: Final = pa.schema([("count", pa.int64())])
# A row that has changed takes the place of the one that waits, and runs again after the one that runs.
_CONFLICT: Final = Conflict(mode="redispatch", reset_counts=True)

_MAY_BE_STOPPED: Final = frozenset({State.CANCELLED, State.FAILED})

_Mapper: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the jobs of a run. ``consumer`` holds their ends; ``flow`` is what budgets are set on. Jobs that
    ended before ``began_at_ms``, on the store's clock, are reused only with ``reuse``, and never if their row is to be
    run again because it failed."""

    url: str
    queue: str
    options: Options
    run_id: str
    consumer: str
    flow: str
    reuse: bool = True
    began_at_ms: int = 0


def enqueue_rows(rows: DataFrame, batch: Batch) -> int:
    """Put in the jobs of a snapshot's rows, of which there is a verdict; how many were not there yet.

    The fingerprint is the ``write_id``: a row that is known with the same one is a duplicate, whatever has become of
    its job. So this can be repeated, by Spark and by a run that was killed.
    """
    return _sum(
        rows.select("job_id", "fingerprint", "payload", "placement", "key_json", "verdict").mapInArrow(
            _putter(batch), _COUNT
        )
    )


def cancel_rows(rows: DataFrame, batch: Batch) -> int:
    """Cancel the jobs of these rows that have not begun; how many there were."""
    return _sum(rows.select("job_id").mapInArrow(_canceller(batch), _COUNT))


def _sum(counts: DataFrame) -> int:
    return sum(row["count"] for row in counts.collect())


def _putter(batch: Batch) -> _Mapper:
    def put(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        accepted = 0
        with Store(batch.url) as store:
            for chunk in _chunks(batches):
                accepted += store.run(_put_rows(store, batch, chunk.to_pylist()))
        yield pa.RecordBatch.from_pydict({"count": [accepted]}, schema=_ARROW)

    return put


async def _put_rows(store: Store, batch: Batch, rows: list[dict[str, Any]]) -> int:
    afresh = [_job(batch, row) for row in rows if not batch.reuse or row["verdict"] == "failed"]
    others = [_job(batch, row) for row in rows if batch.reuse and row["verdict"] != "failed"]
    count = await _put_afresh(store, batch, afresh) if afresh else 0
    return count + (await _put(store, batch, others) if others else 0)


async def _put(store: Store, batch: Batch, jobs: list[NewJob]) -> int:
    answers = await store.storage.enqueue(batch.queue, jobs)
    known = [answer for answer in answers if answer.status == "duplicate"]
    stopped = [answer.id for answer in known if answer.state in _MAY_BE_STOPPED]
    if stopped:
        await _retry_stopped(store, batch, stopped)
    # What is there already, with the same content or another, is not held for us by having been put in.
    there = [answer.id for answer in answers if answer.status != "queued"]
    if there:
        await store.storage.hold(batch.queue, batch.consumer, there, ttl_ms=_HOLD_MS)
    return len(answers) - len(known)


async def _put_afresh(store: Store, batch: Batch, jobs: list[NewJob]) -> int:
    """Enqueue jobs without reusing results from before the run. Leave alone what an earlier run on this output left
    open and what this one has enqueued already: it would be paid for twice."""
    known = await store.storage.get(batch.queue, [job.id for job in jobs])
    left: list[str] = []
    others: list[NewJob] = []
    for job, record in zip(jobs, known, strict=True):
        if record is None or not record.write_id.startswith(fingerprint_in(job.write_id) or job.write_id):
            others.append(job)
        elif record.finished_at_ms and record.finished_at_ms < batch.began_at_ms:
            others.append(msgspec.structs.replace(job, write_id=f"{job.write_id}-{batch.run_id}"))
        else:
            left.append(job.id)
    if left:
        await _retry_stopped(store, batch, left)
        await store.storage.hold(batch.queue, batch.consumer, left, ttl_ms=_HOLD_MS)
    return await _put(store, batch, others) if others else 0


async def _retry_stopped(store: Store, batch: Batch, ids: list[str]) -> None:
    """Jobs that an earlier run had put in and stopped before they began."""
    jobs = await store.storage.get(batch.queue, ids)
    stopped = [
        job.id for job in jobs if job is not None and (job.state is State.CANCELLED or not has_begun(job))
    ]
    if stopped:
        await store.storage.retry(batch.queue, stopped)


def _job(batch: Batch, row: dict[str, Any]) -> NewJob:
    annex = Annex(headers={KEY_HEADER: row["key_json"]}, holds={batch.consumer: _HOLD_MS}, flow=batch.flow)
    fields: dict[str, Any] = {"annex": annex}
    if row["placement"] is not None:
        fields = placed(fields, msgspec.json.decode(row["placement"]))
    return NewJob(
        row["job_id"],
        row["payload"],
        batch.options,
        run_id=batch.run_id,
        write_id=row["fingerprint"],
        conflict=_CONFLICT,
        **fields,
    )


def _canceller(batch: Batch) -> _Mapper:
    def cancel(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        cancelled = 0
        with Store(batch.url) as store:
            for chunk in _chunks(batches):
                cancelled += store.run(_cancel_pending(store, batch, chunk.column("job_id").to_pylist()))
        yield pa.RecordBatch.from_pydict({"count": [cancelled]}, schema=_ARROW)

    return cancel


async def _cancel_pending(store: Store, batch: Batch, ids: list[str]) -> int:
    """What runs is paid for already: it is let finish."""
    jobs = await store.storage.get(batch.queue, ids)
    pending = [
        job.id for job in jobs if job is not None and job.state in OPEN and job.state is not State.ACTIVE
    ]
    answers = await store.storage.cancel(batch.queue, pending) if pending else []
    return sum(answer == "cancelled" for answer in answers)


def _chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for start in range(0, batch.num_rows, _CHUNK):
            yield batch.slice(start, _CHUNK)
