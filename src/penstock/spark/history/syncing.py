"""Bring a history up to date: once, or for as long as it is wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec
from pyspark.sql import SparkSession

from penstock.core.duration import milliseconds
from penstock.errors import InvalidOption, StorageError
from penstock.spark.delta import Conflict
from penstock.spark.history.bronze import Appended, append, queue_names
from penstock.spark.history.compaction import compact
from penstock.spark.history.folder import History, open_history
from penstock.spark.history.gold import summarise
from penstock.spark.history.silver import fold
from penstock.spark.history.state import EpochChange, Loss
from penstock.spark.local import session
from penstock.spark.store import Store, url_for_executors

__all__ = ["SyncReport", "follow", "sync"]

T = TypeVar("T")
Layer: TypeAlias = Literal["bronze", "silver", "gold"]
_PER_COMMIT: Final = 4_000_000
_ATTEMPTS: Final = 20


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a sync. ``events`` were added to bronze. ``bronze``, ``silver`` and ``gold`` say how many commits
    each table has. ``losses`` and ``changes`` are those that this sync has found."""

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
    storage_options: Mapping[str, str] | None = None,
) -> SyncReport:
    """Add the events that are new since the last sync, of all queues or of some, and bring silver and gold up to them.

    May be killed anywhere and started again: what is committed stays, what is not is done again, nothing is in the
    tables twice. Two at once are safe; one of them does its work anew. Goes up to what was the end when it began, or to
    ``max_events``. ``upto="bronze"`` or ``"silver"`` leaves the tables after that as they are; a later sync has more to
    do for them. Without ``spark`` it is the session of this process (``penstock.spark.session``).

    ``path`` is a folder, or the URL of an object store (``s3://``, ``gs://``, ``az://``). ``storage_options`` are those
    of delta-rs, which also reads the usual environment variables.

    Raises:
        InvalidOption: a folder that holds something else, an unsafe store, both queues and pattern.
        StorageError: the store cannot be read. What was committed before stays.
    """
    if max_events is not None and max_events < 1:
        raise InvalidOption(f"max_events={max_events}: give at least 1, or leave it out.")
    began = time.monotonic()
    url = url_for_executors(url)
    with Store(url) as store:
        names = store.run(queue_names(store.storage, queues, pattern))
    history = open_history(path, storage_options, create=True)
    spark = spark or session()
    added = _append_all(spark, history, url=url, queues=names, limit=max_events)
    if upto != "bronze":
        _insist(lambda: fold(spark, history))
    if upto == "gold":
        _insist(lambda: summarise(spark, history))
    _insist(lambda: compact(spark, history))
    return SyncReport(
        events=sum(commit.events for commit in added),
        bronze=history.bronze.load().number,
        silver=history.silver.load().number,
        gold=history.gold.load().number,
        losses=tuple(loss for commit in added for loss in commit.losses),
        changes=tuple(change for commit in added for change in commit.changes),
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
    storage_options: Mapping[str, str] | None = None,
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
                storage_options=storage_options,
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
    spark: SparkSession, history: History, *, url: str, queues: Sequence[str], limit: int | None
) -> list[Appended]:
    """Append in commits of some million events at most, up to where the logs ended when it began."""
    commits: list[Appended] = []
    total, more = 0, True
    while more and (limit is None or total < limit):
        share = _PER_COMMIT if limit is None else min(_PER_COMMIT, limit - total)
        added = _insist(
            lambda share=share: append(spark, history, url=url, queues=queues, limit=share)  # type: ignore[misc]
        )
        commits += [added] if added else []
        total += added.events if added else 0
        more = added is not None and added.events >= share
    return commits


def _insist(commit: Callable[[], T]) -> T:
    """Do it anew if somebody else was first. Raises ``Conflict`` if that never ends."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return commit()
        except Conflict:
            continue
    return commit()
