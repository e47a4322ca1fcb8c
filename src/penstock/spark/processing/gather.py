"""Taking the ends of a run's jobs from the store into the ledger, while they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame

from penstock.core.job import EMPTY_EXTRAS, Job
from penstock.core.lifecycle import State
from penstock.core.limits import MILLION
from penstock.spark.errors import OutputLost
from penstock.spark.processing.enqueue import Batch, has_begun, rows_of
from penstock.spark.processing.ledger import Ledger
from penstock.spark.processing.outputlease import OutputLease
from penstock.spark.processing.progress import Tally
from penstock.spark.publishing import NameTaken
from penstock.spark.store import Store
from penstock.storage.values import JobPage

# A Valkey server does nothing else during a call: letting go of 200 jobs takes it some 2 ms, reading 500
# some 3 ms.
_PAGE: Final = 500
_RELEASED: Final = 200
_MOST: Final = 50_000
_ATTEMPTS: Final = 5
MOST_NOTED: Final = 50_000


class Gathering:
    """Reads what is held for the batch's consumer, writes it down, then lets the store have it back: in that order, so
    that nothing is lost. What was written and not let go of, because the run was killed in between, is known by its
    job's id and the time of its end. ``judge`` may return a failed job for one whose result is not as expected."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        lease: OutputLease,
        batch: Batch,
        *,
        cost_name: str,
        judge: Callable[[Job], Job] = lambda job: job,
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._lease = lease
        self._batch = batch
        self._cost_name = cost_name
        self._judge = judge
        self.tally = Tally(0)
        ledger.check_held = self.check_held
        self._commit = ledger.last_commit()
        # The newest of the ends that were taken: when it was, and all jobs that ended then.
        self._newest_ms = 0
        self._newest: set[str] = set()
        # The fingerprint and state of each end that this run has written, by job, unless there are too many.
        self.ended: dict[str, tuple[str, str]] | None = {}
        # Jobs that were cancelled because the run stops have no outcome worth a row.
        self.is_stopping = False

    def look(self, expected: int) -> tuple[bool, bool]:
        """Whether as many ends as are ``expected`` are waiting to be taken, and whether any is. It is asked often, and
        jobs are read to answer it: many only when a page of them is all there is to wait for."""
        limit = expected if expected <= _PAGE else 1
        waiting = len(self._page("", limit).jobs)
        return waiting >= expected, waiting > 0

    @property
    def last_commit(self) -> int:
        """The number of the newest commit that is known of."""
        return self._commit

    def take_left(self) -> None:
        """Write down what a run that was killed has paid for, and had no time to write. Workers may be at its jobs
        still: what ends from now on is for later."""
        while self.take(is_first=True) >= _MOST:
            pass

    def take(self, *, is_first: bool = False) -> int:
        """Write down all that is held now; how many there were. ``is_first``: some may have been written before."""
        jobs: list[Job] = []
        cursor = ""
        while len(jobs) < _MOST:
            page = self._page(cursor)
            jobs += map(self._judge, page.jobs)
            if not (cursor := page.cursor):
                break
        if jobs:
            known = self._write(jobs, is_first=is_first)
            for start in range(0, len(jobs), _RELEASED):
                ids = [job.id for job in jobs[start : start + _RELEASED]]
                self._store.run(self._store.storage.release(self._batch.queue, self._batch.consumer, ids))
            # Ends that another run has written count here, too; but not those that this one has counted before.
            self._count([job for job in jobs if _end(job) not in known or not self._may_be_known(job)])
            self._note_newest(jobs)
        return len(jobs)

    def reject(self, rows: DataFrame) -> None:
        """Write down the rows of a snapshot that cannot be jobs, unless the ledger says so of them already."""
        self._commit_by(
            lambda commit, _: self._ledger.append_rejected(
                rows.where("refused IS NOT NULL"),
                task=self._batch.options.task,
                version=self._batch.options.version,
                run_id=self._batch.run_id,
                commit=commit,
            )
        )

    def _page(self, cursor: str, limit: int = _PAGE) -> JobPage:
        held = self._store.storage.held(self._batch.queue, self._batch.consumer, cursor=cursor, limit=limit)
        return self._store.run(held)

    def _write(self, jobs: list[Job], *, is_first: bool) -> set[tuple[str, int]]:
        """Those ends that were in the ledger before."""
        kept = [
            job for job in jobs if has_begun(job) and not (self.is_stopping and job.state is State.CANCELLED)
        ]
        known: set[tuple[str, int]] = set()

        def write(commit: int, is_retried: bool) -> bool:
            nonlocal known
            doubtful = [job.id for job in kept if is_first or is_retried or self._may_be_known(job)]
            known = self._ledger.ends_of(doubtful) if doubtful else set()
            fresh = [job for job in kept if _end(job) not in known]
            if known:
                # Somebody else has written ends that this run waits for.
                self.ended = None
            if fresh:
                rows = rows_of(fresh, commit=commit, cost_name=self._cost_name)
                self._ledger.append(rows, commit=commit)
                self._note_ended(rows)
            return bool(fresh)

        self._check_lease()
        if kept:
            self._commit_by(write)
        return known

    def _note_ended(self, rows: pa.Table) -> None:
        if self.ended is None or len(self.ended) + rows.num_rows > MOST_NOTED:
            self.ended = None
            return
        columns = (rows.column(name).to_pylist() for name in ("job_id", "fingerprint", "state"))
        # In the order of their ends: the newest of a job is what holds.
        for id, fingerprint, state in zip(*columns, strict=True):
            self.ended[id] = (fingerprint, state)

    def _may_be_known(self, job: Job) -> bool:
        """Ends come in the order of their time. One that is older than what was taken has been held since, maybe for
        the second time: whoever puts rows in holds those that are there, and Spark may repeat what an executor has
        done."""
        return job.finished_at_ms < self._newest_ms or job.id in self._newest

    def _note_newest(self, jobs: list[Job]) -> None:
        newest_ms = max(job.finished_at_ms for job in jobs)
        if newest_ms > self._newest_ms:
            self._newest_ms, self._newest = newest_ms, set()
        self._newest.update(job.id for job in jobs if job.finished_at_ms == self._newest_ms)

    def _commit_by(self, write: Callable[[int, bool], bool]) -> None:
        """Make the next commit, if there is anything to write. Its number can be had once, so that a run that was
        away and does not know it yet cannot write beside another: one of them finds it taken, and looks again."""
        for attempt in range(_ATTEMPTS):
            self._check_lease()
            try:
                self._commit += write(self._commit + 1, attempt > 0)
            except NameTaken:
                self._commit = self._ledger.last_commit()
            else:
                return
        raise self._lost()

    def _check_lease(self) -> None:
        if self._lease.is_lost:
            raise self._lost()

    def check_held(self) -> None:
        """Ask the store whether the output is still ours.

        Raises:
            OutputLost: another run has taken over.
        """
        if not self._store.run(self._lease.charge.is_held(self._store.storage)):
            raise self._lost()

    def _lost(self) -> OutputLost:
        return OutputLost(
            f"another run has taken over {self._ledger.output}: this one was away for longer than its lease. What "
            "it had not written is held in the store, and the other run takes it."
        )

    def _count(self, jobs: list[Job]) -> None:
        tally = self.tally
        for job in jobs:
            is_reused = job.finished_at_ms < self._batch.began_at_ms
            match job.state:
                case State.COMPLETED if is_reused:
                    tally.reused += 1
                case State.COMPLETED:
                    tally.completed += 1
                case State.FAILED if has_begun(job):
                    tally.failed += 1
                case _:
                    tally.cancelled += 1
            if not is_reused:
                used = (job.extras or EMPTY_EXTRAS).usage or {}
                tally.cost += used.get(self._cost_name, 0) / MILLION


def _end(job: Job) -> tuple[str, int]:
    return job.id, job.finished_at_ms
