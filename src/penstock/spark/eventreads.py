"""Which queues a read is about."""

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

from penstock.core.event import columns
from penstock.core.names import check_queue
from penstock.errors import EventsLost, InvalidOption
from penstock.spark.cells import Builder, Column, instants, plain
from penstock.spark.options import ReadOptions
from penstock.spark.schemas import EVENTS
from penstock.spark.store import Store
from penstock.storage.contract import Storage
from penstock.storage.values import Gap


async def chosen_queues(storage: Storage, options: ReadOptions) -> list[str]:
    """By ``queue``, ``subscribe`` or ``subscribePattern``, the latter among the queues that there are now.

    Raises:
        InvalidOption: a pattern that is none.
    """
    if options.queue:
        return [check_queue(options.queue)]
    if options.subscribe:
        return [check_queue(name.strip()) for name in options.subscribe.split(",")]
    try:
        pattern = re.compile(options.subscribe_pattern)
    except re.error as error:
        raise InvalidOption(
            f"subscribePattern={options.subscribe_pattern!r} is not a valid regular expression: {error}."
        ) from None
    return [name for name in await storage.queues() if pattern.fullmatch(name)]


# Where reads of event logs begin and end: ``{queue: {epoch, seq}}``, with the sequence of the last event
# read.


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


class Offset(msgspec.Struct, frozen=True):
    """A place in a queue's log. Sequences of another epoch mean nothing."""

    epoch: str
    seq: int


Offsets = dict[str, Offset]


def loaded(said: Mapping[str, Any]) -> Offsets:
    """What Spark keeps as JSON."""
    return msgspec.convert(said, Offsets)


def dumped(offsets: Offsets) -> dict[str, Any]:
    """Back to what Spark keeps."""
    return {queue: {"epoch": place.epoch, "seq": place.seq} for queue, place in sorted(offsets.items())}


def instant_ms(said: str | datetime, *, what: str) -> int:
    """Epoch milliseconds from a number of them or an ISO 8601 time, which without a zone is UTC."""
    if isinstance(said, str) and said.isdecimal():
        return int(said)
    try:
        moment = datetime.fromisoformat(said) if isinstance(said, str) else said
    except ValueError:
        raise InvalidOption(
            f"{what}={said!r} is not a time. Give ISO 8601 (2026-01-31T12:00:00Z) or epoch milliseconds."
        ) from None
    since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH
    # Up, not down: the first millisecond that is not before the instant.
    return -(-since // _MILLISECOND)


async def resolve(
    storage: Storage, queue: str, said: str, *, what: Literal["startingOffsets", "endingOffsets"]
) -> Offset:
    """``earliest``, ``latest``, or what the JSON has for this queue; for one it does not name, the default."""
    page = await storage.read_entries(queue, after=0, limit=1)
    first_kept = page.gap.last if page.gap else 0
    if said == "earliest":
        return Offset(page.epoch, first_kept)
    if said == "latest":
        return Offset(page.epoch, page.last)
    given = _named(said, what).get(queue)
    if given is None:
        return Offset(page.epoch, first_kept if what == "startingOffsets" else page.last)
    if isinstance(given, int):
        return Offset(page.epoch, page.last if given == -1 else given)
    return given


def _named(said: str, what: str) -> Mapping[str, Offset | int]:
    try:
        named = msgspec.json.decode(said, type=dict[str, Offset | int])
    except msgspec.MsgspecError as error:
        raise InvalidOption(
            f'{what}={said!r} is wrong: {error}. Give earliest, latest, or JSON such as {{"mail": 17}}.'
        ) from None
    for queue in named:
        check_queue(queue)
    return named


async def position_at(storage: Storage, queue: str, at_ms: int) -> int:
    """The sequence of the last event before an instant. Times never go back within a queue, so it can be bisected."""
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


# Ranges of event logs as Arrow batches: what the batch reader, the stream and the history share.


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
