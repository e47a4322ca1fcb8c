"""Spark's executors as workers: ``penstock.spark.fleet``.

A fleet is one Spark job whose tasks each run a worker. It is itself a job of the queue ``penstock.fleets``, held by the
driver: its workers end when it does, also if the driver is killed. Jobs, leases, limits and retries are the store's, as
with any worker; what a killed executor had under way is taken over when its leases end.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import threading
import time
from types import TracebackType
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
from penstock.errors import InvalidOption
from penstock.spark.driver_lease import LEASE_MS, HeldJob
from penstock.spark.errors import FleetFailed
from penstock.spark.executor_task import REPORT, Assignment, work
from penstock.spark.store import Store, shared_url
from penstock.storage.values import Settlement, Take
from penstock.worker.options import Queues

if TYPE_CHECKING:
    from pyspark import SparkContext


try:
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
except ImportError:  # a client of Spark Connect alone has no JVM to talk to
    Py4JJavaError = PySparkException

logger = get_logger("penstock.spark")

FLEETS: Final = "penstock.fleets"
_OPTIONS: Final = Options(task="penstock.fleet", attempts=1, max_stalls=0)
_MOST_STARTS: Final = 4
_EXTRA_S: Final = 30.0


class FleetOptions(TypedDict, total=False):
    """Options of a worker that make sense on an executor; see ``Worker``."""

    concurrency: int
    threads: int | None
    child_processes: int | None
    lease: Duration
    heartbeat: Duration | None
    grace: Duration


class FleetWorker(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker did, by its own count."""

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
    """What the workers say that came to their end in peace; ``starts`` is how often Spark's job had to be started. What
    was done by executors that were killed is not in it: the event log has all of it."""

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
    """Let executors work on an app's ``queues`` (those of all its tasks unless given), with a worker in each of
    ``size`` tasks: as many as Spark runs at a time, unless given. Returns at once; ``wait()`` for its end.

    ``app`` must be at the top of a module that executors can import, and may be given as ``"module:name"``; they work
    for the store that it has here. The fleet ends when its queues are drained, unless ``until_drained`` is false; when
    ``time_budget`` is over; by ``stop()``; and soon after this process does.

    Raises:
        InvalidOption: an app that executors cannot import, or a store they cannot reach.
        StorageError: the store does not answer.
    """
    refuse_unknown(options, FleetOptions.__annotations__, where="a fleet")
    found = find(app, App) if isinstance(app, str) else app
    found.load()
    made = Fleet(
        spark,
        found,
        size=_checked(size) or slots(spark),
        time_budget_ms=None if time_budget is None else milliseconds(time_budget, what="time_budget"),
        options={"queues": queues, "burst": until_drained, **options},
    )
    # What is wrong with the options is better said here than on every executor.
    found.worker(**made.options)
    made.start()
    return made


class Fleet:
    """A fleet, made by ``penstock.spark.fleet``. In a ``with`` block it is stopped, and waited for, at its end."""

    def __init__(
        self,
        spark: SparkSession,
        app: App,
        *,
        size: int,
        time_budget_ms: int | None,
        options: dict[str, Any],
    ) -> None:
        self.id = uuid7()
        self.size = size
        self.options = options
        self._spark = spark
        self._target = ":".join(locate(app, in_script=False))
        self._modules = task_modules(app)
        self._held = _FleetJob(shared_url(app), self.id, self._target)
        self._time_budget_ms = time_budget_ms
        self._grace_s = milliseconds(options.get("grace", "30s"), what="grace") / 1000
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-fleet", daemon=True)
        self._rows: list[Row] = []
        self._starts = 0
        self._began_at = self._ended_at = 0.0
        self._error: Exception | None = None

    def start(self) -> None:
        """Raises ``StorageError`` if the store does not answer."""
        self._began_at = time.monotonic()
        self._held.__enter__()
        self._thread.start()
        if self._time_budget_ms is not None:
            timer = threading.Timer(self._time_budget_ms / 1000, self.stop)
            timer.daemon = True
            timer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is None:
            self.wait()
        else:
            self._join(None)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """The workers claim no more, let running jobs finish for their ``grace``, hand back the others, and end."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._held.__exit__(None, None, None)

    def wait(self, timeout: Duration | None = None) -> FleetReport:
        """Wait for the end.

        Raises:
            FleetFailed: Spark has given it up, its workers could not begin, or they took its driver for dead.
            TimeoutError: it has not ended in ``timeout``, and goes on.
        """
        self._join(None if timeout is None else milliseconds(timeout, what="timeout") / 1000)
        if self.is_running:
            raise TimeoutError(f"fleet {self.id} has not ended in {timeout}, and goes on")
        self.check()
        return FleetReport(
            fleet_id=self.id,
            workers=tuple(_worker(row) for row in self._rows if row["worker"]),
            starts=self._starts,
            seconds=self._ended_at - self._began_at,
        )

    def check(self) -> None:
        """Raises ``FleetFailed`` if it has come to a bad end."""
        if not self.is_running and self._error is not None:
            raise FleetFailed(str(self._error)) from self._error

    def _join(self, timeout_s: float | None) -> None:
        """Wait for the thread. One that was told to stop and does not is interrupted: its leases end by themselves."""
        if timeout_s is not None:
            self._thread.join(timeout_s)
            return
        while not self._stopped.wait(0.1) and self.is_running:
            pass
        self._thread.join(self._grace_s + _EXTRA_S)
        if self.is_running:
            self._interrupt()
            self._thread.join()

    @property
    def _tag(self) -> str:
        return f"penstock-fleet-{self.id}"

    def _mark(self) -> None:
        """What this thread has Spark do is the fleet's."""
        if (context := _context(self._spark)) is not None:
            context.addJobTag(self._tag)
        else:
            self._spark.addTag(self._tag)

    def _interrupt(self) -> None:
        # Without Spark Connect, a session knows its tags by thread, and interrupts nothing by those of another.
        if (context := _context(self._spark)) is not None:
            context.cancelJobsWithTag(self._tag)
        else:
            self._spark.interruptTag(self._tag)

    def _run(self) -> None:
        try:
            self._mark()
            self._rows = self._collect()
            if mistakes := [row["error"] for row in self._rows if row["error"]]:
                self._error = InvalidOption(mistakes[0])
            elif any(row["abandoned"] for row in self._rows) and not self._stopped.is_set():
                self._error = FleetFailed(
                    f"fleet {self.id} was taken for dead, and its workers have ended: its job in the queue {FLEETS!r} "
                    "was held no more. This process extends it every few seconds, and must not be away, nor without "
                    f"the store, for {LEASE_MS // 1000} seconds; or somebody has ended the job. Start the fleet again: "
                    "what is done is done, and the rest is still in its queues."
                )
        except Exception as error:
            self._error = error
        finally:
            self._ended_at = time.monotonic()
            self.stop()

    def _collect(self) -> list[Row]:
        """Run Spark's job: once, unless it breaks down. Executors may be killed by what handlers do, and each task has
        only so many attempts."""
        while True:
            self._starts += 1
            try:
                return self._tasks().collect()
            except (PySparkException, Py4JJavaError) as error:
                # Of what the JVM throws, pyspark makes its own what it has a name for: not that a job was aborted.
                if self._stopped.is_set():
                    return []
                if self._starts == _MOST_STARTS:
                    raise FleetFailed(
                        f"fleet {self.id} was given up by Spark, as often as it was started ({self._starts}): "
                        f"{_said(error)}"
                    ) from error
                logger.warning(
                    "fleet %s: Spark has given it up, and it is started again: %s", self.id, _short(error)
                )

    def _tasks(self) -> DataFrame:
        assignment = Assignment(
            app=self._target, modules=self._modules, charge=self._held.charge, options=self.options
        )
        return self._spark.range(0, self.size, 1, self.size).mapInArrow(work(assignment), REPORT)


class _FleetJob(HeldJob):
    """The fleet as a job. Its lease ends soon after its driver, and with that the job: nobody else takes it."""

    def __init__(self, url: str, id: str, target: str) -> None:
        super().__init__(url, FLEETS, holder="fleet")
        said = {"app": target, "host": platform.node(), "pid": os.getpid()}
        self._job = NewJob(id, msgspec.json.encode(said), _OPTIONS)

    async def take(self, store: Store) -> Lease:
        storage = store.storage
        await storage.enqueue(FLEETS, [self._job])
        while True:
            claimed = await storage.claim(FLEETS, Take(self._worker, 100, LEASE_MS))
            # Others may begin at the same time: whoever gets their jobs hands them back.
            others = [lease for lease in claimed.leases if lease.id != self._job.id]
            if others:
                handed = [Settlement(lease.id, lease.token, Release()) for lease in others]
                await storage.settle(FLEETS, handed)
            for lease in claimed.leases:
                if lease.id == self._job.id:
                    return lease
            await asyncio.sleep(0.1)


def _context(spark: SparkSession) -> SparkContext | None:
    """``None`` by Spark Connect."""
    try:
        return spark.sparkContext
    except PySparkException:
        return None


def slots(spark: SparkSession) -> int:
    """How many tasks the session runs at a time, as far as Spark knows by now."""
    # Spark splits a range into as many parts; a session by Spark Connect has no other way to ask.
    parts = spark.range(0, 10_000).select(F.spark_partition_id().alias("part")).distinct()
    return parts.count()


def _checked(size: int | None) -> int | None:
    if size is not None and (type(size) is not int or not 1 <= size <= 100_000):
        raise InvalidOption(f"size={size!r} is not valid. Give a whole number from 1 to 100000.")
    return size


def _worker(row: Row) -> FleetWorker:
    said = row.asDict()
    del said["abandoned"], said["error"]
    return FleetWorker(**said)


def _short(error: Exception) -> str:
    return _said(error).partition("\n")[0][:300]


def _said(error: Exception) -> str:
    """Without the line in which py4j names the call that it made."""
    return re.sub(r"^An error occurred while calling \S+\n: ", "", str(error).strip())
