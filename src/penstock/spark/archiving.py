"""``penstock.spark.archive``: finished jobs, moved from the store into a table.

What is to move is first written to a journal beside the table, a folder of this call, read back and compared with the
store; then each job that has not changed since is freed in the store, and its row goes from the journal into the table,
in one Spark job. So a job is in the store or in the table, never in both, and one that was retried meanwhile stays.
What a call that was killed leaves in its journal, the next one finishes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import PurePath
from typing import Final

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from penstock.core.duration import Duration, milliseconds
from penstock.core.ids import uuid7
from penstock.core.lifecycle import State
from penstock.core.names import check_queue
from penstock.errors import InvalidOption
from penstock.spark.archivejournal import Journal, journal_path
from penstock.spark.archivetable import ArchiveTable
from penstock.spark.errors import ArchiveTorn, OutputLost
from penstock.spark.freeing import COLUMNS, COMPARED, Source, comparing, freeing, sound
from penstock.spark.heldjob import Charge
from penstock.spark.store import Store, url_for_executors
from penstock.spark.tables.outputlease import OutputLease, output_identity

__all__ = ["Archived", "archive"]

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
