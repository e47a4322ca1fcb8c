"""Filters of a query that a read applies by itself, so that it reads less.

Spark hands them over where its session allows (``spark.sql.python.filterPushdown.enabled``, from pyspark 4.1).
Elsewhere it refuses any reader with a ``pushFilters`` of its own; as ours only saves work, it passes for the base's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from penstock.core.job import Job
from penstock.core.lifecycle import State
from penstock.errors import InvalidOption
from penstock.spark.eventreads import EventRange, chosen_queues, event_builder, plan_ranges, read_range
from penstock.spark.options import ReadOptions
from penstock.spark.schemas import JobBuilder
from penstock.spark.store import Store

Filters: TypeAlias = Sequence[Any]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


class Pushing:
    """What a reader has as ``pushFilters``: takes filters, and gives back those that Spark is to apply."""

    def __init__(self, push: Callable[[Filters], Iterable[Any]]) -> None:
        self._push = push
        self.__func__ = getattr(DataSourceReader, "pushFilters", None)

    def __call__(self, filters: Filters) -> Iterable[Any]:
        return self._push(filters)


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """What columns may be; ``None`` for one that may be anything."""

    queue: frozenset[str] | None = None
    id: frozenset[str] | None = None
    state: frozenset[str] | None = None


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Events from ``since_ms`` on, and before ``until_ms``; ``None`` for no bound."""

    since_ms: int | None = None
    until_ms: int | None = None


def narrowed(filters: Filters, columns: Iterable[str]) -> tuple[Pushed, list[Any]]:
    """What the equalities (``=``, ``IN``) on these text columns leave, and the filters that are something else."""
    values: dict[str, frozenset[str]] = {}
    others: list[Any] = []
    for filter in filters:
        column, allowed = _equality(filter)
        if allowed is None or column not in columns:
            others.append(filter)
        else:
            values[column] = allowed & values.get(column, allowed)
    return Pushed(**values), others


def within(filters: Filters, column: str) -> Times:
    """The milliseconds in which all instants are that the comparisons of ``column`` with times let pass; Spark is to
    apply them all the same, for it knows the microseconds."""
    from pyspark.sql.datasource import GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual

    since: list[int] = []
    until: list[int] = []
    for filter in filters:
        if getattr(filter, "attribute", None) != (column,) or not _is_instant(getattr(filter, "value", None)):
            continue
        at_ms = max((filter.value - _EPOCH) // _MILLISECOND, 0)
        if isinstance(filter, (GreaterThan, GreaterThanOrEqual)):
            since.append(at_ms)
        elif isinstance(filter, (LessThan, LessThanOrEqual)):
            until.append(at_ms + 1)
    return Times(since_ms=max(since, default=None), until_ms=min(until, default=None))


def _equality(filter: Any) -> tuple[str, frozenset[str] | None]:
    """The column that is to be one of some texts, and these; ``None`` for any other filter."""
    from pyspark.sql.datasource import EqualTo, In

    match filter:
        case EqualTo(attribute=(column,), value=str() as value):
            return column, frozenset({value})
        case In(attribute=(column,), value=[*values]):
            # Nothing equals null, so it adds nothing.
            texts = [value for value in values if value is not None]
            return column, frozenset(texts) if all(isinstance(value, str) for value in texts) else None
        case _:
            return "", None


def _is_instant(value: Any) -> bool:
    return isinstance(value, datetime) and value.tzinfo is not None


# ``spark.read.format("penstock")``: jobs and events of queues as a table.


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


class JobsNamed(InputPartition):
    """The jobs of a queue that have these ids, if there are any."""

    def __init__(self, queue: str, ids: Sequence[str]) -> None:
        super().__init__((queue, *ids))
        self.queue, self.ids = queue, ids


class JobReader(DataSourceReader):
    """Jobs by identity, never by state: one that moves on during the read is in the table once."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._states = _states(options)
        self._pushed = Pushed()
        JobBuilder(schema, options.kind)

    @property
    def pushFilters(self) -> Pushing:
        return Pushing(self._push)

    def _push(self, filters: Sequence[Any]) -> list[Any]:
        self._pushed, others = narrowed(filters, ("queue", "id", "state"))
        if self._pushed.state is not None:
            there = State if self._states is None else self._states
            self._states = frozenset(state for state in there if state in self._pushed.state)
        return others

    def partitions(self) -> list[InputPartition]:
        if self._states is not None and not self._states:
            return [InputPartition(None)]
        parts: list[InputPartition] = []
        with Store(self._options.url) as store:
            for queue in store.run(chosen_queues(store.storage, self._options)):
                if self._pushed.queue is not None and queue not in self._pushed.queue:
                    continue
                if self._pushed.id is not None:
                    parts.append(JobsNamed(queue, sorted(self._pushed.id)))
                    continue
                counts = store.run(store.storage.counts(queue))
                total = counts.open + counts.completed + counts.failed + counts.cancelled
                count = self._options.num_partitions or min(total // _PER_PARTITION + 1, _MOST_PARTITIONS)
                parts += [JobsPart(queue, part, count) for part in range(count)]
        return parts or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        builder = JobBuilder(self._schema, self._options.kind)
        with Store(self._options.url) as store:
            match partition:
                case JobsPart():
                    pages = self._scanned(store, partition, light=builder.is_light)
                case JobsNamed():
                    pages = self._named(store, partition)
                case _:
                    return
            for jobs in pages:
                if jobs:
                    yield builder.batch(jobs)

    def _scanned(self, store: Store, partition: JobsPart, *, light: bool) -> Iterator[list[Job]]:
        seen: set[str] = set()
        cursor = ""
        while True:
            page = store.run(
                store.storage.scan_jobs(
                    partition.queue,
                    states=self._states,
                    part=partition.part,
                    parts=partition.parts,
                    cursor=cursor,
                    limit=_PAGE,
                    light=light,
                )
            )
            # A store may show a job again while it makes room for others.
            fresh = [job for job in page.jobs if job.id not in seen]
            seen.update(job.id for job in fresh)
            yield fresh
            if not (cursor := page.cursor):
                return

    def _named(self, store: Store, partition: JobsNamed) -> Iterator[list[Job]]:
        for start in range(0, len(partition.ids), _PAGE):
            found = store.run(store.storage.get(partition.queue, partition.ids[start : start + _PAGE]))
            yield [job for job in found if job and (self._states is None or job.state in self._states)]


class EventReader(DataSourceReader):
    """A range of the log of each queue, split by sequence."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._queues: frozenset[str] | None = None
        event_builder(schema)

    @property
    def pushFilters(self) -> Pushing:
        return Pushing(self._push)

    def _push(self, filters: Sequence[Any]) -> list[Any]:
        pushed, others = narrowed(filters, ("queue",))
        self._queues = pushed.queue
        self._options = _between(self._options, within(others, "at"))
        return others

    def partitions(self) -> list[InputPartition]:
        with Store(self._options.url) as store:
            ranges = store.run(plan_ranges(store.storage, self._options))
        chosen: list[InputPartition] = [
            part for part in ranges if self._queues is None or part.queue in self._queues
        ]
        return chosen or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, EventRange):
            yield from read_range(partition, self._options, self._schema)


def _between(options: ReadOptions, times: Times) -> ReadOptions:
    """The same read within these times, unless the user has said himself where it begins or ends."""
    fields: dict[str, str] = {}
    if (
        times.since_ms is not None
        and not options.starting_timestamp
        and options.starting_offsets == "earliest"
    ):
        fields["starting_timestamp"] = str(times.since_ms)
    if times.until_ms is not None and not options.ending_timestamp and options.ending_offsets == "latest":
        fields["ending_timestamp"] = str(times.until_ms)
    return msgspec.structs.replace(options, **fields)


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
