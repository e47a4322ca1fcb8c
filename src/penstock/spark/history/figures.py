"""The figures on the page of a history, read without Spark.

They come from gold, which is small. Its finest grain is the minute. Therefore the figures of a span of a few minutes
are computed by second, from the events in bronze.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.delta import DataFile, Table
from penstock.spark.history.folder import History
from penstock.spark.history.measures import COUNTED, GRAINS, OUT

SECOND_MS: Final = 1000
_MAX_EVENTS: Final = 2_000_000
_COLUMNS: Final = ("queue", "seq", "type", "id", "at", "worker", "run_ms", "wait_ms", "cost", "data")
_ENDS: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_RUN_ENDS: Final = ("completed", "failed", "retrying")
_SUMS: Final = (*COUNTED, "cost", "usd")
_TIMINGS: Final = tuple(f"{what}_{end}" for what in ("wait", "run") for end in _ENDS)
_MEASURES: Final = (*_SUMS, *_TIMINGS, "run_ms", "busy_ms", "backlog", "backlog_max")

Rows = list[dict[str, Any]]


def second_rows(history: History, minutes: Rows, *, since_ms: int, until_ms: int) -> Rows:
    """Return the measures for each second of a span, by store, queue and worker.

    ``minutes`` are gold's rows by minute, with the backlog at the end of each. Return no rows if the span has too many
    events to read here.
    """
    files = [
        file
        for file in history.bronze.load().files
        if file.low < until_ms + GRAINS["minute"] and file.high >= since_ms
    ]
    if sum(file.rows for file in files) > _MAX_EVENTS:
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
    filters = pc.field("id") != ""
    table = pa.concat_tables(history.bronze.folder.read(file.path, _COLUMNS, filters) for file in files)
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
    micros = pd.io.json.ujson_loads(data or "{}").get("usd")
    return None if micros is None else float(micros)


def _measured(events: pd.DataFrame, *, dimension: str, names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each second and name, with counts, costs and exact percentiles."""
    by = [*names, "second"]
    grouped = events.groupby(by, sort=True)
    measures = grouped[list(_SUMS)].sum(min_count=1)
    for what, column in (("wait", "wait_ms"), ("run", "ran_ms")):
        ends = grouped[column].quantile(list(_ENDS.values())).unstack()
        for end, share in _ENDS.items():
            measures[f"{what}_{end}"] = ends[share]
    measures = measures.reset_index()
    for row in measures.replace({np.nan: None}).to_dict("records"):
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
    """Return a numpy number as a Python number, as an int if it is whole."""
    if value is None:
        return None
    number = float(value)
    return int(number) if number.is_integer() else number


def _busy_rows(events: pd.DataFrame, since_ms: int) -> Iterator[dict[str, Any]]:
    """Yield the busy time of each worker by second: every run is split at the seconds that it overlaps."""
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
    """Yield the backlog of each queue at the end of every second in which it changed.

    Gold has the backlog at the end of each minute, including jobs without an event. So every minute starts from the
    previous one in gold.
    """
    steps = events["type"].isin(["enqueued", "retried"]).astype("int64") - events["type"].isin(OUT)
    changes = events.assign(step=steps)[steps != 0].sort_values(["queue", "at", "seq"])
    changes["minute"] = changes["at"] // GRAINS["minute"] * GRAINS["minute"]
    changes["open"] = changes.groupby(["queue", "minute"])["step"].cumsum()
    changes["high"] = np.maximum(changes["open"], changes["open"] - changes["step"])
    seconds = changes.groupby(["queue", "minute", "second"]).agg({"open": "last", "high": "max"})
    known = _minute_ends(minutes)
    for (queue, minute, second), (last, high) in zip(seconds.index, seconds.to_numpy(), strict=True):
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


# Figures from gold.


# A chart cannot distinguish more points.
_MAX_POINTS: Final = 720
_MAX_NAMES: Final = 12
_MAX_WORKERS: Final = 24
_COUNTS: Final = tuple(COUNTED)
_SERIES: Final = (*_COUNTS, *_TIMINGS, "busy_ms", "backlog", "backlog_max", "cost", "usd")


def figures(history: History, *, since_ms: int, until_ms: int) -> dict[str, Any]:
    """Return all figures between two instants as JSON-compatible values. The length of the periods depends on the span.

    A span of a few minutes is shown by the second. Tasks, groups and causes then cover the overlapping minutes.
    """
    metrics = _read(history.gold)
    causes = _read(history.causes)
    within = _span(metrics, since_ms, until_ms)
    grain = _grain(within)
    fine, coarse = _of(metrics, grain, within), _of(metrics, _coarser(grain), within)
    seconds = _seconds(history, fine, within, (since_ms, until_ms)) if grain == "minute" else []
    return {
        **(_charts("second", SECOND_MS, seconds) if seconds else _charts(grain, GRAINS[grain], fine)),
        "tasks": _named(fine, coarse, "task"),
        "groups": _named(fine, coarse, "group"),
        "causes": _causes(_of(causes, grain, within)),
    }


def _seconds(
    history: History, minutes: list[dict[str, Any]], within: tuple[int, int], requested: tuple[int, int]
) -> list[dict[str, Any]]:
    """Return the rows by second if the span is short enough."""
    first_ms, end_ms = max(within[0], requested[0]), min(within[1] + GRAINS["minute"], requested[1])
    if end_ms - first_ms > _MAX_POINTS * SECOND_MS:
        return []
    return second_rows(history, minutes, since_ms=first_ms, until_ms=end_ms)


def _charts(grain: str, length: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the data of the charts, with an empty period at each end, so that lines start and end at zero."""
    instants = [row["at"] for row in rows]
    first, last = (min(instants) // length * length, max(instants)) if instants else (0, 0)
    start = first - length
    return {
        "grain": grain,
        "length": length,
        "from": first,
        "to": last + length,
        "start": start,
        "points": (last - start) // length + 2,
        "series": {
            queue: _series(of_queue, start, length)
            for queue, of_queue in _grouped(rows, ("store", "queue"), "queue").items()
        },
        "workers": _workers(rows, start, length),
    }


def _read(table: Table) -> list[dict[str, Any]]:
    files = table.load().files
    if not files:
        return []
    names = [name for name in table.schema.names if not name.endswith("_histogram")]
    read = pa.concat_tables(table.read(file, names) for file in files)
    at_ms = pc.cast(
        pc.divide(pc.cast(pc.cast(read["at"], pa.timestamp("us", "UTC")), pa.int64()), 1000), pa.int64()
    )
    rows: list[dict[str, Any]] = read.set_column(read.schema.get_field_index("at"), "at", at_ms).to_pylist()
    return rows


def _span(rows: Iterable[Mapping[str, Any]], since_ms: int, until_ms: int) -> tuple[int, int]:
    minutes = [row["at"] for row in rows if row["grain"] == "minute" and since_ms <= row["at"] < until_ms]
    return (min(minutes), max(minutes)) if minutes else (since_ms, since_ms)


def _grain(within: tuple[int, int]) -> str:
    for grain, length in GRAINS.items():
        if (within[1] - within[0]) // length <= _MAX_POINTS:
            return grain
    return "day"


def _coarser(grain: str) -> str:
    names = list(GRAINS)
    return names[min(names.index(grain) + 1, len(names) - 1)]


def _of(rows: Iterable[dict[str, Any]], grain: str, within: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the rows of the periods that overlap a span."""
    first, last = within
    return [
        row
        for row in rows
        if row["grain"] == grain and row["at"] <= last and row["at"] + GRAINS[grain] > first
    ]


def _grouped(
    rows: Iterable[dict[str, Any]], dimensions: tuple[str, ...], name: str
) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["dimension"] in dimensions:
            groups.setdefault(row[name], []).append(row)
    return dict(sorted(groups.items()))


def _series(rows: Iterable[Mapping[str, Any]], start: int, length: int) -> dict[str, Any]:
    """Return the points with their values. Empty points are omitted."""
    ordered = sorted(rows, key=lambda row: int(row["at"]))
    points = [(row["at"] - start) // length for row in ordered]
    return {"at": points, **{name: [_short(row[name]) for row in ordered] for name in _SERIES}}


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _named(fine: list[dict[str, Any]], coarse: list[dict[str, Any]], dimension: str) -> list[dict[str, Any]]:
    """Return the slowest names with their counts. Times are those of the worst coarser period."""
    names: list[dict[str, Any]] = []
    worst = {
        (row["queue"], row["name"]): row
        for row in sorted(coarse, key=_slowness)
        if row["dimension"] == dimension
    }
    keyed: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in fine:
        if row["dimension"] == dimension:
            keyed.setdefault((row["queue"], row["name"]), []).append(row)
    for (queue, name), rows in keyed.items():
        counts = {count: sum(row[count] or 0 for row in rows) for count in _COUNTS}
        times = {timing: _short(worst.get((queue, name), {}).get(timing)) for timing in _TIMINGS}
        busy = sum(row["run_ms"] or 0 for row in rows)
        names.append({"queue": queue, "name": name, **counts, **times, "run_ms": busy})
    return sorted(names, key=_slowness, reverse=True)[:_MAX_NAMES]


def _slowness(row: Mapping[str, Any]) -> float:
    return float(row["run_p95"] or 0)


def _workers(rows: list[dict[str, Any]], start: int, length: int) -> list[dict[str, Any]]:
    """Return the busiest workers, with their busy share by period."""
    workers: list[dict[str, Any]] = []
    for name, of_worker in _grouped(rows, ("worker",), "name").items():
        counts = {count: sum(row[count] or 0 for row in of_worker) for count in _COUNTS}
        busy: dict[int, float] = {}
        for row in of_worker:
            point = (row["at"] - start) // length
            busy[point] = busy.get(point, 0) + (row["busy_ms"] or 0)
        shares = {point: round(value / length, 4) for point, value in sorted(busy.items())}
        workers.append(
            {
                "name": name,
                **counts,
                "at": list(shares),
                "busy": list(shares.values()),
                "busy_ms": sum(busy.values()),
                "queues": sorted({row["queue"] for row in of_worker}),
            }
        )
    return sorted(workers, key=lambda worker: worker["busy_ms"], reverse=True)[:_MAX_WORKERS]


def _causes(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    causes: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        cause = causes.setdefault(
            (row["queue"], row["error_type"]),
            {
                "queue": row["queue"],
                "name": row["error_type"],
                "failed": 0,
                "retried": 0,
                "tasks": set(),
                "example": "",
            },
        )
        cause["failed"] += row["failed"]
        cause["retried"] += row["retried"]
        cause["tasks"].add(row["task"])
        cause["example"] = (row["example"] or cause["example"])[:300]
    ordered = sorted(causes.values(), key=lambda cause: cause["failed"] + cause["retried"], reverse=True)
    return [{**cause, "tasks": sorted(cause["tasks"])} for cause in ordered]
