"""What the project set out to reach, as data, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .results import Results
from .systems import System

__all__ = ["TARGETS", "Target", "Verdict", "judge"]


@dataclass(frozen=True)
class Target:
    """A figure of ours against the best of some others (`rivals`), or, without rivals, against a number."""

    title: str
    ours: str
    workload: str
    key: str
    limit: float
    rivals: Callable[[System], bool] | None = None
    at_most: bool = False
    """Small is good: latency, bytes."""
    stretch: float | None = None


@dataclass(frozen=True)
class Verdict:
    """A target beside the figure of a run; `value` is None if the run cannot tell."""

    target: Target
    value: float | None = None
    spread: tuple[float, float] | None = None
    rival: str = ""

    @property
    def passed(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.target.limit if self.target.at_most else self.value >= self.target.limit


def is_peer(s: System) -> bool:
    return s.part == "peer"


TARGETS = (
    Target(
        "drain, against the best Python peer",
        "penstock:valkey",
        "drain",
        "rate",
        8,
        rivals=lambda s: is_peer(s) and s.language == "python",
        stretch=12,
    ),
    Target(
        "drain, against BullMQ on Node",
        "penstock:valkey",
        "drain",
        "rate",
        2.5,
        rivals=lambda s: s.name == "bullmq-node",
    ),
    Target(
        "bulk enqueue, against the best peer that dedups",
        "penstock:valkey",
        "bulk",
        "rate",
        2.5,
        rivals=lambda s: is_peer(s) and s.dedups,
    ),
    Target(
        "both at once, against the best peer",
        "penstock:valkey",
        "e2e",
        "rate",
        2.5,
        rivals=is_peer,
    ),
    Target(
        "one by one, against raw FCALL",
        "penstock:valkey",
        "one",
        "rate",
        0.8,
        rivals=lambda s: s.name == "anchor:fcall",
    ),
    Target(
        "call p50, against the best peer that acknowledges",
        "penstock:valkey",
        "latency",
        "p50",
        0.6,
        rivals=lambda s: is_peer(s) and s.acknowledges,
        at_most=True,
    ),
    Target(
        "bytes per queued job, its event included",
        "penstock:valkey",
        "bulk",
        "bytes",
        320,
        at_most=True,
    ),
    Target(
        "SQLite drain, against the best SQLite peer",
        "penstock:sqlite",
        "drain",
        "rate",
        8,
        rivals=lambda s: is_peer(s) and s.kind == "sqlite",
    ),
)


def judge(target: Target, results: Results) -> Verdict:
    """The ratio of medians; the spread is that of the ratios within each repeat."""
    workload, key = target.workload, target.key
    ours = results.median(target.ours, workload, key)
    if ours is None:
        return Verdict(target)
    if target.rivals is None:
        mine = results.values(target.ours, workload, key)
        return Verdict(target, ours, (min(mine), max(mine)))
    rivals = [s for s in results.systems if target.rivals(s)]
    rival = results.best(rivals, workload, key, smallest=target.at_most)
    theirs = results.median(rival, workload, key) if rival else None
    if rival is None or not theirs:
        return Verdict(target)
    left, right = (results.by_repeat(name, workload, key) for name in (target.ours, rival))
    ratios = [left[r] / right[r] for r in left.keys() & right.keys()]
    return Verdict(target, ours / theirs, (min(ratios), max(ratios)) if ratios else None, rival)
