"""The grain of seconds: what a short span measured, computed from bronze when the page is written.

Gold starts at minutes, which show nothing of a run that took one. Bronze has every event, and a span of a few minutes
is small enough to be read without Spark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.delta import DataFile
from penstock.spark.history.folder import History
from penstock.spark.history.measures import COUNTED, GRAINS, OUT

__all__ = ["SECOND_MS", "second_rows"]

SECOND_MS: Final = 1000
_MOST_EVENTS: Final = 2_000_000
_COLUMNS: Final = ("queue", "seq", "type", "id", "at", "worker", "run_ms", "wait_ms", "cost", "data")
_ENDS: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_RUN_ENDS: Final = ("completed", "failed", "retrying")
_SUMS: Final = (*COUNTED, "cost", "usd")
_TIMINGS: Final = tuple(f"{what}_{end}" for what in ("wait", "run") for end in _ENDS)
_MEASURES: Final = (*_SUMS, *_TIMINGS, "run_ms", "busy_ms", "backlog", "backlog_max")

Rows = list[dict[str, Any]]


def second_rows(history: History, minutes: Rows, *, since_ms: int, until_ms: int) -> Rows:
    """Return the rows of gold's metrics for each second of a span, by store, queue and worker.

    ``minutes`` are gold's rows by minute, which know the backlog at the end of each. Return no rows if the span
    holds too many events to be read here.
    """
    files = [
        file
        for file in history.bronze.load().files
        if file.low < until_ms + GRAINS["minute"] and file.high >= since_ms
    ]
    if sum(file.rows for file in files) > _MOST_EVENTS:
        return []
    events = _events(history, files, since_ms, until_ms)
    if events.empty:
        return []
    parts = [
        *_measured(events, dimension="store", names=[]),
        *_measured(events, dimension="queue", names=["queue"]),
        *_measured(events[events["worker"] != ""], dimension="worker", names=["queue", "worker"]),
        *_busy_rows(events, since_ms),
        *_backlog_rows(events, minutes),
    ]
    return _merged(parts)


def _merged(parts: Rows) -> Rows:
    """Return one row for each period and name, with every measure of gold."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for part in parts:
        key = tuple(part[name] for name in ("dimension", "queue", "name", "at"))
        rows.setdefault(key, dict.fromkeys(_MEASURES)).update(part)
    return list(rows.values())


def _events(history: History, files: Sequence[DataFile], since_ms: int, until_ms: int) -> pd.DataFrame:
    if not files:
        return pd.DataFrame(columns=list(_COLUMNS))
    wanted = pc.field("id") != ""
    table = pa.concat_tables(history.bronze.folder.read(file.path, _COLUMNS, wanted) for file in files)
    at = pc.cast(pc.cast(table["at"], pa.timestamp("us", "UTC")), pa.int64())
    events = table.set_column(table.schema.get_field_index("at"), "at", pc.divide(at, 1000)).to_pandas()
    events = events[(events["at"] >= since_ms) & (events["at"] < until_ms)]
    is_claim, is_run, is_usage = (
        events["type"].isin(types) for types in (["claimed"], list(_RUN_ENDS), ["used"])
    )
    micros = events["data"].where(is_usage).map(_usd_micros, na_action="ignore")
    return events.assign(
        second=events["at"] // SECOND_MS * SECOND_MS,
        wait_ms=events["wait_ms"].where(is_claim),
        ran_ms=events["run_ms"].where(is_run),
        cost=events["cost"].where(is_claim),
        usd=micros.astype("float64") / 1e6,
        **{name: events["type"].isin(types).astype("int64") for name, types in COUNTED.items()},
    )


def _usd_micros(data: str) -> float | None:
    found = pd.io.json.ujson_loads(data or "{}").get("usd")
    return None if found is None else float(found)


def _measured(events: pd.DataFrame, *, dimension: str, names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each second and name, with counts, costs and exact percentiles."""
    by = [*names, "second"]
    grouped = events.groupby(by, sort=True)
    found = grouped[list(_SUMS)].sum(min_count=1)
    for what, column in (("wait", "wait_ms"), ("run", "ran_ms")):
        ends = grouped[column].quantile(list(_ENDS.values())).unstack()
        for end, share in _ENDS.items():
            found[f"{what}_{end}"] = ends[share]
    found = found.reset_index()
    for row in found.replace({np.nan: None}).to_dict("records"):
        yield _row(dimension, row.pop("queue", ""), row.pop("worker", ""), row.pop("second"), row)


def _row(dimension: str, queue: str, name: str, at_ms: int, values: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        "grain": "second",
        "dimension": dimension,
        "queue": queue,
        "name": name,
        "at": int(at_ms),
        **{name: _plain(value) for name, value in values.items()},
    }


def _plain(value: Any) -> float | int | None:
    """Return a number of numpy's as one of Python's, whole if it is."""
    if value is None:
        return None
    number = float(value)
    return int(number) if number.is_integer() else number


def _busy_rows(events: pd.DataFrame, since_ms: int) -> Iterator[dict[str, Any]]:
    """Yield how long each worker was busy in each second: every run is cut at the seconds that it touches."""
    runs = events[(events["ran_ms"] > 0) & (events["worker"] != "")]
    began = np.maximum(runs["at"] - runs["ran_ms"], since_ms).to_numpy(dtype="int64")
    ended = runs["at"].to_numpy(dtype="int64")
    first = began // SECOND_MS
    counts = np.maximum(ended // SECOND_MS - first + 1, 0)
    index = np.repeat(np.arange(len(runs)), counts)
    nth = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    second = (first[index] + nth) * SECOND_MS
    within = np.minimum(ended[index], second + SECOND_MS) - np.maximum(began[index], second)
    pieces = pd.DataFrame(
        {
            "queue": runs["queue"].to_numpy()[index],
            "worker": runs["worker"].to_numpy()[index],
            "second": second,
            "busy_ms": within,
        }
    )
    sums = pieces.groupby(["queue", "worker", "second"], sort=True)["busy_ms"].sum()
    for (queue, worker, at_ms), busy_ms in sums.items():
        yield _row("worker", str(queue), str(worker), at_ms, {"busy_ms": busy_ms})


def _backlog_rows(events: pd.DataFrame, minutes: Rows) -> Iterator[dict[str, Any]]:
    """Yield the open jobs of each queue at the end of every second in which that changed.

    Gold knows the backlog at the end of each minute, jobs without an event included. So every minute starts from
    what gold has for the one before.
    """
    steps = events["type"].isin(["enqueued", "retried"]).astype("int64") - events["type"].isin(OUT)
    changes = events.assign(step=steps)[steps != 0].sort_values(["queue", "at", "seq"])
    changes["minute"] = changes["at"] // GRAINS["minute"] * GRAINS["minute"]
    changes["open"] = changes.groupby(["queue", "minute"])["step"].cumsum()
    changes["high"] = np.maximum(changes["open"], changes["open"] - changes["step"])
    found = changes.groupby(["queue", "minute", "second"]).agg({"open": "last", "high": "max"})
    known = _minute_ends(minutes)
    for (queue, minute, second), (last, high) in zip(found.index, found.to_numpy(), strict=True):
        ends = known.get(queue, {})
        carried = ends.get(max((at for at in ends if at < minute), default=0), 0)
        backlogs = {"backlog": carried + last, "backlog_max": carried + high}
        yield _row("queue", queue, "", second, backlogs)


def _minute_ends(minutes: Rows) -> dict[str, dict[int, int]]:
    known: dict[str, dict[int, int]] = {}
    for row in minutes:
        if row["grain"] == "minute" and row["dimension"] == "queue" and row["backlog"] is not None:
            known.setdefault(row["queue"], {})[row["at"]] = row["backlog"]
    return known
