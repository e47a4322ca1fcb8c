"""Figures as text: numbers of a readable length, medians with their spread, Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

__all__ = ["figure", "markdown", "spread"]


def figure(value: float) -> str:
    """Three digits or so: 81234 -> 81.2k, 24.2 -> 24, 0.561 -> 0.56."""
    if value >= 10_000:
        return f"{value / 1000:.1f}k"
    if value >= 1000:
        return f"{value / 1000:.2f}k"
    if value >= 20:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 2 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def spread(values: Sequence[float]) -> str:
    """`median (min..max)`; a dash if there is nothing."""
    if not values:
        return "-"
    middle = figure(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({figure(min(values))}..{figure(max(values))})"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
