"""What the page of a history shows, read from gold without Spark: gold is small."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.delta import Table
from penstock.spark.history.folder import History
from penstock.spark.history.measures import COUNTED, GRAINS
from penstock.spark.history.seconds import SECOND_MS, second_rows

__all__ = ["figures"]

# A chart cannot show more points apart from each other.
_MOST_POINTS: Final = 720
_MOST_NAMES: Final = 12
_MOST_WORKERS: Final = 24
_COUNTS: Final = tuple(COUNTED)
_TIMINGS: Final = tuple(f"{what}_{end}" for what in ("wait", "run") for end in ("p50", "p95", "p99"))
_SERIES: Final = (*_COUNTS, *_TIMINGS, "busy_ms", "backlog", "backlog_max", "cost", "usd")


def figures(history: History, *, since_ms: int, until_ms: int) -> dict[str, Any]:
    """Return everything between two instants, in periods of a length that fits, as plain values for JSON.

    A span of a few minutes is shown by the second. Tasks, groups and causes then come from the minutes it touches.
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
    history: History, minutes: list[dict[str, Any]], within: tuple[int, int], asked: tuple[int, int]
) -> list[dict[str, Any]]:
    """Return the rows by second, if the span is short enough to show them."""
    first_ms, end_ms = max(within[0], asked[0]), min(within[1] + GRAINS["minute"], asked[1])
    if end_ms - first_ms > _MOST_POINTS * SECOND_MS:
        return []
    return second_rows(history, minutes, since_ms=first_ms, until_ms=end_ms)


def _charts(grain: str, length: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the charts show. There is an empty period at either end, so that lines start and end at zero."""
    found = [row["at"] for row in rows]
    first, last = (min(found) // length * length, max(found)) if found else (0, 0)
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
        if (within[1] - within[0]) // length <= _MOST_POINTS:
            return grain
    return "day"


def _coarser(grain: str) -> str:
    names = list(GRAINS)
    return names[min(names.index(grain) + 1, len(names) - 1)]


def _of(rows: Iterable[dict[str, Any]], grain: str, within: tuple[int, int]) -> list[dict[str, Any]]:
    """The rows of the periods that touch a span."""
    first, last = within
    return [
        row
        for row in rows
        if row["grain"] == grain and row["at"] <= last and row["at"] + GRAINS[grain] > first
    ]


def _grouped(
    rows: Iterable[dict[str, Any]], dimensions: tuple[str, ...], name: str
) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["dimension"] in dimensions:
            found.setdefault(row[name], []).append(row)
    return dict(sorted(found.items()))


def _series(rows: Iterable[Mapping[str, Any]], start: int, length: int) -> dict[str, Any]:
    """Points with their values, without those in which nothing happened."""
    ordered = sorted(rows, key=lambda row: int(row["at"]))
    points = [(row["at"] - start) // length for row in ordered]
    return {"at": points, **{name: [_short(row[name]) for row in ordered] for name in _SERIES}}


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _named(fine: list[dict[str, Any]], coarse: list[dict[str, Any]], dimension: str) -> list[dict[str, Any]]:
    """The names that took the longest, with their counts; times are of the worst of their coarser periods."""
    found: list[dict[str, Any]] = []
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
        found.append({"queue": queue, "name": name, **counts, **times, "run_ms": busy})
    return sorted(found, key=_slowness, reverse=True)[:_MOST_NAMES]


def _slowness(row: Mapping[str, Any]) -> float:
    return float(row["run_p95"] or 0)


def _workers(rows: list[dict[str, Any]], start: int, length: int) -> list[dict[str, Any]]:
    """The busiest, each with how busy it was in every period."""
    found: list[dict[str, Any]] = []
    for name, of_worker in _grouped(rows, ("worker",), "name").items():
        counts = {count: sum(row[count] or 0 for row in of_worker) for count in _COUNTS}
        busy: dict[int, float] = {}
        for row in of_worker:
            point = (row["at"] - start) // length
            busy[point] = busy.get(point, 0) + (row["busy_ms"] or 0)
        shares = {point: round(value / length, 4) for point, value in sorted(busy.items())}
        found.append(
            {
                "name": name,
                **counts,
                "at": list(shares),
                "busy": list(shares.values()),
                "busy_ms": sum(busy.values()),
                "queues": sorted({row["queue"] for row in of_worker}),
            }
        )
    return sorted(found, key=lambda worker: worker["busy_ms"], reverse=True)[:_MOST_WORKERS]


def _causes(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        cause = found.setdefault(
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
    ordered = sorted(found.values(), key=lambda cause: cause["failed"] + cause["retried"], reverse=True)
    return [{**cause, "tasks": sorted(cause["tasks"])} for cause in ordered]
