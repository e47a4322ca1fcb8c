"""A run as Markdown: the table, the targets, what failed, how each system is driven, the machine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from .results import Results
from .table import figure, markdown, spread
from .targets import TARGETS, Verdict, judge

__all__ = ["report"]

COLUMNS = (
    ("one by one /s", "one", "rate"),
    ("bulk /s", "bulk", "rate"),
    ("drain /s", "drain", "rate"),
    ("both at once /s", "e2e", "rate"),
    ("call p50 ms", "latency", "p50"),
    ("call p99 ms", "latency", "p99"),
    ("bytes/job", "bulk", "bytes"),
    ("drain: worker us/job", "drain", "client_us"),
    ("drain: server us/job", "drain", "server_us"),
    ("drain: commands/job", "drain", "commands"),
)
SERVER_ONLY = {"server_us", "commands"}
MEDIAN_ONLY = SERVER_ONLY | {"bytes", "client_us"}


def report(results: Results, versions: Mapping[str, str], *, smoke: bool) -> str:
    parts = [
        comparison(results, versions),
        targets(results, smoke=smoke),
        trouble(results),
        driven(results),
        machine(results),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def comparison(results: Results, versions: Mapping[str, str]) -> list[str]:
    rows = []
    for system in results.systems:
        cells = [system.name, versions.get(system.name, "")]
        for _, workload, key in COLUMNS:
            values = results.values(system.name, workload, key)
            if key in SERVER_ONLY and system.kind != "redis":
                values = []
            cells.append(spread([statistics.median(values)] if values and key in MEDIAN_ONLY else values))
        rows.append(cells)
    return markdown(["system", "version", *(title for title, _, _ in COLUMNS)], rows)


def targets(results: Results, *, smoke: bool) -> list[str]:
    rows = [verdict_row(judge(t, results)) for t in TARGETS]
    lines = ["Targets, as ratios inside this run:", ""]
    if smoke:
        lines = ["Targets. **A smoke run: too few jobs for these figures to mean anything.**", ""]
    return lines + markdown(["target", "against", "wanted", "this run (spread)", ""], rows)


def verdict_row(v: Verdict) -> list[str]:
    t = v.target
    unit = "" if t.rivals is None else "x"
    wanted = f"{'<=' if t.at_most else '>='} {t.limit:g}{unit}"
    if t.stretch:
        wanted += f" (stretch {t.stretch:g}{unit})"
    if v.value is None:
        return [t.title, v.rival, wanted, "-", "not measured"]
    value = f"{figure(v.value)}{unit}"
    if v.spread and v.spread[0] != v.spread[1]:
        value += f" ({figure(v.spread[0])}..{figure(v.spread[1])})"
    word = "pass" if v.passed else "**fail**"
    if v.passed and t.stretch and v.value >= t.stretch:
        word = "pass, stretch too"
    return [t.title, v.rival, wanted, value, word]


def trouble(results: Results) -> list[str]:
    """Failed or suspicious samples, one line per system and workload."""
    said: dict[tuple[str, str], list[str]] = {}
    for s in results.samples:
        text = s.get("error") or s.get("warning")
        if text:
            said.setdefault((s["system"], s["workload"]), []).append(text)
    if not said:
        return []
    lines = ["Failed or suspicious:", ""]
    for (system, workload), texts in said.items():
        words = [line for line in texts[-1].splitlines() if line.strip()]
        lines.append(
            f"- {system} {workload}: {len(texts)}x {words[0]}" + (f" … {words[-1]}" if words[1:] else "")
        )
    return lines


def driven(results: Results) -> list[str]:
    return ["How each is driven:", "", *(f"- {s.name}: {s.note}" for s in results.systems)]


def machine(results: Results) -> list[str]:
    shares = [s["foreign"] for s in results.samples if "foreign" in s]
    speeds = [s["speed"] for s in results.samples if "speed" in s]
    if not shares:
        return []
    return [
        f"Other processes' share of the machine while measuring: median {statistics.median(shares):.0%}, "
        f"worst {max(shares):.0%}. Speed of one core around each measurement (million loop turns per CPU "
        f"second): median {statistics.median(speeds):.1f}, {min(speeds):.1f}..{max(speeds):.1f}."
    ]
