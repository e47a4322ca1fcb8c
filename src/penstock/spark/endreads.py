"""Streams of results and of failures: the event log says which jobs have ended, the store what they left.

A row stands for one end of a job: a job that failed, was retried and has failed again has two, and whoever reads late
gets the last of them only. What the store no longer keeps cannot be had, and is told like events that are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
from pyspark.sql.types import StructType

from penstock.core.job import Job
from penstock.core.lifecycle import EventType, State
from penstock.errors import EventsLost
from penstock.spark.eventreads import EventRange, event_pages
from penstock.spark.jobcolumns import JobBuilder
from penstock.spark.options import ReadOptions
from penstock.spark.store import Store

__all__ = ["read_ends"]

_CHUNK: Final = 1000
_ENDS: Final[Mapping[str, frozenset[str]]] = {
    "results": frozenset({EventType.COMPLETED}),
    "failed": frozenset({EventType.FAILED, EventType.EXPIRED}),
}
_STATES: Final = {"results": State.COMPLETED, "failed": State.FAILED}


class _End(NamedTuple):
    """That a life of a job ended, and when."""

    id: str
    incarnation: int
    at_ms: int


def read_ends(part: EventRange, options: ReadOptions, schema: StructType) -> Iterator[pa.RecordBatch]:
    """The jobs that have ended in a range of the log, by completing or by failing, as ``options.kind`` says.

    Raises:
        EventsLost: as ``read_range``, and if a job that ended is no longer kept, unless ``failOnDataLoss`` is off.
    """
    builder = JobBuilder(schema, options.kind)
    with Store(options.url) as store:
        for ends in _chunks(part, options, store):
            jobs = store.run(store.storage.get(part.queue, [end.id for end in ends]))
            if options.fail_on_data_loss:
                _check_kept(part.queue, ends, jobs)
            pairs = zip(ends, jobs, strict=True)
            if fresh := [job for end, job in pairs if job and _is_left_by(end, job, options)]:
                yield builder.batch(fresh)


def _chunks(part: EventRange, options: ReadOptions, store: Store) -> Iterator[list[_End]]:
    wanted = _ENDS[options.kind]
    for _, page in event_pages(part, options, store, ("seq", "type", *_End._fields)):
        columns = (page[name] for name in _End._fields)
        ends = [_End(*rest) for type, *rest in zip(page["type"], *columns, strict=True) if type in wanted]
        for start in range(0, len(ends), _CHUNK):
            yield ends[start : start + _CHUNK]


def _is_left_by(end: _End, job: Job, options: ReadOptions) -> bool:
    """Whether the job is still as this end of it left it: if not, a later event tells of it, or will."""
    now = (job.incarnation, job.finished_at_ms, job.state)
    return now == (end.incarnation, end.at_ms, _STATES[options.kind])


def _check_kept(queue: str, ends: Sequence[_End], jobs: Sequence[Job | None]) -> None:
    pairs = zip(ends, jobs, strict=True)
    gone = [end.id for end, job in pairs if job is None or job.incarnation != end.incarnation]
    if gone:
        raise EventsLost(
            f"queue {queue!r}: {len(gone)} jobs have ended, and are no longer kept, {gone[0]!r} among them. Read "
            "sooner, keep them longer (result_ttl and failure_ttl of their task), or set failOnDataLoss to false to "
            "go on without them.",
            first=0,
            last=0,
        )
