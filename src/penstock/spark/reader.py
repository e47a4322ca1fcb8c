"""``spark.read.format("penstock")``: jobs and events of queues as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from penstock.core.lifecycle import State
from penstock.errors import InvalidOption
from penstock.spark.eventreads import EventRange, event_builder, plan_ranges, read_range
from penstock.spark.jobcolumns import JobBuilder
from penstock.spark.options import ReadOptions
from penstock.spark.queues import chosen_queues
from penstock.spark.store import Store

__all__ = ["EventReader", "JobReader", "reader_of"]

_PER_PARTITION: Final = 50_000
_MOST_PARTITIONS: Final = 32
_PAGE: Final = 1000
_STATES: Final = {"results": frozenset({State.COMPLETED}), "failed": frozenset({State.FAILED})}


def reader_of(options: ReadOptions, schema: StructType) -> DataSourceReader:
    """The reader of the kind that was asked for. Raises ``InvalidOption`` for a schema it cannot fill."""
    return EventReader(options, schema) if options.kind == "events" else JobReader(options, schema)


class JobsPart(InputPartition):
    """The jobs of a queue whose ids fall into one of so many parts."""

    def __init__(self, queue: str, part: int, parts: int) -> None:
        super().__init__((queue, part, parts))
        self.queue, self.part, self.parts = queue, part, parts


class JobReader(DataSourceReader):
    """Jobs by identity, never by state: one that moves on during the read is in the table once."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._states = _states(options)
        JobBuilder(schema, options.kind)

    def partitions(self) -> list[InputPartition]:
        parts: list[InputPartition] = []
        with Store(self._options.url) as store:
            for queue in store.run(chosen_queues(store.storage, self._options)):
                counts = store.run(store.storage.counts(queue))
                total = counts.open + counts.completed + counts.failed + counts.cancelled
                count = self._options.num_partitions or min(total // _PER_PARTITION + 1, _MOST_PARTITIONS)
                parts += [JobsPart(queue, part, count) for part in range(count)]
        return parts or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, JobsPart):
            return
        builder = JobBuilder(self._schema, self._options.kind)
        seen: set[str] = set()
        cursor = ""
        with Store(self._options.url) as store:
            while True:
                page = store.run(
                    store.storage.scan_jobs(
                        partition.queue,
                        states=self._states,
                        part=partition.part,
                        parts=partition.parts,
                        cursor=cursor,
                        limit=_PAGE,
                        light=builder.is_light,
                    )
                )
                # A store may show a job again while it makes room for others.
                fresh = [job for job in page.jobs if job.id not in seen]
                seen.update(job.id for job in fresh)
                if fresh:
                    yield builder.batch(fresh)
                if not (cursor := page.cursor):
                    return


class EventReader(DataSourceReader):
    """A range of the log of each queue, split by sequence."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        event_builder(schema)

    def partitions(self) -> list[InputPartition]:
        with Store(self._options.url) as store:
            ranges: list[InputPartition] = [*store.run(plan_ranges(store.storage, self._options))]
        return ranges or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, EventRange):
            yield from read_range(partition, self._options, self._schema)


def _states(options: ReadOptions) -> frozenset[State] | None:
    allowed: frozenset[State] | None = _STATES.get(options.kind)
    if not options.state:
        return allowed
    names = [name.strip() for name in options.state.split(",")]
    try:
        states = frozenset(State(name) for name in names)
    except ValueError:
        known = ", ".join(State)
        raise InvalidOption(f"state={options.state!r} is not known. There are: {known}.") from None
    if allowed is not None and not states <= allowed:
        raise InvalidOption(
            f"kind={options.kind!r} has only {', '.join(allowed)} jobs. Leave state out, or use kind=jobs."
        )
    return states
