"""Atomic appends to a folder of files.

Spark's own append is not safe when drivers are killed, because all writers of a folder share its ``_temporary``. A
commit also publishes the files of a killed driver. A JVM that outlives its driver still commits, and removes the files
of others. So each append writes its files to a separate folder. Then this process publishes them, each with one link
under a unique name.

Reads of an output bypass the session's cache. Spark identifies a folder by its name. Once a user has cached a table of
it, every other read returns the cached rows, and misses what others have written since. The same applies to catalog
tables and their lists of files.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from penstock.core.text import get_logger
from penstock.errors import InvalidOption
from penstock.spark.compaction import Moved, finish_folds, fold, piles
from penstock.spark.delta import make_durable

logger = get_logger("penstock.spark")

# Spark ignores names that begin with an underscore.
STAGING: Final = "_penstock"
_STAGED: Final = "staged-"
# Formats that are just files in a folder. The others have their own commits.
_FILES: Final = frozenset({"parquet", "orc", "json", "csv", "avro", "text", "xml"})
_ATTEMPT: Final = "mapreduce.job.application.attempt.id"
_END_OF_STEM: Final = ".c000"
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?://(?=/))?")
_PATTERN: Final = frozenset("*?[]{}\\")
_COMMITTED: Final = re.compile(r"penstock-(\d{10})-")
# Spark's default is INT96, which is deprecated, and which other readers interpret as nanoseconds.
_MICROS: Final = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}
_NO_OPTIONS: Final[Mapping[str, str]] = {}


class NameTaken(Exception):
    """A file of that name exists already. Nothing was published."""


def append_files(
    rows: DataFrame,
    output: str,
    *,
    format: str,
    name: str,
    options: Mapping[str, str] = _NO_OPTIONS,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Append ``rows`` to the files at a path, in files named ``name``. Each file appears atomically. ``options`` are
    those of Spark's writer. ``check`` runs before the files are published, and raises to prevent that.

    With Spark Connect, if this process cannot access the server's files, use Spark's own append.

    Raises:
        NameTaken: another writer has published files of this name.
    """
    spark = rows.sparkSession
    writer = rows.write.format(format).options(**options)
    if format.lower() not in _FILES:
        writer.mode("append").save(output)
        return
    staged = f"{output.rstrip('/')}/{STAGING}/{_STAGED}{uuid4().hex}"
    with _settings(spark, _MICROS):
        writer.save(staged)
    here = local_path(staged)
    is_here = here is not None and here.is_dir()
    try:
        check()
        if here is not None and is_here:
            _link(here, Path(str(local_path(output))), name)
        elif _hadoop(spark, staged) is not None:
            _rename(spark, staged, output, name)
        else:
            again = spark.read.format(format).schema(rows.schema).load(staged)
            last = again.write.format(format).options(**options).option(_ATTEMPT, _attempt())
            with _settings(spark, _MICROS):
                last.mode("append").save(output)
    finally:
        remove_folder(spark, staged)
    # Refresh the tables of the folder that users have cached, as Spark's own append does.
    spark.catalog.refreshByPath(output)


def commit_name(number: int) -> str:
    """Return the file name of a commit. Two writers of the same commit use the same name, so one of them fails."""
    return f"penstock-{number:010}"


def last_commit(names: Iterable[str]) -> int:
    """Return the highest commit number among these file names; 0 if there is none."""
    return max((int(match[1]) for name in names if (match := _COMMITTED.match(name))), default=0)


def compact_files(spark: SparkSession, output: str, *, check: Callable[[], None]) -> Moved | None:
    """Merge the small Parquet files of a folder. Return ``None`` if there is nothing to do, or if this process cannot
    access the folder. ``check`` raises if another writer has taken over.

    A writer that has lost its lease may still publish staged files, under a name that the merge frees. Therefore the
    merge first removes all staged files, so that the writer's next step fails.
    """
    here = local_path(output)
    if here is None or not here.is_dir():
        return None
    check()
    finish_folds(here)
    sizes = {path.name: path.stat().st_size for path in here.iterdir() if _is_ours(path.name)}
    moved = Moved([], [])
    for pile in piles(sizes):
        check()
        for staged in (here / STAGING).glob(f"{_STAGED}*"):
            shutil.rmtree(staged)
        made = _fold_pile(spark, output, pile, check=check)
        if made is None:
            break
        moved.gone.extend(pile)
        moved.made.append(made)
    if not moved.made:
        return None
    spark.catalog.refreshByPath(output)
    return moved


def finish_compaction(output: str) -> None:
    """Finish or undo the compaction of a killed run. Only the holder of the output may call it."""
    here = local_path(output)
    if here is not None:
        finish_folds(here)


def _fold_pile(
    spark: SparkSession, output: str, pile: Sequence[str], *, check: Callable[[], None]
) -> str | None:
    """Return the name of the merged file; ``None`` if the file system has no links."""
    here, root = Path(str(local_path(output))), output.rstrip("/")
    staged = f"{STAGING}/folded-{uuid4().hex}"
    rows = spark.read.option("mergeSchema", "true").parquet(*(f"{root}/{name}" for name in pile))
    name = f"{commit_name(last_commit(pile))}-{uuid4().hex}.parquet"
    try:
        with _settings(spark, _MICROS):
            rows.coalesce(1).write.parquet(f"{root}/{staged}")
        (made,) = (here / staged).glob("*.parquet")
        fold(here, pile, made=made, name=name, check=check)
    except OSError as error:
        logger.warning("the files of %s cannot be merged: %s", output, error)
        return None
    finally:
        shutil.rmtree(here / staged, ignore_errors=True)
    return name


def append_table(rows: DataFrame, table: str, *, format: str) -> None:
    """Append ``rows`` to a catalog table. Do not publish files that killed writers have left in its folder."""
    with _settings(rows.sparkSession, {**_MICROS, _ATTEMPT: _attempt()}):
        rows.write.mode("append").format(format).saveAsTable(table)


def refuse_pattern(path: str) -> None:
    """Raise ``InvalidOption`` for a path that Spark would treat as a pattern, which may match other folders."""
    if special := sorted(_PATTERN & set(path)):
        raise InvalidOption(
            f"{path} contains {special[0]!r}, so Spark would treat it as a pattern for several folders. Rename the "
            "folder."
        )


def list_folder(spark: SparkSession, path: str) -> list[str] | None:
    """Return the names in a folder that Spark does not ignore; an empty list if the folder does not exist. Return
    ``None`` with Spark Connect, if this process cannot access it."""
    here = local_path(path)
    if here is not None and here.is_dir():
        names = [entry.name for entry in here.iterdir()]
    elif (there := _hadoop(spark, path)) is not None:
        files, folder = there
        statuses = files.listStatus(folder) if files.exists(folder) else []
        names = [str(status.getPath().getName()) for status in statuses]
    else:
        return None
    return sorted(filter(_is_visible, names))


def _hadoop(spark: SparkSession, path: str) -> tuple[Any, Any] | None:
    """Return the JVM's file system of a path, and the JVM's path; ``None`` with Spark Connect."""
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:
        return None
    target = jvm.org.apache.hadoop.fs.Path(path)
    return target.getFileSystem(spark._jsc.hadoopConfiguration()), target


def remove_folder(spark: SparkSession, path: str) -> None:
    """Remove a folder with its content, if it exists. With Spark Connect, do nothing if it is out of reach."""
    here = local_path(path)
    if here is not None and here.is_dir():
        shutil.rmtree(here, ignore_errors=True)
    elif (there := _hadoop(spark, path)) is not None:
        files, target = there
        files.delete(target, True)


def read_text(spark: SparkSession, path: str) -> str | None:
    """Return the text of a small file; ``None`` if it does not exist, or is out of reach with Spark Connect."""
    here = local_path(path)
    if here is not None:
        try:
            return here.read_text()
        except FileNotFoundError:
            return None
    there = _hadoop(spark, path)
    if there is None or not there[0].exists(there[1]):
        return None
    files, target = there
    stream = files.open(target)
    try:
        jvm: Any = spark._jvm
        return str(jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
    finally:
        stream.close()


def write_text(spark: SparkSession, path: str, text: str) -> None:
    """Write a small file, and replace an existing one atomically. With Spark Connect, do nothing if the path is out of
    reach."""
    here = local_path(path)
    if here is not None:
        here.parent.mkdir(parents=True, exist_ok=True)
        written = here.with_name(f".{here.name}-{uuid4().hex}")
        written.write_text(text)
        make_durable(written)
        written.replace(here)
    elif (there := _hadoop(spark, path)) is not None:
        files, target = there
        stream = files.create(target, True)
        stream.write(bytearray(text.encode()))
        stream.close()


def local_path(path: str) -> Path | None:
    """Return the path in the local file system; ``None`` for other file systems. As in Spark, only the scheme is
    special; ``#`` and ``%`` are ordinary characters."""
    scheme = _SCHEME.match(path)
    if scheme is None:
        return Path(path)
    return Path(path[scheme.end() :]) if scheme[1] == "file" else None


def _link(staged: Path, output: Path, name: str) -> None:
    paths = [path for path in sorted(staged.iterdir()) if _is_visible(path.name)]
    if not paths:
        raise FileNotFoundError(f"another writer has removed the files in {staged}")
    for number, path in enumerate(paths):
        make_durable(path)
        target = output / _file_name(name, number, path.name)
        try:
            os.link(path, target)
        except FileExistsError:
            raise NameTaken(target.name) from None
        except OSError:
            # The file system has no links.
            if target.exists():
                raise NameTaken(target.name) from None
            path.rename(target)
    make_durable(output)


def _rename(spark: SparkSession, staged: str, output: str, name: str) -> None:
    for number, written in enumerate(list_folder(spark, staged) or ()):
        places = (f"{staged}/{written}", f"{output.rstrip('/')}/{_file_name(name, number, written)}")
        (files, source), (_, target) = (place for path in places if (place := _hadoop(spark, path)))
        if files.exists(target) or not files.rename(source, target):
            raise NameTaken(str(target.getName()))


def _is_visible(name: str) -> bool:
    """Return whether Spark reads a file of this name."""
    return not name.startswith(("_", "."))


def _is_ours(name: str) -> bool:
    return _COMMITTED.match(name) is not None and name.endswith(".parquet")


def _file_name(name: str, number: int, written: str) -> str:
    """Return the published name of a file, with the suffix that tells how to read it."""
    stem, _, rest = written.partition(_END_OF_STEM)
    suffix = rest if rest else stem[stem.find(".") :]
    return f"{name}-{number:05}{suffix}"


def with_micros(spark: SparkSession) -> AbstractContextManager[None]:
    """Write timestamps as microseconds within a ``with`` block."""
    return _settings(spark, _MICROS)


def _attempt() -> str:
    """Return a random name for a folder in ``_temporary``. By default all writers share one folder, and commit it."""
    return str(random.randrange(1, 2**31))


@contextmanager
def _settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Change settings of the session within a ``with`` block."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, former in before.items():
            if former is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, former)


_NOT_THERE: Final = ("PATH_NOT_FOUND", "UNABLE_TO_INFER_SCHEMA", "TABLE_OR_VIEW_NOT_FOUND")


_NO_JAR: Final = (
    "DATA_SOURCE_NOT_FOUND",
    "Failed to find data source",
    "No FileSystem for scheme",
    "ClassNotFoundException",
)


def fresh_path(spark: SparkSession, path: str, load: Callable[[str], DataFrame]) -> DataFrame | None:
    """Return what ``load`` reads at a path; ``None`` if there is nothing."""

    def read() -> DataFrame:
        spark.catalog.refreshByPath(path)
        return load(path)

    return _read_or_none(read, path)


def fresh_table(spark: SparkSession, name: str) -> DataFrame | None:
    """Return a table of the catalog; ``None`` if it does not exist."""

    def read() -> DataFrame:
        spark.catalog.refreshTable(name)
        return spark.table(name)

    return _read_or_none(read, name)


def _read_or_none(read: Callable[[], DataFrame], name: str) -> DataFrame | None:
    try:
        table = read()
        # Spark Connect is lazy: ask for the schema to raise errors here.
        _ = table.schema
    except Exception as error:
        if isinstance(error, AnalysisException) and str(error.getCondition()).startswith(_NOT_THERE):
            return None
        _refuse_without_jar(error, name)
        raise
    return table


def _refuse_without_jar(error: Exception, name: str) -> None:
    """Raise ``InvalidOption`` if the session lacks a jar that the format or the file system of an output needs."""
    lines = [line.strip() for line in str(error).splitlines() if any(mark in line for mark in _NO_JAR)]
    if lines:
        raise InvalidOption(
            f"Spark cannot use {name}, because its session lacks a jar: {lines[0]} Start the session with the jar "
            "(spark.jars.packages), or choose another format or location."
        ) from error
