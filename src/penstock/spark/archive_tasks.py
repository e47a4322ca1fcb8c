"""Executor tasks on the rows of an archive's journal: compare the rows with the store, and remove their jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, Literal, TypeAlias

import msgspec
import pyarrow as pa
from pyspark.sql.types import BinaryType, StructField, StructType

from penstock.core.job import Job
from penstock.spark.schemas import schema_of
from penstock.spark.store import Store
from penstock.storage.values import Unchanged

_Mapper: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
_Verdict: TypeAlias = Literal["same", "changed", "gone", "torn"]

_VALUES: Final = {"payload": "payload_bytes", "result": "result_bytes"}
COLUMNS: Final = StructType(
    [*schema_of("jobs").fields, *(StructField(name, BinaryType()) for name in _VALUES.values())]
)
COMPARED: Final = "verdict string, count bigint"
_ARROW: Final = pa.schema([("verdict", pa.string()), ("count", pa.int64())])
# A Valkey server is blocked during a call.
_CHUNK: Final = 200


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The queue of the jobs. Holds of ``consumer`` do not keep a job from being removed."""

    url: str
    queue: str
    consumer: str = ""


def compare_rows(source: Source) -> _Mapper:
    """Return a mapper from rows to counts by verdict.

    ``same``: the row equals its job. ``torn``: it differs, although the job has not changed state. ``changed``: the
    job has changed since. ``gone``: the job does not exist, or its id belongs to another job.
    """

    def compare(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        verdicts: Counter[str] = Counter()
        with Store(source.url) as store:
            for chunk in _chunks(batches):
                verdicts.update(_verdicts(store, source, chunk))
        counted = {"verdict": list(verdicts), "count": list(verdicts.values())}
        yield pa.RecordBatch.from_pydict(counted, schema=_ARROW)

    return compare


def drop_torn(source: Source) -> _Mapper:
    """Return a mapper that drops torn rows."""

    def keep(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with Store(source.url) as store:
            for chunk in _chunks(batches):
                is_intact = [verdict != "torn" for verdict in _verdicts(store, source, chunk)]
                yield chunk.filter(pa.array(is_intact, pa.bool_()))

    return keep


def remove_jobs(source: Source) -> _Mapper:
    """Return a mapper that removes each job that has not changed since its row was copied, and keeps the rows whose
    jobs are no longer in the store.

    Spark may repeat it: jobs that an earlier attempt removed are gone, so their rows are kept.
    """

    def remove(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with Store(source.url) as store:
            for chunk in _chunks(batches):
                gone = store.run(_remove(store, source, _read(chunk)))
                yield _drop_copied_bytes(chunk.filter(pa.array(gone, pa.bool_())))

    return remove


async def _remove(store: Store, source: Source, jobs: list[Unchanged]) -> list[bool]:
    """Return which of the jobs are gone now."""
    answers = await store.storage.remove_unchanged(source.queue, jobs, consumer=source.consumer)
    gone = [answer in ("removed", "not_found") for answer in answers]
    changed = [n for n, answer in enumerate(answers) if answer == "changed"]
    if changed:
        # A retried job is still the same job. If its id belongs to a new incarnation, the copied job is gone for good.
        now = await store.storage.get(source.queue, [jobs[n].id for n in changed])
        for n, job in zip(changed, now, strict=True):
            gone[n] = job is None or job.incarnation != jobs[n].incarnation
    return gone


def _verdicts(store: Store, source: Source, rows: pa.RecordBatch) -> list[_Verdict]:
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
    """Clear the bytes of values that the text column holds unchanged."""
    for text, raw in _VALUES.items():
        pairs = zip(rows.column(text).to_pylist(), rows.column(raw).to_pylist(), strict=True)
        stored = [None if copy is not None and copy.encode() == value else value for copy, value in pairs]
        at = rows.schema.get_field_index(raw)
        rows = rows.set_column(at, rows.schema.field(at), pa.array(stored, rows.schema.field(at).type))
    return rows


def _chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for start in range(0, batch.num_rows, _CHUNK):
            yield batch.slice(start, _CHUNK)
