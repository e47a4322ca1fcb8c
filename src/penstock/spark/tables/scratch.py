"""A place for what a run writes down for itself: where the executors can read it, and no reader of the output does."""

from __future__ import annotations

import tempfile
from types import TracebackType

from pyspark.sql import SparkSession

from penstock.errors import InvalidOption
from penstock.spark.publishing import STAGING, remove_folder
from penstock.spark.tables.ledger import Ledger

__all__ = ["Scratch"]


class Scratch:
    """A folder within a ``with`` block. For an output at a path it stands inside that; for a table it is ``given``, or
    a temporary one if Spark runs on this machine."""

    def __init__(self, spark: SparkSession, ledger: Ledger, run_id: str, given: str | None) -> None:
        self._spark = spark
        self._root = given or _default(spark, ledger)
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


def _default(spark: SparkSession, ledger: Ledger) -> str:
    if ledger.is_path:
        return f"{ledger.output.rstrip('/')}/{STAGING}"
    master = spark.conf.get("spark.master", "")
    if master is None or not master.startswith("local"):
        raise InvalidOption(
            f"the run needs a place that all executors can read and write, and the output {ledger.output!r} is a "
            "table. Give scratch='s3://...' or the like."
        )
    return tempfile.mkdtemp(prefix="penstock-")
