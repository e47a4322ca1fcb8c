"""The HTML page of a history: one self-contained file without external requests.

The figures are read without Spark. They come from gold, which is small. For a span of a few minutes, they are computed
for each second from the events in bronze.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from penstock.errors import InvalidOption
from penstock.spark.delta import Table
from penstock.spark.event_ranges import instant_ms
from penstock.spark.history.bronze import bronze_state
from penstock.spark.history.gold import backlog_of, event_steps
from penstock.spark.history.measures import GRAINS, SECONDS, measures_of, merged_measures
from penstock.spark.history.tables import (
    COUNTED,
    PERCENTILES,
    TIMED,
    BronzeState,
    History,
    millis,
    open_history,
)

Rows: TypeAlias = list[dict[str, Any]]

_PARTS: Final = Path(__file__).with_name("page")
_END_MS: Final = 1 << 60


def report(
    path: str | Path,
    out: str | Path,
    *,
    since: str | datetime | None = None,
    until: str | datetime | None = None,
    title: str = "Queues",
    storage_options: Mapping[str, str] | None = None,
) -> Path:
    """Write the page of a history as of its last sync, and return its path. This needs neither Spark nor the store.

    ``since`` and ``until`` limit the time range. They are datetimes or ISO 8601 texts (UTC if they have no zone). An
    existing page at ``out`` is replaced atomically.

    Raises:
        InvalidOption: the folder is not a history, has no gold yet, or a time is invalid.
    """
    history = open_history(path, storage_options, create=False)
    gold = history.gold.load()
    if not gold.number:
        raise InvalidOption(
            f"{history.folder.root} has no gold yet. Run history.sync first (with upto='gold', the default)."
        )
    data = figures(
        history,
        since_ms=0 if since is None else instant_ms(since, what="since"),
        until_ms=_END_MS if until is None else instant_ms(until, what="until"),
    )
    assert gold.table is not None
    synced = gold.table.history(1)[0]["timestamp"]
    data |= {"synced": synced, "title": title, **_losses(bronze_state(history, history.bronze.load()))}
    target = Path(out)
    draft = target.with_name(f".{target.name}.draft")
    draft.write_text(_render(data, title), encoding="utf-8")
    draft.replace(target)
    return target


def _losses(bronze: BronzeState) -> dict[str, Any]:
    return {
        "losses": [[loss.queue, loss.first, loss.last] for loss in bronze.losses],
        "changes": [[change.queue, change.common + 1, change.read] for change in bronze.changes],
    }


def _script() -> str:
    """Return both modules as one script, because a single file cannot import modules."""
    charts, page = ((_PARTS / name).read_text(encoding="utf-8") for name in ("charts.js", "page.js"))
    return charts.replace("\nexport ", "\n") + page[page.index("\n") :]


def _render(data: dict[str, Any], title: str) -> str:
    # The data must not close its script element.
    packed = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    parts = {
        "title": html.escape(title),
        "style": (_PARTS / "page.css").read_text(encoding="utf-8"),
        "script": _script(),
        "data": packed,
    }
    page = (_PARTS / "page.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        page = page.replace(f"{{{{ {name} }}}}", part, 1)
    return page


# Figures.


# A chart cannot distinguish more points.
_MAX_POINTS: Final = 720
_MAX_NAMES: Final = 12
_MAX_WORKERS: Final = 24
_MAX_EVENTS: Final = 2_000_000
_EVENT_COLUMNS: Final = (
    "queue", "seq", "type", "id", "at", "task", "group", "worker", "run_ms", "wait_ms", "cost", "data",
)  # fmt: skip
_TIMINGS: Final = tuple(f"{what}_{end}" for what in TIMED for end in PERCENTILES)
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
        **(_charts("second", SECONDS["second"], seconds) if seconds else _charts(grain, GRAINS[grain], fine)),
        "tasks": _named(fine, coarse, "task"),
        "groups": _named(fine, coarse, "group"),
        "causes": _causes(_of(causes, grain, within)),
    }


def _seconds(history: History, minutes: Rows, within: tuple[int, int], requested: tuple[int, int]) -> Rows:
    """Return the measures for each second, from the events in bronze, because gold's finest grain is the minute. Return
    no rows if the span is long, or has too many events to read here."""
    since_ms, until_ms = max(within[0], requested[0]), min(within[1] + GRAINS["minute"], requested[1])
    if until_ms - since_ms > _MAX_POINTS * SECONDS["second"]:
        return []
    files = [file for file in history.bronze.load().files if file.low < until_ms and file.high >= since_ms]
    if not files or sum(file.rows for file in files) > _MAX_EVENTS:
        return []
    events = pa.concat_tables(history.bronze.read(file, _EVENT_COLUMNS) for file in files).sort_by("seq")
    at_ms = millis(events["at"])
    events = events.filter(pa.array((at_ms >= since_ms) & (at_ms < until_ms)))
    parts = [measures_of(events, SECONDS, since_ms=since_ms), *_backlogs(event_steps(events), minutes)]
    return _plain(merged_measures(pa.concat_tables(parts)))


def _backlogs(steps: pa.Table, minutes: Rows) -> Iterator[pa.Table]:
    """Yield the backlog by the second, as parts of gold. Jobs may leave a queue without an event, so each minute
    starts from the latest earlier backlog in gold."""
    ends = sorted(
        (row["at"], row["queue"], row["backlog"])
        for row in minutes
        if row["dimension"] == "queue" and row["backlog"] is not None
    )
    minute = steps["at"].to_numpy() // GRAINS["minute"] * GRAINS["minute"]
    for start in np.unique(minute).tolist():
        before = {queue: backlog for at, queue, backlog in ends if at < start}
        yield backlog_of(steps.filter(pa.array(minute == start)), before, SECONDS)[0]


def _charts(grain: str, length: int, rows: Rows) -> dict[str, Any]:
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


def _read(table: Table) -> Rows:
    names = [name for name in table.schema.names if not name.endswith("_histogram")]
    tables = [table.read(file, names) for file in table.load().files]
    return _plain(pa.concat_tables(tables)) if tables else []


def _plain(table: pa.Table) -> Rows:
    """Return the rows without histograms, and with times as epoch milliseconds."""
    kept = table.drop_columns([name for name in table.column_names if name.endswith("_histogram")])
    rows: Rows = kept.set_column(
        kept.schema.get_field_index("at"), "at", pa.array(millis(kept["at"]))
    ).to_pylist()
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


def _of(rows: Iterable[dict[str, Any]], grain: str, within: tuple[int, int]) -> Rows:
    """Return the rows of the periods that overlap a span."""
    first, last = within
    return [
        row
        for row in rows
        if row["grain"] == grain and row["at"] <= last and row["at"] + GRAINS[grain] > first
    ]


def _grouped(rows: Iterable[dict[str, Any]], dimensions: tuple[str, ...], name: str) -> dict[str, Rows]:
    groups: dict[str, Rows] = {}
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


def _named(fine: Rows, coarse: Rows, dimension: str) -> Rows:
    """Return the slowest names with their counts. Their times are those of the slowest coarser period."""
    names: Rows = []
    worst = {
        (row["queue"], row["name"]): row
        for row in sorted(coarse, key=_slowness)
        if row["dimension"] == dimension
    }
    keyed: dict[tuple[str, str], Rows] = {}
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


def _workers(rows: Rows, start: int, length: int) -> Rows:
    """Return the busiest workers, with their busy share by period."""
    workers: Rows = []
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


def _causes(rows: Iterable[Mapping[str, Any]]) -> Rows:
    causes: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        queue, name = key = row["queue"], row["error_type"]
        new = {"queue": queue, "name": name, "failed": 0, "retried": 0, "tasks": set(), "example": ""}
        cause = causes.setdefault(key, new)
        cause["failed"] += row["failed"]
        cause["retried"] += row["retried"]
        cause["tasks"].add(row["task"])
        cause["example"] = (row["example"] or cause["example"])[:300]
    ordered = sorted(causes.values(), key=lambda cause: cause["failed"] + cause["retried"], reverse=True)
    return [{**cause, "tasks": sorted(cause["tasks"])} for cause in ordered]
