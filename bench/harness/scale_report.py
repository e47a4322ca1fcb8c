"""The scale run as Markdown: cost per job at both backlogs and their ratio, then the idle worker."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from .table import figure, markdown, spread

__all__ = ["scale_report", "verdicts"]

CPU_LIMIT = 1.25
COMMANDS_LIMIT = 1.05
"""The same commands per job: what is left to the size of the batches, which time decides."""
IDLE_LIMIT = 0.01
WAKE_LIMIT_MS = 5.0
FIGURES = (
    ("client_us", "CPU us/job, {client}", CPU_LIMIT),
    ("server_us", "CPU us/job, server", CPU_LIMIT),
    ("commands", "commands/job", COMMANDS_LIMIT),
    ("statements", "statements/job", COMMANDS_LIMIT),
    ("rate", "jobs/s", None),
)
CLIENT = {"enqueue": "producer", "drain": "worker"}


def scale_report(run: dict[str, Any]) -> str:
    parts = [flat_table(run), idle_table(run), [f"- {e}" for e in run["errors"]]]
    return "\n\n".join("\n".join(part) for part in parts if part)


def verdicts(run: dict[str, Any]) -> list[bool]:
    """One per checked line of the tables, in their order."""
    return [ok for *_, ok in [*flat_rows(run), *idle_rows(run)] if ok is not None]


def flat_table(run: dict[str, Any]) -> list[str]:
    rows = [[*cells, word(ok)] for *cells, ok in flat_rows(run)]
    if not rows:
        return []
    small, large = run["sizes"]
    head = ["system", "phase", "figure", f"backlog {small:,}", f"backlog {large:,}", "ratio", "wanted", ""]
    return markdown(head, rows)


def flat_rows(run: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    small, large = run["sizes"]
    for system in run["systems"]:
        for phase in ("enqueue", "drain"):
            for key, title, limit in FIGURES:
                low, high = (values(run, system, phase, size, key) for size in (small, large))
                if not low or not high or not statistics.median(low):
                    continue
                ratio = statistics.median(high) / statistics.median(low)
                ok = None if limit is None else ratio <= limit
                wanted = "" if limit is None else f"<= {limit:g}"
                name = title.format(client=CLIENT[phase])
                yield system, phase, name, spread(low), spread(high), f"{ratio:.2f}", wanted, ok


def values(run: dict[str, Any], system: str, phase: str, size: int, key: str) -> list[float]:
    wanted = (system, phase, size)
    return [s[key] for s in run["flat"] if (s["system"], s["phase"], s["size"]) == wanted and key in s]


def idle_table(run: dict[str, Any]) -> list[str]:
    rows = [[*cells, word(ok)] for *cells, ok in idle_rows(run)]
    return markdown(["system", "figure", "measured", "wanted", ""], rows) if rows else []


def idle_rows(run: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for s in run["idle"]:
        share = s["worker_share"]
        title = f"idle worker, share of a core over {s['seconds']:.0f} s"
        yield s["system"], title, f"{share:.2%}", f"< {IDLE_LIMIT:.0%}", share < IDLE_LIMIT
        if "server_share" in s:
            yield s["system"], "its server meanwhile", f"{s['server_share']:.2%}", "", None
    for s in run["wake"]:
        measured = f"{figure(s['p50'])} (p99 {figure(s['p99'])}, max {figure(s['max'])})"
        title = f"wake-up from another process, p50 ms of {s['n']}"
        yield s["system"], title, measured, f"<= {WAKE_LIMIT_MS:g}", s["p50"] <= WAKE_LIMIT_MS


def word(ok: bool | None) -> str:
    return "" if ok is None else "pass" if ok else "**fail**"
