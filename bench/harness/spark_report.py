"""The run of bench/spark as Markdown: what Spark and plain processes did per second, and the ratio of the two."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from .table import markdown, spread

__all__ = ["spark_report", "verdicts"]

WANTED = 0.8


class Line(NamedTuple):
    """``spark`` and ``plain`` are what the samples are called; without a target it is only shown."""

    title: str
    spark: str
    plain: str = ""
    wanted: float | None = None


LINES = (
    Line("rows to jobs: `df.write`, two plain loaders", "write", "write", WANTED),
    Line("events to bronze, one plain exporter", "bronze", "bronze", WANTED),
    Line("the same, two plain exporters", "bronze", "bronze, two processes"),
    Line("bronze to silver", "silver"),
    Line("bronze and silver to gold", "gold"),
    Line("jobs run: fleet of 2, two plain workers", "fleet", "fleet", WANTED),
    Line("the same with their start", "fleet, with its start", "fleet, with its start"),
)


def spark_report(run: dict[str, Any]) -> str:
    rows = []
    for engine, line, ratios in measured(run):
        seconds = statistics.median(s["seconds"] for s in samples(run, engine, "spark", line.spark))
        rows.append(
            [
                engine,
                line.title,
                spread(rates(run, engine, "spark", line.spark)),
                f"{seconds:.1f}",
                spread(rates(run, engine, "plain", line.plain)),
                shown(run, engine, line, ratios),
                "" if line.wanted is None else f">= {line.wanted:g}",
                "" if line.wanted is None else word(ratio(run, engine, line) >= line.wanted),
            ]
        )
    head = ["engine", "", "Spark /s", "Spark s", "plain /s", "ratio", "wanted", ""]
    return "\n".join(markdown(head, rows))


def verdicts(run: dict[str, Any]) -> list[bool]:
    """One per line with a target."""
    return [
        ratio(run, engine, line) >= line.wanted
        for engine, line, _ in measured(run)
        if line.wanted is not None
    ]


def measured(run: dict[str, Any]) -> Iterator[tuple[str, Line, list[float]]]:
    """The lines there is something for, with the ratio of each round."""
    for engine in run["engines"]:
        for line in LINES:
            ours, theirs = (
                samples(run, engine, "spark", line.spark),
                samples(run, engine, "plain", line.plain),
            )
            if ours and (theirs or not line.plain):
                pairs = [(a, b) for a in ours for b in theirs if a["round"] == b["round"]]
                yield engine, line, [b["seconds"] / a["seconds"] for a, b in pairs]


def shown(run: dict[str, Any], engine: str, line: Line, ratios: list[float]) -> str:
    if not ratios:
        return ""
    ends = f" ({min(ratios):.2f}..{max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{ratio(run, engine, line):.2f}{ends}"


def ratio(run: dict[str, Any], engine: str, line: Line) -> float:
    """Of the medians."""
    ours, theirs = rates(run, engine, "spark", line.spark), rates(run, engine, "plain", line.plain)
    return statistics.median(ours) / statistics.median(theirs)


def rates(run: dict[str, Any], engine: str, system: str, what: str) -> list[float]:
    return [s["count"] / s["seconds"] for s in samples(run, engine, system, what)]


def samples(run: dict[str, Any], engine: str, system: str, what: str) -> list[dict[str, Any]]:
    wanted = (engine, system, what)
    return [s for s in run["samples"] if (s["engine"], s["system"], s["what"]) == wanted]


def word(ok: bool) -> str:
    return "pass" if ok else "**fail**"
