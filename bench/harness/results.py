"""The samples of a run, and what is asked of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from .measure import Sample
from .systems import System

__all__ = ["Results"]


class Results:
    """Samples with the systems they belong to; failed samples count as absent."""

    def __init__(self, samples: Sequence[Sample], systems: Iterable[System]) -> None:
        self.samples = samples
        present = {s["system"] for s in samples}
        self.systems = [s for s in systems if s.name in present]

    def by_repeat(self, system: str, workload: str, key: str) -> dict[int, float]:
        return {
            s["repeat"]: s[key]
            for s in self.samples
            if s["system"] == system and s["workload"] == workload and key in s
        }

    def values(self, system: str, workload: str, key: str) -> list[float]:
        return list(self.by_repeat(system, workload, key).values())

    def median(self, system: str, workload: str, key: str) -> float | None:
        values = self.values(system, workload, key)
        return statistics.median(values) if values else None

    def best(
        self, systems: Iterable[System], workload: str, key: str, *, smallest: bool = False
    ) -> str | None:
        """The system with the best median of a figure; None if nobody has one."""
        medians = {s.name: self.median(s.name, workload, key) for s in systems}
        known = {name: value for name, value in medians.items() if value is not None}
        if not known:
            return None
        return (min if smallest else max)(known, key=known.__getitem__)
