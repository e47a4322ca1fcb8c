"""The schemas of the tables that Spark reads, by kind, and batches of jobs in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from penstock.core.job import EMPTY_EXTRAS, Extras, Job
from penstock.core.limits import MILLION
from penstock.spark.cells import Builder, Column, instants, json_text, plain, value_column

Kind: TypeAlias = Literal["jobs", "results", "failed", "events"]
PayloadFormat: TypeAlias = Literal["json", "variant", "typed"]
KINDS: Final = ("jobs", "results", "failed", "events")

_TEXT, _INT, _LONG, _DOUBLE, _TIME = StringType(), IntegerType(), LongType(), DoubleType(), TimestampType()
# The type of payloads and results depends on the payload format.
_VALUE: Final = BinaryType()

_EVENTS: Final[dict[str, DataType]] = {
    "queue": _TEXT,
    "epoch": _TEXT,
    "seq": _LONG,
    "at": _TIME,
    "type": _TEXT,
    "id": _TEXT,
    "incarnation": _LONG,
    "enqueued_at": _TIME,
    "run_id": _TEXT,
    "task": _TEXT,
    "version": _TEXT,
    "state": _TEXT,
    "run": _INT,
    "token": _LONG,
    "worker": _TEXT,
    "run_ms": _LONG,
    "wait_ms": _LONG,
    "error_type": _TEXT,
    "error": _TEXT,
    "group": _TEXT,
    "priority": _LONG,
    "cost": _DOUBLE,
    "size": _LONG,
    "data": _TEXT,
    "by": _TEXT,
}


def _extras(job: Job) -> Extras:
    return job.extras or EMPTY_EXTRAS


def _usage(job: Job) -> dict[str, float] | None:
    used = _extras(job).usage
    return None if used is None else {name: micros / MILLION for name, micros in used.items()}


_Getter: TypeAlias = Callable[[Job], Any]
_JOBS: Final[dict[str, tuple[DataType, _Getter]]] = {
    "queue": (_TEXT, lambda job: job.queue),
    "id": (_TEXT, lambda job: job.id),
    "incarnation": (_LONG, lambda job: job.incarnation),
    "state": (_TEXT, lambda job: job.state),
    "task": (_TEXT, lambda job: job.options.task),
    "version": (_TEXT, lambda job: job.options.version),
    "run_id": (_TEXT, lambda job: job.run_id or None),
    "write_id": (_TEXT, lambda job: job.write_id or None),
    "group": (_TEXT, lambda job: _extras(job).group or None),
    "payload": (_VALUE, lambda job: job.payload),
    "priority": (_LONG, lambda job: job.priority),
    "cost": (_LONG, lambda job: _extras(job).cost),
    "headers": (MapType(_TEXT, _TEXT, valueContainsNull=False), lambda job: _extras(job).headers),
    "enqueued_at": (_TIME, lambda job: job.enqueued_at_ms),
    "run_at": (_TIME, lambda job: job.run_at_ms),
    "claimed_at": (_TIME, lambda job: job.claimed_at_ms),
    "finished_at": (_TIME, lambda job: job.finished_at_ms),
    "expires_at": (_TIME, lambda job: job.expires_at_ms),
    "kept_until": (_TIME, lambda job: job.kept_until_ms),
    "runs": (_INT, lambda job: job.runs),
    "failures": (_INT, lambda job: job.failures),
    "stalls": (_INT, lambda job: job.stalls),
    "worker": (_TEXT, lambda job: job.worker or None),
    "cancelling": (BooleanType(), lambda job: job.cancelling),
    "blocked_by": (_TEXT, lambda job: job.blocked_by or None),
    "progress": (_TEXT, lambda job: None if job.progress is None else json_text(job.progress)),
    "result": (_VALUE, lambda job: job.result),
    "error_type": (_TEXT, lambda job: job.failure and job.failure.type),
    "error": (_TEXT, lambda job: job.failure and job.failure.message),
    "traceback": (_TEXT, lambda job: (job.failure and job.failure.traceback) or None),
    "usage": (MapType(_TEXT, _DOUBLE, valueContainsNull=False), _usage),
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


def schema_of(kind: Kind, payload_format: PayloadFormat = "json") -> StructType:
    """Return the columns of a kind, with payloads and results as JSON text or as variants."""
    value: DataType = VariantType() if payload_format == "variant" else _TEXT
    fields = _EVENTS
    if kind != "events":
        columns = {name: type for name, (type, _) in _JOBS.items() if name not in _LACKING[kind]}
        fields = {name: value if type is _VALUE else type for name, type in columns.items()}
    return StructType([StructField(name, type) for name, type in fields.items()])


EVENTS: Final = schema_of("events")


def quoted(name: str) -> str:
    """Return a name quoted for Spark SQL."""
    return f"`{name.replace('`', '``')}`"


class JobBuilder:
    """Builds batches of jobs. Raises ``InvalidOption`` if the schema has a column that the kind lacks.

    ``is_light``: neither payloads nor results are asked for.
    """

    def __init__(self, schema: StructType, kind: Kind) -> None:
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
