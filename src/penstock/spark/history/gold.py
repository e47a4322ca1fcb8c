"""Gold: measures per minute, hour and day, for the whole store and by queue, task, group and worker.

Periods are in UTC, by the time of the event. New events are added to their periods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from penstock.spark.delta import Table
from penstock.spark.history.folding import Fold, fold_forward, next_slice, owners_of
from penstock.spark.history.measures import (
    GRAINS,
    OUT,
    PARTS,
    causes_of,
    instant_column,
    measures_of,
    merged_causes,
    merged_measures,
    parts_of,
    periods_of,
    shaped,
)
from penstock.spark.history.silver import REMOVED
from penstock.spark.history.tables import CAUSES, FoldState, History, Instants, Placing, fold_state, millis

_COLUMNS: Final = ("queue", "epoch", "seq", "at", "type", "enqueued_at", "run_ms")
_JOB: Final = (
    "queue", "state", "first_place", "place", "first_type", "first_seen_at", "finished_at", "removed_at",
)  # fmt: skip


class _Measures(Fold):
    rows = PARTS
    ranged = "at"

    def from_events(self, events: pa.Table) -> pa.Table:
        return measures_of(events)

    def from_known(self, table: pa.Table) -> pa.Table:
        return parts_of(table)

    def folded(self, rows: pa.Table) -> pa.Table:
        return merged_measures(rows)


class _Causes(Fold):
    rows = CAUSES
    ranged = "at"

    def from_events(self, events: pa.Table) -> pa.Table:
        return causes_of(events)

    def folded(self, rows: pa.Table) -> pa.Table:
        return merged_causes(rows)


def summarise(spark: SparkSession, history: History) -> bool:
    """Fold the next slice of events into gold and causes, up to silver, in one commit each. Return whether there are
    more.

    Raises:
        Conflict: another sync committed to one of them first.
    """
    silver = fold_state(history.silver.load())
    has_more = [_add(spark, history, table, upto=silver) for table in (history.gold, history.causes)]
    return any(has_more)


def _add(spark: SparkSession, history: History, table: Table, *, upto: FoldState) -> bool:
    part = next_slice(history, table, upto)
    if part is None:
        return False
    events = part.events(history, _COLUMNS)
    instants = periods_of(millis(events["at"]), np.asarray(events["run_ms"].to_numpy(), np.int64))
    if table is history.causes:
        return fold_forward(spark, table, part, fold=_Causes(history.bronze, part.placing), instants=instants)
    steps = _steps(history, events, part.placing, has_losses=bool(upto.losses or upto.changes))
    backlog, open = backlog_of(steps, part.known.open)
    fold = _Measures(history.bronze, part.placing, extra=backlog)
    instants = np.unique(np.concatenate([instants, millis(backlog["at"])]))
    return fold_forward(spark, table, part, fold=fold, instants=instants, open=open)


def _steps(history: History, events: pa.Table, placing: Placing, *, has_losses: bool) -> pa.Table:
    """Return the change of the backlog by each new event: ``queue``, ``at`` and ``step``.

    Silver adds what events do not say: which jobs were removed while open, and which lost their first event.
    """
    removed, obliterated = _of_type(events, "removed"), _of_type(events, "obliterated")
    tables = [event_steps(events)]
    for jobs in _jobs_without_events(history, events, has_losses=has_losses):
        is_gone = pc.or_(
            _is_among(jobs, ("queue", "place"), removed, ("queue", "place")),
            _is_among(jobs, ("queue", "removed_at"), obliterated, ("queue", "at")),
        )
        gone = jobs.filter(pc.and_(pc.equal(jobs["state"], REMOVED), is_gone))
        tables.append(_step_table(gone, "finished_at", pa.repeat(-1, gone.num_rows)))
        is_first = placing.covers(jobs["queue"], jobs["first_place"])
        begun = pc.is_in(jobs["first_type"], pa.array(["enqueued", "retried"]))
        late = jobs.filter(pc.and_(is_first, pc.invert(begun)))
        tables.append(_step_table(late, "first_seen_at", pa.repeat(1, late.num_rows)))
    return pa.concat_tables(tables)


def _is_among(rows: pa.Table, names: tuple[str, str], others: pa.Table, other_names: tuple[str, str]) -> Any:
    """Return, for each row, whether ``others`` has a row with the same pair of values."""
    pairs = (
        pc.binary_join_element_wise(
            table[text], pc.cast(pc.cast(table[number], pa.int64()), pa.string()), " "
        )
        for table, (text, number) in ((rows, names), (others, other_names))
    )
    ours, theirs = pairs
    return pc.fill_null(pc.is_in(ours, theirs.combine_chunks()), False)


def event_steps(events: pa.Table) -> pa.Table:
    """Return the change of the backlog that the type of each event implies."""
    kind = events["type"]
    step = pc.subtract(
        pc.cast(pc.is_in(kind, pa.array(["enqueued", "retried"])), pa.int64()),
        pc.cast(pc.is_in(kind, pa.array(OUT)), pa.int64()),
    )
    return _step_table(events, "at", step)


def _step_table(rows: pa.Table, at: str, step: Any) -> pa.Table:
    schema = pa.schema({"queue": pa.string(), "at": pa.int64(), "step": pa.int64()})
    columns = [rows["queue"], pa.array(millis(rows[at])), step]
    return pa.table(
        [pc.cast(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def _of_type(events: pa.Table, kind: str) -> pa.Table:
    return events.filter(pc.equal(events["type"], kind))


def _jobs_without_events(history: History, events: pa.Table, *, has_losses: bool) -> Iterator[pa.Table]:
    """Yield the jobs of silver that may have changed the backlog without an event."""
    removed, files = _of_type(events, "removed"), history.silver.load().files
    if not _of_type(events, "obliterated").num_rows:
        touching = events if has_losses else removed
        births = millis(touching["enqueued_at"].drop_null())
        lows = np.array([file.low for file in files], np.int64)
        files = [files[index] for index in np.unique(owners_of(lows, births)).tolist()] if files else []
    for file in files:
        yield history.silver.read(file, _JOB)


def backlog_of(
    steps: pa.Table, before: Mapping[str, int], grains: Mapping[str, int] = GRAINS
) -> tuple[pa.Table, dict[str, int]]:
    """Return the backlog of each queue in every period in which it changed, as parts of gold, and its backlog at the
    end."""
    steps = steps.filter(pc.not_equal(steps["step"], 0)).sort_by(
        [("queue", "ascending"), ("at", "ascending")]
    )
    queues = steps["queue"].to_numpy(zero_copy_only=False)
    step, at = steps["step"].to_numpy(), steps["at"].to_numpy()
    open = dict(before)
    tables: list[pa.Table] = []
    for queue in np.unique(queues).tolist():
        own = queues == queue
        after = open.get(queue, 0) + np.cumsum(step[own])
        open[queue] = int(after[-1])
        backlog = {"at": at[own], "backlog": after, "backlog_max": np.maximum(after, after - step[own])}
        tables += [_in_periods(queue, backlog, *grain) for grain in grains.items()]
    return (pa.concat_tables(tables) if tables else PARTS.empty_table()), open


def _in_periods(queue: str, backlog: Mapping[str, Instants], grain: str, length: int) -> pa.Table:
    period = backlog["at"] // length * length
    ends = np.flatnonzero(np.append(period[1:] != period[:-1], True))
    starts = np.concatenate([[0], ends[:-1] + 1])
    rows = pa.table(
        {
            "at": instant_column(period[ends]),
            "backlog": backlog["backlog"][ends],
            "backlog_max": np.maximum.reduceat(backlog["backlog_max"], starts),
        }
    )
    same = {"grain": grain, "dimension": "queue", "queue": queue, "name": queue, "what": "", "turn": 1}
    return shaped(rows, PARTS, same)
