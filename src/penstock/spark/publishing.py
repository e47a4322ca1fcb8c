"""Appending to a table of files, so that a driver that is killed leaves nothing half done, and nothing that goes on.

Spark's own append has every writer of a folder work in its ``_temporary``: what a killed driver has finished there is
taken up by the next one's commit, and a JVM that outlives its driver still commits, and takes away what others have
there. So files are written to a folder of their own, and this process puts them in place: each with one link, under a
name that only one can have.
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

from pyspark.sql import DataFrame, SparkSession

from penstock.core.text import get_logger
from penstock.errors import InvalidOption
from penstock.spark.compaction import Moved, finish_folds, fold, piles
from penstock.spark.delta import make_durable

logger = get_logger("penstock.spark")

# Spark passes over names that begin with an underscore.
STAGING: Final = "_penstock"
_STAGED: Final = "staged-"
# Formats that are nothing but files in a folder. The others have commits of their own.
_FILES: Final = frozenset({"parquet", "orc", "json", "csv", "avro", "text", "xml"})
_ATTEMPT: Final = "mapreduce.job.application.attempt.id"
_END_OF_STEM: Final = ".c000"
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?://(?=/))?")
_PATTERN: Final = frozenset("*?[]{}\\")
_COMMITTED: Final = re.compile(r"penstock-(\d{10})-")
# Spark's default is INT96, which is deprecated and which other readers take for nanoseconds.
_MICROS: Final = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}
_NO_OPTIONS: Final[Mapping[str, str]] = {}


class NameTaken(Exception):
    """There is a file of that name already. Nothing was put in place."""


def append_files(
    rows: DataFrame,
    output: str,
    *,
    format: str,
    name: str,
    options: Mapping[str, str] = _NO_OPTIONS,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Add ``rows`` to the files at a path; they are named ``name``. One file appears as a whole, or not at all.
    ``options`` are those of Spark's writer. ``check`` is called before the files are put in place, and raises if they
    must not be.

    By Spark Connect, if the server's files are not to be seen from here, it is Spark's own append.

    Raises:
        NameTaken: somebody else has put files of this name there.
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
        elif (jvm := getattr(spark, "_jvm", None)) is not None:
            _rename(spark, jvm, staged, output, name)
        else:
            again = spark.read.format(format).schema(rows.schema).load(staged)
            last = again.write.format(format).options(**options).option(_ATTEMPT, _attempt())
            with _settings(spark, _MICROS):
                last.mode("append").save(output)
    finally:
        remove_folder(spark, staged)
    # As Spark's own append does, for whoever has cached a table of the folder.
    spark.catalog.refreshByPath(output)


def commit_name(number: int) -> str:
    """What the files of a commit are named: two writers that both take it for theirs want the same name."""
    return f"penstock-{number:010}"


def last_commit(names: Iterable[str]) -> int:
    """The highest number among the commits that these files are of; 0 if there is none."""
    return max((int(found[1]) for name in names if (found := _COMMITTED.match(name))), default=0)


def compact_files(spark: SparkSession, output: str, *, check: Callable[[], None]) -> Moved | None:
    """Put the small Parquet files of a folder together; ``None`` if there is nothing to do, or if the folder is not to
    be seen from here. ``check`` raises if another writer has taken over.

    A writer that was away may want a name that goes away here, to put its own files there. It has checked that the
    folder is its own after it staged them. So all staged files are removed first: its next step fails.
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
    """Finish what a run that was killed has begun of ``compact_files``, or undo it. For the holder only."""
    here = local_path(output)
    if here is not None:
        finish_folds(here)


def _fold_pile(
    spark: SparkSession, output: str, pile: Sequence[str], *, check: Callable[[], None]
) -> str | None:
    """Return the name of the file that was made; ``None`` if the file system has no links."""
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
        logger.warning("the files of %s cannot be put together: %s", output, error)
        return None
    finally:
        shutil.rmtree(here / staged, ignore_errors=True)
    return name


def append_table(rows: DataFrame, table: str, *, format: str) -> None:
    """Add ``rows`` to a table of the catalog, apart from what writers that were killed have left in its folder."""
    with _settings(rows.sparkSession, {**_MICROS, _ATTEMPT: _attempt()}):
        rows.write.mode("append").format(format).saveAsTable(table)


def refuse_pattern(path: str) -> None:
    """Raises ``InvalidOption`` for one that Spark would read as a pattern, and with it other folders."""
    if found := sorted(_PATTERN & set(path)):
        raise InvalidOption(
            f"{path} has a {found[0]!r} in it, and is a pattern for several folders to Spark. Give the folder another "
            "name."
        )


def list_folder(spark: SparkSession, path: str) -> list[str] | None:
    """The names in it that Spark does not pass over; none if it is not there. ``None`` by Spark Connect, if it is not
    to be seen from here."""
    here = local_path(path)
    if here is not None and here.is_dir():
        names = [entry.name for entry in here.iterdir()]
    elif (jvm := getattr(spark, "_jvm", None)) is not None:
        folder = jvm.org.apache.hadoop.fs.Path(path)
        files = folder.getFileSystem(spark._jsc.hadoopConfiguration())
        names = (
            [status.getPath().getName() for status in files.listStatus(folder)]
            if files.exists(folder)
            else []
        )
    else:
        return None
    return sorted(filter(_is_shown, names))


def remove_folder(spark: SparkSession, path: str) -> None:
    """With all that is in it; nothing if it is not there. Not by Spark Connect, if it is not to be seen from here."""
    here = local_path(path)
    if here is not None and here.is_dir():
        shutil.rmtree(here, ignore_errors=True)
    elif (jvm := getattr(spark, "_jvm", None)) is not None:
        target = jvm.org.apache.hadoop.fs.Path(path)
        target.getFileSystem(spark._jsc.hadoopConfiguration()).delete(target, True)


def read_text(spark: SparkSession, path: str) -> str | None:
    """Return the text of a small file; ``None`` if it is not there, or cannot be seen from here by Spark Connect."""
    here = local_path(path)
    if here is not None:
        try:
            return here.read_text()
        except FileNotFoundError:
            return None
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:
        return None
    target = jvm.org.apache.hadoop.fs.Path(path)
    files = target.getFileSystem(spark._jsc.hadoopConfiguration())
    if not files.exists(target):
        return None
    stream = files.open(target)
    try:
        return str(jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
    finally:
        stream.close()


def write_text(spark: SparkSession, path: str, text: str) -> None:
    """Write a small file, in the place of the one that is there. A reader finds the one or the other. Not by Spark
    Connect, if it cannot be seen from here."""
    here = local_path(path)
    if here is not None:
        here.parent.mkdir(parents=True, exist_ok=True)
        written = here.with_name(f".{here.name}-{uuid4().hex}")
        written.write_text(text)
        make_durable(written)
        written.replace(here)
    elif (jvm := getattr(spark, "_jvm", None)) is not None:
        target = jvm.org.apache.hadoop.fs.Path(path)
        stream = target.getFileSystem(spark._jsc.hadoopConfiguration()).create(target, True)
        stream.write(bytearray(text.encode()))
        stream.close()


def local_path(path: str) -> Path | None:
    """Where it would be in the file system of this machine, if it can be there. As Spark reads it: nothing but a scheme
    has a meaning, and ``#`` and ``%`` are characters of a name like any other."""
    scheme = _SCHEME.match(path)
    if scheme is None:
        return Path(path)
    return Path(path[scheme.end() :]) if scheme[1] == "file" else None


def _link(staged: Path, output: Path, name: str) -> None:
    paths = [path for path in sorted(staged.iterdir()) if _is_shown(path.name)]
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
            # A file system without links.
            if target.exists():
                raise NameTaken(target.name) from None
            path.rename(target)
    make_durable(output)


def _rename(spark: SparkSession, jvm: Any, staged: str, output: str, name: str) -> None:
    hadoop = jvm.org.apache.hadoop.fs
    source = hadoop.Path(staged)
    files = source.getFileSystem(spark._jsc.hadoopConfiguration())
    found = sorted(str(status.getPath().getName()) for status in files.listStatus(source))
    paths = [path for path in found if _is_shown(path)]
    for number, path in enumerate(paths):
        target = hadoop.Path(output, _file_name(name, number, path))
        if files.exists(target) or not files.rename(hadoop.Path(staged, path), target):
            raise NameTaken(str(target.getName()))


def _is_shown(name: str) -> bool:
    """Whether Spark reads a file of this name, or passes over it."""
    return not name.startswith(("_", "."))


def _is_ours(name: str) -> bool:
    return _COMMITTED.match(name) is not None and name.endswith(".parquet")


def _file_name(name: str, number: int, written: str) -> str:
    """The end of the name says how to read it."""
    stem, _, rest = written.partition(_END_OF_STEM)
    suffix = rest if rest else stem[stem.find(".") :]
    return f"{name}-{number:05}{suffix}"


def with_micros(spark: SparkSession) -> AbstractContextManager[None]:
    """Write timestamps as microseconds within a ``with`` block."""
    return _settings(spark, _MICROS)


def _attempt() -> str:
    """Names the folder in ``_temporary`` whose content a commit takes over: by default the same for all writers."""
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
