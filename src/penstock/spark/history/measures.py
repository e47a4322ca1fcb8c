"""The measures of gold as rows that can be added up, for a minute or a day, for a task or the whole store.

Histograms of durations can be added up as well, so the percentiles of an hour follow from its minutes. The bounds of a
bucket differ by 2 %, so a percentile is off by at most 1 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.history.tables import (
    CAUSES,
    COUNTED,
    GOLD,
    GOLD_KEYS,
    PERCENTILES,
    TIMED,
    Instants,
    aggregated,
    millis,
    usd_micros,
    where,
)

_GROWTH: Final = 1.02
_LOG: Final = float(np.log(_GROWTH))


def bucket_of(ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the bucket of each duration; 0 has the bucket -1."""
    buckets = np.ceil(np.log(np.maximum(ms, 1)) / _LOG)
    return np.where(ms < 1, -1, buckets).astype(np.int32)


def _middle(buckets: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Return the duration in the middle of each bucket, at most 1 % from its bounds."""
    return np.where(buckets < 0, 0.0, 2 * np.power(_GROWTH, buckets.astype(float)) / (_GROWTH + 1))


def percentile_rows(
    groups: npt.NDArray[np.int64], buckets: npt.NDArray[np.int32], times: npt.NDArray[np.int64], share: float
) -> npt.NDArray[np.float64]:
    """Return the percentile of each group. The entries are sorted by group and bucket. ``groups`` has the start of each
    group and, as its last element, the number of entries."""
    reached = np.cumsum(times)
    before = np.concatenate([[0], reached])[groups[:-1]]
    totals = np.concatenate([[0], reached])[groups[1:]] - before
    ranks = before + np.maximum(np.ceil(share * totals), 1)
    percentiles: npt.NDArray[np.float64] = _middle(buckets)[np.searchsorted(reached, ranks, side="left")]
    return percentiles


# Parts and rows of gold.


GRAINS: Final = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
SECONDS: Final = {"second": 1000}
OUT: Final = ("completed", "failed", "expired", "cancelled")
_RUN_ENDS: Final = ("completed", "failed", "retrying")
_FAILED: Final = ("failed", "retrying", "expired")
_MINUTE: Final = GRAINS["minute"]

_TEXT, _LONG, _DOUBLE, _TIME = pa.string(), pa.int64(), pa.float64(), pa.timestamp("us", "UTC")
# Rows with the same key are merged: these columns are summed, the others follow their rule in _HOW.
_SUMS: Final = {
    **dict.fromkeys(COUNTED, _LONG),
    **dict.fromkeys(("run_ms", "busy_ms", "usd_micros"), _LONG),
    "cost": _DOUBLE,
}
_HOW: Final = {
    **dict.fromkeys(_SUMS, "sum"),
    **dict.fromkeys(("wait_max", "run_max", "backlog_max"), "max"),
    "backlog": "last",
}
# A row of PARTS is a share of the measures or, with ``what``, the number of durations in one bucket. Rows
# with a larger ``turn`` are newer.
PARTS: Final = pa.schema(
    {
        **GOLD_KEYS,
        **_SUMS,
        **dict.fromkeys(("wait_max", "run_max"), _DOUBLE),
        **dict.fromkeys(("backlog", "backlog_max"), _LONG),
        "what": _TEXT,
        "bucket": pa.int32(),
        "times": _LONG,
        "turn": pa.int32(),
    }
)
_NAMES: Final = ("queue", "task", "group", "worker")


def measures_of(events: pa.Table, grains: Mapping[str, int] = GRAINS, *, since_ms: int = 0) -> pa.Table:
    """Return the parts that these events add to gold, for each period of ``grains``, which has the shortest first.
    Busy time before ``since_ms`` does not count."""
    events = events.filter(pc.not_equal(events["id"], ""))
    unit = next(iter(grains.values()))
    tables = [_counts(events, unit), _busy(events, unit, since_ms), *_durations(events, unit)]
    return _parts(_spread(rows, grains) for rows in tables if rows.num_rows)


def _parts(tables: Iterable[pa.Table]) -> pa.Table:
    parts = [shaped(table, PARTS, {"what": "", "turn": 1}) for table in tables]
    rows = pa.concat_tables(parts) if parts else PARTS.empty_table()
    return _sum_parts(rows)


def shaped(table: pa.Table, schema: pa.Schema, defaults: Mapping[str, Any]) -> pa.Table:
    """Return the table with exactly these columns. Missing columns get their default or null."""
    columns = [
        pc.cast(table[field.name], field.type)
        if field.name in table.column_names
        else pa.repeat(pa.scalar(defaults.get(field.name), field.type), table.num_rows)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _sum_parts(rows: pa.Table) -> pa.Table:
    """Return one row for each key, bucket and turn."""
    keys = [*GOLD_KEYS, "what", "bucket", "turn"]
    return aggregated(rows, keys, {**_HOW, "times": "sum"}).select(PARTS.names).cast(PARTS)


def _starts(events: pa.Table, unit: int) -> pa.Table:
    """Return the names of each event, and the start of the unit of time that it falls into."""
    at_ms = millis(events["at"])
    return events.select(list(_NAMES)).append_column("start", pa.array(at_ms // unit * unit))


def _counts(events: pa.Table, unit: int) -> pa.Table:
    kind = events["type"]
    rows = _starts(events, unit)
    values = {name: pc.cast(pc.is_in(kind, pa.array(types)), _LONG) for name, types in COUNTED.items()}
    values |= {
        "run_ms": where(pc.is_in(kind, pa.array(_RUN_ENDS)), events["run_ms"]),
        "wait_max": where(pc.equal(kind, "claimed"), events["wait_ms"]),
        "cost": where(pc.equal(kind, "claimed"), events["cost"]),
        "usd_micros": usd_micros(events, pc.equal(kind, "used")),
    }
    values["run_max"] = values["run_ms"]
    for name, column in values.items():
        rows = rows.append_column(name, column)
    return aggregated(rows, ("start", *_NAMES), {name: _HOW[name] for name in values})


def _durations(events: pa.Table, unit: int) -> Iterator[pa.Table]:
    """Yield the numbers of waits and of runs in each bucket."""
    for what, column, types in (("wait", "wait_ms", ("claimed",)), ("run", "run_ms", _RUN_ENDS)):
        own = events.filter(pc.is_in(events["type"], pa.array(types)))
        buckets = bucket_of(np.asarray(own[column].to_numpy(), np.int64))
        rows = _starts(own, unit).append_column("bucket", pa.array(buckets))
        counted = rows.group_by(["start", *_NAMES, "bucket"], use_threads=False).aggregate(
            [([], "count_all")]
        )
        counted = counted.rename_columns({"count_all": "times"})
        yield counted.append_column("what", pa.repeat(what, counted.num_rows))


def _busy(events: pa.Table, unit: int, since_ms: int) -> pa.Table:
    """Return the busy time in each unit of time. Split runs that span several units."""
    runs = events.filter(pc.and_(pc.greater(events["run_ms"], 0), pc.not_equal(events["worker"], "")))
    ended = millis(runs["at"])
    began = np.maximum(ended - np.asarray(runs["run_ms"].to_numpy(), np.int64), since_ms)
    index, start = spanned(began, ended, unit)
    within = np.minimum(ended[index], start + unit) - np.maximum(began[index], start)
    rows = runs.select(list(_NAMES)).take(pa.array(index))
    rows = rows.append_column("start", pa.array(start)).append_column("busy_ms", pa.array(within))
    return aggregated(rows, ("start", *_NAMES), {"busy_ms": "sum"})


def spanned(began: Instants, ended: Instants, unit: int) -> tuple[Instants, Instants]:
    """Return the index of the span and the start of the unit, for each unit of time that overlaps a span."""
    first = began // unit
    counts = ended // unit - first + 1
    index = np.repeat(np.arange(len(began)), counts)
    nth = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    return index, (first[index] + nth) * unit


def _spread(rows: pa.Table, grains: Mapping[str, int]) -> pa.Table:
    """Return each row once for each of its names and periods."""
    values = [name for name in rows.column_names if name not in (*_NAMES, "start")]
    empty = pa.repeat("", rows.num_rows)
    tables: list[pa.Table] = []
    for dimension in ("store", *_NAMES):
        name = empty if dimension == "store" else rows[dimension]
        queue = empty if dimension == "store" else rows["queue"]
        named = rows.select(values).append_column("queue", queue).append_column("name", name)
        named = named.append_column("start", rows["start"])
        if dimension != "store":
            named = named.filter(pc.not_equal(named["name"], ""))
        named = named.append_column("dimension", pa.repeat(dimension, named.num_rows))
        tables += in_periods(named, grains)
    return pa.concat_tables(tables)


def in_periods(rows: pa.Table, grains: Mapping[str, int]) -> Iterator[pa.Table]:
    """Yield the rows for each grain, with the period of their ``start``."""
    starts = np.asarray(rows["start"].to_numpy(), np.int64)
    rows = rows.drop_columns(["start"])
    for grain, length in grains.items():
        placed = rows.append_column("at", instant_column(starts // length * length))
        yield placed.append_column("grain", pa.repeat(grain, rows.num_rows))


def instant_column(at_ms: Instants) -> pa.Array:
    """Return epoch milliseconds as instants."""
    return pa.array(at_ms * 1000).cast(_TIME)


def periods_of(at_ms: Instants, run_ms: Instants) -> Instants:
    """Return the starts of all periods that overlap the events and the runs that they finish."""
    _, minutes = spanned(at_ms - run_ms, at_ms, _MINUTE)
    minutes = np.unique(minutes)
    return np.unique(np.concatenate([minutes // length * length for length in GRAINS.values()]))


def parts_of(gold: pa.Table) -> pa.Table:
    """Split rows of gold into parts."""
    micros = pc.cast(pc.round(pc.multiply(gold["usd"], 1e6)), _LONG)
    tables = [shaped(gold.append_column("usd_micros", micros), PARTS, {"what": "", "turn": 0})]
    for what in TIMED:
        histogram = gold[f"{what}_histogram"].combine_chunks()
        lengths = pc.fill_null(pc.list_value_length(histogram), 0).to_numpy()
        rows = gold.select(list(GOLD_KEYS)).take(pa.array(np.repeat(np.arange(gold.num_rows), lengths)))
        entries = pc.list_flatten(histogram)
        for name in ("bucket", "times"):
            rows = rows.append_column(name, pc.struct_field(entries, name))
        tables.append(shaped(rows, PARTS, {"what": what, "turn": 0}))
    return pa.concat_tables(tables)


def merged_measures(parts: pa.Table) -> pa.Table:
    """Merge parts into rows of gold, in order."""
    parts = parts.sort_by("turn")
    sums = parts.filter(pc.equal(parts["what"], ""))
    order = [(name, "ascending") for name in ("at", "grain", "dimension", "queue", "name")]
    rows = aggregated(sums, GOLD_KEYS, _HOW).sort_by(order)
    columns: dict[str, Any] = {name: rows[name] for name in rows.column_names}
    columns |= {name: pc.fill_null(rows[name], 0) for name in COUNTED}
    columns["usd"] = pc.divide(pc.cast(rows["usd_micros"], _DOUBLE), 1e6)
    lengths = SECONDS | GRAINS
    spans = pa.array([lengths[grain] for grain in rows["grain"].to_pylist()], _DOUBLE)
    columns["utilisation"] = pc.divide(pc.cast(rows["busy_ms"], _DOUBLE), spans)
    for what in TIMED:
        columns |= _timings(parts, rows, what)
    return pa.table([pc.cast(columns[field.name], field.type) for field in GOLD], schema=GOLD)


def _timings(parts: pa.Table, rows: pa.Table, what: str) -> dict[str, Any]:
    """Return the histogram of each row and its percentiles."""
    own = parts.filter(pc.equal(parts["what"], what)).select([*GOLD_KEYS, "bucket", "times"])
    numbered = rows.select([*GOLD_KEYS]).append_column("row", pa.array(np.arange(rows.num_rows)))
    entries_by_row = own.join(numbered, [*GOLD_KEYS], join_type="inner")
    counted = entries_by_row.group_by(["row", "bucket"]).aggregate([("times", "sum")])
    counted = counted.sort_by([("row", "ascending"), ("bucket", "ascending")])
    buckets, times = counted["bucket"].combine_chunks(), counted["times_sum"].combine_chunks()
    starts = np.searchsorted(counted["row"].to_numpy(), np.arange(rows.num_rows + 1))
    is_empty = starts[1:] == starts[:-1]
    filled = np.concatenate([starts[:-1][~is_empty], starts[-1:]])
    offsets = pa.array(starts, pa.int32())
    entries = pa.StructArray.from_arrays([buckets, times], ["bucket", "times"])
    columns: dict[str, Any] = {f"{what}_histogram": pa.ListArray.from_arrays(offsets, entries)}
    most = np.asarray(pc.fill_null(rows[f"{what}_max"], 0).to_numpy(), np.float64)
    for end, share in PERCENTILES.items():
        values = np.full(rows.num_rows, np.nan)
        values[~is_empty] = percentile_rows(filled, buckets.to_numpy(), times.to_numpy(), share)
        # A bucket extends a little beyond its longest duration.
        columns[f"{what}_{end}"] = pa.array(np.round(np.minimum(values, most), 3), mask=is_empty)
    return columns


def causes_of(events: pa.Table) -> pa.Table:
    """Return failures by period and cause."""
    is_failure = pc.and_(pc.is_in(events["type"], pa.array(_FAILED)), pc.not_equal(events["error_type"], ""))
    failures = events.filter(pc.and_(is_failure, pc.not_equal(events["id"], "")))
    is_retry = pc.equal(failures["type"], "retrying")
    rows = failures.select(["queue", "task", "error_type"])
    rows = rows.append_column("start", pa.array(millis(failures["at"])))
    rows = rows.append_column("failed", pc.cast(pc.invert(is_retry), _LONG))
    rows = rows.append_column("retried", pc.cast(is_retry, _LONG)).append_column("example", failures["error"])
    spread = pa.concat_tables(in_periods(rows, GRAINS))
    return merged_causes(shaped(spread, CAUSES, {}))


def merged_causes(rows: pa.Table) -> pa.Table:
    """Return one row for each period and cause, in order."""
    keys = ("at", "grain", "queue", "task", "error_type")
    causes = aggregated(rows, keys, {"failed": "sum", "retried": "sum", "example": "max"})
    return causes.sort_by([(name, "ascending") for name in keys]).select(CAUSES.names).cast(CAUSES)
