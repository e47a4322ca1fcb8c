"""The run of bench/features as Markdown: per engine and phase, what each feature costs; then what is wanted."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from .table import figure, markdown

__all__ = ["features_report", "verdicts"]

PHASES = ("enqueue", "drain")
FIGURES = {"server_us": "server us", "python_us": "Python us", "cpu_us": "CPU us", "commands": "commands"}
"""CPU is that of both: what a job costs the machine."""
BEFORE_LIMIT = 1.03
"""Plain jobs, to those of the checkout before: their CPU and their commands."""
BEFORE_FIGURES = {"valkey": ("cpu_us", "commands"), "sqlite": ("python_us",)}
DRAIN_LIMITS = {"groups": 3.0, "groups-capped": 3.0, "flows": 5.0}
"""Server CPU of a drain, to that of plain jobs."""


def features_report(run: dict[str, Any]) -> str:
    tables = [table(run, engine) for engine in run["engines"]]
    rows = [
        [name, measured, wanted, "pass" if ok else "**fail**"] for name, measured, wanted, ok in wants(run)
    ]
    if rows:
        tables.append(markdown(["figure", "measured", "wanted", ""], rows))
    return "\n\n".join("\n".join(lines) for lines in tables)


def verdicts(run: dict[str, Any]) -> list[bool]:
    """One per line of the last table."""
    return [ok for *_, ok in wants(run)]


def table(run: dict[str, Any], engine: str) -> list[str]:
    features = list(dict.fromkeys(s["feature"] for s in run["samples"] if s["engine"] == engine))
    columns = [
        (phase, key) for phase in PHASES for key in FIGURES if values(run, engine, "plain", phase, key)
    ]
    head = [engine, *(f"{phase}: {FIGURES[key]}" for phase, key in columns)]
    return markdown(
        head, ([f, *(cell(run, engine, f, phase, key) for phase, key in columns)] for f in features)
    )


def cell(run: dict[str, Any], engine: str, feature: str, phase: str, key: str) -> str:
    least = min(values(run, engine, feature, phase, key), default=None)
    if least is None:
        return "-"
    ratio = None if feature == "plain" else ratio_of(run, (engine, phase, key), feature, "plain")
    return figure(least) if ratio is None else f"{figure(least)} ({ratio:.2f})"


def values(
    run: dict[str, Any], engine: str, feature: str, phase: str, key: str, number: int | None = None
) -> list[float]:
    """All samples, or those of a round."""
    wanted = (engine, feature, phase)
    return [
        s[key]
        for s in run["samples"]
        if (s["engine"], s["feature"], s["phase"]) == wanted and key in s and number in (None, s["round"])
    ]


def ratio_of(run: dict[str, Any], of: tuple[str, str, str], feature: str, base: str) -> float | None:
    """The median of the rounds' ratios: what was measured close together saw the same machine."""
    engine, phase, key = of
    ratios = []
    for number in range(run["rounds"]):
        above, below = (values(run, engine, name, phase, key, number) for name in (feature, base))
        if above and below:
            ratios.append(statistics.median(above) / statistics.median(below))
    return statistics.median(ratios) if ratios else None


def wants(run: dict[str, Any]) -> Iterator[tuple[str, str, str, bool]]:
    """Plain jobs cost what they did before; a drain of some features at most so many times what plain jobs do."""
    for engine in run["engines"]:
        for phase in PHASES:
            for key in BEFORE_FIGURES[engine]:
                name = f"{engine}, {phase} of plain jobs, {FIGURES[key]}: now to before"
                ratio = ratio_of(run, (engine, phase, key), "plain", "plain-before")
                yield from compared(name, ratio, BEFORE_LIMIT)
    for feature, limit in DRAIN_LIMITS.items():
        name = f"valkey, drain of {feature}, server us: to plain"
        yield from compared(name, ratio_of(run, ("valkey", "drain", "server_us"), feature, "plain"), limit)


def compared(name: str, ratio: float | None, limit: float) -> Iterator[tuple[str, str, str, bool]]:
    if ratio is not None:
        yield name, f"{ratio:.3f}", f"<= {limit:g}", round(ratio, 3) <= limit
