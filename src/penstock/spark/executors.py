"""``penstock.spark.fleet``: Spark's executors as workers.

A fleet is one Spark job whose tasks each run a worker. The driver also holds a job of the queue ``penstock.fleets``.
The workers stop when that lease ends, even if the driver was killed. The store handles jobs, leases, limits and
retries, as it does for any worker. When an executor is killed, others take over its jobs after their leases expire.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Self, TypedDict, Unpack

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from penstock.client.app import App
from penstock.client.imports import find, locate, task_modules
from penstock.client.options import refuse_unknown
from penstock.core.job import Lease, NewJob, Options
from penstock.core.names import uuid7
from penstock.core.outcome import Release
from penstock.core.text import get_logger
from penstock.core.units import Duration, milliseconds
from penstock.errors import FleetFailed, InvalidOption
from penstock.spark.driver_lease import LEASE_MS, DriverLease
from penstock.spark.executor_task import REPORT, Assignment, work
from penstock.spark.store import Store, shared_url
from penstock.storage.values import Settlement, Take
from penstock.worker.options import Queues

if TYPE_CHECKING:
    from pyspark import SparkContext


try:
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
except ImportError:  # a pure Spark Connect client has no JVM
    Py4JJavaError = PySparkException

logger = get_logger("penstock.spark")

FLEETS: Final = "penstock.fleets"
_OPTIONS: Final = Options(task="penstock.fleet", attempts=1, max_stalls=0)
_MAX_STARTS: Final = 4
_STOP_MARGIN_S: Final = 30.0


class FleetOptions(TypedDict, total=False):
    """Options of the workers; see ``Worker``."""

    concurrency: int
    threads: int | None
    child_processes: int | None
    lease: Duration
    heartbeat: Duration | None
    grace: Duration


class FleetWorker(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of one worker."""

    worker: str
    host: str
    claimed: int
    completed: int
    failed: int
    retrying: int
    cancelled: int
    released: int
    stalled: int


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of workers that stopped normally. ``starts`` is how often the Spark job was started. The counters
    exclude the work of killed executors, which only the event log has."""

    fleet_id: str
    workers: tuple[FleetWorker, ...]
    starts: int
    seconds: float

    @property
    def completed(self) -> int:
        return sum(worker.completed for worker in self.workers)

    @property
    def failed(self) -> int:
        return sum(worker.failed for worker in self.workers)


def fleet(
    spark: SparkSession,
    app: App | str,
    *,
    size: int | None = None,
    queues: Queues | None = None,
    until_drained: bool = True,
    time_budget: Duration | None = None,
    **options: Unpack[FleetOptions],
) -> Fleet:
    """Start workers on Spark's executors, and return immediately. Call ``wait()`` to wait until the fleet finishes.

    The workers run jobs of ``queues`` (default: the queues of all tasks of the app). ``size`` is the number of workers
    (default: the number of task slots). ``app`` must be at the top level of a module that executors can import; it may
    be a string, ``"module:name"``. Executors use the store that the app has in this process.

    The fleet finishes when its queues are drained (unless ``until_drained`` is false), after ``time_budget``, on
    ``stop()``, and soon after this process exits.

    Raises:
        InvalidOption: executors cannot import the app or reach its store.
        StorageError: the store does not answer.
    """
    refuse_unknown(options, FleetOptions.__annotations__, where="a fleet")
    app = find(app, App) if isinstance(app, str) else app
    app.load()
    fleet = Fleet(
        spark,
        app,
        size=_checked(size) or slots(spark),
        time_budget_ms=None if time_budget is None else milliseconds(time_budget, what="time_budget"),
        options={"queues": queues, "burst": until_drained, **options},
    )
    # Check the options here rather than on every executor.
    app.worker(**fleet.options)
    fleet.start()
    return fleet


class Fleet:
    """A running fleet, as ``penstock.spark.fleet`` returns it. A ``with`` block stops it at the end, and waits for
    it."""

    def __init__(
        self, spark: SparkSession, app: App, *, size: int, time_budget_ms: int | None, options: dict[str, Any]
    ) -> None:
        self.id = uuid7()
        self.size = size
        self.options = options
        self._spark = spark
        self._target = ":".join(locate(app, in_script=False))
        self._modules = task_modules(app)
        self._lease = _FleetJob(shared_url(app), self.id, self._target)
        self._time_budget_ms = time_budget_ms
        self._grace_s = milliseconds(options.get("grace", "30s"), what="grace") / 1000
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-fleet", daemon=True)
        self._rows: list[Row] = []
        self._starts = 0
        self._began_at = self._ended_at = 0.0
        self._error: Exception | None = None

    def start(self) -> None:
        """Start the Spark job. Raise ``StorageError`` if the store does not answer."""
        self._began_at = time.monotonic()
        self._lease.__enter__()
        self._thread.start()
        if self._time_budget_ms is not None:
            timer = threading.Timer(self._time_budget_ms / 1000, self.stop)
            timer.daemon = True
            timer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stop()
        if error is None:
            self.wait()
        else:
            self._join(None)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop claiming jobs. Running jobs have the ``grace`` period to finish; then they are released."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._lease.__exit__(None, None, None)

    def wait(self, timeout: Duration | None = None) -> FleetReport:
        """Wait until the fleet finishes, and return its report.

        Raises:
            FleetFailed: Spark gave up on the fleet, its workers could not start, or they considered its driver dead.
            TimeoutError: the fleet is still running after ``timeout``.
        """
        self._join(None if timeout is None else milliseconds(timeout, what="timeout") / 1000)
        if self.is_running:
            raise TimeoutError(f"fleet {self.id} is still running after {timeout}")
        self.check()
        return FleetReport(
            fleet_id=self.id,
            workers=tuple(_worker(row) for row in self._rows if row["worker"]),
            starts=self._starts,
            seconds=self._ended_at - self._began_at,
        )

    def check(self) -> None:
        """Raise ``FleetFailed`` if the fleet has failed."""
        if not self.is_running and self._error is not None:
            raise FleetFailed(str(self._error)) from self._error

    def _join(self, timeout_s: float | None) -> None:
        """Wait for the thread. If the fleet was stopped and does not finish, cancel its Spark job; its leases
        expire."""
        if timeout_s is not None:
            self._thread.join(timeout_s)
            return
        while not self._stopped.wait(0.1) and self.is_running:
            pass
        self._thread.join(self._grace_s + _STOP_MARGIN_S)
        if self.is_running:
            self._interrupt()
            self._thread.join()

    @property
    def _tag(self) -> str:
        return f"penstock-fleet-{self.id}"

    def _tag_thread(self) -> None:
        """Tag the Spark jobs of this thread as the fleet's."""
        if (context := _context(self._spark)) is not None:
            context.addJobTag(self._tag)
        else:
            self._spark.addTag(self._tag)

    def _interrupt(self) -> None:
        # Without Spark Connect, a session cannot interrupt by the tag of another thread, but its context can.
        if (context := _context(self._spark)) is not None:
            context.cancelJobsWithTag(self._tag)
        else:
            self._spark.interruptTag(self._tag)

    def _run(self) -> None:
        try:
            self._tag_thread()
            self._rows = self._collect()
            if errors := [row["error"] for row in self._rows if row["error"]]:
                self._error = InvalidOption(errors[0])
            elif any(row["abandoned"] for row in self._rows) and not self._stopped.is_set():
                self._error = FleetFailed(
                    f"fleet {self.id} lost its lease in the queue {FLEETS!r}, so its workers have stopped. Either this "
                    f"process or its connection to the store was suspended for {LEASE_MS // 1000} seconds, or another "
                    "process finished the job. Start the fleet again: the remaining jobs are still in its queues."
                )
        except Exception as error:
            self._error = error
        finally:
            self._ended_at = time.monotonic()
            self.stop()

    def _collect(self) -> list[Row]:
        """Run the Spark job. Start it again if it fails, because handlers may kill executors, and Spark limits the
        attempts of a task."""
        while True:
            self._starts += 1
            try:
                return self._tasks().collect()
            except (PySparkException, Py4JJavaError) as error:
                # pyspark has no separate exception for an aborted job.
                if self._stopped.is_set():
                    return []
                if self._starts == _MAX_STARTS:
                    raise FleetFailed(
                        f"Spark gave up fleet {self.id} after {self._starts} starts: {_message(error)}"
                    ) from error
                logger.warning(
                    "fleet %s: Spark gave it up; starting it again: %s", self.id, _first_line(error)
                )

    def _tasks(self) -> DataFrame:
        assignment = Assignment(
            app=self._target, modules=self._modules, lease_check=self._lease.lease_check, options=self.options
        )
        return self._spark.range(0, self.size, 1, self.size).mapInArrow(work(assignment), REPORT)


class _FleetJob(DriverLease):
    """The fleet as a job. When its driver dies, the lease expires and the job fails, so that no process takes it
    over."""

    def __init__(self, url: str, id: str, target: str) -> None:
        super().__init__(url, FLEETS, holder="fleet")
        payload = {"app": target, "host": platform.node(), "pid": os.getpid()}
        self._job = NewJob(id, msgspec.json.encode(payload), _OPTIONS)

    async def take(self, store: Store) -> Lease:
        storage = store.storage
        await storage.enqueue(FLEETS, [self._job])
        while True:
            claimed = await storage.claim(FLEETS, Take(self._worker, 100, LEASE_MS))
            # A claim may return jobs of fleets that start at the same time. Release those.
            others = [lease for lease in claimed.leases if lease.id != self._job.id]
            if others:
                released = [Settlement(lease.id, lease.token, Release()) for lease in others]
                await storage.settle(FLEETS, released)
            for lease in claimed.leases:
                if lease.id == self._job.id:
                    return lease
            await asyncio.sleep(0.1)


def _context(spark: SparkSession) -> SparkContext | None:
    """Return the Spark context; ``None`` with Spark Connect."""
    try:
        return spark.sparkContext
    except PySparkException:
        return None


def slots(spark: SparkSession) -> int:
    """Return the number of task slots that Spark knows so far."""
    # Spark splits a range into one partition per slot. Spark Connect offers no other way to ask.
    parts = spark.range(0, 10_000).select(F.spark_partition_id().alias("part")).distinct()
    return parts.count()


def _checked(size: int | None) -> int | None:
    if size is not None and (type(size) is not int or not 1 <= size <= 100_000):
        raise InvalidOption(f"size must be an integer from 1 to 100000, got {size!r}.")
    return size


def _worker(row: Row) -> FleetWorker:
    fields = row.asDict()
    del fields["abandoned"], fields["error"]
    return FleetWorker(**fields)


def _first_line(error: Exception) -> str:
    return _message(error).partition("\n")[0][:300]


def _message(error: Exception) -> str:
    """Return the message without py4j's line about the call."""
    return re.sub(r"^An error occurred while calling \S+\n: ", "", str(error).strip())
