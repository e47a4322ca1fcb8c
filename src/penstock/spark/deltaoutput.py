"""An output that is a Delta table: executors write its files, the driver commits them through delta-rs.

Commits are numbered. A commit succeeds only if its predecessor is the newest commit of the version that the driver has
loaded. If two drivers use the same number, one of them fails.
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
from penstock.spark.delta import Conflict, DataFile, Folder, Snapshot, Table, open_folder, vacuum
from penstock.spark.publishing import NameTaken
from penstock.spark.schemas import quoted

_LOG: Final = "_delta_log"
# Environment variables with the address and credentials of an object store. Local executors need them, too.
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
# Characters that Delta does not allow in column names.
_ODD: Final = frozenset(" ,;{}()\n\t=")


# Table features for which a reader needs more than the data files.
_REWRITTEN: Final = frozenset({"deletionVectors", "columnMapping"})


class DeltaOutput:
    """The Delta table at ``path``, a local folder or the URL of an object store with credentials in the environment.
    ``ranged`` is a time column; each file records the bounds of the columns ``stats``."""

    def __init__(self, spark: SparkSession, path: str, *, ranged: str, stats: Sequence[str]) -> None:
        self._spark = spark
        self.folder = open_folder(path, _settings(spark))
        self._ranged = ranged
        self._stats = tuple(stats)

    @property
    def is_local(self) -> bool:
        return self.folder.is_local

    def load(self) -> Snapshot:
        """Return the current version of the table."""
        return self._table(pa.schema([])).load()

    def schema(self) -> StructType | None:
        """Return the columns of the table; ``None`` if the table does not exist.

        Raises:
            InvalidInput: the folder has other files.
        """
        base = self.load()
        if base.table is not None:
            return from_arrow_schema(_arrow_of(base), prefer_timestamp_ntz=True)
        others = [name for name in self.folder.names() if not name.startswith(("_", "."))]
        if others:
            raise InvalidInput(
                f"{self.folder.root} is not a Delta table, and not empty: it has {others[0]!r}. Choose another "
                "output, or the format that it was written in."
            )
        return None

    def read(self, schema: StructType, files: Sequence[str] | None = None) -> DataFrame:
        """Read the columns of ``schema``, from ``files`` or by default from all files of the table."""
        paths = self.files() if files is None else list(files)
        if not paths:
            return self._spark.createDataFrame([], schema)
        if self.is_local:
            return self._spark.read.schema(schema).parquet(*(f"{self.folder.root}/{path}" for path in paths))
        # For most object stores, Spark needs a jar; delta-rs does not.
        listed = self._spark.createDataFrame(pa.table({"path": paths}))
        reader = partial(_read, folder=self.folder, schema=arrow_schema(schema))
        return listed.repartition(min(len(paths), 64)).mapInArrow(reader, schema)

    def files(self) -> list[str]:
        """Return the files of the table. Their names are never reused."""
        return sorted(file.path for file in self.load().files)

    def create(self, schema: StructType) -> None:
        """Create the table unless it exists.

        Raises:
            InvalidInput: Delta does not support the name of a column.
        """
        odd = [name for name in schema.fieldNames() if _ODD & set(name)]
        if odd:
            raise InvalidInput(
                f"a Delta table cannot have the column {odd[0]!r}: its name contains a space or one of ,;{{}}()=. "
                "Rename it, or write the output as Parquet."
            )
        try:
            self._table(_nullable(schema)).create()
        except DeltaError as error:
            raise InvalidInput(f"cannot create a Delta table at {self.folder.root}: {error}") from error

    def append(self, rows: DataFrame, *, number: int) -> None:
        """Commit ``rows`` atomically under a number.

        Raises:
            NameTaken: another driver has committed since. Nothing was committed; reload the table.
        """
        base = self.load()
        if base.table is None:
            self.create(rows.schema)
            base = self.load()
        if base.number != number - 1:
            raise NameTaken(f"{self.folder.root}: commit {number}")
        self._commit(base, self._table(_arrow_of(base)), rows)

    def replace(self, rows: DataFrame) -> None:
        """Replace all rows and columns atomically with those of ``rows``. Raise ``NameTaken`` as ``append`` does."""
        table = self._table(_nullable(rows.schema))
        table.create()
        self._commit(table.allow_columns(self.load()), table, rows, is_overwrite=True)

    def _commit(self, base: Snapshot, table: Table, rows: DataFrame, *, is_overwrite: bool = False) -> None:
        number = base.number + 1
        columns = [F.col(quoted(name)).alias(f"c{n}") for n, name in enumerate(table.schema.names)]
        writer = partial(_write, table=table, number=number)
        written = rows.select(*columns).mapInArrow(writer, "file binary").collect()
        files = [msgspec.msgpack.decode(row["file"], type=DataFile) for row in written]
        try:
            table.commit(base, add=files, state=str(number), is_overwrite=is_overwrite)
        except Conflict as error:
            raise NameTaken(str(error)) from None

    def compact(self) -> Moved | None:
        """Merge small files in a separate commit, and remove files that no version of the last week needs. Return
        ``None`` if there is nothing to do.

        Raises:
            NameTaken: another driver has committed since. Nothing was committed.
        """
        base = self.load()
        if base.table is None or _is_unsupported(base):
            return None
        table = self._table(_arrow_of(base))
        groups = piles({file.path: file.bytes for file in base.files})
        if not groups:
            return None
        files = {file.path: file for file in base.files}
        made = [
            table.write(
                pa.concat_tables(table.read(files[path]).select(table.schema.names) for path in pile),
                base.number + 1,
            )
            for pile in groups
        ]
        gone = [files[path] for pile in groups for path in pile]
        try:
            table.commit(base, add=made, remove=gone, state=str(base.number + 1), is_new=False)
        except Conflict as error:
            raise NameTaken(str(error)) from None
        # Remove only files that the log lists: the folder may have others.
        vacuum(base.table, full=False)
        return Moved([file.path for file in gone], [file.path for file in made])

    def _table(self, schema: pa.Schema) -> Table:
        return Table(self.folder, schema, ranged=self._ranged, stats=self._stats)


def _settings(spark: SparkSession) -> dict[str, str]:
    """Return the object store settings of this process for local executors, because the environment of a running JVM
    may lack them. On a cluster, executors have their own settings."""
    if not str(spark.conf.get("spark.master", "")).startswith("local"):
        return {}
    return {name.lower(): os.environ[name] for name in _SETTINGS if name in os.environ}


def is_delta_table(path: str) -> bool:
    """Return whether a local folder is a Delta table."""
    if "://" in path:
        return False
    return _LOG in Folder(path.removeprefix("file:")).names()


def _is_unsupported(base: Snapshot) -> bool:
    """Return whether the table uses features that this code does not support."""
    assert base.table is not None
    features = set(base.table.protocol().reader_features or ())
    return bool(base.table.metadata().partition_columns) or bool(features & _REWRITTEN)


def _arrow_of(base: Snapshot) -> pa.Schema:
    assert base.table is not None
    return pa.schema(base.table.schema().to_arrow())


def _nullable(schema: StructType) -> pa.Schema:
    return arrow_schema(StructType([StructField(field.name, field.dataType) for field in schema]))


def _write(batches: Iterator[pa.RecordBatch], *, table: Table, number: int) -> Iterator[pa.RecordBatch]:
    """Write the rows of a task as one file. If Spark repeats the task, only the last file counts."""
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
