"""Jobs as columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import StructType

from penstock.core.annex import EMPTY_ANNEX, Annex
from penstock.core.job import Job
from penstock.core.usage import MILLION
from penstock.spark.arrow import Builder, Column, instants, json_text, plain, value_column
from penstock.spark.schemas import Kind, schema_of

__all__ = ["JobBuilder"]

_Getter = Callable[[Job], Any]


def _annex(job: Job) -> Annex:
    return job.annex or EMPTY_ANNEX


def _usage(job: Job) -> dict[str, float] | None:
    used = _annex(job).usage
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
    "group": lambda job: _or_none(_annex(job).group),
    "payload": lambda job: job.payload,
    "payload_bytes": lambda job: job.payload,
    "priority": lambda job: job.priority,
    "cost": lambda job: _annex(job).cost,
    "headers": lambda job: _annex(job).headers,
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
    """Makes batches of jobs. Raises ``InvalidOption`` for a schema with a column that the kind does not have.

    ``is_light``: neither payloads nor results are asked for.
    """

    def __init__(self, schema: StructType, kind: Kind) -> None:
        self._builder = Builder(schema, _known(kind), where=f"kind={kind!r}")
        self._getters = {name: _GETTERS[name] for name in self._builder.names}
        self.is_light = _VALUES.isdisjoint(self._builder.names)

    def batch(self, jobs: Sequence[Job]) -> pa.RecordBatch:
        return self._builder.batch({name: [get(job) for job in jobs] for name, get in self._getters.items()})


def _known(kind: Kind) -> dict[str, Column]:
    """The columns of the kind, and those that are there for who asks: payloads, and bytes as they are stored."""
    names = [*schema_of(kind).fieldNames(), "payload", "payload_bytes", "result_bytes"]
    return {name: _column_of(name) for name in names}


def _column_of(name: str) -> Column:
    if name in _VALUES:
        return value_column
    return instants if name.endswith("_at") or name == "kept_until" else plain
