"""``penstock.spark.archive`` moves finished jobs from the store into a table.

A call first copies the jobs to a journal, a folder beside the table, and compares the copies with the store. Then one
Spark job removes each unchanged job from the store, and appends its copy to the table. So a job is in the store or in
the table, never in both, and a job that was retried meanwhile stays in the store. If a call is killed, the next one
finishes its journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from penstock.errors import ArchiveTorn, InvalidInput, InvalidOption, OutputLost
from penstock.spark.deltaoutput import DeltaOutput, is_delta_table
from penstock.spark.driver_lease import LeaseCheck, OutputLease, output_identity
from penstock.spark.operate import COLUMNS, ArchiveSource, count_verdicts, drop_torn, remove_jobs
from penstock.spark.publishing import (
    STAGING,
    append_files,
    append_table,
    commit_name,
    fresh_path,
    fresh_table,
    last_commit,
    list_folder,
    refuse_pattern,
    remove_folder,
)
from penstock.spark.schemas import namespace_of
from penstock.spark.store import Store, url_for_executors

# Spark ignores names that begin with an underscore.
_FOLDER: Final = "_penstock_archive"
_SHARED: Final = "shared"
_TABLE: Final = "table:"
_KEY: Final = ["queue", "id", "incarnation", "finished_at"]
_FINISHED: Final = ("completed", "failed", "cancelled")


class Journal:
    """The copies of one call, in a folder of their own below ``path``. So a call that has lost its lease cannot
    overwrite the copies of another call.

    Create a journal only while you hold the output: folders that exist at that time are left over from earlier calls.
    With Spark Connect, which cannot list folders, all calls share one folder.
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
        """Return the copies of earlier calls; ``None`` if there are none. Two calls may have copied the same job."""
        tables = (ArchiveTable(self._spark, folder, format="parquet").read() for folder in self._left)
        journals = [table for table in tables if table is not None]
        return reduce(DataFrame.unionByName, journals) if journals else None

    def clear_left(self) -> None:
        for folder in self._left:
            self._remove(folder)

    def _remove(self, folder: str) -> None:
        if folder.endswith(f"/{_SHARED}"):
            self._spark.createDataFrame([], COLUMNS).write.mode("overwrite").parquet(folder)
        else:
            remove_folder(self._spark, folder)


def journal_path(table: ArchiveTable, url: str, queue: str, scratch: str | None) -> str:
    """Return the folder for the journals of a queue. It is the same for every call, and does not depend on the password
    in the URL.

    Raises:
        InvalidOption: the output needs ``scratch``.
    """
    if scratch is None and (not table.is_path or table.is_beyond_spark):
        raise InvalidOption(
            "the journal of an archive needs a permanent folder that Spark can write to, and the output "
            f"{table.output!r} is not one. Set scratch='s3://...' or similar, the same at every call."
        )
    parts = urlsplit(url)
    identity = "\n".join(
        (parts.hostname or "", str(parts.port), parts.path, namespace_of(url), queue, table.output)
    )
    name = blake2b(identity.encode(), digest_size=8).hexdigest()
    root = scratch or f"{table.output.rstrip('/')}/{_FOLDER}"
    return f"{root.rstrip('/')}/{name}"


class ArchiveTable:
    """A table of archived jobs with ``COLUMNS``, at a path or in the catalog (``table:db.archive``)."""

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
        """Return whether the table is in an object store that Spark may need a jar for."""
        return self._delta is not None and not self._delta.is_local

    def read(self) -> DataFrame | None:
        """Return all rows; ``None`` if the table does not exist yet."""
        if self._delta is not None:
            schema = self._delta.schema()
            return None if schema is None else self._delta.read(schema)
        if not self.is_path:
            return fresh_table(self._spark, self.output)
        return fresh_path(self._spark, self.output, self._spark.read.format(self._format).load)

    def check(self) -> None:
        """Raise ``InvalidInput`` if the output holds something other than archived jobs."""
        if self.is_path and self._delta is None and is_delta_table(self.output):
            raise InvalidInput(
                f"{self.output} is a Delta table. Set format='delta', or choose another output."
            )
        table = self.read()
        missing = (
            [] if table is None else [name for name in COLUMNS.fieldNames() if name not in table.columns]
        )
        if table is not None and missing:
            raise InvalidInput(
                f"{self.output} is not a table of archived jobs: it has no column {missing[0]!r}. Its columns are: "
                f"{', '.join(table.columns)}. Choose another output."
            )

    def take_over(self) -> None:
        """Remove unfinished files of earlier calls, and continue their commit numbers. Call it on acquiring the
        output."""
        if self._delta is not None:
            self._commits = self._delta.load().number
            return
        if not self.is_path:
            return
        remove_folder(self._spark, f"{self.output.rstrip('/')}/{STAGING}")
        self._commits = last_commit(list_folder(self._spark, self.output) or ())

    def append(self, rows: DataFrame) -> None:
        """Append rows. Each file appears as a whole, or not at all.

        Raises:
            NameTaken: another holder has made this commit. Nothing was appended.
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


class Archived(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a call. ``archived`` jobs moved from the store to the table, among them ``recovered`` jobs that
    killed calls had copied. ``kept`` jobs stay in the store, because they were retried meanwhile or another consumer
    holds them."""

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
    """Move the jobs of ``queue`` that finished more than ``older_than`` ago into ``output``, a path or a catalog table
    (``table:db.archive``). The rows have all columns of ``kind=jobs``, with payload and result.

    Jobs that only ``consumer`` holds are released; jobs that another consumer holds stay. ``scratch`` is the folder for
    the journal if the output is a table; pass the same one to every call. You can repeat the call.

    Raises:
        InvalidOption, InvalidInput: ``states`` has one that is not finished, the output needs ``scratch``, or it
            holds something else.
        OutputBusy: another call is writing to the output.
        OutputLost: this call was away for so long that another one took over.
        ArchiveTorn: the copies differ from the store. Nothing was removed.
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
        source = ArchiveSource(url=url, queue=queue, consumer=consumer)
        move = _Transfer(spark, table, Journal(spark, path), source, lease.lease_check)
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


@dataclass(frozen=True)
class _Transfer:
    """A transfer from the store to the journal (``begin``), and from there to the table (``finish``)."""

    spark: SparkSession
    table: ArchiveTable
    journal: Journal
    source: ArchiveSource
    lease_check: LeaseCheck

    def begin(self, states: Sequence[str], before: datetime) -> None:
        options = {
            "url": self.source.url,
            "queue": self.source.queue,
            "kind": "jobs",
            "state": ",".join(states),
        }
        jobs = self.spark.read.format("penstock").schema(COLUMNS).options(**options).load()
        self.journal.write(jobs.where(F.col("finished_at") <= F.lit(before)))

    def finish_left(self) -> int:
        """Archive the jobs in the journals of killed calls, and return their number."""
        rows = self.journal.read_left()
        if rows is None:
            return 0

        def todo() -> DataFrame:
            # Skip torn rows: their jobs are still in the store, and are copied again.
            return self._without_archived(rows.dropDuplicates(_KEY)).mapInArrow(
                drop_torn(self.source), COLUMNS
            )

        archived, _ = self._publish(todo(), left=todo)
        self.journal.clear_left()
        return archived

    def finish(self) -> tuple[int, int]:
        """Archive the copied jobs. Return how many were archived, and how many stay in the store."""
        self._check_held()
        rows = self.journal.read()
        done = self._publish(rows, left=lambda: self._without_archived(rows))
        self.journal.clear()
        return done

    def _publish(self, rows: DataFrame, left: Callable[[], DataFrame]) -> tuple[int, int]:
        """Move the rows into the table. ``left`` returns those that are not in the table yet. It builds a new query
        each time: if one query reads two versions of a folder, Spark may mix them up."""
        count = self._compare(rows)
        if not count:
            return 0, 0
        self._check_held()
        try:
            self.table.append(rows.mapInArrow(remove_jobs(self.source), COLUMNS))
        except Exception:
            # Another holder may have made this commit, or removed its staged files.
            self._check_held()
            raise
        kept = left().count()
        if kept and count_verdicts(left(), self.source)["gone"]:
            raise ArchiveTorn(
                f"some jobs that were removed from the store are not in {self.table.output}. They are in the journal: "
                "call archive again to move them."
            )
        return count - kept, kept

    def _check_held(self) -> None:
        """Raise ``OutputLost`` if another call has taken over the output."""
        with Store(self.source.url) as store:
            if store.run(self.lease_check.is_held(store.storage)):
                return
        raise OutputLost(
            f"this call was away for longer than its lease, and another has taken over {self.table.output}. The "
            "jobs that it removed are in the table or in a journal: call archive again to move them."
        )

    def _compare(self, rows: DataFrame) -> int:
        """Return the number of rows. Raise ``ArchiveTorn`` if one differs from its job although the job has not
        changed; clear the journal first, so that the next call starts over."""
        verdicts = count_verdicts(rows, self.source)
        if torn := verdicts["torn"]:
            self.journal.clear()
            raise ArchiveTorn(
                f"{torn} jobs in {self.journal.folder} differ from the store. This call removed and archived nothing."
            )
        return sum(verdicts.values())

    def _without_archived(self, rows: DataFrame) -> DataFrame:
        archived = self.table.read()
        if archived is None:
            return rows
        # Compare the finish time as well: a store that was emptied numbers incarnations from 1 again.
        known = archived.select(*_KEY)
        return rows.join(known, _KEY, "left_anti").select(*COLUMNS.fieldNames())


def _check_states(states: Sequence[str]) -> None:
    finished = {State(name) for name in _FINISHED}
    wrong = [state for state in ([states] if isinstance(states, str) else states) if state not in finished]
    if wrong or not states or isinstance(states, str):
        raise InvalidOption(
            f"states must be a list of {', '.join(_FINISHED)}, because only finished jobs can be archived, "
            f"got {states!r}."
        )
