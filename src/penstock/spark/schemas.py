"""The schemas of the tables that Spark reads, by kind, and batches of jobs in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa
from pyspark.sql.types import (
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

_TEXT, _INT, _LONG = StringType(), IntegerType(), LongType()
_DOUBLE, _TIME = DoubleType(), TimestampType()

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

_IDENTITY: Final[dict[str, DataType]] = {
    "queue": _TEXT,
    "id": _TEXT,
    "incarnation": _LONG,
    "state": _TEXT,
    "task": _TEXT,
    "version": _TEXT,
    "run_id": _TEXT,
    "write_id": _TEXT,
    "group": _TEXT,
}
_COUNTS: Final[dict[str, DataType]] = {"runs": _INT, "failures": _INT, "stalls": _INT}
_ERROR: Final[dict[str, DataType]] = {"error_type": _TEXT, "error": _TEXT, "traceback": _TEXT}
_USAGE: Final[dict[str, DataType]] = {"usage": MapType(_TEXT, _DOUBLE, valueContainsNull=False)}


def _jobs(value: DataType) -> dict[str, DataType]:
    return {
        **_IDENTITY,
        "payload": value,
        "priority": _LONG,
        "cost": _LONG,
        "headers": MapType(_TEXT, _TEXT, valueContainsNull=False),
        "enqueued_at": _TIME,
        "run_at": _TIME,
        "claimed_at": _TIME,
        "finished_at": _TIME,
        "expires_at": _TIME,
        "kept_until": _TIME,
        **_COUNTS,
        "worker": _TEXT,
        "cancelling": BooleanType(),
        "blocked_by": _TEXT,
        "progress": _TEXT,
        "result": value,
        **_ERROR,
        **_USAGE,
    }


def _results(value: DataType) -> dict[str, DataType]:
    return {
        **_IDENTITY,
        "enqueued_at": _TIME,
        "claimed_at": _TIME,
        "finished_at": _TIME,
        **_COUNTS,
        "worker": _TEXT,
        "result": value,
        **_USAGE,
    }


def _failed(value: DataType) -> dict[str, DataType]:
    return {
        **_IDENTITY,
        "payload": value,
        "enqueued_at": _TIME,
        "claimed_at": _TIME,
        "finished_at": _TIME,
        **_COUNTS,
        "worker": _TEXT,
        **_ERROR,
        **_USAGE,
    }


def schema_of(kind: Kind, payload_format: PayloadFormat = "json") -> StructType:
    """Return the columns of a kind, with payloads and results as JSON text or as variants."""
    value: DataType = VariantType() if payload_format == "variant" else _TEXT
    match kind:
        case "events":
            fields = _EVENTS
        case "jobs":
            fields = _jobs(value)
        case "results":
            fields = _results(value)
        case "failed":
            fields = _failed(value)
    return StructType([StructField(name, type) for name, type in fields.items()])


EVENTS: Final = schema_of("events")


def quoted(name: str) -> str:
    """Return a name quoted for Spark SQL."""
    return f"`{name.replace('`', '``')}`"


# Batches of jobs.


_Getter = Callable[[Job], Any]


def _extras(job: Job) -> Extras:
    return job.extras or EMPTY_EXTRAS


def _usage(job: Job) -> dict[str, float] | None:
    used = _extras(job).usage
    return None if used is None else {name: micros / MILLION for name, micros in used.items()}


def _or_none(text: str) -> str | None:
    return text or None


_GETTERS: Final[Mapping[str, _Getter]] = {
    "queue": lambda job: job.queue,
    "id": lambda job: job.id,
    "incarnation": lambda job: job.incarnation,
    "state": lambda job: job.state,
    "task": lambda job: job.options.task,
    "version": lambda job: job.options.version,
    "run_id": lambda job: _or_none(job.run_id),
    "write_id": lambda job: _or_none(job.write_id),
    "group": lambda job: _or_none(_extras(job).group),
    "payload": lambda job: job.payload,
    "payload_bytes": lambda job: job.payload,
    "priority": lambda job: job.priority,
    "cost": lambda job: _extras(job).cost,
    "headers": lambda job: _extras(job).headers,
    "enqueued_at": lambda job: job.enqueued_at_ms,
    "run_at": lambda job: job.run_at_ms,
    "claimed_at": lambda job: job.claimed_at_ms,
    "finished_at": lambda job: job.finished_at_ms,
    "expires_at": lambda job: job.expires_at_ms,
    "kept_until": lambda job: job.kept_until_ms,
    "runs": lambda job: job.runs,
    "failures": lambda job: job.failures,
    "stalls": lambda job: job.stalls,
    "worker": lambda job: _or_none(job.worker),
    "cancelling": lambda job: job.cancelling,
    "blocked_by": lambda job: _or_none(job.blocked_by),
    "progress": lambda job: None if job.progress is None else json_text(job.progress),
    "result": lambda job: job.result,
    "result_bytes": lambda job: job.result,
    "error_type": lambda job: None if job.failure is None else job.failure.type,
    "error": lambda job: None if job.failure is None else job.failure.message,
    "traceback": lambda job: None if job.failure is None else _or_none(job.failure.traceback),
    "usage": _usage,
}
_VALUES: Final = frozenset({"payload", "payload_bytes", "result", "result_bytes"})


class JobBuilder:
    """Builds batches of jobs. Raises ``InvalidOption`` if the schema has a column that the kind lacks.

    ``is_light``: neither payloads nor results are asked for.
    """

    def __init__(self, schema: StructType, kind: Kind) -> None:
        self._builder = Builder(schema, _known(kind), where=f"kind={kind!r}")
        self._getters = {name: _GETTERS[name] for name in self._builder.names}
        self.is_light = _VALUES.isdisjoint(self._builder.names)

    def batch(self, jobs: Sequence[Job]) -> pa.RecordBatch:
        return self._builder.batch({name: [get(job) for job in jobs] for name, get in self._getters.items()})


def _known(kind: Kind) -> dict[str, Column]:
    """Return the columns of the kind, and the optional ones: payloads, and bytes as they are stored."""
    names = [*schema_of(kind).fieldNames(), "payload", "payload_bytes", "result_bytes"]
    return {name: _column_of(name) for name in names}


def _column_of(name: str) -> Column:
    if name in _VALUES:
        return value_column
    return instants if name.endswith("_at") or name == "kept_until" else plain
