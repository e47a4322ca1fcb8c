"""Jobs from the rows of a snapshot. Executors enqueue and cancel them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import msgspec
from pyspark.sql import DataFrame

from penstock.client.options import placed
from penstock.core.job import Conflict, Extras, Job, NewJob, Options
from penstock.core.lifecycle import OPEN, State
from penstock.spark.processing.snapshot import fingerprint_in
from penstock.spark.store import Store
from penstock.spark.tasks import Batches, chunks, collected

KEY_HEADER: Final = "penstock-key"
_BUDGET_EXCEEDED: Final = "BudgetExceeded"


def has_begun(job: Job) -> bool:
    """Return whether a finished job ever started. It did not if the budget of its run was already spent."""
    return job.failure is None or job.failure.type != _BUDGET_EXCEEDED


_HOLD_MS: Final = 30 * 86_400_000
# A Valkey server is blocked during a call: 200 new rows take 2 ms, known rows up to 7 ms.
_CHUNK: Final = 200
# A changed row replaces a waiting job, or runs again after an active one.
_CONFLICT: Final = Conflict(mode="redispatch", reset_counts=True)

_STOPPED_STATES: Final = frozenset({State.CANCELLED, State.FAILED})


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for the jobs of a run. ``consumer`` holds finished jobs; budgets apply to ``flow``. Results from before
    ``began_at_ms``, on the store's clock, are reused only with ``reuse``, and never for a retry of a failed row."""

    url: str
    queue: str
    options: Options
    run_id: str
    consumer: str
    flow: str
    reuse: bool = True
    began_at_ms: int = 0


def enqueue_rows(rows: DataFrame, batch: Batch) -> int:
    """Enqueue the rows of a snapshot with verdicts, and return the number of new jobs.

    The fingerprint is the ``write_id``: a known row with the same fingerprint is a duplicate, whatever the state of its
    job. So Spark can repeat a task, and a run can continue the work of a killed run.
    """
    columns = ("job_id", "fingerprint", "payload", "placement", "key_json", "verdict")
    return sum(collected(rows.select(*columns), partial(_enqueue_partition, batch), int))


def cancel_rows(rows: DataFrame, batch: Batch) -> int:
    """Cancel the jobs of these rows that have not started, and return their number."""
    return sum(collected(rows.select("job_id"), partial(_cancel_partition, batch), int))


def _enqueue_partition(batch: Batch, batches: Batches) -> Iterator[int]:
    with Store(batch.url) as store:
        for chunk in chunks(batches, _CHUNK):
            yield store.run(_enqueue_chunk(store, batch, chunk.to_pylist()))


def _cancel_partition(batch: Batch, batches: Batches) -> Iterator[int]:
    with Store(batch.url) as store:
        for chunk in chunks(batches, _CHUNK):
            yield store.run(_cancel_pending(store, batch, chunk.column("job_id").to_pylist()))


async def _enqueue_chunk(store: Store, batch: Batch, rows: list[dict[str, Any]]) -> int:
    again = [_job(batch, row) for row in rows if not batch.reuse or row["verdict"] == "failed"]
    others = [_job(batch, row) for row in rows if batch.reuse and row["verdict"] != "failed"]
    count = await _enqueue_again(store, batch, again) if again else 0
    return count + (await _enqueue(store, batch, others) if others else 0)


async def _enqueue(store: Store, batch: Batch, jobs: list[NewJob]) -> int:
    answers = await store.storage.enqueue(batch.queue, jobs)
    known = [answer for answer in answers if answer.status == "duplicate"]
    stopped = [answer.id for answer in known if answer.state in _STOPPED_STATES]
    if stopped:
        await _retry_stopped(store, batch, stopped)
    # The enqueue call holds only new jobs for the consumer.
    existing = [answer.id for answer in answers if answer.status != "queued"]
    if existing:
        await store.storage.hold(batch.queue, batch.consumer, existing, ttl_ms=_HOLD_MS)
    return len(answers) - len(known)


async def _enqueue_again(store: Store, batch: Batch, jobs: list[NewJob]) -> int:
    """Enqueue jobs without reusing results from before the run. Skip jobs that an earlier run on this output left open,
    or that this one has already enqueued: running them again would cost twice."""
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
    return await _enqueue(store, batch, others) if others else 0


async def _retry_stopped(store: Store, batch: Batch, ids: list[str]) -> None:
    """Retry jobs that an earlier run enqueued, and stopped before they started."""
    jobs = await store.storage.get(batch.queue, ids)
    stopped = [
        job.id for job in jobs if job is not None and (job.state is State.CANCELLED or not has_begun(job))
    ]
    if stopped:
        await store.storage.retry(batch.queue, stopped)


def _job(batch: Batch, row: dict[str, Any]) -> NewJob:
    extras = Extras(headers={KEY_HEADER: row["key_json"]}, holds={batch.consumer: _HOLD_MS}, flow=batch.flow)
    fields: dict[str, Any] = {"extras": extras}
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


async def _cancel_pending(store: Store, batch: Batch, ids: list[str]) -> int:
    """Cancel the open jobs that are not active. Active jobs are already paid for."""
    jobs = await store.storage.get(batch.queue, ids)
    pending = [
        job.id for job in jobs if job is not None and job.state in OPEN and job.state is not State.ACTIVE
    ]
    answers = await store.storage.cancel(batch.queue, pending) if pending else []
    return sum(answer == "cancelled" for answer in answers)
