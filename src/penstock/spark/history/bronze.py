"""Bronze: the events in their original form. Each commit records its end, where the next sync continues.

Executors read ranges of the event logs, and write them straight from Arrow into Parquet files.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace
from pyspark.sql import SparkSession

from penstock.core.event import Event
from penstock.core.names import check_queue
from penstock.errors import InvalidOption, StorageUnavailable
from penstock.spark.delta import Conflict, DataFile, Snapshot, Table
from penstock.spark.event_ranges import EventRange, matching_queues, read_range
from penstock.spark.history.tables import BronzeState, EpochChange, History, Loss, Place, Range
from penstock.spark.schemas import EVENTS, ReadOptions
from penstock.spark.store import Store
from penstock.spark.tasks import collected, each, numbered, parallelism
from penstock.storage.contract import Storage

_IDENTIFYING = ("type", "id", "incarnation", "token", "run", "worker")


async def common_until(
    storage: Storage, queue: str, place: Place, *, bronze: Table, snapshot: Snapshot
) -> int:
    """Return the number of the last event that the store's log and bronze have in common.

    This is a binary search, because both are copies of one log up to some event, and differ from there. Events that the
    store has trimmed cannot be compared, and count as common.
    """
    page = await storage.read_entries(queue, after=0, limit=1)
    low, high = (page.gap.last if page.gap else 0), min(place.seq, page.last)
    low = min(low, high)
    while low < high:
        middle = (low + high + 1) // 2
        if _is_known(await _event(storage, queue, middle), bronze, snapshot):
            low = middle
        else:
            high = middle - 1
    return low


async def _event(storage: Storage, queue: str, seq: int) -> Event | None:
    events = (await storage.read_events(queue, after=seq - 1, limit=1)).events
    return events[0] if events and events[0].seq == seq else None


def _is_known(event: Event | None, bronze: Table, snapshot: Snapshot) -> bool:
    """Return whether bronze has this event, in any epoch."""
    if event is None:
        return False
    filters = [("queue", "=", event.queue), ("seq", "=", event.seq)]
    identity = tuple(str(event.type) if name == "type" else getattr(event, name) for name in _IDENTIFYING)
    return any(
        (round(row.pop("at").timestamp() * 1000), *row.values()) == (event.at_ms, *identity)
        for file in snapshot.files
        if file.low <= event.at_ms <= file.high
        for row in bronze.folder.read(file.path, ["at", *_IDENTIFYING], filters=filters).to_pylist()
    )


# Ranges of event logs, written to files by executors.


_LEAST: Final = 25_000
_MOST: Final = 250_000


class WrittenFile(msgspec.Struct, frozen=True):
    """A file of bronze, and the ranges of its events."""

    file: DataFile
    ranges: tuple[Range, ...]


def shares_of(ranges: Sequence[Range], parallelism: int) -> list[list[Range]]:
    """Return shares of about equal size, each for one task and one file. No file is smaller than necessary."""
    total = sum(_length(part) for part in ranges)
    target = min(max(-(-total // parallelism), _LEAST), _MOST)
    shares: list[list[Range]] = []
    filled = target
    for part in (piece for whole in ranges for piece in _pieces(whole, target)):
        if filled + _length(part) > target:
            shares.append([])
            filled = 0
        shares[-1].append(part)
        filled += _length(part)
    return shares


def _length(part: Range) -> int:
    return part.last - part.first + 1


def _pieces(part: Range, target: int) -> Iterator[Range]:
    count = -(-_length(part) // target)
    edges = [part.first + _length(part) * number // count for number in range(count + 1)]
    for first, end in pairwise(edges):
        yield replace(part, first=first, last=end - 1)


def write_shares(
    spark: SparkSession, shares: Sequence[Sequence[Range]], *, url: str, bronze: Table, number: int
) -> list[WrittenFile]:
    """Write a file for each share in one Spark job. A file may have fewer events than its share, if some are gone.

    A repeated task writes another file. Only the returned files count.
    """
    write = partial(_write, url=url, bronze=bronze, number=number)
    return collected(numbered(spark, shares), each(shares, write), WrittenFile) if shares else []


def _write(share: Sequence[Range], *, url: str, bronze: Table, number: int) -> Iterator[WrittenFile]:
    options = ReadOptions(url=url, kind="events", fail_on_data_loss=False)
    batches: list[pa.RecordBatch] = []
    for part in share:
        events = EventRange(part.queue, part.epoch, part.first - 1, part.last)
        batches.extend(read_range(events, options, EVENTS))
    if batches:
        table = pa.Table.from_batches(batches)
        yield WrittenFile(bronze.write(table, number), tuple(_ranges(table)))


def _ranges(table: pa.Table) -> Iterator[Range]:
    """Yield the contiguous ranges of the table, in order."""
    seqs = table["seq"].combine_chunks()
    steps = pc.pairwise_diff(seqs)
    broken = pc.not_equal(steps, 1).fill_null(True)
    for name in ("queue", "epoch"):
        column = table[name].combine_chunks()
        changed = pc.not_equal(column[1:], column[:-1])
        broken = pc.or_(broken, pa.concat_arrays([pa.array([True]), changed]))
    starts = pc.indices_nonzero(broken).to_pylist()
    for start, end in zip(starts, [*starts[1:], table.num_rows], strict=True):
        yield Range(
            queue=table["queue"][start].as_py(),
            epoch=table["epoch"][start].as_py(),
            first=seqs[start].as_py(),
            last=seqs[end - 1].as_py(),
        )


# Commits to bronze.


_HOLD_MS = 7 * 86_400_000


class Appended(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a commit: the number of added events, and the losses and epoch changes that it found."""

    events: int
    losses: tuple[Loss, ...]
    changes: tuple[EpochChange, ...]


class _Plan(msgspec.Struct, frozen=True):
    ranges: list[Range]
    losses: list[Loss]
    changes: list[EpochChange]


async def queue_names(storage: Storage, queues: Sequence[str] | None, pattern: str | None) -> list[str]:
    """Return the queues to read: the named ones, the matching ones, or all.

    Raises:
        InvalidOption: both are set, or the pattern is not a valid regular expression.
    """
    if queues is not None and pattern is not None:
        raise InvalidOption("set queues or pattern, not both.")
    if queues is not None:
        return [check_queue(name) for name in queues]
    return await matching_queues(storage, pattern or ".*", what="pattern")


async def hold(storage: Storage, consumer: str, bronze: BronzeState, queues: Iterable[str]) -> None:
    """Make the store keep the events that bronze lacks, and release those that it has."""
    for queue in queues:
        place = bronze.places.get(queue)
        await storage.hold_events(queue, consumer, offset=place.seq if place else 0, ttl_ms=_HOLD_MS)


def append(
    spark: SparkSession, history: History, *, url: str, queues: Sequence[str], limit: int
) -> Appended | None:
    """Commit the next ``limit`` events of these queues, or fewer; return None if there are none.

    Raises:
        Conflict: another sync committed first. Nothing was committed.
    """
    snapshot = history.bronze.load()
    base, consumer = bronze_state(history, snapshot), history.consumer
    with Store(url) as store:
        store.run(hold(store.storage, consumer, base, queues))
        plan = store.run(_plan(store.storage, history, snapshot, base, queues, limit=limit))
        if not (plan.ranges or plan.losses or plan.changes):
            return None
        shares = shares_of(plan.ranges, parallelism(spark))
        written = write_shares(spark, shares, url=url, bronze=history.bronze, number=snapshot.number + 1)
        unread = _unread(plan.ranges, written)
        store.run(_check_lost(store.storage, unread))
        state = _next(base, plan, unread)
        files = [item.file for item in written]
        history.bronze.commit(snapshot, add=files, state=msgspec.json.encode(state).decode())
        for change in plan.changes:
            # Reset the consumer, because its position never moves back, and the new log may be shorter.
            store.run(store.storage.release_events(change.queue, consumer))
        store.run(hold(store.storage, consumer, state, queues))
    return Appended(
        events=sum(file.rows for file in files),
        losses=state.losses[len(base.losses) :],
        changes=tuple(plan.changes),
    )


def bronze_state(history: History, snapshot: Snapshot) -> BronzeState:
    """Return the state of bronze. If its log no longer has the state, compute it from the rows."""
    if snapshot.state is not None:
        return msgspec.json.decode(snapshot.state, type=BronzeState)
    if not snapshot.files:
        return BronzeState()
    seen = pa.concat_tables(
        history.bronze.read(file, ["queue", "epoch", "seq", "at"]) for file in snapshot.files
    )
    ends = seen.group_by(["queue", "epoch"]).aggregate([("seq", "max"), ("at", "min")]).sort_by("at_min")
    epochs: dict[str, tuple[str, ...]] = {}
    places: dict[str, Place] = {}
    for row in ends.to_pylist():
        epochs[row["queue"]] = (*epochs.get(row["queue"], ()), row["epoch"])
        places[row["queue"]] = Place(row["epoch"], row["seq_max"])
    return BronzeState(places=places, epochs=epochs)


async def _plan(
    storage: Storage,
    history: History,
    snapshot: Snapshot,
    base: BronzeState,
    queues: Sequence[str],
    *,
    limit: int,
) -> _Plan:
    plan = _Plan([], [], [])
    for queue in queues:
        place = base.places.get(queue)
        page = await storage.read_entries(queue, after=place.seq if place else 0, limit=1)
        if place is not None and page.epoch != place.epoch:
            common = await common_until(storage, queue, place, bronze=history.bronze, snapshot=snapshot)
            plan.changes.append(_change(queue, place, page.epoch, common))
            place = Place(page.epoch, common)
            page = await storage.read_entries(queue, after=common, limit=1)
        after = place.seq if place else 0
        if page.gap is not None:
            plan.losses.append(_loss(queue, page.epoch, page.gap.first, page.gap.last))
            after = page.gap.last
        until = min(page.last, after + limit)
        if until > after:
            plan.ranges.append(Range(queue=queue, epoch=page.epoch, first=after + 1, last=until))
            limit -= until - after
    return plan


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _change(queue: str, place: Place, epoch: str, common: int) -> EpochChange:
    return EpochChange(
        queue=queue, before=place.epoch, after=epoch, common=common, read=place.seq, found_at_ms=_now_ms()
    )


def _loss(queue: str, epoch: str, first: int, last: int) -> Loss:
    return Loss(queue=queue, epoch=epoch, first=first, last=last, found_at_ms=_now_ms())


def _unread(planned: Iterable[Range], written: Iterable[WrittenFile]) -> list[Range]:
    """Return the planned ranges that are in no file, because they were trimmed, or the store was replaced."""
    read = sorted(
        (part for file in written for part in file.ranges), key=lambda part: (part.queue, part.first)
    )
    missing: list[Range] = []
    for plan in planned:
        expected = plan.first
        for part in read:
            if part.queue != plan.queue:
                continue
            if part.first > expected:
                missing.append(replace(plan, first=expected, last=part.first - 1))
            expected = part.last + 1
        if expected <= plan.last:
            missing.append(replace(plan, first=expected, last=plan.last))
    return missing


async def _check_lost(storage: Storage, unread: Iterable[Range]) -> None:
    """Raise ``Conflict`` if the store was replaced, and ``StorageUnavailable`` if it still has the events."""
    for part in unread:
        page = await storage.read_entries(part.queue, after=part.first - 1, limit=1)
        if page.epoch != part.epoch:
            raise Conflict(f"the epoch of queue {part.queue!r} has changed since the read began")
        if page.gap is None or page.gap.last < part.last:
            raise StorageUnavailable(
                f"queue {part.queue!r}: events {part.first} to {part.last} are in the store, but Spark's executors did "
                "not find them. Use a URL that refers to the same store on every machine."
            )


def _next(base: BronzeState, plan: _Plan, unread: Sequence[Range]) -> BronzeState:
    trimmed = [_loss(part.queue, part.epoch, part.first, part.last) for part in unread]
    reached = {change.queue: Place(change.after, change.common) for change in plan.changes}
    reached |= {loss.queue: Place(loss.epoch, loss.last) for loss in plan.losses}
    reached |= {part.queue: Place(part.epoch, part.last) for part in plan.ranges}
    epochs = dict(base.epochs)
    for queue, place in reached.items():
        known = epochs.get(queue, ())
        epochs[queue] = known if place.epoch in known else (*known, place.epoch)
    return BronzeState(
        places={**base.places, **reached},
        epochs=epochs,
        losses=(*base.losses, *plan.losses, *trimmed),
        changes=(*base.changes, *plan.changes),
    )
