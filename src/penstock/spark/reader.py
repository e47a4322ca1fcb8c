"""``spark.read.format("penstock")``: jobs and events of queues as tables.

The readers apply some filters of a query themselves, to read less. Spark passes filters if its session allows it
(``spark.sql.python.filterPushdown.enabled``, from pyspark 4.1). Otherwise Spark rejects any reader that overrides
``pushFilters``. Our override only saves work, so it poses as the method of the base class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from penstock.core.job import Job
from penstock.core.lifecycle import State
from penstock.errors import InvalidOption
from penstock.spark.event_ranges import (
    EPOCH,
    MILLISECOND,
    EventRange,
    chosen_queues,
    event_builder,
    plan_ranges,
    read_range,
)
from penstock.spark.schemas import JobBuilder, ReadOptions
from penstock.spark.store import Store

Filters: TypeAlias = Sequence[Any]


class PushFilters:
    """The ``pushFilters`` of a reader. It takes filters, and returns those that Spark must apply."""

    def __init__(self, push: Callable[[Filters], Iterable[Any]]) -> None:
        self._push = push
        self.__func__ = getattr(DataSourceReader, "pushFilters", None)

    def __call__(self, filters: Filters) -> Iterable[Any]:
        return self._push(filters)


class AllowedValues(msgspec.Struct, frozen=True, kw_only=True):
    """The allowed values of columns; ``None`` allows every value."""

    queue: frozenset[str] | None = None
    id: frozenset[str] | None = None
    state: frozenset[str] | None = None


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """A time range from ``since_ms`` until before ``until_ms``; ``None`` means unbounded."""

    since_ms: int | None = None
    until_ms: int | None = None


def narrowed(filters: Filters, columns: Iterable[str]) -> tuple[AllowedValues, list[Any]]:
    """Return the values that equalities (``=``, ``IN``) on these text columns allow, and all other filters."""
    values: dict[str, frozenset[str]] = {}
    others: list[Any] = []
    for filter in filters:
        column, allowed = _equality(filter)
        if allowed is None or column not in columns:
            others.append(filter)
        else:
            values[column] = allowed & values.get(column, allowed)
    return AllowedValues(**values), others


def within(filters: Filters, column: str) -> Times:
    """Return the range, in milliseconds, that comparisons of ``column`` with times allow. Spark must still apply the
    filters, because they may be finer than a millisecond."""
    from pyspark.sql.datasource import GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual

    since: list[int] = []
    until: list[int] = []
    for filter in filters:
        if getattr(filter, "attribute", None) != (column,) or not _is_instant(getattr(filter, "value", None)):
            continue
        at_ms = max((filter.value - EPOCH) // MILLISECOND, 0)
        if isinstance(filter, (GreaterThan, GreaterThanOrEqual)):
            since.append(at_ms)
        elif isinstance(filter, (LessThan, LessThanOrEqual)):
            until.append(at_ms + 1)
    return Times(since_ms=max(since, default=None), until_ms=min(until, default=None))


def _equality(filter: Any) -> tuple[str, frozenset[str] | None]:
    """Return the column of an equality with texts, and the texts; ``None`` for any other filter."""
    from pyspark.sql.datasource import EqualTo, In

    match filter:
        case EqualTo(attribute=(column,), value=str() as value):
            return column, frozenset({value})
        case In(attribute=(column,), value=[*values]):
            # Nothing equals null.
            texts = [value for value in values if value is not None]
            return column, frozenset(texts) if all(isinstance(value, str) for value in texts) else None
        case _:
            return "", None


def _is_instant(value: Any) -> bool:
    return isinstance(value, datetime) and value.tzinfo is not None


# The readers.


_PER_PARTITION: Final = 50_000
_MAX_PARTITIONS: Final = 32
_PAGE: Final = 1000
_STATES: Final = {"results": frozenset({State.COMPLETED}), "failed": frozenset({State.FAILED})}


def reader_of(options: ReadOptions, schema: StructType) -> DataSourceReader:
    """Return the reader for the requested kind. Raise ``InvalidOption`` if the schema does not fit it."""
    return EventReader(options, schema) if options.kind == "events" else JobReader(options, schema)


class JobsPart(InputPartition):
    """The jobs of a queue whose ids fall into one of ``parts`` parts."""

    def __init__(self, queue: str, part: int, parts: int) -> None:
        super().__init__((queue, part, parts))
        self.queue, self.part, self.parts = queue, part, parts


class JobsNamed(InputPartition):
    """The jobs of a queue with these ids."""

    def __init__(self, queue: str, ids: Sequence[str]) -> None:
        super().__init__((queue, *ids))
        self.queue, self.ids = queue, ids


class JobReader(DataSourceReader):
    """Reads jobs by id, not by state, so that a job that changes state during the read appears once."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._states = _states(options)
        self._allowed = AllowedValues()
        JobBuilder(schema, options.kind)

    @property
    def pushFilters(self) -> PushFilters:
        return PushFilters(self._push)

    def _push(self, filters: Sequence[Any]) -> list[Any]:
        self._allowed, others = narrowed(filters, ("queue", "id", "state"))
        if self._allowed.state is not None:
            candidates = State if self._states is None else self._states
            self._states = frozenset(state for state in candidates if state in self._allowed.state)
        return others

    def partitions(self) -> list[InputPartition]:
        if self._states is not None and not self._states:
            return [InputPartition(None)]
        parts: list[InputPartition] = []
        with Store(self._options.url) as store:
            for queue in store.run(chosen_queues(store.storage, self._options)):
                if self._allowed.queue is not None and queue not in self._allowed.queue:
                    continue
                if self._allowed.id is not None:
                    parts.append(JobsNamed(queue, sorted(self._allowed.id)))
                    continue
                counts = store.run(store.storage.counts(queue))
                total = counts.open + counts.completed + counts.failed + counts.cancelled
                count = self._options.num_partitions or min(total // _PER_PARTITION + 1, _MAX_PARTITIONS)
                parts += [JobsPart(queue, part, count) for part in range(count)]
        return parts or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        builder = JobBuilder(self._schema, self._options.kind)
        with Store(self._options.url) as store:
            match partition:
                case JobsPart():
                    pages = self._scan(store, partition, light=builder.is_light)
                case JobsNamed():
                    pages = self._get(store, partition)
                case _:
                    return
            for jobs in pages:
                if jobs:
                    yield builder.batch(jobs)

    def _scan(self, store: Store, partition: JobsPart, *, light: bool) -> Iterator[list[Job]]:
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
            # A store may return a job twice while it resizes its tables.
            fresh = [job for job in page.jobs if job.id not in seen]
            seen.update(job.id for job in fresh)
            yield fresh
            if not (cursor := page.cursor):
                return

    def _get(self, store: Store, partition: JobsNamed) -> Iterator[list[Job]]:
        for start in range(0, len(partition.ids), _PAGE):
            jobs = store.run(store.storage.get(partition.queue, partition.ids[start : start + _PAGE]))
            yield [job for job in jobs if job and (self._states is None or job.state in self._states)]


class EventReader(DataSourceReader):
    """Reads a range of each queue's log, split by sequence number."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._queues: frozenset[str] | None = None
        event_builder(schema)

    @property
    def pushFilters(self) -> PushFilters:
        return PushFilters(self._push)

    def _push(self, filters: Sequence[Any]) -> list[Any]:
        allowed, others = narrowed(filters, ("queue",))
        self._queues = allowed.queue
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
    """Return the options limited to these times. Bounds that the user set take precedence."""
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
        raise InvalidOption(f"state={options.state!r} is unknown. The states are: {known}.") from None
    if allowed is not None and not states <= allowed:
        raise InvalidOption(
            f"kind={options.kind!r} has only {', '.join(allowed)} jobs. Leave state out, or use kind=jobs."
        )
    return states
