"""``spark.readStream.format("penstock")``: streams of events, results and failures. Requires pyspark 4.2.

Offsets are epochs and sequence numbers of event logs; Spark stores them. A named consumer (``consumerName``) keeps the
store from trimming events after the offset that Spark has committed. Spark reports that offset when it plans the next
batch.

For results and failures, the event log says which jobs finished, and the store has the jobs. A row is one outcome of a
job. A job that fails, is retried and fails again has two outcomes; a late reader gets only the last one. A job that the
store no longer keeps counts as lost, like a trimmed event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.core.job import Job
from penstock.core.lifecycle import EventType, State
from penstock.core.names import check_consumer
from penstock.core.units import milliseconds
from penstock.errors import EventsLost, InvalidOption
from penstock.spark.event_ranges import (
    EventRange,
    Offset,
    Offsets,
    chosen_queues,
    event_builder,
    event_pages,
    from_spark,
    instant_ms,
    position_at,
    read_range,
    resolve,
    split,
    to_spark,
)
from penstock.spark.schemas import EVENTS, JobBuilder, ReadOptions
from penstock.spark.store import Store
from penstock.storage.contract import Storage

_CHUNK: Final = 1000
_ENDS: Final[Mapping[str, frozenset[str]]] = {
    "results": frozenset({EventType.COMPLETED}),
    "failed": frozenset({EventType.FAILED, EventType.EXPIRED}),
}
_STATES: Final = {"results": State.COMPLETED, "failed": State.FAILED}


class _End(NamedTuple):
    """The finish time of one incarnation of a job."""

    id: str
    incarnation: int
    at_ms: int


def read_ends(part: EventRange, options: ReadOptions, schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the jobs that completed or failed, depending on ``options.kind``, in a range of the log.

    Raises:
        EventsLost: as for ``read_range``; also if a finished job is no longer kept, unless ``failOnDataLoss`` is off.
    """
    builder = JobBuilder(schema, options.kind)
    with Store(options.url) as store:
        for ends in _chunks(part, options, store):
            jobs = store.run(store.storage.get(part.queue, [end.id for end in ends]))
            if options.fail_on_data_loss:
                _check_kept(part.queue, ends, jobs)
            pairs = zip(ends, jobs, strict=True)
            if fresh := [job for end, job in pairs if job and _is_unchanged(end, job, options)]:
                yield builder.batch(fresh)


def _chunks(part: EventRange, options: ReadOptions, store: Store) -> Iterator[list[_End]]:
    types = _ENDS[options.kind]
    for _, page in event_pages(part, options, store, ("seq", "type", *_End._fields)):
        columns = (page[name] for name in _End._fields)
        ends = [_End(*rest) for type, *rest in zip(page["type"], *columns, strict=True) if type in types]
        for start in range(0, len(ends), _CHUNK):
            yield ends[start : start + _CHUNK]


def _is_unchanged(end: _End, job: Job, options: ReadOptions) -> bool:
    """Return whether the job is unchanged since this end. If not, a later event covers it."""
    now = (job.incarnation, job.finished_at_ms, job.state)
    return now == (end.incarnation, end.at_ms, _STATES[options.kind])


def _check_kept(queue: str, ends: Sequence[_End], jobs: Sequence[Job | None]) -> None:
    pairs = zip(ends, jobs, strict=True)
    gone = [end.id for end, job in pairs if job is None or job.incarnation != end.incarnation]
    if gone:
        raise EventsLost(
            f"queue {queue!r}: {len(gone)} finished jobs are no longer kept, for example {gone[0]!r}. Read sooner, "
            "keep them longer (result_ttl and failure_ttl of their task), or set failOnDataLoss to false to skip "
            "them.",
            first=0,
            last=0,
        )


# The stream.


_Read: TypeAlias = Callable[[EventRange, ReadOptions, StructType], Iterator[pa.RecordBatch]]


class EventStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The stream reader. It lives on the driver as long as the query; executors use copies of it for ``read``."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if options.consumer_name:
            check_consumer(options.consumer_name)
        self._options = options
        self._schema = schema
        self._ttl_ms = milliseconds(options.consumer_ttl, what="consumerTtl")
        self._target: Offsets | None = None
        self._read = _reader(options, schema)

    def initialOffset(self) -> dict[str, Any]:
        return to_spark(self._run(self._start))

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.max_events_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._run(self._ends)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        ends = self._target if self._target is not None else self._run(self._ends)
        begins = from_spark(start)
        if isinstance(limit, ReadAllAvailable):
            return to_spark({**begins, **ends})
        assert isinstance(limit, ReadMaxRows), limit
        return to_spark(_up_to(limit.max_rows, begins, ends))

    def reportLatestOffset(self) -> dict[str, Any]:
        return to_spark(self._run(self._ends))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begins = from_spark(start)
        parts: list[InputPartition] = []
        for queue, until in from_spark(end).items():
            after = begins.get(queue, Offset(until.epoch, 0))
            if after.epoch != until.epoch:
                after = self._after_loss(queue, after, until)
            parts += split(queue, until.epoch, after.seq, until.seq, self._options.num_partitions)
        return parts or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, EventRange):
            yield from self._read(partition, self._options, self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Release the log up to this offset, which the query no longer needs."""
        if self._options.consumer_name:
            self._run(lambda storage: self._hold(storage, from_spark(end)))

    def _run(self, call: Any) -> Any:
        with Store(self._options.url) as store:
            return store.run(call(store.storage))

    async def _start(self, storage: Storage) -> Offsets:
        offsets: Offsets = {}
        for queue in await chosen_queues(storage, self._options):
            offset = await resolve(storage, queue, self._options.starting_offsets, what="startingOffsets")
            if self._options.starting_timestamp:
                at_ms = instant_ms(self._options.starting_timestamp, what="startingTimestamp")
                offset = Offset(offset.epoch, await position_at(storage, queue, at_ms))
            offsets[queue] = offset
        if self._options.consumer_name:
            await self._hold(storage, offsets)
        return offsets

    async def _ends(self, storage: Storage) -> Offsets:
        queues = await chosen_queues(storage, self._options)
        return {queue: await resolve(storage, queue, "latest", what="endingOffsets") for queue in queues}

    async def _hold(self, storage: Storage, offsets: Offsets) -> None:
        for queue, place in offsets.items():
            await storage.hold_events(
                queue, self._options.consumer_name, offset=place.seq, ttl_ms=self._ttl_ms
            )

    def _after_loss(self, queue: str, after: Offset, until: Offset) -> Offset:
        """Return the start of the new log after a loss: the store was replaced or restored."""
        if self._options.fail_on_data_loss:
            raise EventsLost(
                f"queue {queue!r}: the query had read up to event {after.seq} of epoch {after.epoch}, but the store is "
                f"now at epoch {until.epoch}: it was restored, or lost its data. Start with a new checkpoint, or set "
                "failOnDataLoss to false to read the new log from its beginning.",
                first=0,
                last=0,
            )
        return Offset(until.epoch, 0)


def _reader(options: ReadOptions, schema: StructType) -> _Read:
    """Return the function that reads a range of the log. Raise ``InvalidOption`` if the schema does not fit it."""
    if options.kind in ("results", "failed"):
        JobBuilder(schema, options.kind)
        return read_ends
    # Spark asks the batch reader for the columns first, and its default kind is jobs.
    if options.kind == "jobs" and not set(schema.fieldNames()) <= set(EVENTS.fieldNames()):
        raise InvalidOption(
            "a stream cannot read kind='jobs'. Set the option kind to 'events', 'results' or 'failed'."
        )
    event_builder(schema)
    return read_range


def _up_to(limit: int, begins: Mapping[str, Offset], ends: Mapping[str, Offset]) -> Offsets:
    """Return offsets at most ``limit`` events ahead in total, shared among the queues by their lag."""
    lags = {queue: _lag(begins.get(queue), end) for queue, end in ends.items()}
    total = sum(lags.values())
    if total <= limit:
        return {**begins, **ends}
    reached: Offsets = dict(begins)
    left = limit
    for queue, lag in sorted(lags.items(), key=lambda item: item[1]):
        share = min(lag, max(limit * lag // total, 1), left)
        left -= share
        begin = begins.get(queue)
        base = begin.seq if begin is not None and begin.epoch == ends[queue].epoch else 0
        reached[queue] = Offset(ends[queue].epoch, base + share)
    return reached


def _lag(begin: Offset | None, end: Offset) -> int:
    if begin is None or begin.epoch != end.epoch:
        return end.seq
    return max(end.seq - begin.seq, 0)
