"""Collection of a run's finished jobs from the store into the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyspark.sql.types as T
from pyspark.sql import DataFrame

from penstock.core.job import EMPTY_EXTRAS, Job
from penstock.core.lifecycle import State
from penstock.core.limits import MILLION
from penstock.core.outcome import Failure
from penstock.errors import OutputLost
from penstock.spark.cells import arrow_schema, json_text
from penstock.spark.driver_lease import OutputLease
from penstock.spark.processing.enqueue import KEY_HEADER, Batch, has_begun
from penstock.spark.processing.ledger import COLUMNS, Ledger
from penstock.spark.processing.progress import Tally
from penstock.spark.processing.snapshot import fingerprint_in, former_fingerprint
from penstock.spark.publishing import NameTaken
from penstock.spark.store import Store
from penstock.storage.values import JobPage

# A Valkey server is blocked during a call: releasing 200 jobs takes about 2 ms,
# reading 500 about 3 ms.
_PAGE: Final = 500
_RELEASED: Final = 200
_MOST: Final = 50_000
_ATTEMPTS: Final = 5
MAX_REMEMBERED: Final = 50_000
ROWS: Final = arrow_schema(T.StructType([*COLUMNS, T.StructField("key_json", T.StringType())]))


class Collector:
    """Reads finished jobs that the store holds for the batch's consumer, appends them to the ledger, and only then
    releases them, so that none is lost. If the run is killed in between, the next one recognises jobs in the ledger
    by their id and finish time. ``judge`` may turn a completed job into a failed one."""

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
        # The newest finish time so far, and the jobs that finished at that time.
        self._newest_ms = 0
        self._newest: set[str] = set()
        # Fingerprint and state by job of all rows this run has written; None if there are too many.
        self.ended: dict[str, tuple[str, str]] | None = {}
        # Jobs that are cancelled because the run stops get no row.
        self.is_stopping = False

    def poll(self, expected: int) -> tuple[bool, bool]:
        """Return whether all ``expected`` jobs are ready to collect, and whether any is. Read more than one
        job only if a page covers all of ``expected``, because this is called often."""
        limit = expected if expected <= _PAGE else 1
        waiting = len(self._page("", limit).jobs)
        return waiting >= expected, waiting > 0

    @property
    def last_commit(self) -> int:
        """Return the number of the newest known commit."""
        return self._commit

    def collect_left(self) -> None:
        """Collect the finished jobs of a run that was killed. Workers may still be running its other jobs, which are
        collected later."""
        while self.collect(is_first=True) >= _MOST:
            pass

    def collect(self, *, is_first: bool = False) -> int:
        """Append all held jobs to the ledger and return their number. With ``is_first``, it may already have some."""
        jobs: list[Job] = []
        cursor = ""
        while len(jobs) < _MOST:
            page = self._page(cursor)
            jobs += map(self._judged, page.jobs)
            if not (cursor := page.cursor):
                break
        if jobs:
            known = self._write(jobs, is_first=is_first)
            for start in range(0, len(jobs), _RELEASED):
                ids = [job.id for job in jobs[start : start + _RELEASED]]
                self._store.run(self._store.storage.release(self._batch.queue, self._batch.consumer, ids))
            # Count rows that another run wrote, but not those that this run has already counted.
            self._count(
                [job for job in jobs if _finish_time(job) not in known or not self._may_be_known(job)]
            )
            self._note_newest(jobs)
        return len(jobs)

    def reject(self, rows: DataFrame) -> None:
        """Append the rows that cannot become jobs, unless the ledger already lists them as rejected."""
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

    def _judged(self, job: Job) -> Job:
        """Return the job, marked as failed if its result does not pass."""
        job = self._judge(job)
        if job.state is not State.COMPLETED or not job.result:
            return job
        why = self._ledger.complaint(json_text(job.result) or "null")
        if not why:
            return job
        return msgspec.structs.replace(job, state=State.FAILED, failure=Failure("ResultTooLarge", why))

    def _write(self, jobs: list[Job], *, is_first: bool) -> set[tuple[str, int]]:
        """Append the jobs, and return those that were already in the ledger."""
        recorded = [
            job for job in jobs if has_begun(job) and not (self.is_stopping and job.state is State.CANCELLED)
        ]
        known: set[tuple[str, int]] = set()

        def write(commit: int, is_retried: bool) -> bool:
            nonlocal known
            suspects = [job.id for job in recorded if is_first or is_retried or self._may_be_known(job)]
            known = self._ledger.finish_times(suspects) if suspects else set()
            fresh = [job for job in recorded if _finish_time(job) not in known]
            if known:
                # Another run has written rows that this one waits for.
                self.ended = None
            if fresh:
                rows = rows_of(fresh, commit=commit, cost_name=self._cost_name)
                self._ledger.append(rows, commit=commit)
                self._note_ended(rows)
            return bool(fresh)

        self._check_lease()
        if recorded:
            self._commit_by(write)
        return known

    def _note_ended(self, rows: pa.Table) -> None:
        if self.ended is None or len(self.ended) + rows.num_rows > MAX_REMEMBERED:
            self.ended = None
            return
        columns = (rows.column(name).to_pylist() for name in ("job_id", "fingerprint", "state"))
        # The rows are in order of finish time, so the newest row of a job wins.
        for id, fingerprint, state in zip(*columns, strict=True):
            self.ended[id] = (fingerprint, state)

    def _may_be_known(self, job: Job) -> bool:
        """Return whether the ledger may already have this job. Jobs arrive by finish time, so a job that
        finished earlier was held late, and maybe twice: enqueueing also holds jobs that already exist, and Spark may
        repeat a task."""
        return job.finished_at_ms < self._newest_ms or job.id in self._newest

    def _note_newest(self, jobs: list[Job]) -> None:
        newest_ms = max(job.finished_at_ms for job in jobs)
        if newest_ms > self._newest_ms:
            self._newest_ms, self._newest = newest_ms, set()
        self._newest.update(job.id for job in jobs if job.finished_at_ms == self._newest_ms)

    def _commit_by(self, write: Callable[[int, bool], bool]) -> None:
        """Make the next commit, if there is anything to write. Commit numbers are unique, so a run that has lost its
        lease without noticing cannot write at the same time as another run: one of them finds the number taken and
        starts over."""
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
        """Check with the store that this run still holds the output.

        Raises:
            OutputLost: another run has taken over.
        """
        if not self._store.run(self._lease.lease_check.is_held(self._store.storage)):
            raise self._lost()

    def _lost(self) -> OutputLost:
        return OutputLost(
            f"another run has taken over {self._ledger.output}: this one was away for longer than its lease. The "
            "store keeps the results that it has not written, and the other run collects them."
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


def _finish_time(job: Job) -> tuple[str, int]:
    return job.id, job.finished_at_ms


def rows_of(jobs: Sequence[Job], *, commit: int, cost_name: str) -> pa.Table:
    """Return rows for ``Ledger.append``."""
    return pa.Table.from_pylist([_row(job, commit, cost_name) for job in jobs], schema=ROWS)


def _row(job: Job, commit: int, cost_name: str) -> dict[str, Any]:
    extras = job.extras or EMPTY_EXTRAS
    used = {name: micros / MILLION for name, micros in (extras.usage or {}).items()}
    # A completed job still has the failure of an earlier attempt.
    failure = None if job.state is State.COMPLETED else job.failure
    return {
        "state": str(job.state),
        "result": None if job.result is None else json_text(job.result),
        "error_type": failure and failure.type,
        "error": failure and failure.message,
        "runs": job.runs,
        "failures": job.failures,
        "cost": used.get(cost_name),
        "usage": list(used.items()),
        "run_ms": max(job.finished_at_ms - job.claimed_at_ms, 0) if job.claimed_at_ms else None,
        "enqueued_at": job.enqueued_at_ms * 1000,
        "finished_at": job.finished_at_ms * 1000,
        "task": job.options.task,
        "task_version": job.options.version,
        "run_id": job.run_id,
        "job_id": job.id,
        "incarnation": job.incarnation,
        "fingerprint": _fingerprint(job),
        "commit": commit,
        "key_json": (extras.headers or {}).get(KEY_HEADER),
    }


def _fingerprint(job: Job) -> str:
    """Return the fingerprint of the job's row. Compute it for jobs of an earlier version or of another producer."""
    return fingerprint_in(job.write_id) or former_fingerprint(job.payload, job.options.version)
