"""Copies of jobs on their way from the store into a table of archived jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import reduce
from hashlib import blake2b
from pathlib import PurePath
from typing import Final
from urllib.parse import urlsplit

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.core.lifecycle import State
from penstock.core.names import check_queue, uuid7
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidInput, InvalidOption
from penstock.spark.archive_tasks import COLUMNS, COMPARED, Source, comparing, freeing, sound
from penstock.spark.deltaoutput import DeltaOutput, is_delta_table
from penstock.spark.driver_lease import Charge
from penstock.spark.errors import ArchiveTorn, OutputLost
from penstock.spark.options import namespace_of
from penstock.spark.processing.outputlease import OutputLease, output_identity
from penstock.spark.publishing import (
    STAGING,
    append_files,
    append_table,
    commit_name,
    last_commit,
    list_folder,
    refuse_pattern,
    remove_folder,
)
from penstock.spark.store import Store, url_for_executors
from penstock.spark.uncached_read import fresh_path, fresh_table

# Spark passes over names that begin with an underscore.
_FOLDER: Final = "_penstock_archive"
_SHARED: Final = "shared"


class Journal:
    """The copies of one call, in a folder of its own at ``path``: a call that was away for so long that another has
    taken its place writes over nobody's. Made when the output is held; what is there then was left by calls before.

    By Spark Connect, where folders are not to be seen from here, all calls share one.
    """

    def __init__(self, spark: SparkSession, path: str) -> None:
        names = list_folder(spark, path)
        self._spark = spark
        self._left = [f"{path}/{name}" for name in ([_SHARED] if names is None else names)]
        self.folder = f"{path}/{_SHARED if names is None else uuid7()}"

    def write(self, rows: DataFrame) -> None:
        rows.write.mode("overwrite").parquet(self.folder)

    def read(self) -> DataFrame:
        return self._spark.read.schema(COLUMNS).parquet(self.folder)

    def clear(self) -> None:
        self._remove(self.folder)

    def read_left(self) -> DataFrame | None:
        """What calls before this one have left; ``None`` if there is nothing. Two of them may have copied one job."""
        tables = (ArchiveTable(self._spark, folder, format="parquet").read() for folder in self._left)
        found = [table for table in tables if table is not None]
        return reduce(DataFrame.unionByName, found) if found else None

    def clear_left(self) -> None:
        for folder in self._left:
            self._remove(folder)

    def _remove(self, folder: str) -> None:
        if folder.endswith(f"/{_SHARED}"):
            self._spark.createDataFrame([], COLUMNS).write.mode("overwrite").parquet(folder)
        else:
            remove_folder(self._spark, folder)


def journal_path(table: ArchiveTable, url: str, queue: str, scratch: str | None) -> str:
    """Where the journals of a store's queue are: the same at every call, whatever password the URL has.

    Raises:
        InvalidOption: the output is a table, and ``scratch`` was not given.
    """
    if scratch is None and (not table.is_path or table.is_beyond_spark):
        raise InvalidOption(
            "the journal of an archive needs a folder that lasts and that Spark can write to, and the output "
            f"{table.output!r} is not one. Give scratch='s3://...' or the like, the same at every call."
        )
    parts = urlsplit(url)
    named = "\n".join(
        (parts.hostname or "", str(parts.port), parts.path, namespace_of(url), queue, table.output)
    )
    name = blake2b(named.encode(), digest_size=8).hexdigest()
    root = scratch or f"{table.output.rstrip('/')}/{_FOLDER}"
    return f"{root.rstrip('/')}/{name}"


# A table of archived jobs, at a path or in the catalog.


_TABLE: Final = "table:"


class ArchiveTable:
    """Rows with ``COLUMNS``, at a path or in a table of the catalog (``table:db.archive``)."""

    def __init__(self, spark: SparkSession, output: str | PurePath, *, format: str) -> None:
        self._spark = spark
        self._format = format
        self.is_path = not str(output).startswith(_TABLE)
        self.output = str(output).removeprefix(_TABLE)
        self._commits = 0
        if self.is_path:
            refuse_pattern(self.output)
        self._delta: DeltaOutput | None = None
        if self.is_path and format.lower() == "delta":
            self._delta = DeltaOutput(spark, self.output, ranged="finished_at", stats=("queue", "state"))

    @property
    def is_beyond_spark(self) -> bool:
        """Tell whether it is in an object store that Spark may have no jar for."""
        return self._delta is not None and not self._delta.is_local

    def read(self) -> DataFrame | None:
        """All rows; ``None`` if there is no table yet."""
        if self._delta is not None:
            schema = self._delta.schema()
            return None if schema is None else self._delta.read(schema)
        if not self.is_path:
            return fresh_table(self._spark, self.output)
        return fresh_path(self._spark, self.output, self._spark.read.format(self._format).load)

    def check(self) -> None:
        """Raises ``InvalidInput`` if there is something else."""
        if self.is_path and self._delta is None and is_delta_table(self.output):
            raise InvalidInput(f"{self.output} is a Delta table. Give format='delta', or another output.")
        found = self.read()
        missing = (
            [] if found is None else [name for name in COLUMNS.fieldNames() if name not in found.columns]
        )
        if found is not None and missing:
            raise InvalidInput(
                f"{self.output} holds something else than archived jobs: it has no column {missing[0]!r}. Its columns "
                f"are: {', '.join(found.columns)}. Give another output."
            )

    def take_over(self) -> None:
        """For whoever has just become the holder of the output: what calls before had not put in place is removed, and
        commits are counted on from those that are there."""
        if self._delta is not None:
            self._commits = self._delta.load().number
            return
        if not self.is_path:
            return
        remove_folder(self._spark, f"{self.output.rstrip('/')}/{STAGING}")
        self._commits = last_commit(list_folder(self._spark, self.output) or ())

    def append(self, rows: DataFrame) -> None:
        """Each file of it appears as a whole, or not at all.

        Raises:
            NameTaken: another holder has made this commit, which is the one after those that were there when the output
                was taken over. Nothing was put in place.
        """
        if self._delta is not None:
            self._delta.append(rows, number=self._commits + 1)
            self._commits += 1
        elif self.is_path:
            name = commit_name(self._commits + 1)
            append_files(rows, self.output, format=self._format, name=name)
            self._commits += 1
        else:
            append_table(rows, self.output, format=self._format)


# ``penstock.spark.archive``: finished jobs, moved from the store into a table.
#
# What is to move is first written to a journal beside the table, a folder of this call, read back and
# compared with the store; then each job that has not changed since is freed in the store, and its row
# goes from the journal into the table, in one Spark job. So a job is in the store or in the table, never
# in both, and one that was retried meanwhile stays. What a call that was killed leaves in its journal,
# the next one finishes.


_KEY: Final = ["queue", "id", "incarnation", "finished_at"]
_FINISHED: Final = ("completed", "failed", "cancelled")


class Archived(msgspec.Struct, frozen=True, kw_only=True):
    """``archived`` jobs are in the table and no longer in the store; of these ``recovered`` were left by a call that
    was killed. ``kept`` stay in the store: they were retried meanwhile, or another consumer holds them."""

    queue: str
    output: str
    archived: int
    kept: int
    recovered: int
    seconds: float


def archive(
    spark: SparkSession,
    url: str,
    queue: str,
    output: str | PurePath,
    *,
    older_than: Duration = "7d",
    states: Sequence[str] = _FINISHED,
    consumer: str = "",
    format: str = "parquet",
    scratch: str | None = None,
) -> Archived:
    """Move the jobs of ``queue`` that ended longer ago than ``older_than`` into ``output``, a path or a table of the
    catalog (``table:db.archive``), which is appended to: all columns of ``kind=jobs``, with payload and result.

    Jobs that ``consumer`` holds are let go of; those that another one holds are not touched. ``scratch`` is where the
    journal is kept, for an output that is a table: a place that is there again at the next call. Can be repeated.

    Raises:
        InvalidOption, InvalidInput: states that are not finished, a table without ``scratch``, an output that holds
            something else.
        OutputBusy: another call is writing to the output.
        OutputLost: this call was away for so long that another has taken its place.
        ArchiveTorn: what was written is not what the store has. Nothing was freed.
        StorageError: the store does not answer.
    """
    check_queue(queue)
    _check_states(states)
    url = url_for_executors(url)
    older_ms = milliseconds(older_than, what="older_than")
    table = ArchiveTable(spark, output, format=format)
    table.check()
    path = journal_path(table, url, queue, scratch)
    began_at = time.monotonic()
    with OutputLease(url, output_identity(table.output, is_path=table.is_path), uuid7()) as lease:
        table.take_over()
        source = Source(url=url, queue=queue, consumer=consumer)
        move = _Move(spark, table, Journal(spark, path), source, lease.charge)
        recovered = move.finish_left()
        before = datetime.now(UTC) - timedelta(milliseconds=older_ms)
        move.begin(states, before)
        archived, kept = move.finish()
    return Archived(
        queue=queue,
        output=table.output,
        archived=recovered + archived,
        kept=kept,
        recovered=recovered,
        seconds=time.monotonic() - began_at,
    )


class _Move:
    """From the store to the journal (``begin``), from the journal to the table (``finish``)."""

    def __init__(
        self, spark: SparkSession, table: ArchiveTable, journal: Journal, source: Source, charge: Charge
    ) -> None:
        self._spark = spark
        self._table = table
        self._journal = journal
        self._source = source
        self._charge = charge

    def begin(self, states: Sequence[str], before: datetime) -> None:
        options = {
            "url": self._source.url,
            "queue": self._source.queue,
            "kind": "jobs",
            "state": ",".join(states),
        }
        jobs = self._spark.read.format("penstock").schema(COLUMNS).options(**options).load()
        self._journal.write(jobs.where(F.col("finished_at") <= F.lit(before)))

    def finish_left(self) -> int:
        """How many jobs were archived that calls which were killed have left in their journals."""
        rows = self._journal.read_left()
        if rows is None:
            return 0

        def todo() -> DataFrame:
            # A torn row is passed over: its job is in the store, and is copied anew.
            return self._without_archived(rows.dropDuplicates(_KEY)).mapInArrow(sound(self._source), COLUMNS)

        archived, _ = self._publish(todo(), left=todo)
        self._journal.clear_left()
        return archived

    def finish(self) -> tuple[int, int]:
        """How many of the rows that ``begin`` has copied were archived, and how many are kept in the store."""
        self._check_held()
        rows = self._journal.read()
        done = self._publish(rows, left=lambda: self._without_archived(rows))
        self._journal.clear()
        return done

    def _publish(self, rows: DataFrame, left: Callable[[], DataFrame]) -> tuple[int, int]:
        """``left`` gives what is not in the table: made anew when that has grown, not from ``rows``. Where a query has
        the files of a folder as they were and as they are, Spark may take the one for the other."""
        count = self._compare(rows)
        if not count:
            return 0, 0
        self._check_held()
        try:
            self._table.append(rows.mapInArrow(freeing(self._source), COLUMNS))
        except Exception:
            # Another holder has made this commit, or has cleared away what it was made from.
            self._check_held()
            raise
        kept = left().count()
        if kept and self._compared(left()).get("gone", 0):
            raise ArchiveTorn(
                f"jobs were freed that are not in {self._table.output}. They are in the journal: call archive again, "
                "which puts them there."
            )
        return count - kept, kept

    def _check_held(self) -> None:
        """A call that was away may have lost the output without knowing. Raises ``OutputLost``."""
        with Store(self._source.url) as store:
            if store.run(self._charge.is_held(store.storage)):
                return
        raise OutputLost(
            f"this call was away for longer than its lease lasts, and another has taken over {self._table.output}. "
            "What it has freed is in the table or in a journal: call archive again, which puts it there."
        )

    def _compare(self, rows: DataFrame) -> int:
        """How many rows there are. Raises ``ArchiveTorn`` if one differs from its job, which is still what it was; the
        journal is empty then, so that the next call begins anew."""
        verdicts = self._compared(rows)
        if torn := verdicts.get("torn", 0):
            self._journal.clear()
            raise ArchiveTorn(
                f"{torn} jobs in {self._journal.folder} are not as they are in the store. Nothing was freed or "
                "archived by this call."
            )
        return sum(verdicts.values())

    def _compared(self, rows: DataFrame) -> dict[str, int]:
        counts: dict[str, int] = {}
        for row in rows.mapInArrow(comparing(self._source), COMPARED).collect():
            counts[row["verdict"]] = counts.get(row["verdict"], 0) + row["count"]
        return counts

    def _without_archived(self, rows: DataFrame) -> DataFrame:
        archived = self._table.read()
        if archived is None:
            return rows
        # By the time of its end as well: in a store that was emptied, lives are counted from one again.
        known = archived.select(*_KEY)
        return rows.join(known, _KEY, "left_anti").select(*COLUMNS.fieldNames())


def _check_states(states: Sequence[str]) -> None:
    finished = {State(name) for name in _FINISHED}
    wrong = [state for state in ([states] if isinstance(states, str) else states) if state not in finished]
    if wrong or not states or isinstance(states, str):
        raise InvalidOption(
            f"states={states!r} is not valid: only finished jobs can be archived. Give a list of some of "
            f"{', '.join(_FINISHED)}."
        )
