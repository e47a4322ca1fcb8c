"""Reads of event logs, shared by the batch reader, the stream and the history: queues, offsets and ranges.

Offsets have the form ``{queue: {epoch, seq}}``, with the sequence number of the last event read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from penstock.core.event import Gap, columns
from penstock.core.names import check_queue
from penstock.errors import EventsLost, InvalidOption
from penstock.spark.cells import Builder, Column, instants, plain
from penstock.spark.schemas import EVENTS, ReadOptions
from penstock.spark.store import Store
from penstock.storage.contract import Storage


async def chosen_queues(storage: Storage, options: ReadOptions) -> list[str]:
    """Return the queues of a read, chosen by ``queue``, ``subscribe`` or ``subscribePattern``.

    Raises:
        InvalidOption: the pattern is not a valid regular expression.
    """
    if options.queue:
        return [check_queue(options.queue)]
    if options.subscribe:
        return [check_queue(name.strip()) for name in options.subscribe.split(",")]
    return await matching_queues(storage, options.subscribe_pattern, what="subscribePattern")


async def matching_queues(storage: Storage, pattern: str, *, what: str) -> list[str]:
    """Return the queues whose names match. Raise ``InvalidOption`` if the pattern is not a valid regular expression."""
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise InvalidOption(f"{what}={pattern!r} is not a valid regular expression: {error}.") from None
    return [name for name in await storage.queues() if regex.fullmatch(name)]


EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND: Final = timedelta(milliseconds=1)


class Offset(msgspec.Struct, frozen=True):
    """A position in a queue's log. Sequence numbers are valid only within their epoch."""

    epoch: str
    seq: int


Offsets = dict[str, Offset]


def from_spark(stored: Mapping[str, Any]) -> Offsets:
    """Return the offsets that Spark has stored as JSON."""
    return msgspec.convert(stored, Offsets)


def to_spark(offsets: Offsets) -> dict[str, Any]:
    """Return offsets in the form that Spark stores."""
    return {queue: {"epoch": place.epoch, "seq": place.seq} for queue, place in sorted(offsets.items())}


def instant_ms(value: str | datetime, *, what: str) -> int:
    """Return epoch milliseconds from a number or an ISO 8601 time (UTC if it has no zone)."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        raise InvalidOption(
            f"{what} must be an ISO 8601 time (2026-01-31T12:00:00Z) or epoch milliseconds, got {value!r}."
        ) from None
    since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - EPOCH
    # Round up to the first millisecond that is not before the instant.
    return -(-since // MILLISECOND)


async def resolve(
    storage: Storage, queue: str, value: str, *, what: Literal["startingOffsets", "endingOffsets"]
) -> Offset:
    """Return the offset of the queue for ``earliest``, ``latest`` or a JSON object. A queue that the object does not
    name starts at the earliest event, and ends at the latest one."""
    page = await storage.read_entries(queue, after=0, limit=1)
    first_kept = page.gap.last if page.gap else 0
    if value == "earliest":
        return Offset(page.epoch, first_kept)
    if value == "latest":
        return Offset(page.epoch, page.last)
    offset = _named(value, what).get(queue)
    if offset is None:
        return Offset(page.epoch, first_kept if what == "startingOffsets" else page.last)
    if isinstance(offset, int):
        return Offset(page.epoch, page.last if offset == -1 else offset)
    return offset


def _named(value: str, what: str) -> Mapping[str, Offset | int]:
    try:
        named = msgspec.json.decode(value, type=dict[str, Offset | int])
    except msgspec.MsgspecError as error:
        raise InvalidOption(
            f'{what}={value!r} is invalid: {error}. Use earliest, latest, or JSON such as {{"mail": 17}}.'
        ) from None
    for queue in named:
        check_queue(queue)
    return named


async def position_at(storage: Storage, queue: str, at_ms: int) -> int:
    """Return the sequence number of the last event before an instant. Times never decrease, so use a binary search."""
    page = await storage.read_entries(queue, after=0, limit=1)
    low, high = (page.gap.last if page.gap else 0), page.last
    while low < high:
        middle = (low + high) // 2
        events = (await storage.read_events(queue, after=middle, limit=1)).events
        if events and events[0].at_ms >= at_ms:
            high = middle
        else:
            low = middle + 1
    return low


# Ranges of event logs as Arrow batches.


_PER_PARTITION: Final = 250_000
_PAGE: Final = 20_000
# Time columns, and the event fields that they show.
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
    """Return a builder of event batches. Raise ``InvalidOption`` for a column that events do not have."""
    return Builder(schema, _COLUMNS, where="kind='events'")


def split(queue: str, epoch: str, after: int, until: int, parts: int = 0) -> list[EventRange]:
    """Split a range into ``parts`` of about the same length; the default depends on the number of events."""
    length = until - after
    if length <= 0:
        return []
    count = min(parts or length // _PER_PARTITION + 1, length)
    edges = [after + length * part // count for part in range(count + 1)]
    return [EventRange(queue, epoch, low, high) for low, high in pairwise(edges)]


async def plan_ranges(storage: Storage, options: ReadOptions) -> list[EventRange]:
    """Return the ranges of a batch read. Raise ``EventsLost`` if its start is no longer kept."""
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
    """Yield the events of a range in order.

    Raises:
        EventsLost: events are no longer kept, or the store has gone back in time, unless ``failOnDataLoss`` is off.
    """
    builder = event_builder(schema)
    fields = [_TIMES.get(name, name) for name in builder.names if name != "epoch"]
    # Always read the sequence number, which gives the length of a batch.
    names = tuple(dict.fromkeys((*fields, "seq")))
    with Store(options.url) as store:
        for epoch, page in event_pages(part, options, store, names):
            yield builder.batch(_to_columns(page, epoch))


def event_pages(
    part: EventRange, options: ReadOptions, store: Store, names: Sequence[str]
) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    """Yield the epoch and the columns of each page of a range. ``names`` selects the columns, and includes ``seq``.
    Raise as ``read_range`` does."""
    after = part.after
    while after < part.until:
        limit = min(_PAGE, part.until - after)
        page = store.run(store.storage.read_entries(part.queue, after=after, limit=limit))
        if options.fail_on_data_loss:
            check_kept(part, page.epoch, page.gap)
        elif page.epoch != part.epoch:
            return
        values = columns(page.entries, queue=part.queue, after=after, until=part.until, names=names)
        if values["seq"]:
            yield page.epoch, values
        if page.next <= after:
            return
        after = page.next


def _to_columns(page: Mapping[str, Sequence[Any]], epoch: str) -> dict[str, Sequence[Any]]:
    named = dict(page)
    for column, field in _TIMES.items():
        if field in named:
            named[column] = named.pop(field)
    named["epoch"] = [epoch] * len(page["seq"])
    return named


def check_kept(part: EventRange, epoch: str, gap: Gap | None) -> None:
    """Raise ``EventsLost`` if the store's epoch has changed since the range was planned, or events are gone."""
    if epoch != part.epoch:
        raise EventsLost(
            f"queue {part.queue!r}: events {part.after + 1} to {part.until} belong to epoch {part.epoch}, but the "
            f"store is now at epoch {epoch}: it was restored, or lost its data. Start over, or set failOnDataLoss "
            "to false.",
            first=0,
            last=0,
        )
    if gap is not None and gap.first <= part.until:
        raise EventsLost(
            f"queue {part.queue!r}: events {gap.first} to {min(gap.last, part.until)} are no longer kept. Keep more of "
            "the log (queue.configure), hold it for a consumerName, or set failOnDataLoss to false to skip "
            "them.",
            first=gap.first,
            last=min(gap.last, part.until),
        )
