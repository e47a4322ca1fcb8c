"""A place for what a run writes down for itself: where the executors can read it, and no reader of the output does."""

from __future__ import annotations

import tempfile
from types import TracebackType

from pyspark.sql import SparkSession

from penstock.errors import InvalidOption
from penstock.spark.freshreads import fresh_path
from penstock.spark.publishing import STAGING, remove_folder
from penstock.spark.tables.ledger import Ledger
from penstock.spark.tables.outputlease import output_name

__all__ = ["Scratch"]


class Scratch:
    """A folder within a ``with`` block. It stands in one that only runs on this output use: inside the output, if that
    is at a path; in ``given``; or in a temporary one if Spark runs on this machine.

    Raises:
        InvalidOption: Spark lacks a jar for the place, or needs one to be given.
    """

    def __init__(self, spark: SparkSession, ledger: Ledger, run_id: str, given: str | None) -> None:
        self._spark = spark
        self._root = _default(spark, ledger) if given is None else _own_folder(given, ledger)
        if given is not None:
            # Spark says here, and not in the middle of the run, that it cannot use the place.
            fresh_path(spark, self._root, spark.read.parquet)
        self.path = f"{self._root}/{run_id}"

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove_folder(self._spark, self.path)

    def clear(self) -> None:
        """Remove what runs that were killed have left here. For the holder of the output only."""
        remove_folder(self._spark, self._root)


def _own_folder(given: str, ledger: Ledger) -> str:
    """What is given may have anything in it, and serve many outputs."""
    return f"{given.rstrip('/')}/penstock-{output_name(ledger.identity)}"


def _default(spark: SparkSession, ledger: Ledger) -> str:
    if ledger.is_path and not ledger.is_beyond_spark:
        return f"{ledger.output.rstrip('/')}/{STAGING}"
    master = spark.conf.get("spark.master", "")
    if master is None or not master.startswith("local"):
        raise InvalidOption(
            f"the run needs a place that all executors can read and write, and the output {ledger.output!r} is "
            "not one. Give scratch='s3://...' or the like."
        )
    return tempfile.mkdtemp(prefix="penstock-")
