"""What a part of bench/spark works with: a store, a Spark session, and plain processes that wait for work."""

from __future__ import annotations

import shutil
from multiprocessing.pool import Pool
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypedDict

from pyspark.sql import SparkSession

from .server import Server

__all__ = ["CORES", "Part", "Sample", "Stage"]

CORES = 2
"""So many tasks of Spark at a time, and so many plain processes."""


class Sample(TypedDict):
    """So many rows, events or jobs in so many seconds."""

    count: int
    seconds: float


class Part(Protocol):
    """Something that Spark and plain processes do alike."""

    def __init__(self, stage: Stage, *, rows: int, jobs: int) -> None:
        """Make what is measured."""

    def measure(self, system: str, *, warming: bool = False) -> dict[str, Sample]:
        """What ``"plain"`` processes or ``"spark"`` took, by name. ``warming``: with little to do."""


class Stage:
    """A store of its own for each part and engine. Use as a context manager."""

    def __init__(self, engine: str, spark: SparkSession, pool: Pool, folder: Path) -> None:
        self.engine, self.spark, self.pool, self.folder = engine, spark, pool, folder
        self.folder.mkdir()
        self._server = Server() if engine == "valkey" else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._server:
            self._server.stop()

    @property
    def url(self) -> str:
        if self._server:
            return f"valkey://127.0.0.1:{self._server.port}/0"
        return f"sqlite:///{self.folder}/jobs.db"

    def empty(self) -> None:
        """The store is new again."""
        if self._server:
            self._server.flush()
        for path in self.folder.glob("jobs.db*"):
            # Beside the file is a folder with the locks of its workers.
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
