"""Updates of a history: ``sync`` once, ``follow`` repeatedly. ``tables`` returns the tables as DataFrames.

A sync also merges small files of bronze, and removes files that are no longer needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import Final, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar, Unpack

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from penstock.core.units import milliseconds
from penstock.errors import InvalidOption, StorageError
from penstock.spark.delta import Conflict, DataFile, Snapshot, Table
from penstock.spark.history.bronze import Appended, append, queue_names
from penstock.spark.history.gold import summarise
from penstock.spark.history.silver import fold
from penstock.spark.history.steps import fold as fold_steps
from penstock.spark.history.tables import EpochChange, History, Loss, fold_state, open_history
from penstock.spark.local import session
from penstock.spark.store import Store, url_for_executors
from penstock.spark.tasks import Batches, collected, each, numbered


class Tables(NamedTuple):
    """``bronze``: events. ``silver``: jobs. ``gold``: measures by period and name. ``causes``: failures by class.
    ``steps``: recorded steps of jobs."""

    bronze: DataFrame
    silver: DataFrame
    gold: DataFrame
    causes: DataFrame
    steps: DataFrame


def tables(
    spark: SparkSession, path: str | Path, *, storage_options: Mapping[str, str] | None = None
) -> Tables:
    """Return the newest version of each table. It stays readable for a week after a sync has replaced it.

    Raises:
        InvalidOption: the folder is not a history.
    """
    history = open_history(path, storage_options, create=False)
    return Tables(*(_frame(spark, table) for table in history.all))


def _frame(spark: SparkSession, table: Table) -> DataFrame:
    schema, files = from_arrow_schema(table.schema), table.load().files
    if not files:
        return spark.createDataFrame([], schema)
    if table.folder.is_local:
        return spark.read.schema(schema).parquet(*(f"{table.folder.root}/{file.path}" for file in files))
    # For an object store, Spark needs a jar; delta-rs does not.
    return numbered(spark, files).mapInArrow(each(files, partial(_read, table)), schema)


def _read(table: Table, file: DataFile) -> Batches:
    yield from table.read(file).to_batches(20_000)


# Compaction and cleaning.


_MANY: Final = 32
_SMALL: Final = 100_000
_FULL: Final = 1_000_000
_EVERY_S: Final = 86_400
_ORDER: Final = [(name, "ascending") for name in ("queue", "epoch", "seq")]


def compact(spark: SparkSession, history: History) -> None:
    """Merge small files of bronze once there are many. Once a day, remove files that are no longer needed.

    Raises:
        Conflict: another sync committed first. Nothing was committed.
    """
    base = history.bronze.load()
    piles = [pile for pile in _piles(history, base) if len(pile) > 1]
    if sum(map(len, piles)) >= _MANY:
        rewrite = partial(_rewrite, history.bronze)
        made = collected(numbered(spark, piles), each(piles, rewrite), DataFile)
        gone = [file for pile in piles for file in pile]
        history.bronze.commit(base, add=made, remove=gone, state=base.state or "{}", is_new=False)
    for table in history.all:
        _clean(table)


def _clean(table: Table) -> None:
    base = table.load()
    if base.number and _is_due(base):
        table.vacuum(base)


def _is_due(base: Snapshot) -> bool:
    """Return whether the table has commits older than a day, and no cleaning since."""
    assert base.table is not None
    horizon = (time.time() - _EVERY_S) * 1000
    recent = [commit for commit in base.table.history(100) if commit["timestamp"] > horizon]
    return len(recent) < base.table.version() + 1 and not any(
        str(commit.get("operation")).startswith("VACUUM") for commit in recent
    )


def _piles(history: History, base: Snapshot) -> Iterator[list[DataFile]]:
    """Yield groups of small files to merge. Do not mix files that a table has read with files that it has not read."""
    read = [fold_state(table.load()).bronze for table in history.all[1:]]
    small = [file for file in base.files if file.rows < _SMALL]
    alike: dict[tuple[bool, ...], list[DataFile]] = {}
    for file in small:
        alike.setdefault(tuple(file.number <= number for number in read), []).append(file)
    for files in alike.values():
        pile: list[DataFile] = []
        for file in files:
            pile.append(file)
            if sum(member.rows for member in pile) >= _FULL:
                yield pile
                pile = []
        if pile:
            yield pile


def _rewrite(bronze: Table, pile: Sequence[DataFile]) -> Iterator[DataFile]:
    events = pa.concat_tables(bronze.read(file) for file in pile).sort_by(_ORDER)
    yield bronze.write(events, max(file.number for file in pile))


# Sync.


T = TypeVar("T")
Layer: TypeAlias = Literal["bronze", "silver", "gold"]
_PER_COMMIT: Final = 4_000_000
_ATTEMPTS: Final = 20


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a sync. ``events`` is the number of events that it added to bronze. ``bronze``, ``silver`` and
    ``gold`` are the numbers of commits to each table. ``losses`` and ``changes`` are those that this sync found."""

    events: int
    bronze: int
    silver: int
    gold: int
    losses: tuple[Loss, ...] = ()
    changes: tuple[EpochChange, ...] = ()
    seconds: float = 0


class SyncOptions(TypedDict, total=False):
    """Options of ``sync``."""

    queues: Sequence[str] | None
    pattern: str | None
    spark: SparkSession | None
    max_events: int | None
    upto: Layer
    storage_options: Mapping[str, str] | None


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
    """Add the new events of all queues, or of some, and update silver and gold.

    A sync can be killed at any time. The next one continues from the last commit, and adds nothing twice. Concurrent
    syncs are safe; one of them repeats its work. A sync reads up to the end of the logs at its start, or up to
    ``max_events``. ``upto="bronze"`` or ``"silver"`` leaves the later tables to another sync. ``spark`` defaults to the
    session of this process (``penstock.spark.session``).

    ``path`` is a folder, or the URL of an object store (``s3://``, ``gs://``, ``az://``). ``storage_options`` are
    passed to delta-rs, which also reads the usual environment variables.

    Raises:
        InvalidOption: the folder is not a history, the object store is unsafe, or queues and pattern are both set.
        StorageError: the store cannot be read. Earlier commits stay.
    """
    if max_events is not None and max_events < 1:
        raise InvalidOption(f"max_events must be >= 1, got {max_events}. Leave it out for no limit.")
    began = time.monotonic()
    url = url_for_executors(url)
    with Store(url) as store:
        names = store.run(queue_names(store.storage, queues, pattern))
    history = open_history(path, storage_options, create=True)
    spark = spark or session()
    added = _append_all(spark, history, url=url, queues=names, limit=max_events)
    folds = {"bronze": (), "silver": (fold, fold_steps), "gold": (fold, fold_steps, summarise)}
    for fold_slice in folds[upto]:
        while _retry(partial(fold_slice, spark, history)):
            pass
    _retry(lambda: compact(spark, history))
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
    every: str | float = "30s",
    stop: Event | None = None,
    on_sync: Callable[[SyncReport], object] | None = None,
    **options: Unpack[SyncOptions],
) -> None:
    """Sync repeatedly, with the options of ``sync``, until ``stop`` is set. Any thread may set it.

    The pause is ``every``, but at least as long as the previous sync took, so that syncs use at most half of the time.
    If the store cannot be read, the next turn tries again.

    Raises:
        InvalidOption: as for ``sync``, in the first turn.
    """
    pause = milliseconds(every, what="every") / 1000
    stop = stop or Event()
    options["spark"] = options.get("spark") or session()
    is_first = True
    while not stop.is_set():
        began = time.monotonic()
        try:
            report = sync(url, path, **options)
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
    """Append all new events, in commits of up to ``_PER_COMMIT`` events."""
    commits: list[Appended] = []
    total, more = 0, True
    while more and (limit is None or total < limit):
        share = _PER_COMMIT if limit is None else min(_PER_COMMIT, limit - total)
        added = _retry(
            lambda share=share: append(spark, history, url=url, queues=queues, limit=share)  # type: ignore[misc]
        )
        commits += [added] if added else []
        total += added.events if added else 0
        more = added is not None and added.events >= share
    return commits


def _retry(commit: Callable[[], T]) -> T:
    """Retry a commit when another sync was first. Raise ``Conflict`` after too many attempts."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return commit()
        except Conflict:
            continue
    return commit()
