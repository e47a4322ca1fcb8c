"""An output that is a Delta table: executors write its files, the driver commits them through delta-rs.

Commits are numbered. A commit is made on the version that the driver has just looked at, and only if the number before
it is the newest one: of two drivers that both take a number for theirs, one is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import msgspec
import pyarrow as pa
from deltalake.exceptions import DeltaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructField, StructType

from penstock.errors import InvalidInput
from penstock.spark.cells import arrow_schema
from penstock.spark.compaction import Moved, piles
from penstock.spark.delta import Conflict, DataFile, Folder, Snapshot, Table, open_folder
from penstock.spark.publishing import NameTaken
from penstock.spark.schemas import quoted

_LOG: Final = "_delta_log"
# Address and credentials of an object store in the environment. Executors on this machine need them as
# well.
_SETTINGS: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ALLOW_HTTP",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_APPLICATION_CREDENTIALS",
)
# Delta allows none of these in the name of a column.
_ODD: Final = frozenset(" ,;{}()\n\t=")


# Features of a table whose files do not hold its rows as they are.
_REWRITTEN: Final = frozenset({"deletionVectors", "columnMapping"})


class DeltaOutput:
    """The Delta table at ``path``: a folder of this machine, or a URL of an object store, whose credentials the
    environment has. ``ranged`` is a column of times, ``stats`` are columns whose bounds each file notes."""

    def __init__(self, spark: SparkSession, path: str, *, ranged: str, stats: Sequence[str]) -> None:
        self._spark = spark
        self._folder = open_folder(path, _settings(spark))
        self._ranged = ranged
        self._stats = tuple(stats)

    @property
    def is_local(self) -> bool:
        return self._folder.is_local

    def load(self) -> Snapshot:
        """Return the table as it is now."""
        return self._table(pa.schema([])).load()

    def schema(self) -> StructType | None:
        """Return the columns of the table; ``None`` if the table does not exist.

        Raises:
            InvalidInput: the folder has other files.
        """
        base = self.load()
        if base.table is not None:
            return from_arrow_schema(_arrow_of(base), prefer_timestamp_ntz=True)
        others = [name for name in self._folder.names() if not name.startswith(("_", "."))]
        if others:
            raise InvalidInput(
                f"{self._folder.root} is not a Delta table, and not empty: it has {others[0]!r}. Give another output, "
                "or the format that it was written in."
            )
        return None

    def read(self, schema: StructType, files: Sequence[str] | None = None) -> DataFrame:
        """Return columns of the table. With ``files``, only of these."""
        paths = self.files() if files is None else list(files)
        if not paths:
            return self._spark.createDataFrame([], schema)
        if self.is_local:
            return self._spark.read.schema(schema).parquet(*(f"{self._folder.root}/{path}" for path in paths))
        # Spark needs a jar for most object stores, delta-rs does not.
        listed = self._spark.createDataFrame(pa.table({"path": paths}))
        reader = partial(_read, folder=self._folder, schema=arrow_schema(schema))
        return listed.repartition(min(len(paths), 64)).mapInArrow(reader, schema)

    def files(self) -> list[str]:
        """Return the files of the table, whose names are never used again."""
        return sorted(file.path for file in self.load().files)

    def create(self, schema: StructType) -> None:
        """Make the table, unless it is there.

        Raises:
            InvalidInput: a column that Delta cannot have.
        """
        odd = [name for name in schema.fieldNames() if _ODD & set(name)]
        if odd:
            raise InvalidInput(
                f"a Delta table cannot have the column {odd[0]!r}: its name has a space or one of ,;{{}}()=. Rename "
                "it, or write the output as Parquet."
            )
        try:
            self._table(_nullable(schema)).create()
        except DeltaError as error:
            raise InvalidInput(f"{self._folder.root} cannot be made a Delta table: {error}") from error

    def append(self, rows: DataFrame, *, number: int) -> None:
        """Commit ``rows`` under a number, all of them or none.

        Raises:
            NameTaken: another driver has committed since. Nothing was committed: look at the table before you go on.
        """
        base = self.load()
        if base.table is None:
            self.create(rows.schema)
            base = self.load()
        if base.number != number - 1:
            raise NameTaken(f"{self._folder.root}: commit {number}")
        table = self._table(_arrow_of(base))
        columns = [F.col(quoted(name)).alias(f"c{n}") for n, name in enumerate(table.schema.names)]
        writer = partial(_write, table=table, number=number)
        written = rows.select(*columns).mapInArrow(writer, "file binary").collect()
        files = [msgspec.msgpack.decode(row["file"], type=DataFile) for row in written]
        try:
            table.commit(base, add=files, state=str(number))
        except Conflict as error:
            raise NameTaken(str(error)) from None

    def compact(self) -> Moved | None:
        """Put small files together, in a commit of its own; ``None`` if there is nothing to do. Remove files that no
        version of the last week needs.

        Raises:
            NameTaken: another driver has committed since. Nothing was committed.
        """
        base = self.load()
        if base.table is None or _is_beyond_us(base):
            return None
        table = self._table(_arrow_of(base))
        found = piles({file.path: file.bytes for file in base.files})
        if not found:
            return None
        files = {file.path: file for file in base.files}
        made = [
            table.write(
                pa.concat_tables(table.read(files[path]).select(table.schema.names) for path in pile),
                base.number + 1,
            )
            for pile in found
        ]
        gone = [files[path] for pile in found for path in pile]
        try:
            table.commit(base, add=made, remove=gone, state=str(base.number + 1), is_new=False)
        except Conflict as error:
            raise NameTaken(str(error)) from None
        # Only files that the log names: the folder may have others.
        base.table.vacuum(dry_run=False)
        return Moved([file.path for file in gone], [file.path for file in made])

    def _table(self, schema: pa.Schema) -> Table:
        return Table(self._folder, schema, ranged=self._ranged, stats=self._stats)


def _settings(spark: SparkSession) -> dict[str, str]:
    """Return settings of this process for executors that run beside it. Java keeps the environment that it was started
    with, which may lack them. On a cluster the executors have settings of their own."""
    if not str(spark.conf.get("spark.master", "")).startswith("local"):
        return {}
    return {name.lower(): os.environ[name] for name in _SETTINGS if name in os.environ}


def is_delta_table(path: str) -> bool:
    """Tell whether a folder of this machine is a Delta table."""
    if "://" in path:
        return False
    return _LOG in Folder(path.removeprefix("file:")).names()


def _is_beyond_us(base: Snapshot) -> bool:
    """Tell whether another program has changed how the rows of the table are to be read from its files."""
    assert base.table is not None
    features = set(base.table.protocol().reader_features or ())
    return bool(base.table.metadata().partition_columns) or bool(features & _REWRITTEN)


def _arrow_of(base: Snapshot) -> pa.Schema:
    assert base.table is not None
    return pa.schema(base.table.schema().to_arrow())


def _nullable(schema: StructType) -> pa.Schema:
    return arrow_schema(StructType([StructField(field.name, field.dataType) for field in schema]))


def _write(batches: Iterator[pa.RecordBatch], *, table: Table, number: int) -> Iterator[pa.RecordBatch]:
    """Write the rows of a task as one file. If Spark repeats the task, it writes another; only the last one counts."""
    names = table.schema.names
    rows = [batch.rename_columns(names) for batch in batches if batch.num_rows]
    if rows:
        written = table.write(pa.Table.from_batches(rows), number)
        yield pa.RecordBatch.from_pydict({"file": [msgspec.msgpack.encode(written)]})


def _read(
    batches: Iterator[pa.RecordBatch], *, folder: Folder, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for path in batch.column(0).to_pylist():
            yield from folder.read(path, schema.names).select(schema.names).cast(schema).to_batches()
