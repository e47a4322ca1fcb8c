"""The history of durable steps: one row per step of a job, from its ``recorded`` events.

Each event becomes a row of the table, and rows of the same step are merged, as in ``silver``.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from penstock.core.lifecycle import EventType
from penstock.spark.history.folding import Fold, fold_forward, next_slice
from penstock.spark.history.tables import STEPS, History, aggregated, millis

_KEYS: Final = ("queue", "id", "incarnation", "name", "key")
_COLUMNS: Final = ("queue", "epoch", "seq", "type", "enqueued_at")
_UNUSED: Final = "unused"
_HOW: Final = {
    **dict.fromkeys(
        ("task", "status", "run", "attempt", "recorded_at", "last_run_ms", "result_size"), "last"
    ),
    **dict.fromkeys(("error_type", "error", "worker"), "last"),
    **dict.fromkeys(("enqueued_at", "started_at"), "min"),
    "run_ms": "sum",
    "unused": "any",
    "place": "max",
}


class _Recorded(msgspec.Struct):
    """The ``data`` of an event."""

    step: str
    status: str
    failures: int = 0

    @property
    def place(self) -> tuple[str, str]:
        """Return the name of the step, and the key that distinguishes it from other steps of that name."""
        name, bracket, key = self.step.partition("[")
        return (name, key[:-1]) if bracket and key.endswith("]") else (self.step, "")

    @property
    def attempt(self) -> int:
        return self.failures + (self.status not in ("failed", "retrying"))


_decode: Final = msgspec.json.Decoder(_Recorded).decode


def rows_of(events: pa.Table) -> pa.Table:
    """Return each recorded step among the events as a row of the table."""
    events = _recorded(events)
    data = [_decode(text) for text in events["data"].to_pylist()]
    at, run_ms = events["at"], events["run_ms"]
    unused = pa.array([one.status == _UNUSED for one in data], pa.bool_())
    columns: dict[str, Any] = {name: events[name] for name in STEPS.names if name in events.column_names}
    columns |= {
        "name": [one.place[0] for one in data],
        "key": [one.place[1] for one in data],
        "status": [one.status for one in data],
        "attempt": [one.attempt for one in data],
        "started_at": pc.subtract(at, pc.cast(pc.multiply(run_ms, 1000), pa.duration("us"))),
        "recorded_at": at,
        "last_run_ms": run_ms,
        "result_size": events["size"],
        "unused": unused,
    }
    # The event about an unused step carries no record.
    for name in ("status", "attempt", "recorded_at", "last_run_ms", "result_size", "run", "worker"):
        column = pa.chunked_array([columns[name]]) if isinstance(columns[name], list) else columns[name]
        columns[name] = pc.if_else(unused, pa.scalar(None, column.type), column)
    return pa.table([_typed(columns[field.name], field.type) for field in STEPS], schema=STEPS)


def _typed(column: Any, type: pa.DataType) -> Any:
    return pa.array(column, type) if isinstance(column, list) else pc.cast(column, type)


def _recorded(events: pa.Table) -> pa.Table:
    return events.filter(pc.equal(events["type"], EventType.RECORDED.value))


def merged(rows: pa.Table) -> pa.Table:
    """Return one row per step, from rows in any order. The result can be merged again."""
    return aggregated(rows.sort_by("place"), _KEYS, _HOW).select(STEPS.names).cast(STEPS)


class _Steps(Fold):
    rows = STEPS
    ranged = "enqueued_at"

    def from_events(self, events: pa.Table) -> pa.Table:
        return merged(rows_of(events))

    def folded(self, rows: pa.Table) -> pa.Table:
        return merged(rows).sort_by([(name, "ascending") for name in ("enqueued_at", *_KEYS)])


def fold(spark: SparkSession, history: History) -> bool:
    """Fold the next slice of events into the table, in one commit. Return whether there are more.

    Raises:
        Conflict: another sync committed first. Nothing was committed.
    """
    part = next_slice(history, history.steps)
    if part is None:
        return False
    events = _recorded(part.events(history, _COLUMNS))
    fold = _Steps(history.bronze, part.placing)
    return fold_forward(spark, history.steps, part, fold=fold, instants=millis(events["enqueued_at"]))
