"""Bring a history up to date: once, or for as long as it is wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec
from pyspark.sql import SparkSession

from penstock.core.duration import milliseconds
from penstock.errors import InvalidOption, StorageError
from penstock.spark.history.bronze import append, queue_names
from penstock.spark.history.catalog import Catalog
from penstock.spark.history.compaction import compact
from penstock.spark.history.folder import History, open_history
from penstock.spark.history.gold import summarise
from penstock.spark.history.manifest import Conflict, EpochChange, Loss
from penstock.spark.history.silver import fold
from penstock.spark.local import session
from penstock.spark.store import Store, url_for_executors

__all__ = ["SyncReport", "follow", "sync"]

T = TypeVar("T")
Layer: TypeAlias = Literal["bronze", "silver", "gold"]
_PER_COMMIT: Final = 4_000_000
_ATTEMPTS: Final = 20


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a sync has done. ``events``: added to bronze. ``bronze``, ``silver``, ``gold``: the numbers of the newest
    manifests. ``losses`` and ``changes`` are those that this sync has found."""

    events: int
    bronze: int
    silver: int
    gold: int
    losses: tuple[Loss, ...] = ()
    changes: tuple[EpochChange, ...] = ()
    seconds: float = 0


def sync(
    url: str,
    path: str | Path,
    *,
    queues: Sequence[str] | None = None,
    pattern: str | None = None,
    spark: SparkSession | None = None,
    max_events: int | None = None,
    upto: Layer = "gold",
    catalog: str | None = None,
    format: str | None = None,
) -> SyncReport:
    """Add the events that are new since the last sync, of all queues or of some, and bring silver and gold up to them.

    May be killed anywhere and started again: what is committed stays, what is not is done again, nothing is in the
    tables twice. Two at once are safe; one of them does its work anew. Goes up to what was the end when it began, or to
    ``max_events``. ``upto="bronze"`` or ``"silver"`` leaves the tables after that as they are; a later sync has more to
    do for them. Without ``spark`` it is the session of this process (``penstock.spark.session``).

    ``catalog`` is a database in which the tables are shown by name, too: as views of what the folder has, or, with the
    ``format`` of a table that is changed in one step (``delta``, ``iceberg``), as tables of that.

    Raises:
        InvalidOption: a folder that holds something else, or is not in the file system; both queues and pattern; names
            in the catalog that are somebody else's.
        StorageError: the store cannot be read. What was committed before stays.
    """
    if max_events is not None and max_events < 1:
        raise InvalidOption(f"max_events={max_events}: give at least 1, or leave it out.")
    began = time.monotonic()
    url = url_for_executors(url)
    with Store(url) as store:
        names = store.run(queue_names(store.storage, queues, pattern))
    if format is not None and catalog is None:
        raise InvalidOption("format is that of the tables in a catalog. Give catalog=, too.")
    history = open_history(path, create=True)
    spark = spark or session()
    shown = Catalog(spark, history, catalog, format) if catalog is not None else None
    before = history.bronze.newest()
    with history.running() as name:
        if shown is not None:
            # What a sync that was killed has not shown: before files that it replaced are cleared away.
            shown.publish()
        history.clean()
        events = _append_all(spark, history, url=url, sync=name, queues=names, limit=max_events)
        _insist(lambda: compact(spark, history, sync=name))
        if upto != "bronze":
            _insist(lambda: fold(spark, history, sync=name))
        if upto == "gold":
            _insist(lambda: summarise(spark, history, sync=name))
        if shown is not None:
            shown.publish()
    bronze = history.bronze.newest()
    return SyncReport(
        events=events,
        bronze=bronze.number,
        silver=history.silver.newest().number,
        gold=history.gold.newest().number,
        losses=bronze.losses[len(before.losses) :],
        changes=bronze.changes[len(before.changes) :],
        seconds=time.monotonic() - began,
    )


def follow(
    url: str,
    path: str | Path,
    *,
    queues: Sequence[str] | None = None,
    pattern: str | None = None,
    spark: SparkSession | None = None,
    max_events: int | None = None,
    upto: Layer = "gold",
    catalog: str | None = None,
    format: str | None = None,
    every: str | float = "30s",
    stop: Event | None = None,
    on_sync: Callable[[SyncReport], object] | None = None,
) -> None:
    """Sync now and then every so often, until ``stop`` is set, which may be done from any thread.

    Pauses for ``every``, and for as long as the sync before took, so that it takes half of the machine at most. A
    store that cannot be read is tried again at the next turn.

    Raises:
        InvalidOption: as in ``sync``, at the first one.
    """
    pause = milliseconds(every, what="every") / 1000
    stop = stop or Event()
    spark = spark or session()
    is_first = True
    while not stop.is_set():
        began = time.monotonic()
        try:
            report = sync(
                url,
                path,
                queues=queues,
                pattern=pattern,
                spark=spark,
                max_events=max_events,
                upto=upto,
                catalog=catalog,
                format=format,
            )
        except StorageError:
            if is_first:
                raise
        else:
            if on_sync is not None:
                on_sync(report)
        is_first = False
        stop.wait(max(pause, time.monotonic() - began))


def _append_all(
    spark: SparkSession, history: History, *, url: str, sync: str, queues: Sequence[str], limit: int | None
) -> int:
    """In commits of some million events at most, up to where the logs ended when it began."""
    total, more = 0, True
    while more and (limit is None or total < limit):
        share = _PER_COMMIT if limit is None else min(_PER_COMMIT, limit - total)
        added = _insist(
            lambda share=share: append(spark, history, url=url, sync=sync, queues=queues, limit=share)  # type: ignore[misc]
        )
        total += added.events if added else 0
        more = added is not None and added.events >= share
    return total


def _insist(commit: Callable[[], T]) -> T:
    """Do it anew if somebody else was first. Raises ``Conflict`` if that never ends."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return commit()
        except Conflict:
            continue
    return commit()
