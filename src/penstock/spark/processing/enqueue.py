"""Rows of the input to jobs, and finished jobs to rows of the ledger.

Executors enqueue and cancel the jobs. ``Intake`` reads the input once: it counts the rows that the index knows to be
settled, and takes a snapshot of the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType

from penstock.client.options import placed
from penstock.core.job import EMPTY_EXTRAS, Conflict, Extras, Job, NewJob, Options
from penstock.core.lifecycle import OPEN, State
from penstock.core.limits import MILLION
from penstock.spark.cells import json_text
from penstock.spark.processing.ledger import Ledger
from penstock.spark.processing.settled import COMPLETED, FAILED, SettledIndex, row_hashes
from penstock.spark.processing.snapshot import (
    SNAPSHOT,
    fingerprint_in,
    former_fingerprint,
    needed_columns,
    snapshot,
)
from penstock.spark.rows import Layout
from penstock.spark.schemas import quoted
from penstock.spark.store import Store

KEY_HEADER: Final = "penstock-key"
_BUDGET_EXCEEDED: Final = "BudgetExceeded"

_TIME: Final = pa.timestamp("us", tz="UTC")
ARROW: Final = pa.schema(
    [
        ("state", pa.string()),
        ("result", pa.string()),
        ("error_type", pa.string()),
        ("error", pa.string()),
        ("runs", pa.int32()),
        ("failures", pa.int32()),
        ("cost", pa.float64()),
        ("usage", pa.map_(pa.string(), pa.float64())),
        ("run_ms", pa.int64()),
        ("enqueued_at", _TIME),
        ("finished_at", _TIME),
        ("task", pa.string()),
        ("task_version", pa.string()),
        ("run_id", pa.string()),
        ("job_id", pa.string()),
        ("incarnation", pa.int64()),
        ("fingerprint", pa.string()),
        ("commit", pa.int64()),
        ("key_json", pa.string()),
    ]
)


def has_begun(job: Job) -> bool:
    """Return whether a finished job ever started. It did not if the budget of its run was already spent."""
    return job.failure is None or job.failure.type != _BUDGET_EXCEEDED


def rows_of(jobs: Sequence[Job], *, commit: int, cost_name: str) -> pa.Table:
    """Return rows for ``Ledger.append``."""
    return pa.Table.from_pylist([_row(job, commit, cost_name) for job in jobs], schema=ARROW)


def _row(job: Job, commit: int, cost_name: str) -> dict[str, Any]:
    extras = job.extras or EMPTY_EXTRAS
    used = {name: micros / MILLION for name, micros in (extras.usage or {}).items()}
    # A completed job keeps the failure of an earlier attempt.
    failure = None if job.state is State.COMPLETED else job.failure
    return {
        "state": str(job.state),
        "result": None if job.result is None else json_text(job.result),
        "error_type": failure and failure.type,
        "error": failure and failure.message,
        "runs": job.runs,
        "failures": job.failures,
        "cost": used.get(cost_name),
        "usage": list(used.items()),
        "run_ms": max(job.finished_at_ms - job.claimed_at_ms, 0) if job.claimed_at_ms else None,
        "enqueued_at": job.enqueued_at_ms * 1000,
        "finished_at": job.finished_at_ms * 1000,
        "task": job.options.task,
        "task_version": job.options.version,
        "run_id": job.run_id,
        "job_id": job.id,
        "incarnation": job.incarnation,
        "fingerprint": _fingerprint(job),
        "commit": commit,
        "key_json": (extras.headers or {}).get(KEY_HEADER),
    }


def _fingerprint(job: Job) -> str:
    """Return the fingerprint of the job's row. Compute it for jobs of an earlier version or of another producer."""
    return fingerprint_in(job.write_id) or former_fingerprint(job.payload, job.options.version)


# Enqueueing and cancelling from the executors.


_HOLD_MS: Final = 30 * 86_400_000
# A Valkey server is blocked during a call: 200 new rows take 2 ms, known rows up to 7 ms.
_CHUNK: Final = 200
_COUNT: Final = StructType([StructField("count", LongType())])
_COUNT_ARROW: Final = pa.schema([("count", pa.int64())])
# A changed row replaces a waiting job, or runs again after an active one.
_CONFLICT: Final = Conflict(mode="redispatch", reset_counts=True)

_STOPPED_STATES: Final = frozenset({State.CANCELLED, State.FAILED})

_Mapper: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


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

    The fingerprint is the ``write_id``: a known row with the same one is a duplicate, in whatever state its job is. So
    Spark can repeat a task, and a run can continue one that was killed.
    """
    return _sum(
        rows.select("job_id", "fingerprint", "payload", "placement", "key_json", "verdict").mapInArrow(
            _enqueuer(batch), _COUNT
        )
    )


def cancel_rows(rows: DataFrame, batch: Batch) -> int:
    """Cancel the jobs of these rows that have not started, and return their number."""
    return _sum(rows.select("job_id").mapInArrow(_canceller(batch), _COUNT))


def _sum(counts: DataFrame) -> int:
    return sum(row["count"] for row in counts.collect())


def _enqueuer(batch: Batch) -> _Mapper:
    def enqueue(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        accepted = 0
        with Store(batch.url) as store:
            for chunk in _chunks(batches):
                accepted += store.run(_enqueue_chunk(store, batch, chunk.to_pylist()))
        yield pa.RecordBatch.from_pydict({"count": [accepted]}, schema=_COUNT_ARROW)

    return enqueue


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
    # The enqueue call holds only new jobs for us.
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


def _canceller(batch: Batch) -> _Mapper:
    def cancel(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        cancelled = 0
        with Store(batch.url) as store:
            for chunk in _chunks(batches):
                cancelled += store.run(_cancel_pending(store, batch, chunk.column("job_id").to_pylist()))
        yield pa.RecordBatch.from_pydict({"count": [cancelled]}, schema=_COUNT_ARROW)

    return cancel


async def _cancel_pending(store: Store, batch: Batch, ids: list[str]) -> int:
    """Cancel jobs that are not active. Active ones are already paid for."""
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


# The intake of rows.


# Up to this many rows and bytes, this process plans without Spark, which would take longer to start.
_FEW: Final = 1000
_FEW_BYTES: Final = 8 << 20
# For a larger index, Spark chooses the join.
_MAX_BROADCAST: Final = 2_000_000
_OTHER: Final = 0
_BUCKET_BITS: Final = 32_768

# Bitmaps by kind and bucket.
_Bitmaps: TypeAlias = dict[int, dict[int, int]]


class IntakeRows:
    """The rows of an input. ``done`` and ``failed`` count settled keys, ``duplicate`` further rows of these keys.
    ``rows`` is a snapshot of all other rows; ``few`` is the same table if it is small."""

    def __init__(
        self,
        rows: DataFrame,
        few: pa.Table | None,
        *,
        count: int,
        known: _Bitmaps | None = None,
        settled_rows: int = 0,
    ) -> None:
        self.rows = rows
        self.few = few
        self.count = count
        self._known = known or {}
        self.done = _ones(self._known.get(COMPLETED, {}))
        self.failed = _ones(self._known.get(FAILED, {}))
        self.duplicate = settled_rows - self.done - self.failed

    def has_settled(self, entries: DataFrame) -> bool:
        """Return whether the input has one of these entries of the index."""
        entry_bits = _bitmaps(entries.withColumn("kind", F.lit(_OTHER)))[0].get(_OTHER, {})
        return any(
            bits & known.get(bucket, 0)
            for known in self._known.values()
            for bucket, bits in entry_bits.items()
        )


class Intake:
    """Reads the rows of ``df`` for one run, with temporary files in ``folder``. With ``expects_few``, the rows are
    probably few, although the index may be large."""

    def __init__(
        self, df: DataFrame, layout: Layout, ledger: Ledger, folder: str, *, expects_few: bool = False
    ) -> None:
        self._expects_few = expects_few
        self._df = df
        self._layout = layout
        self._ledger = ledger
        self._folder = folder
        self._hashes = row_hashes(df.schema, layout)

    @cached_property
    def index(self) -> SettledIndex | None:
        """The index of the output; ``None`` if the output or the input does not support one."""
        if self._hashes is None or not self._ledger.has_index:
            return None
        index = SettledIndex(self._df.sparkSession, self._ledger.output, self._ledger.files)
        return index if index.is_possible else None

    @cached_property
    def entries(self) -> DataFrame | None:
        """The valid entries of the index."""
        if self.index is None or not self.index.contents.keys:
            return None
        newer = self._ledger.ends(self.index.newer) if self.index.newer else None
        return self.index.read(newer)

    def take(self, *, retry_failed: bool) -> IntakeRows:
        """Return the rows. With ``retry_failed``, failed rows do not count as settled."""
        entries, index = self.entries, self.index
        if entries is None or index is None or self._hashes is None:
            return self.take_all()
        settled = entries if not retry_failed else entries.where(F.col("settled") == COMPLETED)
        if self._expects_few and (taken := self._take_few(settled)) is not None:
            return taken
        known = settled.select("first", F.col("second").alias("was"), "settled", "position")
        if index.contents.keys <= _MAX_BROADCAST:
            known = F.broadcast(known)
        marked = materialize(self._marked(self._hashes, known), f"{self._folder}/marked")
        bitmaps, counts = _bitmaps(marked)
        rest = marked.where(F.col("kind") == _OTHER).select("row.*", "first", "second")
        fresh = self._snapshot(rest, (F.col("first"), F.col("second")))
        count = counts.pop(_OTHER, 0)
        bitmaps.pop(_OTHER, None)
        few = fresh.toArrow() if count <= _FEW else None
        rows = materialize(fresh, f"{self._folder}/input") if few is None else self._frame(few)
        return IntakeRows(rows, _small(few), count=count, known=bitmaps, settled_rows=sum(counts.values()))

    def _take_few(self, settled: DataFrame) -> IntakeRows | None:
        """Return the rows, and look them up in the index; ``None`` if they are many. The other way round, Spark would
        load the whole index for a few rows."""
        few = self._snapshot(self._df, self._hashes).limit(_FEW + 1).toArrow()
        if few.num_rows > _FEW:
            return None
        firsts = self._df.sparkSession.createDataFrame(few.select(["first"])).distinct()
        entries = settled.join(F.broadcast(firsts), "first", "left_semi").collect()
        by_hashes = {(row["first"], row["second"]): row for row in entries}
        found = [by_hashes.get(hashes) for hashes in _pairs(few, "first", "second")]
        hits = [row for row in found if row is not None]
        known = {
            kind: _bitmaps_of(row["position"] for row in hits if row["settled"] == kind)
            for kind in {row["settled"] for row in hits}
        }
        rest = few.filter(pa.array([row is None for row in found], pa.bool_()))
        return IntakeRows(
            self._frame(rest), _small(rest), count=rest.num_rows, known=known, settled_rows=len(hits)
        )

    def take_all(self) -> IntakeRows:
        """Return all rows, without using the index."""
        seen = Observation()
        fresh = self._snapshot(self._df, self._hashes).observe(seen, F.count(F.lit(1)).alias("count"))
        rows = materialize(fresh, f"{self._folder}/input")
        count = int(seen.get["count"])
        few = rows.toArrow() if count <= _FEW else None
        return IntakeRows(rows if few is None else self._frame(few), _small(few), count=count)

    def _snapshot(self, df: DataFrame, hashes: Sequence[Column] | None) -> DataFrame:
        former = self._ledger.has_former_fingerprints()
        return snapshot(df, self._layout, with_former=former, hashes=hashes)

    def _frame(self, few: pa.Table) -> DataFrame:
        return self._df.sparkSession.createDataFrame(few, SNAPSHOT)

    def _marked(self, hashes: Sequence[Column], known: DataFrame) -> DataFrame:
        """Return the rows with ``kind``: how the index entry at ``position`` settles them. Columns of settled rows are
        null."""
        first, second = hashes
        columns = [F.col(quoted(name)) for name in needed_columns(self._layout)]
        hashed = self._df.select(
            F.struct(*columns).alias("row"), first.alias("first"), second.alias("second")
        )
        joined = hashed.join(known, "first", "left")
        is_known = F.col("second").eqNullSafe(F.col("was"))
        kind = F.when(is_known, F.col("settled")).otherwise(F.lit(_OTHER)).cast("tinyint")
        hidden = [F.when(~is_known, F.col(name)).alias(name) for name in ("row", "first", "second")]
        return joined.select(
            kind.alias("kind"), F.when(is_known, F.col("position")).alias("position"), *hidden
        )


def materialize(rows: DataFrame, path: str) -> DataFrame:
    """Write the rows to a file and return them from there, so that they cannot change."""
    rows.write.mode("overwrite").parquet(path)
    return rows.sparkSession.read.schema(rows.schema).parquet(path)


def _small(few: pa.Table | None) -> pa.Table | None:
    return few if few is not None and few.nbytes <= _FEW_BYTES else None


def _bitmaps(rows: DataFrame) -> tuple[_Bitmaps, dict[int, int]]:
    """Return the positions of each ``kind`` as bitmaps by bucket, and the number of rows. A distinct count would make
    Spark sort all rows; bitmaps are small."""
    place = F.coalesce(F.col("position"), F.lit(0))
    buckets = (
        rows.groupBy("kind", F.bitmap_bucket_number(place).alias("bucket"))
        .agg(
            F.bitmap_construct_agg(F.bitmap_bit_position(place)).alias("bits"),
            F.count(F.lit(1)).alias("rows"),
        )
        .collect()
    )
    bitmaps: _Bitmaps = defaultdict(dict)
    counts: dict[int, int] = defaultdict(int)
    for row in buckets:
        bitmaps[row["kind"]][row["bucket"]] = int.from_bytes(row["bits"])
        counts[row["kind"]] += row["rows"]
    return dict(bitmaps), dict(counts)


def _bitmaps_of(positions: Iterable[int]) -> dict[int, int]:
    """Return positions as bitmaps by bucket, as ``_bitmaps`` does."""
    bitmaps: dict[int, int] = defaultdict(int)
    for position in positions:
        # Spark begins to count at 1.
        bucket, bit = divmod(position - 1, _BUCKET_BITS) if position else (-1, 0)
        byte = _BUCKET_BITS // 8 - 1 - bit // 8
        bitmaps[bucket + 1] |= 1 << (8 * byte + bit % 8)
    return dict(bitmaps)


def _pairs(table: pa.Table, *names: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(table.column(name).to_pylist() for name in names), strict=True)


def _ones(bitmap: dict[int, int]) -> int:
    return sum(bits.bit_count() for bits in bitmap.values())
