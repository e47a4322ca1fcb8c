"""Ranges of event logs as Arrow batches: what the batch reader, the stream and the history share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from penstock.core.eventcolumns import columns
from penstock.errors import EventsLost
from penstock.spark.arrow import Builder, Column, instants, plain
from penstock.spark.offsets import Offset, instant_ms, position_at, resolve
from penstock.spark.options import ReadOptions
from penstock.spark.queues import chosen_queues
from penstock.spark.schemas import EVENTS
from penstock.spark.store import Store
from penstock.storage.base import Storage
from penstock.storage.values import Gap

__all__ = ["EventRange", "event_builder", "event_pages", "plan_ranges", "read_range", "split"]

_PER_PARTITION: Final = 250_000
_PAGE: Final = 20_000
# The fields of events that are times, under the names that their columns have.
_TIMES: Final = {"at": "at_ms", "enqueued_at": "enqueued_at_ms"}
_COLUMNS: Final[Mapping[str, Column]] = {
    name: instants if name in _TIMES else plain for name in EVENTS.fieldNames()
}


class EventRange(InputPartition):
    """The events of a queue with ``after < seq <= until``."""

    def __init__(self, queue: str, epoch: str, after: int, until: int) -> None:
        super().__init__((queue, epoch, after, until))
        self.queue, self.epoch, self.after, self.until = queue, epoch, after, until


def event_builder(schema: StructType) -> Builder:
    """Raises ``InvalidOption`` for a column that events do not have."""
    return Builder(schema, _COLUMNS, where="kind='events'")


def split(queue: str, epoch: str, after: int, until: int, parts: int = 0) -> list[EventRange]:
    """A range in ``parts`` of about the same length; by default as many as are worth a task each."""
    length = until - after
    if length <= 0:
        return []
    count = min(parts or length // _PER_PARTITION + 1, length)
    edges = [after + length * part // count for part in range(count + 1)]
    return [EventRange(queue, epoch, low, high) for low, high in pairwise(edges)]


async def plan_ranges(storage: Storage, options: ReadOptions) -> list[EventRange]:
    """What a batch read is to read. Raises ``EventsLost`` if it is to begin where nothing is kept any more."""
    ranges: list[EventRange] = []
    for queue in await chosen_queues(storage, options):
        start, end = await _bounds(storage, queue, options)
        ranges += split(queue, start.epoch, start.seq, end.seq, options.num_partitions)
    return ranges


async def _bounds(storage: Storage, queue: str, options: ReadOptions) -> tuple[Offset, Offset]:
    start = await resolve(storage, queue, options.starting_offsets, what="startingOffsets")
    end = await resolve(storage, queue, options.ending_offsets, what="endingOffsets")
    if options.starting_timestamp:
        at_ms = instant_ms(options.starting_timestamp, what="startingTimestamp")
        start = Offset(start.epoch, await position_at(storage, queue, at_ms))
    if options.ending_timestamp:
        at_ms = instant_ms(options.ending_timestamp, what="endingTimestamp")
        end = Offset(end.epoch, await position_at(storage, queue, at_ms))
    return start, end


def read_range(part: EventRange, options: ReadOptions, schema: StructType) -> Iterator[pa.RecordBatch]:
    """The events of a range, in order.

    Raises:
        EventsLost: some are no longer kept, or the store has gone back in time, unless ``failOnDataLoss`` is off.
    """
    builder = event_builder(schema)
    wanted = [_TIMES.get(name, name) for name in builder.names if name != "epoch"]
    # The sequence is what the length of a batch is known by.
    names = tuple(dict.fromkeys((*wanted, "seq")))
    with Store(options.url) as store:
        for epoch, found in event_pages(part, options, store, names):
            yield builder.batch(_renamed(found, epoch))


def event_pages(
    part: EventRange, options: ReadOptions, store: Store, names: Sequence[str]
) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """The events of a range page by page: their epoch, and their columns of these ``names``, with ``seq`` among them.
    Raises as ``read_range``."""
    after = part.after
    while after < part.until:
        limit = min(_PAGE, part.until - after)
        page = store.run(store.storage.read_entries(part.queue, after=after, limit=limit))
        if options.fail_on_data_loss:
            check_kept(part, page.epoch, page.gap)
        elif page.epoch != part.epoch:
            return
        found = columns(page.entries, queue=part.queue, after=after, until=part.until, names=names)
        if found["seq"]:
            yield page.epoch, found
        if page.next <= after:
            return
        after = page.next


def _renamed(found: Mapping[str, Sequence[Any]], epoch: str) -> dict[str, Sequence[Any]]:
    named = dict(found)
    for column, field in _TIMES.items():
        if field in named:
            named[column] = named.pop(field)
    named["epoch"] = [epoch] * len(found["seq"])
    return named


def check_kept(part: EventRange, epoch: str, gap: Gap | None) -> None:
    """Raises ``EventsLost`` if the store is not the one the range was planned on, or some of the range is gone."""
    if epoch != part.epoch:
        raise EventsLost(
            f"queue {part.queue!r}: events {part.after + 1} to {part.until} were of epoch {part.epoch}, and the "
            f"store's is {epoch} now: it was restored, or lost what it had. Begin anew, or set failOnDataLoss to "
            "false.",
            first=0,
            last=0,
        )
    if gap is not None and gap.first <= part.until:
        raise EventsLost(
            f"queue {part.queue!r}: events {gap.first} to {min(gap.last, part.until)} are no longer kept. Keep more of "
            "the log (queue.configure), hold it for a consumerName, or set failOnDataLoss to false to go on without "
            "them.",
            first=gap.first,
            last=min(gap.last, part.until),
        )
