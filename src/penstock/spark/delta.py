"""Delta Lake tables through delta-rs, on a disk or in an object store, without a jar.

Spark's executors write Parquet files. The driver commits them in one numbered step: it loads the table once, and the
commit succeeds only if nobody else has committed since. A writer that loses starts over from the new version.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, TableFeatures, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions
from pyarrow.fs import LocalFileSystem, PyFileSystem

from penstock.errors import InvalidOption


def make_durable(path: Path) -> None:
    """Flush a file, or the names in a folder, so that they survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_APP: Final = "penstock"
_STATE: Final = "penstock"
# Columns whose bounds select the files that may hold certain events.
_BOUNDED: Final = ("queue", "epoch", "seq")
_UNSAFE: Final = "allow_unsafe_rename"
# The type of timestamps without a zone.
_LOCAL: Final = '"timestamp_ntz"'
# Delta's default. Readers of earlier versions of a table rely on it.
_KEPT_HOURS: Final = 7 * 24
_CLOUDS: Final = ("aws", "azure", "google")
_CLIENT_OPTIONS: Final = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "proxy_url",
    "timeout",
)
_ODD: Final = frozenset("%#?\\")


class Conflict(Exception):
    """Another writer has committed since the table was loaded. Nothing was committed; start over."""


class DataFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a table. ``low`` and ``high`` bound the table's time column, in epoch milliseconds. ``bounds`` has the
    minimum and maximum of further columns, but only for a file that was read from the log.

    ``number`` is the commit that wrote the rows; for merged files, the last one.
    """

    path: str
    rows: int
    bytes: int
    stats: str
    low: int = 0
    high: int = 0
    bounds: dict[str, tuple[Any, Any]] = {}

    @property
    def number(self) -> int:
        return int(self.path.partition("-")[0])


class Folder(msgspec.Struct, frozen=True):
    """A location of tables: an absolute local path, or the URL of an object store."""

    root: str
    options: dict[str, str] = {}

    @property
    def is_local(self) -> bool:
        return "://" not in self.root

    def inside(self, name: str) -> Folder:
        return Folder(f"{self.root}/{name}", self.options)

    def names(self) -> list[str]:
        """Return the names in the folder."""
        if self.is_local:
            return os.listdir(self.root) if os.path.isdir(self.root) else []
        from pyarrow.fs import FileSelector

        infos = self._remote.get_file_info(FileSelector("", allow_not_found=True))
        return [info.base_name for info in infos]

    def write(self, table: pa.Table, path: str) -> int:
        """Write a Parquet file that survives a power failure, and return its size in bytes."""
        if not self.is_local:
            with self._remote.open_output_stream(path) as stream:
                _write(table, stream)
            return int(self._remote.get_file_info(path).size)
        target = Path(self.root, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            _write(table, file)
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    def read(self, path: str, columns: Sequence[str] | None = None, filters: Any = None) -> pa.Table:
        """Read a file, or some of its columns and rows."""
        where = f"{self.root}/{path}" if self.is_local else path
        filesystem = LocalFileSystem() if self.is_local else self._remote
        # Open the file here, because a dataset would treat parts of the path as columns.
        with filesystem.open_input_file(where) as file:
            names = None if columns is None else list(columns)
            return pq.read_table(file, columns=names, filters=filters, partitioning=None)

    def write_text(self, text: str, path: str) -> None:
        """Write a text to an object store, and replace an existing one."""
        # The streams of delta-rs accept only ``bytes``, so a buffered stream converts the data.
        with pa.BufferedOutputStream(self._remote.open_output_stream(path), 65536) as stream:
            stream.write(text.encode())

    def read_text(self, path: str) -> str:
        """Return a text in an object store. Raise ``OSError`` if there is none."""
        with self._remote.open_input_file(path) as file:
            return bytes(file.read()).decode()

    @property
    def _remote(self) -> PyFileSystem:
        return PyFileSystem(DeltaStorageHandler(self.root, dict(self.options)))


def _write(table: pa.Table, sink: Any) -> None:
    pq.write_table(table, sink, compression="zstd", compression_level=1)


def open_folder(path: str | Path, options: Mapping[str, str] | None) -> Folder:
    """Return the folder behind a path or URL.

    Raises:
        InvalidOption: the options allow writers to overwrite each other's commits.
    """
    text = str(path)
    settings = dict(options or {})
    for name in [*settings, *os.environ]:
        if name.lower().endswith(_UNSAFE):
            raise InvalidOption(
                f"{name} is set, which lets writers overwrite each other's commits. Unset it, and use a store that "
                "supports conditional puts."
            )
    if text.startswith("file:"):
        text = "/" + text.removeprefix("file:").lstrip("/")
    if odd := sorted(set(text) & _ODD):
        raise InvalidOption(
            f"{text}: delta-rs does not support names with {' '.join(odd)}. Rename the folder."
        )
    if "://" not in text:
        return Folder(str(Path(text).absolute()))
    return Folder(text.rstrip("/"), settings)


class Snapshot:
    """A loaded version of a table: its files, the number of our commits, and the state of the last one."""

    def __init__(self, table: DeltaTable | None, ranged: str) -> None:
        self.table = table
        self._ranged = ranged
        self.number: int = (table.transaction_version(_APP) or 0) if table is not None else 0

    @cached_property
    def files(self) -> list[DataFile]:
        if self.table is None:
            return []
        added = pa.table(self.table.get_add_actions(flatten=True)).to_pylist()
        return sorted((self._file(row) for row in added), key=lambda file: (file.low, file.path))

    def _file(self, row: Mapping[str, Any]) -> DataFile:
        return DataFile(
            path=row["path"],
            rows=row["num_records"],
            bytes=row["size_bytes"],
            stats="",
            low=_millis(row.get(f"min.{self._ranged}")),
            high=_millis(row.get(f"max.{self._ranged}")),
            bounds={
                name: (row[f"min.{name}"], row[f"max.{name}"]) for name in _BOUNDED if f"max.{name}" in row
            },
        )

    @cached_property
    def state(self) -> str | None:
        """Return the state of our last commit; ``None`` for a new table, or if the log no longer contains it."""
        if self.table is None or not self.number:
            return None
        for limit in (1, 20, None):
            for commit in self.table.history(limit):
                if _STATE in commit:
                    return str(commit[_STATE])
        return None


class Table:
    """One Delta table. ``ranged`` is the time column that files are selected by. Each file records the bounds of the
    columns ``stats`` for readers of the table."""

    def __init__(self, folder: Folder, schema: pa.Schema, *, ranged: str, stats: Sequence[str] = ()) -> None:
        self.folder = folder
        self.schema = schema
        self._ranged = ranged
        self._stats = tuple(dict.fromkeys((ranged, *stats)))

    def create(self) -> None:
        """Create the table unless it exists.

        Raises:
            InvalidOption: the store lets two writers commit the same version.
        """
        if self.load().table is not None:
            return
        if self.folder.is_local:
            Path(self.folder.root).mkdir(parents=True, exist_ok=True)
        else:
            _probe(self.folder)
        try:
            schema, options = Schema.from_arrow(self.schema), dict(self.folder.options)
            create_table_with_add_actions(self.folder.root, schema, [], storage_options=options)
        except DeltaError:
            if self.load().table is None:
                raise
            # Another writer created it at the same time.
        self._make_durable()

    def allow_columns(self, base: Snapshot) -> Snapshot:
        """Add the table features that our columns need, and return the table. Its own columns stay as they are."""
        assert base.table is not None
        needs_local = _LOCAL in Schema.from_arrow(self.schema).to_json()
        if not needs_local or "timestampNtz" in (base.table.protocol().reader_features or ()):
            return base
        feature = TableFeatures.TimestampWithoutTimezone
        base.table.alter.add_feature(feature, allow_protocol_versions_increase=True)
        return self.load()

    def load(self) -> Snapshot:
        try:
            table: DeltaTable | None = DeltaTable(self.folder.root, storage_options=dict(self.folder.options))
        except TableNotFoundError:
            table = None
        return Snapshot(table, self._ranged)

    def write(self, rows: pa.Table, number: int) -> DataFile:
        """Write a file for the commit with that number. The file counts only once it is committed."""
        path = f"{number:010}-{uuid4().hex}.parquet"
        size = self.folder.write(rows.cast(self.schema), path)
        low, high = _bounds(rows[self._ranged])
        return DataFile(
            path=path,
            rows=rows.num_rows,
            bytes=size,
            stats=_statistics(rows, self._stats),
            low=_millis(low),
            high=_millis(high),
        )

    def read(self, file: DataFile, columns: Sequence[str] | None = None) -> pa.Table:
        return self.folder.read(file.path, columns)

    def commit(
        self,
        base: Snapshot,
        *,
        add: Iterable[DataFile] = (),
        remove: Iterable[DataFile] = (),
        state: str,
        is_new: bool = True,
        is_overwrite: bool = False,
    ) -> None:
        """Commit the step after ``base``. With ``is_new=False``, only the files change, and the rows stay the same.
        ``is_overwrite`` removes all other files, and replaces the columns of the table.

        Raises:
            Conflict: another writer was first. Nothing was committed.
        """
        now = time.time_ns() // 1_000_000
        added = [AddAction(file.path, file.bytes, {}, now, is_new, file.stats) for file in add]
        properties = CommitProperties(
            custom_metadata={_STATE: state},
            app_transactions=[Transaction(_APP, base.number + 1)],
            max_commit_retries=0,
        )
        removed = [RemoveAction(file.path, is_new, now, file.bytes, {}) for file in remove]
        assert base.table is not None
        try:
            base.table.create_write_transaction(
                [*added, *removed],
                mode="overwrite" if is_overwrite else "append",
                schema=Schema.from_arrow(self.schema),
                commit_properties=properties,
            )
        except CommitFailedError as error:
            raise Conflict(f"{self.folder.root}: {error}") from None
        self._make_durable()

    def vacuum(self, base: Snapshot) -> None:
        """Remove files that no version of the last week needs, including those of killed writers."""
        if base.table is not None:
            vacuum(base.table, full=True)

    def _make_durable(self) -> None:
        """Flush the commit to disk, which delta-rs does not do."""
        if self.folder.is_local:
            log = Path(self.folder.root, "_delta_log")
            make_durable(max(log.glob("*.json")))
            for folder in (log, log.parent, log.parent.parent):
                make_durable(folder)


def vacuum(table: DeltaTable, *, full: bool) -> None:
    """Remove files that no version of the last week needs. If the table asks for a longer retention, respect it. With
    ``full``, also remove files that are not in the log."""
    try:
        table.vacuum(_KEPT_HOURS, dry_run=False, full=full)
    except DeltaError:
        # The table asks for a longer retention.
        table.vacuum(dry_run=False, full=full)


def _probe(folder: Folder) -> None:
    """Put one object twice on the condition that it does not exist. The store must refuse the second put."""
    from obstore import delete, put
    from obstore.exceptions import AlreadyExistsError
    from obstore.store import from_url

    named = {name.lower(): value for name, value in folder.options.items()}
    # Unlike delta-rs, obstore does not read these from the environment.
    environment = {name.lower(): value for name, value in os.environ.items()}
    client = {
        name: (environment | named)[f"{cloud}_{name}"]
        for name in _CLIENT_OPTIONS
        for cloud in _CLOUDS
        if f"{cloud}_{name}" in environment | named
    }
    client_names = {f"{cloud}_{name}" for name in _CLIENT_OPTIONS for cloud in _CLOUDS}
    config = {
        name: value for name, value in named.items() if name.startswith(_CLOUDS) and name not in client_names
    }
    store = from_url(folder.root, config=config, client_options=client)  # type: ignore[call-overload]
    name = f"_probe-{uuid4().hex}"
    try:
        put(store, name, b"", mode="create")
        put(store, name, b"", mode="create")
    except AlreadyExistsError:
        return
    finally:
        delete(store, name)
    raise InvalidOption(
        f"{folder.root}: this store does not support conditional puts, so writers could overwrite each other's "
        "commits. Use a store that does."
    )


def _millis(instant: Any) -> int:
    if isinstance(instant, datetime):
        return round(instant.astimezone(UTC).timestamp() * 1000)
    return int(instant or 0)


def _bounds(column: pa.ChunkedArray) -> tuple[Any, Any]:
    bounds = pc.min_max(column).as_py()
    return bounds["min"], bounds["max"]


def _statistics(rows: pa.Table, names: Sequence[str]) -> str:
    low, high = {}, {}
    for name in names:
        least, most = _bounds(rows[name])
        if least is not None:
            low[name], high[name] = _statistic(least), _statistic(most)
    nulls = {name: rows[name].null_count for name in names}
    stats = {"numRecords": rows.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls}
    return msgspec.json.encode(stats).decode()


def _statistic(value: Any) -> Any:
    """Return a bound in the form of Delta's statistics. Our times are whole milliseconds."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{value.microsecond // 1000:03}Z"
    return value
