"""Start and stop Spark for a command, hiding Java's start-up messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from penstock.cli.errors import InvalidUsage
from penstock.cli.output import console
from penstock.cli.parameters import all_options, option

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_JAVA_MESSAGES: Final = (
    b"WARNING: Using incubator modules",
    b"Setting default log level to",
    b"To adjust logging level use",
    b"Picked up JAVA_TOOL_OPTIONS",
)


@contextmanager
def without_java_messages() -> Iterator[None]:
    """Drop Java's start-up messages from the stderr of processes that start within the block."""
    sys.stderr.flush()
    ours = os.dup(2)
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    threading.Thread(target=_pass_on, args=(reading, os.dup(ours)), name="penstock-java", daemon=True).start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(ours, 2)
        os.close(ours)


def _pass_on(reading: int, writing: int) -> None:
    with os.fdopen(reading, "rb") as source, os.fdopen(writing, "wb", buffering=0) as target:
        for line in source:
            if not line.startswith(_JAVA_MESSAGES):
                target.write(line)


# The session


T = TypeVar("T")

_PATIENCE_S: Final = 20.0
# As `spark-sql` and `pyspark` do: tables in ./spark-warehouse, their names in ./metastore_db.
_PERSISTENT_CATALOG: Final = {
    "spark.sql.catalogImplementation": "hive",
    "spark.driver.defaultJavaOptions": "-Dderby.stream.error.file=/dev/null",
}


@dataclass(frozen=True, slots=True)
class SparkChoice:
    """The Spark to use: a local one, unless ``--remote`` or ``--conf spark.master=...`` is given."""

    remote: str | None
    cores: int | None
    memory: str
    conf: Sequence[str]


_choice_options = all_options(
    option("--remote URL", "Use the Spark Connect server at sc://host."),
    option("--cores NUMBER", "Cores of the local Spark. [all]", click.IntRange(1)),
    option("--memory SIZE", "Memory of the local Spark.", default="2g", show_default=True),
    option("--conf KEY=VALUE", "Set an option of Spark; may be repeated.", multiple=True),
)


def session_options(function: Callable[..., T]) -> Callable[..., T]:
    """Add the options that choose Spark; the function gets them as ``choice``."""

    @_choice_options
    @wraps(function)
    def with_choice(
        *args: Any, remote: str | None, cores: int | None, memory: str, conf: tuple[str, ...], **rest: Any
    ) -> T:
        return function(*args, choice=SparkChoice(remote, cores, memory, conf), **rest)

    return with_choice


@contextmanager
def open_session(choice: SparkChoice, *, catalog: bool = False) -> Iterator[SparkSession]:
    """Open a session for the block, and stop it and its Java afterwards. An existing session is used and left open.

    ``catalog``: the command names tables, so a session without a configured catalog gets a persistent one. SIGTERM
    stops the command as Ctrl-C does.
    """
    settings = dict(pairs(choice.conf, option="--conf"))
    with _terminated_as_interrupted(), _interrupts_first():
        if choice.remote is not None:
            yield from _remote(choice.remote, settings)
        else:
            has_catalog = any(key.startswith(("spark.sql.catalog", "spark.master")) for key in settings)
            defaults = _PERSISTENT_CATALOG if catalog and not has_catalog else {}
            yield from _local(choice.cores, choice.memory, defaults | settings)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _interrupts_first() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` instead of the errors that a Ctrl-C within a call of Java causes."""
    try:
        yield
    except Exception as error:
        earlier: BaseException | None = error
        while earlier is not None:
            if isinstance(earlier, KeyboardInterrupt):
                raise earlier from None
            earlier = earlier.__context__
        raise


def _remote(url: str, settings: Mapping[str, str]) -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.remote(url)
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def _local(cores: int | None, memory: str, settings: Mapping[str, str]) -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession

    from penstock.spark import session

    if (existing := SparkSession.getActiveSession()) is not None:
        yield existing
        return
    if sys.stderr.isatty():
        console(stderr=True).print("starting Spark ...", style="dim")
    try:
        with without_java_messages():
            spark = session("penstock", cores=cores, memory=memory, config=settings)
        yield spark
    finally:
        _end_java()


def pairs(texts: Sequence[str], *, option: str) -> Iterator[tuple[str, str]]:
    """Yield the keys and values of a repeated option ``KEY=VALUE``."""
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise InvalidUsage(f"{option} {text}: give KEY=VALUE.")
        yield key, value


def _end_java() -> None:
    """Stop the session and its Java, which would otherwise outlive this process."""
    from pyspark import SparkContext

    context, gateway = SparkContext._active_spark_context, SparkContext._gateway
    if context is not None:
        context.stop()
    process: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
    if gateway is None or process is None:
        return
    gateway.shutdown()
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
