"""``process``: every row of a table a job, every result a row of the output.

Killed anywhere and started again, it pays only for what is missing: the ledger knows what was done, the store what is
under way, and what has ended is held there until the ledger has it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from penstock.core.limits import MILLION
from penstock.spark.driver_lease import noted_interrupts
from penstock.spark.errors import TooManyFailures
from penstock.spark.processing.enqueue import Batch, cancel_rows, enqueue_rows
from penstock.spark.processing.gather import MOST_NOTED, Gathering
from penstock.spark.processing.ledger import Ledger, latest
from penstock.spark.processing.outputlease import OutputLease
from penstock.spark.processing.plan import Todo
from penstock.spark.processing.progress import Progress, Tally
from penstock.spark.store import Store
from penstock.storage.values import Budget

# How long ends may wait for the commit that writes them down: longer the longer a run goes on, so that
# its files are few. They are held in the store meanwhile.
_COMMIT_S: Final = (2.0, 10.0)
_COMMITS: Final = 60
_POLL_S: Final = 0.1
_IDLE_S: Final = 30.0
_LONGEST_IDLE_S: Final = 600.0
_NOBODY_S: Final = 5.0
_ALIVE_MS: Final = 15_000
_PUTTING_S: Final = 30.0
_SAMPLE: Final = 20


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """When a run ends before its rows do. ``None``: never."""

    max_cost: float | None = None
    max_failures: int | None = None
    max_failure_rate: float | None = None
    cost_name: str = "usd"

    def stop_for(self, tally: Tally) -> str:
        """Return the limit that failures have passed, or nothing. A rate is judged by ``_SAMPLE`` rows or more, or by
        all rows if there are fewer."""
        if self.max_failures is not None and tally.failed > self.max_failures:
            return "max_failures"
        ended = tally.ended - tally.cancelled
        least = max(ended, min(tally.total, _SAMPLE))
        if self.max_failure_rate is not None and tally.failed > self.max_failure_rate * least:
            return "max_failure_rate"
        return ""


class Run:
    """One run over rows that are written down (``todo``), by the holder of the output's lease."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        lease: OutputLease,
        batch: Batch,
        *,
        limits: Limits,
        progress: Progress,
        gathering: Gathering,
        check_workers: Callable[[], None],
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._lease = lease
        self._batch = batch
        self._limits = limits
        self._progress = progress
        self._tally = gathering.tally
        self._gathering = gathering
        # What is older in the ledger is of other runs: rows that it calls done are none that this one is to do.
        self._began_after = gathering.last_commit
        gathering.ended = {}
        # The fingerprints by job of all rows, once they are enqueued, unless there are too many.
        self._ids: Mapping[str, str] | None = None
        self._check_workers = check_workers
        self._began_at = self._said_at = time.monotonic()
        self._interrupted = threading.Event()
        self.stopped = ""

    def run(self, todo: Todo, count: int) -> None:
        """Put the rows in and take their ends, until all of them are in the ledger or the run is to stop.

        Ctrl-C stops it: what has not begun is taken back, what is under way is let finish and written down. The second
        Ctrl-C leaves that to the next run.

        Raises:
            TooManyFailures: more than ``max_failures`` or ``max_failure_rate``.
            KeyboardInterrupt: it was stopped by Ctrl-C.
        """
        self._set_budget()
        try:
            with noted_interrupts() as self._interrupted:
                self._all_rounds(todo, count)
        finally:
            # A run that was away leaves alone what is another's by now.
            if self._limits.max_cost is not None and self._holds_output():
                self._remove_budgets()
        if self._interrupted.is_set():
            raise KeyboardInterrupt
        if self.stopped in ("max_failures", "max_failure_rate"):
            ended = self._tally.ended - self._tally.cancelled
            raise TooManyFailures(
                f"{self._tally.failed} of {ended} rows have failed, more than {self.stopped}="
                f"{getattr(self._limits, self.stopped)}. What was done is in {self._ledger.output}; look at its rows "
                "with penstock_state = 'failed'."
            )

    def _all_rounds(self, todo: Todo, count: int) -> None:
        missing = todo
        while count:
            self._round(todo, missing, count)
            if self.stopped:
                return
            # Always from all rows, so that no plan has the ledger as it was and as it is: Spark would take the one for
            # the other.
            missing = self._missing(todo)
            count = missing.rows.count() if missing.ids is None else len(missing.ids)

    def _round(self, todo: Todo, missing: Todo, count: int) -> None:
        """Put rows in and wait for as many ends, or until that is in vain: some jobs may be gone from the store."""
        is_noted = missing is todo and todo.ids is None and count <= MOST_NOTED
        putting = _Putting(missing.rows, self._batch, is_noted=is_noted)
        try:
            self._gather(todo, putting, count)
            self._ids = putting.ids or self._ids
        except Exception:
            # It reads what is removed at the end of the run: its complaints of that would hide what has gone wrong.
            putting.wait(_PUTTING_S)
            raise

    def _gather(self, todo: Todo, putting: _Putting, count: int) -> None:
        expected = self._tally.ended + count
        last_at = seen_at = time.monotonic()
        while self._tally.ended < expected:
            are_all, are_some = self._gathering.look(expected - self._tally.ended)
            now = time.monotonic()
            if not are_some:
                seen_at = now
            is_due = are_all or now - seen_at > self._commit_s(now)
            if is_due or (are_some and putting.is_done and self._is_drained()):
                self._gathering.take()
                last_at = seen_at = time.monotonic()
            self._progress.show(self._tally)
            self._lease.report(
                {"total": self._tally.total, "ended": self._tally.ended, "failed": self._tally.failed}
            )
            putting.check()
            self._check_workers()
            self._stop_if_due(todo, putting)
            self._warn_if_idle(now - last_at)
            if putting.is_done and self._is_in_vain(now - last_at):
                return
            time.sleep(_POLL_S)
        putting.join()

    def _commit_s(self, now: float) -> float:
        least, most = _COMMIT_S
        return min(max((now - self._began_at) / _COMMITS, least), most)

    def _stop_if_due(self, todo: Todo, putting: _Putting) -> None:
        if self.stopped:
            return
        if self._interrupted.is_set():
            self.stopped = "interrupted"
        elif self._lease.is_cancelled:
            self.stopped = "cancelled"
        elif passed := self._limits.stop_for(self._tally):
            self.stopped = passed
        elif self._is_over_budget():
            self.stopped = "max_cost"
        if self.stopped:
            self._gathering.is_stopping = True
            again = " (again Ctrl-C leaves it at once)" if self.stopped == "interrupted" else ""
            self._progress.warn(f"stopping: {self.stopped}; what is under way is let finish{again}")
            # What is yet to be put in could not be taken back.
            putting.join()
            cancel_rows(self._missing(todo).rows, self._batch)

    def _is_drained(self) -> bool:
        """Tell whether the queue has no open jobs, so that no end is to come."""
        return not self._store.run(self._store.storage.counts(self._batch.queue)).open

    def _is_in_vain(self, idle_s: float) -> bool:
        """Whether no end has come for so long that none may come. One that stops does not wait for long handlers; else
        it is so if nothing is open, or after a long time in a queue that others use as well: putting all rows in again
        to find out is dear."""
        if idle_s < _IDLE_S:
            return False
        if self.stopped or idle_s > _LONGEST_IDLE_S:
            return True
        return self._is_drained() and not self._gathering.look(1)[1]

    def _missing(self, todo: Todo) -> Todo:
        """The rows whose end was not written down since the run began. One of an earlier run does not count: it may
        have been cancelled, or have failed and is to be retried."""
        ended = self._gathering.ended
        ids = self._ids if todo.ids is None else todo.ids
        if ids is not None and ended is not None:
            left = {id: made for id, made in ids.items() if ended.get(id, ("",))[0] != made}
            # Spark finds many rows by a join rather than by their names.
            if todo.ids is not None or not left:
                return todo.only(left)
        known = self._ledger.ends()
        if known is None:
            return Todo(todo.rows)
        done = latest(known.where(F.col("commit") > self._began_after))
        ends = done.select("job_id", "fingerprint")
        return Todo(todo.rows.join(ends, ["job_id", "fingerprint"], "left_anti"))

    def _warn_if_idle(self, idle_s: float) -> None:
        now = time.monotonic()
        if idle_s < _NOBODY_S or now - self._said_at < _NOBODY_S:
            return
        self._said_at = now + _IDLE_S
        queue = self._batch.queue
        workers = self._store.run(self._store.storage.workers(queue))
        counts = self._store.run(self._store.storage.counts(queue))
        if counts.paused:
            self._progress.warn(f"queue {queue!r} is paused: queue.resume() lets its workers go on")
        elif not any(worker.age_ms < _ALIVE_MS for worker in workers):
            self._progress.warn(
                f"nobody is claiming from queue {queue!r}: {counts.waiting:,} jobs wait. Start a worker on it, or give "
                "workers=4."
            )

    # The budget is set on a flow that all jobs of the output belong to, so that the store itself stops further jobs.

    def _holds_output(self) -> bool:
        return self._store.run(self._lease.charge.is_held(self._store.storage))

    def _set_budget(self) -> None:
        self._remove_budgets()
        if self._limits.max_cost is None:
            return
        micros = self._spent() + round(self._limits.max_cost * MILLION)
        budget = Budget(self._limits.cost_name, micros, flow=self._batch.flow)
        self._store.run(self._store.storage.set_budget(self._batch.queue, budget))

    def _spent(self) -> int:
        used = self._store.run(self._store.storage.usage(self._batch.queue))
        name, flow = self._limits.cost_name, self._batch.flow
        return sum(use.micros for use in used if (use.kind, use.key, use.name) == ("flow", flow, name))

    def _is_over_budget(self) -> bool:
        if self._limits.max_cost is None:
            return False
        return any(budget.spent >= budget.micros for budget in self._budgets())

    def _remove_budgets(self) -> None:
        """Also those that a run which was killed has left: they would stop the jobs of this one."""
        for budget in self._budgets():
            removed = self._store.storage.remove_budget(self._batch.queue, budget.name, flow=self._batch.flow)
            self._store.run(removed)

    def _budgets(self) -> list[Budget]:
        budgets = self._store.run(self._store.storage.budgets(self._batch.queue))
        return [budget for budget in budgets if budget.flow == self._batch.flow]


class _Putting:
    """Puts rows in beside everything else. With ``is_noted``, ``ids`` are their fingerprints by job in the end."""

    def __init__(self, rows: DataFrame, batch: Batch, *, is_noted: bool) -> None:
        self._rows = rows
        self._batch = batch
        self._is_noted = is_noted
        self.ids: Mapping[str, str] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-enqueue", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raises what putting in has raised."""
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Wait for its end. Raises as ``check``."""
        self._thread.join()
        self.check()

    def wait(self, seconds: float) -> None:
        """For its end, whatever that is, but no longer than this."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            enqueue_rows(self._rows, self._batch)
            if self._is_noted:
                noted = self._rows.select("job_id", "fingerprint").toArrow()
                self.ids = dict(zip(*(column.to_pylist() for column in noted.columns), strict=True))
        except BaseException as error:
            self._error = error
