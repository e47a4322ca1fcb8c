"""The run of ``process``: every row of a table becomes a job, every result a row of the output.

A run can be killed anywhere. The next one pays only for what is missing: the ledger has the finished rows, the store
has the open jobs, and it holds finished ones until they are in the ledger.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from penstock.core.limits import MILLION
from penstock.errors import InvalidOption, TooManyFailures
from penstock.spark.driver_lease import OutputLease, noted_interrupts
from penstock.spark.processing.collector import MAX_REMEMBERED, Collector
from penstock.spark.processing.enqueue import Batch, cancel_rows, enqueue_rows
from penstock.spark.processing.ledger import Ledger, latest
from penstock.spark.processing.plan import Todo
from penstock.spark.processing.progress import Progress, Tally
from penstock.spark.processing.workers import RunWorkers
from penstock.spark.store import Store
from penstock.storage.values import Budget

# Bounds on the delay before finished jobs are committed. The delay grows with the duration of the run, so
# that there are few files. Meanwhile the store holds the jobs.
_COMMIT_S: Final = (2.0, 10.0)
_COMMITS: Final = 60
_POLL_S: Final = 0.1
_IDLE_S: Final = 30.0
_LONGEST_IDLE_S: Final = 600.0
_NOBODY_S: Final = 5.0
# Workers that the run starts may have to load a model first.
_STARTING_S: Final = 60.0
_ALIVE_MS: Final = 15_000
_ENQUEUE_S: Final = 30.0
_SAMPLE: Final = 20


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that stop a run early. ``None`` means no limit."""

    max_cost: float | None = None
    max_failures: int | None = None
    max_failure_rate: float | None = None
    cost_name: str = "usd"

    def __post_init__(self) -> None:
        rate = self.max_failure_rate
        if rate is not None and not 0 <= rate < 1:
            raise InvalidOption(f"max_failure_rate must be a share from 0 to below 1, got {rate}.")

    def stop_for(self, tally: Tally) -> str:
        """Return the name of the exceeded limit, or "". The rate applies to at least ``_SAMPLE`` rows, or to all rows
        if there are fewer."""
        if self.max_failures is not None and tally.failed > self.max_failures:
            return "max_failures"
        ended = tally.ended - tally.cancelled
        sample = max(ended, min(tally.total, _SAMPLE))
        if self.max_failure_rate is not None and tally.failed > self.max_failure_rate * sample:
            return "max_failure_rate"
        return ""


@dataclass(kw_only=True)
class Run:
    """One run over the rows of a snapshot (``todo``), by the holder of the output's lease."""

    store: Store
    ledger: Ledger
    lease: OutputLease
    batch: Batch
    limits: Limits
    progress: Progress
    collector: Collector
    workers: RunWorkers
    stopped: str = ""

    def __post_init__(self) -> None:
        self._tally = self.collector.tally
        # Older commits belong to other runs. They do not finish rows of this run.
        self._began_after = self.collector.last_commit
        self.collector.ended = {}
        # Fingerprints of all rows by job, once they are enqueued; None if there are too many.
        self._ids: Mapping[str, str] | None = None
        self._began_at = self._warned_at = time.monotonic()
        self._interrupted = threading.Event()

    def run(self, todo: Todo, count: int) -> None:
        """Enqueue the rows and collect their results until all are in the ledger or the run stops.

        Ctrl-C stops the run: it cancels jobs that have not started, and collects the running ones as they finish. A
        second Ctrl-C leaves those to the next run.

        Raises:
            TooManyFailures: ``max_failures`` or ``max_failure_rate`` was exceeded.
            KeyboardInterrupt: Ctrl-C stopped the run.
        """
        self._set_budget()
        try:
            with noted_interrupts() as self._interrupted:
                self._all_rounds(todo, count)
        finally:
            # If another run has taken over, its budgets must stay.
            if self.limits.max_cost is not None and self._holds_output():
                self._remove_budgets()
        if self._interrupted.is_set():
            raise KeyboardInterrupt
        if self.stopped in ("max_failures", "max_failure_rate"):
            ended = self._tally.ended - self._tally.cancelled
            raise TooManyFailures(
                f"{self._tally.failed} of {ended} rows failed, more than {self.stopped}="
                f"{getattr(self.limits, self.stopped)}. The results so far are in {self.ledger.output}; the failed "
                "rows have penstock_state = 'failed'."
            )

    def _all_rounds(self, todo: Todo, count: int) -> None:
        missing = todo
        while count:
            self._round(todo, missing, count)
            if self.stopped:
                return
            # Start from all rows each time: if one plan read two versions of the ledger, Spark might mix them
            # up.
            missing = self._missing(todo)
            count = missing.rows.count() if missing.ids is None else len(missing.ids)

    def _round(self, todo: Todo, missing: Todo, count: int) -> None:
        """Enqueue rows and wait for their results. Stop when waiting is futile: the store may have lost jobs."""
        keeps_ids = missing is todo and todo.ids is None and count <= MAX_REMEMBERED
        enqueueing = _Enqueueing(missing.rows, self.batch, keeps_ids=keeps_ids)
        try:
            self._collect(todo, enqueueing, count)
            self._ids = enqueueing.ids or self._ids
        except Exception:
            # The thread reads files that the run removes when it ends. Its errors would hide this one.
            enqueueing.wait(_ENQUEUE_S)
            raise

    def _collect(self, todo: Todo, enqueueing: _Enqueueing, count: int) -> None:
        expected = self._tally.ended + count
        last_at = seen_at = time.monotonic()
        while self._tally.ended < expected:
            all_ready, any_ready = self.collector.poll(expected - self._tally.ended)
            now = time.monotonic()
            if not any_ready:
                seen_at = now
            is_due = all_ready or now - seen_at > self._commit_s(now)
            if is_due or (any_ready and enqueueing.is_done and self._is_drained()):
                self.collector.collect()
                last_at = seen_at = time.monotonic()
            self.progress.show(self._tally)
            self.lease.report(
                {"total": self._tally.total, "ended": self._tally.ended, "failed": self._tally.failed}
            )
            enqueueing.check()
            self.workers.check()
            self._stop_if_due(todo, enqueueing)
            self._warn_if_idle(now - last_at)
            if enqueueing.is_done and self._is_futile(now - last_at):
                return
            time.sleep(_POLL_S)
        enqueueing.join()

    def _commit_s(self, now: float) -> float:
        least, most = _COMMIT_S
        return min(max((now - self._began_at) / _COMMITS, least), most)

    def _stop_if_due(self, todo: Todo, enqueueing: _Enqueueing) -> None:
        if self.stopped:
            return
        if self._interrupted.is_set():
            self.stopped = "interrupted"
        elif self.lease.is_cancelled:
            self.stopped = "cancelled"
        elif passed := self.limits.stop_for(self._tally):
            self.stopped = passed
        elif self._is_over_budget():
            self.stopped = "max_cost"
        if self.stopped:
            self.collector.is_stopping = True
            again = " (press Ctrl-C again to leave immediately)" if self.stopped == "interrupted" else ""
            self.progress.warn(f"stopping: {self.stopped}; waiting for running jobs to finish{again}")
            # Wait for the thread, because rows that it enqueues later would not be cancelled.
            enqueueing.join()
            cancel_rows(self._missing(todo).rows, self.batch)

    def _is_drained(self) -> bool:
        """Return whether the queue has no open jobs left."""
        return not self.store.run(self.store.storage.counts(self.batch.queue)).open

    def _is_futile(self, idle_s: float) -> bool:
        """Return whether no further results are likely. A stopping run does not wait for long handlers. Otherwise the
        queue must be drained, or idle for a long time, because a wrong guess enqueues all rows again."""
        if idle_s < _IDLE_S:
            return False
        if self.stopped or idle_s > _LONGEST_IDLE_S:
            return True
        return self._is_drained() and not self.collector.poll(1)[1]

    def _missing(self, todo: Todo) -> Todo:
        """Return the rows without a ledger row of this run. Rows of earlier runs do not count: those may be cancelled,
        or failed and due for a retry."""
        ended = self.collector.ended
        ids = self._ids if todo.ids is None else todo.ids
        if ids is not None and ended is not None:
            left = {
                id: fingerprint for id, fingerprint in ids.items() if ended.get(id, ("",))[0] != fingerprint
            }
            # For many rows, Spark uses a join instead of a list of ids.
            if todo.ids is not None or not left:
                return todo.only(left)
        known = self.ledger.outcomes()
        if known is None:
            return Todo(todo.rows)
        done = latest(known.where(F.col("commit") > self._began_after))
        outcomes = done.select("job_id", "fingerprint")
        return Todo(todo.rows.join(outcomes, ["job_id", "fingerprint"], "left_anti"))

    def _warn_if_idle(self, idle_s: float) -> None:
        now = time.monotonic()
        patience_s = _STARTING_S if self.workers.are_ours else _NOBODY_S
        if idle_s < patience_s or now - self._warned_at < _NOBODY_S:
            return
        self._warned_at = now + _IDLE_S
        queue = self.batch.queue
        workers = self.store.run(self.store.storage.workers(queue))
        counts = self.store.run(self.store.storage.counts(queue))
        if counts.paused:
            self.progress.warn(f"queue {queue!r} is paused. Call queue.resume() to continue.")
        elif not any(worker.age_ms < _ALIVE_MS for worker in workers):
            remedy = (
                "The workers of this run have not begun. Check what their module does when it is imported."
                if self.workers.are_ours
                else "Start a worker, or set workers=4."
            )
            self.progress.warn(
                f"no worker is claiming from queue {queue!r}: {counts.waiting:,} jobs are waiting. {remedy}"
            )

    # The budget is on a flow that all jobs of the output belong to, so the store itself stops further jobs.

    def _holds_output(self) -> bool:
        return self.store.run(self.lease.lease_check.is_held(self.store.storage))

    def _set_budget(self) -> None:
        self._remove_budgets()
        if self.limits.max_cost is None:
            return
        micros = self._spent() + round(self.limits.max_cost * MILLION)
        budget = Budget(self.limits.cost_name, micros, flow=self.batch.flow)
        self.store.run(self.store.storage.set_budget(self.batch.queue, budget))

    def _spent(self) -> int:
        used = self.store.run(self.store.storage.usage(self.batch.queue))
        name, flow = self.limits.cost_name, self.batch.flow
        return sum(use.micros for use in used if (use.kind, use.key, use.name) == ("flow", flow, name))

    def _is_over_budget(self) -> bool:
        if self.limits.max_cost is None:
            return False
        return any(budget.spent >= budget.micros for budget in self._budgets())

    def _remove_budgets(self) -> None:
        """Remove all budgets, including those of killed runs, which would stop the jobs of this one."""
        for budget in self._budgets():
            removed = self.store.storage.remove_budget(self.batch.queue, budget.name, flow=self.batch.flow)
            self.store.run(removed)

    def _budgets(self) -> list[Budget]:
        budgets = self.store.run(self.store.storage.budgets(self.batch.queue))
        return [budget for budget in budgets if budget.flow == self.batch.flow]


class _Enqueueing:
    """A thread that enqueues rows. With ``keeps_ids``, it sets ``ids`` to their fingerprints by job at the end."""

    def __init__(self, rows: DataFrame, batch: Batch, *, keeps_ids: bool) -> None:
        self._rows = rows
        self._batch = batch
        self._keeps_ids = keeps_ids
        self.ids: Mapping[str, str] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-enqueue", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raise the error of the thread, if any."""
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Wait for the thread. Raise its error, if any."""
        self._thread.join()
        self.check()

    def wait(self, seconds: float) -> None:
        """Wait for the thread, whatever its outcome, but at most this long."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            enqueue_rows(self._rows, self._batch)
            if self._keeps_ids:
                noted = self._rows.select("job_id", "fingerprint").toArrow()
                self.ids = dict(zip(*(column.to_pylist() for column in noted.columns), strict=True))
        except BaseException as error:
            self._error = error
