"""The tables that Spark reads and writes: their schemas by kind, batches of jobs in them, and their options.

Spark passes option values as text, under lower-case names. Users write camel case, such as ``numPartitions``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar
from urllib.parse import parse_qs

import msgspec
import pyarrow as pa
import pyspark.sql.types as T

from penstock.client.app import App
from penstock.client.options import refuse_unknown
from penstock.core.job import JOB_FIELDS, FieldKind, Job, JobField
from penstock.core.limits import MILLION
from penstock.core.names import check_queue, check_task
from penstock.core.text import split_url
from penstock.errors import InvalidOption
from penstock.spark.cells import Builder, Column, instants, json_text, plain, value_column
from penstock.spark.store import shared_url, url_for_executors

Kind: TypeAlias = Literal["jobs", "results", "failed", "events"]
PayloadFormat: TypeAlias = Literal["json", "variant", "typed"]
KINDS: Final = ("jobs", "results", "failed", "events")

_TEXT, _INT, _LONG, _DOUBLE, _TIME = (
    T.StringType(),
    T.IntegerType(),
    T.LongType(),
    T.DoubleType(),
    T.TimestampType(),
)
# The type of payloads and results depends on the payload format.
_VALUE: Final = T.BinaryType()

_EVENTS: Final[dict[str, T.DataType]] = {
    **dict.fromkeys(("queue", "epoch"), _TEXT),
    "seq": _LONG,
    "at": _TIME,
    **dict.fromkeys(("type", "id"), _TEXT),
    "incarnation": _LONG,
    "enqueued_at": _TIME,
    **dict.fromkeys(("run_id", "task", "version", "state"), _TEXT),
    "run": _INT,
    "token": _LONG,
    "worker": _TEXT,
    **dict.fromkeys(("run_ms", "wait_ms"), _LONG),
    **dict.fromkeys(("error_type", "error", "group"), _TEXT),
    "priority": _LONG,
    "cost": _DOUBLE,
    "size": _LONG,
    **dict.fromkeys(("data", "by"), _TEXT),
}


_Getter: TypeAlias = Callable[[Job], Any]
_TYPES: Final[dict[FieldKind, T.DataType]] = {
    "text": _TEXT,
    "name": _TEXT,
    "number": _LONG,
    "count": _INT,
    "flag": T.BooleanType(),
    "time": _TIME,
    "amounts": T.MapType(_TEXT, _DOUBLE, valueContainsNull=False),
    "texts": T.MapType(_TEXT, _TEXT, valueContainsNull=False),
    "value": _VALUE,
    "json": _TEXT,
}
_CONVERT: Final[dict[FieldKind, Callable[[Any], Any]]] = {
    "name": lambda name: name or None,
    "amounts": lambda used: (
        None if used is None else {name: micros / MILLION for name, micros in used.items()}
    ),
    "json": lambda value: None if value is None else json_text(value),
}
_FAILURE: Final[dict[str, tuple[T.DataType, _Getter]]] = {
    "error_type": (_TEXT, lambda job: job.failure and job.failure.type),
    "error": (_TEXT, lambda job: job.failure and job.failure.message),
    "traceback": (_TEXT, lambda job: (job.failure and job.failure.traceback) or None),
}


def _columns_of(field: JobField) -> dict[str, tuple[T.DataType, _Getter]]:
    """Return the type and the getter of the column of a field; a failure has three columns."""
    if field.kind == "failure":
        return _FAILURE
    read, convert = field.read, _CONVERT.get(field.kind)
    get = read if convert is None else lambda job: convert(read(job))
    return {field.name: (_TYPES[field.kind], get)}


_JOBS: Final = {
    name: column for field in JOB_FIELDS if field.in_tables for name, column in _columns_of(field).items()
}
# Columns that a user's schema may ask for: payloads and results as they are stored.
_STORED: Final[dict[str, _Getter]] = {
    "payload_bytes": lambda job: job.payload,
    "result_bytes": lambda job: job.result,
}
_VALUES: Final = frozenset({"payload", "result", *_STORED})
_NOT_FINISHED: Final = {
    *("priority", "cost", "headers", "run_at", "expires_at", "kept_until"),
    *("cancelling", "blocked_by", "progress"),
}
# The columns of kind=jobs that the other kinds lack.
_LACKING: Final[dict[Kind, set[str]]] = {
    "jobs": set(),
    "results": {*_NOT_FINISHED, "payload", "error_type", "error", "traceback"},
    "failed": {*_NOT_FINISHED, "result"},
}


def schema_of(kind: Kind, payload_format: PayloadFormat = "json") -> T.StructType:
    """Return the columns of a kind, with payloads and results as JSON text or as variants."""
    value: T.DataType = T.VariantType() if payload_format == "variant" else _TEXT
    fields = _EVENTS
    if kind != "events":
        columns = {name: type for name, (type, _) in _JOBS.items() if name not in _LACKING[kind]}
        fields = {name: value if type is _VALUE else type for name, type in columns.items()}
    return T.StructType([T.StructField(name, type) for name, type in fields.items()])


EVENTS: Final = schema_of("events")


def quoted(name: str) -> str:
    """Return a name quoted for Spark SQL."""
    return f"`{name.replace('`', '``')}`"


class JobBuilder:
    """Builds batches of jobs. Raises ``InvalidOption`` if the schema has a column that the kind lacks.

    ``is_light`` is true if the schema has neither payloads nor results.
    """

    def __init__(self, schema: T.StructType, kind: Kind) -> None:
        known = [*schema_of(kind).fieldNames(), "payload", *_STORED]
        self._builder = Builder(schema, {name: _column_of(name) for name in known}, where=f"kind={kind!r}")
        getters = {name: getter for name, (_, getter) in _JOBS.items()} | _STORED
        self._getters = {name: getters[name] for name in self._builder.names}
        self.is_light = _VALUES.isdisjoint(self._builder.names)

    def batch(self, jobs: Sequence[Job]) -> pa.RecordBatch:
        return self._builder.batch({name: [get(job) for job in jobs] for name, get in self._getters.items()})


def _column_of(name: str) -> Column:
    if name in _VALUES:
        return value_column
    return instants if name.endswith("_at") or name == "kept_until" else plain


class ReadOptions(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Options of a read. Exactly one of ``queue``, ``subscribe`` (comma-separated) and ``subscribe_pattern`` is set.

    Offsets are ``earliest``, ``latest``, or JSON: ``{"mail": {"epoch": "...", "seq": 17}}``, or just the number in
    place of the inner object. Timestamps are epoch milliseconds or ISO 8601. ``num_partitions=0`` means automatic.
    """

    url: str = ""
    queue: str = ""
    subscribe: str = ""
    subscribe_pattern: str = ""
    kind: Kind = "jobs"
    state: str = ""
    starting_offsets: str = "earliest"
    ending_offsets: str = "latest"
    starting_timestamp: str = ""
    ending_timestamp: str = ""
    num_partitions: int = 0
    payload_format: PayloadFormat = "json"
    max_events_per_trigger: int = 250_000
    fail_on_data_loss: bool = True
    consumer_name: str = ""
    consumer_ttl: str = "7d"


class WriteOptions(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Options of a write. Lists of columns are comma-separated. ``write_id`` identifies the save. If a save is
    repeated under the same id, its rows are duplicates, whatever the state of their jobs."""

    url: str = ""
    queue: str = ""
    task: str = ""
    key_columns: str = ""
    payload_columns: str = ""
    priority_column: str = ""
    delay_column: str = ""
    group_column: str = ""
    cost_column: str = ""
    batch_size: int = 1000
    release: Literal["immediately", "onCommit"] = "immediately"
    bad_rows: Literal["fail", "skip"] = "fail"
    write_id: str = ""
    run_id: str = ""


_Options = TypeVar("_Options", ReadOptions, WriteOptions)

# Spark adds these to the user's options.
_SPARK_OPTIONS = frozenset({"path", "checkpointlocation"})


def read_options(values: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a read. Raise ``InvalidOption`` for an unknown name or an invalid value."""
    options = _parse(values, ReadOptions, where="spark.read.format('penstock')")
    chosen = [name for name in ("queue", "subscribe", "subscribe_pattern") if getattr(options, name)]
    if len(chosen) != 1:
        raise InvalidOption(
            "set exactly one of the options queue, subscribe ('mail,reports') and subscribePattern ('mail-.*'), "
            f"got {len(chosen)}."
        )
    if options.queue:
        check_queue(options.queue)
    if options.num_partitions < 0:
        raise InvalidOption(
            f"numPartitions must be >= 1, got {options.num_partitions}. Leave it out for an automatic number."
        )
    if options.max_events_per_trigger < 1:
        raise InvalidOption(f"maxEventsPerTrigger must be >= 1, got {options.max_events_per_trigger}.")
    return options


def write_options(values: Mapping[str, str]) -> WriteOptions:
    """Parse the options of a write. Raise ``InvalidOption`` or ``InvalidName`` for an unknown name or an invalid
    value."""
    options = _parse(values, WriteOptions, where="df.write.format('penstock')")
    if not options.key_columns:
        raise InvalidOption(
            "keyColumns is missing. Name the columns that identify a row, such as 'user_id' or 'day,user_id'."
        )
    if not options.task and not options.queue:
        raise InvalidOption("task and queue are both missing. Name the task of the jobs, or their queue.")
    if options.task and ":" not in options.task:
        check_task(options.task)
    if options.queue:
        check_queue(options.queue)
    if not 1 <= options.batch_size <= 10_000:
        raise InvalidOption(f"batchSize must be from 1 to 10000, got {options.batch_size}.")
    return options


def namespace_of(url: str) -> str:
    """Return the namespace in a URL. The ids of rows depend on it."""
    return parse_qs(split_url(url).query).get("namespace", [""])[0]


def _parse(values: Mapping[str, str], kind: type[_Options], *, where: str) -> _Options:
    names: list[str] = [field.encode_name for field in msgspec.structs.fields(kind)]
    by_lower = {name.lower(): name for name in names}
    user_values = {name: value for name, value in values.items() if name.lower() not in _SPARK_OPTIONS}
    for name in user_values:
        if name.lower() not in by_lower:
            refuse_unknown([name], names, where=where)
    named: dict[str, Any] = {by_lower[name.lower()]: value for name, value in user_values.items()}
    if "url" not in named:
        named["url"] = shared_url(App())
    try:
        options = msgspec.convert(named, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidOption(_explain(str(error), named)) from None
    return msgspec.structs.replace(options, url=url_for_executors(options.url))


def _explain(message: str, values: Mapping[str, Any]) -> str:
    match = re.fullmatch(r"(.*) - at `\$\.(\w+)`", message)
    if match is None:
        return f"an option is invalid: {message}."
    return f"{match[2]}={values.get(match[2])!r} is invalid: {match[1][:1].lower()}{match[1][1:]}."
