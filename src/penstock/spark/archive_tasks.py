"""What the executors do with the rows of an archive's journal: compare them with the store, and free their jobs."""

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
# A Valkey server does nothing else during a call.
_CHUNK: Final = 200


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Whose jobs they are. ``consumer`` is the one whose holds are let go of."""

    url: str
    queue: str
    consumer: str = ""


def comparing(source: Source) -> _Mapper:
    """Rows to counts by verdict: ``same`` as the job, which has not moved; ``torn``, although it has not moved;
    ``changed`` since; or ``gone``: there is no such job, or another under its id."""

    def compare(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        verdicts: Counter[str] = Counter()
        with Store(source.url) as store:
            for chunk in _chunks(batches):
                verdicts.update(_verdicts(store, source, chunk))
        counted = {"verdict": list(verdicts), "count": list(verdicts.values())}
        yield pa.RecordBatch.from_pydict(counted, schema=_ARROW)

    return compare


def sound(source: Source) -> _Mapper:
    """Rows to those that are not torn."""

    def keep(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with Store(source.url) as store:
            for chunk in _chunks(batches):
                is_sound = [verdict != "torn" for verdict in _verdicts(store, source, chunk)]
                yield chunk.filter(pa.array(is_sound, pa.bool_()))

    return keep


def freeing(source: Source) -> _Mapper:
    """Rows to those whose jobs are not in the store, or not any more: a job that is still what its row says is freed.

    May be repeated: what an earlier attempt has freed is not there, and its row is given.
    """

    def free(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with Store(source.url) as store:
            for chunk in _chunks(batches):
                gone = store.run(_free(store, source, _read(chunk)))
                yield _told_once(chunk.filter(pa.array(gone, pa.bool_())))

    return free


async def _free(store: Store, source: Source, jobs: list[Unchanged]) -> list[bool]:
    """Which of them are gone now."""
    answers = await store.storage.remove_unchanged(source.queue, jobs, consumer=source.consumer)
    gone = [answer in ("removed", "not_found") for answer in answers]
    changed = [n for n, answer in enumerate(answers) if answer == "changed"]
    if changed:
        # A job that was retried is still that job, and lives. Under another life of its id, ours is over for good.
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


def _told_once(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Bytes that the text column has to the letter are left out."""
    for text, raw in _VALUES.items():
        pairs = zip(rows.column(text).to_pylist(), rows.column(raw).to_pylist(), strict=True)
        kept = [None if said is not None and said.encode() == stored else stored for said, stored in pairs]
        at = rows.schema.get_field_index(raw)
        rows = rows.set_column(at, rows.schema.field(at), pa.array(kept, rows.schema.field(at).type))
    return rows


def _chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for start in range(0, batch.num_rows, _CHUNK):
            yield batch.slice(start, _CHUNK)
