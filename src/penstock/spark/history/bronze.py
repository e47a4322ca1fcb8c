"""Bronze: the events as they came. Each commit says how far it goes, and the next sync goes on from there."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence

import msgspec
import pyarrow as pa
from msgspec.structs import replace
from pyspark.sql import SparkSession

from penstock.core.names import check_queue
from penstock.errors import InvalidOption, StorageUnavailable
from penstock.spark.delta import Conflict, Snapshot
from penstock.spark.history.eventfiles import WrittenFile, shares_of, write_shares
from penstock.spark.history.folder import History
from penstock.spark.history.lineage import common_until
from penstock.spark.history.state import BronzeState, EpochChange, Loss, Place, Range, state_of
from penstock.spark.store import Store
from penstock.storage.base import Storage

__all__ = ["Appended", "append", "bronze_state", "parallelism", "queue_names"]

_HOLD_MS = 7 * 86_400_000


class Appended(msgspec.Struct, frozen=True, kw_only=True):
    """One commit: how many events it added, and which were found to be missing."""

    events: int
    losses: tuple[Loss, ...]
    changes: tuple[EpochChange, ...]


class _Plan(msgspec.Struct, frozen=True):
    ranges: list[Range]
    losses: list[Loss]
    changes: list[EpochChange]


async def queue_names(storage: Storage, queues: Sequence[str] | None, pattern: str | None) -> list[str]:
    """The queues to read: those named, those that match, or all there are.

    Raises:
        InvalidOption: both were given, or a pattern that is none.
    """
    if queues is not None and pattern is not None:
        raise InvalidOption("both queues and pattern were given: leave one of them out.")
    if queues is not None:
        return [check_queue(name) for name in queues]
    try:
        wanted = re.compile(pattern or ".*")
    except re.error as error:
        raise InvalidOption(f"pattern={pattern!r} is not a valid regular expression: {error}.") from None
    return [name for name in await storage.queues() if wanted.fullmatch(name)]


async def hold(storage: Storage, consumer: str, bronze: BronzeState, queues: Iterable[str]) -> None:
    """Have the store keep what bronze does not have yet, and let go of what it has."""
    for queue in queues:
        place = bronze.places.get(queue)
        await storage.hold_events(queue, consumer, offset=place.seq if place else 0, ttl_ms=_HOLD_MS)


def append(
    spark: SparkSession, history: History, *, url: str, queues: Sequence[str], limit: int
) -> Appended | None:
    """Commit the next ``limit`` events of these queues, or fewer; return None if there are none.

    Raises:
        Conflict: another sync was first. Nothing was committed.
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
        files = [found.file for found in written]
        history.bronze.commit(snapshot, add=files, state=msgspec.json.encode(state).decode())
        for change in plan.changes:
            # The position of a consumer never moves back by itself, and the log of the new epoch may be shorter.
            store.run(store.storage.release_events(change.queue, consumer))
        store.run(hold(store.storage, consumer, state, queues))
    return Appended(
        events=sum(file.rows for file in files),
        losses=state.losses[len(base.losses) :],
        changes=tuple(plan.changes),
    )


def bronze_state(history: History, snapshot: Snapshot) -> BronzeState:
    """Return how far bronze goes. If its log was cleaned up too far to say so, its rows do."""
    state = state_of(snapshot, BronzeState)
    if state is not None or not snapshot.files:
        return state or BronzeState()
    seen = pa.concat_tables(
        history.bronze.read(file, ["queue", "epoch", "seq", "at"]) for file in snapshot.files
    )
    found = seen.group_by(["queue", "epoch"]).aggregate([("seq", "max"), ("at", "min")]).sort_by("at_min")
    epochs: dict[str, tuple[str, ...]] = {}
    places: dict[str, Place] = {}
    for row in found.to_pylist():
        epochs[row["queue"]] = (*epochs.get(row["queue"], ()), row["epoch"])
        places[row["queue"]] = Place(row["epoch"], row["seq_max"])
    return BronzeState(places=places, epochs=epochs)


def parallelism(spark: SparkSession) -> int:
    """How many tasks the session runs at a time."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # over Spark Connect there is no context
        return int(spark.conf.get("spark.sql.shuffle.partitions", "8") or 8)


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
    """What was planned and is in no file: it was trimmed in between, or the store is another one by now."""
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
    """Raises ``Conflict`` if the store has changed under the read, ``StorageUnavailable`` if nothing is lost at all."""
    for part in unread:
        page = await storage.read_entries(part.queue, after=part.first - 1, limit=1)
        if page.epoch != part.epoch:
            raise Conflict(f"queue {part.queue!r} has another epoch than when the read began")
        if page.gap is None or page.gap.last < part.last:
            raise StorageUnavailable(
                f"queue {part.queue!r}: events {part.first} to {part.last} are in the store, but Spark's executors did "
                "not find them there. Give a URL that means the same store on every machine."
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
