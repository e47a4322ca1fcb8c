"""``spark.readStream.format("penstock")``: the event logs of queues, by epoch and sequence, or the results and failures
that they tell of. From pyspark 4.2.

The offsets are Spark's to keep. A named consumer (``consumerName``) holds the log back for it: up to what Spark has
said that it is done with, which it says when it plans the batch after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.core.duration import milliseconds
from penstock.core.names import check_consumer
from penstock.errors import EventsLost, InvalidOption
from penstock.spark.endreads import read_ends
from penstock.spark.eventreads import EventRange, event_builder, read_range, split
from penstock.spark.jobcolumns import JobBuilder
from penstock.spark.offsets import Offset, Offsets, dumped, instant_ms, loaded, position_at, resolve
from penstock.spark.options import ReadOptions
from penstock.spark.queues import chosen_queues
from penstock.spark.schemas import EVENTS
from penstock.spark.store import Store
from penstock.storage.base import Storage

__all__ = ["EventStream"]

_Read: TypeAlias = Callable[[EventRange, ReadOptions, StructType], Iterator[pa.RecordBatch]]


class EventStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """On the driver it lives as long as the query; executors get copies, for ``read``."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if options.consumer_name:
            check_consumer(options.consumer_name)
        self._options = options
        self._schema = schema
        self._ttl_ms = milliseconds(options.consumer_ttl, what="consumerTtl")
        self._target: Offsets | None = None
        self._read = _reader(options, schema)

    def initialOffset(self) -> dict[str, Any]:
        return dumped(self._ask(self._start))

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.max_events_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._ask(self._ends)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        ends = self._target if self._target is not None else self._ask(self._ends)
        begins = loaded(start)
        if isinstance(limit, ReadAllAvailable):
            return dumped({**begins, **ends})
        assert isinstance(limit, ReadMaxRows), limit
        return dumped(_up_to(limit.max_rows, begins, ends))

    def reportLatestOffset(self) -> dict[str, Any]:
        return dumped(self._ask(self._ends))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begins = loaded(start)
        parts: list[InputPartition] = []
        for queue, until in loaded(end).items():
            after = begins.get(queue, Offset(until.epoch, 0))
            if after.epoch != until.epoch:
                after = self._after_loss(queue, after, until)
            parts += split(queue, until.epoch, after.seq, until.seq, self._options.num_partitions)
        return parts or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, EventRange):
            yield from self._read(partition, self._options, self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """The log up to there is no longer needed by this query."""
        if self._options.consumer_name:
            self._ask(lambda storage: self._hold(storage, loaded(end)))

    def _ask(self, question: Any) -> Any:
        with Store(self._options.url) as store:
            return store.run(question(store.storage))

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
        """The store is another one than before, or has gone back: its events begin anew."""
        if self._options.fail_on_data_loss:
            raise EventsLost(
                f"queue {queue!r}: the query had read up to event {after.seq} of epoch {after.epoch}, and the store's "
                f"epoch is {until.epoch} now: it was restored, or lost what it had. Begin with a new checkpoint, or "
                "set failOnDataLoss to false to read the new log from its beginning.",
                first=0,
                last=0,
            )
        return Offset(until.epoch, 0)


def _reader(options: ReadOptions, schema: StructType) -> _Read:
    """What reads a range of the log. Raises ``InvalidOption`` for a schema that it cannot fill."""
    if options.kind in ("results", "failed"):
        JobBuilder(schema, options.kind)
        return read_ends
    # A stream is not asked for its columns before Spark asks the batch read, whose kind is jobs unless it is said.
    if options.kind == "jobs" and not set(schema.fieldNames()) <= set(EVENTS.fieldNames()):
        raise InvalidOption(
            "a stream is of events, of results or of failed jobs, and its columns are those of jobs. Give the option "
            "kind: 'events', 'results' or 'failed'."
        )
    event_builder(schema)
    return read_range


def _up_to(limit: int, begins: Mapping[str, Offset], ends: Mapping[str, Offset]) -> Offsets:
    """Ends that are at most ``limit`` events away in all: each queue has its share of what there is."""
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
