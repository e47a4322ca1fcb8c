"""The table of bench/duel, and its targets."""

from __future__ import annotations

import statistics
from typing import Any

from .table import figure, markdown, spread

__all__ = ["duel_page", "verdicts"]

ANCHOR = "asyncio"
LEAST_SHARES = ((100_000, 0.6), (20_000, 0.4))
"""From how many rows on, which share of plain asyncio's throughput Penstock is to reach."""


def duel_page(run: dict[str, Any]) -> str:
    head = [
        "system",
        "rows/s",
        f"to {ANCHOR}",
        "after a SIGKILL half-way: paid twice",
        "lost",
        "s to the end",
    ]
    rows = [row_of(run, system["name"]) for system in run["systems"]]
    notes = [f"- {system['name']}: {system['note']}" for system in run["systems"]]
    return "\n".join(
        [
            f"# The duel, {run['run']}",
            "",
            f"Penstock {run['version']}; {run['cpus']} CPUs; {run['rows']:,} rows, a call of {run['work_ms']:g} ms "
            f"each, {run['in_flight']} under way at a time; {run['rounds']} rounds in turn. Cells: median "
            "(least..most).",
            "",
            *markdown(head, rows),
            "",
            *notes,
            "",
            *targets(run),
        ]
    )


def row_of(run: dict[str, Any], system: str) -> list[str]:
    rates = [rate for rate, _ in rates_of(run, system)]
    kills = [s for s in run["samples"] if s["system"] == system and s["what"] == "kill"]
    counts = [", ".join(f"{kill[name]:,}" for kill in kills) or "-" for name in ("twice", "lost")]
    ends = spread([kill["seconds"] for kill in kills])
    return [system, spread(rates), spread(shares(run, system)), *counts, ends]


def rates_of(run: dict[str, Any], system: str) -> list[tuple[float, int]]:
    """Rows per second and round of each race."""
    races = [s for s in run["samples"] if s["system"] == system and s["what"] == "race"]
    return [(race["rows"] / race["seconds"], race["round"]) for race in races]


def shares(run: dict[str, Any], system: str) -> list[float]:
    """The system's throughput to that of plain asyncio in the same round."""
    anchor = {number: rate for rate, number in rates_of(run, ANCHOR)}
    return [rate / anchor[number] for rate, number in rates_of(run, system) if number in anchor]


def targets(run: dict[str, Any]) -> list[str]:
    least = least_share(run["rows"])
    lines = []
    for name in (system["name"] for system in run["systems"] if system["name"].startswith("penstock")):
        found = shares(run, name)
        if found and least:
            met = statistics.median(found) >= least
            lines.append(
                f"- {'met' if met else 'MISSED'}: {name} {spread(found)} of {ANCHOR}, wanted {figure(least)}"
            )
    lost = [s for s in run["samples"] if s.get("lost")]
    lines += [
        f"- MISSED: {s['system']} lost {s['lost']} rows ({s['what']})"
        for s in lost
        if "penstock" in s["system"]
    ]
    return lines


def least_share(rows: int) -> float | None:
    return next((share for least, share in LEAST_SHARES if rows >= least), None)


def verdicts(run: dict[str, Any]) -> list[bool]:
    """Whether each target was reached."""
    return [line.startswith("- met") for line in targets(run)]
