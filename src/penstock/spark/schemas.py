"""The tables that Spark sees: a schema for each kind."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

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

__all__ = ["EVENTS", "KINDS", "Kind", "PayloadFormat", "quoted", "schema_of"]

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
    """The columns of a kind. With ``typed`` it is what there is before the user says what payloads hold: text."""
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
    """A name as Spark's SQL takes it, whatever characters it has."""
    return f"`{name.replace('`', '``')}`"
