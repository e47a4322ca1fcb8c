"""The workers that a run starts, besides those on its queue anyway: processes here, Spark's executors, or both."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from pyspark.sql import SparkSession

from penstock.errors import InvalidOption
from penstock.spark.executors import Fleet, fleet, slots
from penstock.spark.tables.crew import open_crew
from penstock.task import Task

__all__ = ["Staff"]


class Staff:
    """Hired within a ``with`` block, for as long as the run takes; of several blocks inside each other, the outermost.

    Raises:
        InvalidOption: a ``fleet`` nobody knows, an app that others cannot import, or a fleet that would leave no slot
            to Spark for the run itself: each would wait for the other.
    """

    def __init__(
        self,
        spark: SparkSession,
        task: Task[..., Any],
        *,
        workers: int,
        fleet: str | None,
        fleet_size: int | None,
        concurrency: int,
    ) -> None:
        if fleet not in (None, "spark"):
            raise InvalidOption(
                f"fleet={fleet!r} is not known. Give fleet='spark', or workers=4 for processes here."
            )
        if fleet is None and fleet_size is not None:
            raise InvalidOption("fleet_size is the size of Spark's fleet. Give fleet='spark', too.")
        self._spark = spark
        self._task = task
        self._crew = open_crew(task, workers, concurrency=concurrency)
        self._size = 0 if fleet is None else _room(spark, fleet_size)
        self._concurrency = concurrency
        self._fleet: Fleet | None = None
        self._hired = ExitStack()
        self._users = 0

    def __enter__(self) -> Self:
        self._users += 1
        if self._users > 1:
            return self
        with ExitStack() as hired:
            hired.enter_context(self._crew)
            if self._size:
                # Until the run ends: the queue may be drained while rows are yet to be put in.
                self._fleet = fleet(
                    self._spark,
                    self._task.app,
                    size=self._size,
                    queues=[self._task.queue],
                    until_drained=False,
                    concurrency=self._concurrency,
                )
                hired.enter_context(self._fleet)
            self._hired = hired.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if not self._users:
            self._hired.__exit__(kind, error, trace)

    def check(self) -> None:
        """Raises ``FleetFailed`` if those that were hired have ended by themselves."""
        self._crew.check()
        if self._fleet is not None:
            self._fleet.check()


def _room(spark: SparkSession, asked: int | None) -> int:
    if asked is not None and spark.conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        return asked
    there = slots(spark)
    size = max(there - 1, 1) if asked is None else asked
    if size >= there:
        raise InvalidOption(
            f"a fleet of {size} takes all {there} task slots of this Spark session, and the run needs one for itself. "
            f"Give {f'fleet_size={there - 1}' if there > 1 else 'the session more cores'}, or use workers=."
        )
    return size
