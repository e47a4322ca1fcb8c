"""The jobs of a storm, as data: which job a number stands for, and how that job must end.

Producers, handlers and the checker all read this file, so that none of them has to believe another. It imports nothing
from Penstock.
"""

from __future__ import annotations

import zlib
from typing import Literal, NamedTuple

QUEUES = ("storm-0", "storm-1", "storm-2", "storm-3")
PRODUCERS = 3
UNIT = 20
"""Producers enqueue this number of consecutive jobs in one go."""

Mode = Literal["bulk", "together", "one_by_one", "flow", "dedup"]
MODES: tuple[Mode, ...] = (
    "bulk",
    "together",
    "bulk",
    "flow",
    "together",
    "bulk",
    "dedup",
    "together",
    "bulk",
    "one_by_one",
)

Kind = Literal[
    "plain",
    "delayed",
    "fails_once",
    "dies",
    "snoozes",
    "strict",
    "capped",
    "thread",
    "long",
    "large",
    "urgent",
]
# The share of each kind among 100 jobs; all others are plain.
SHARES: tuple[tuple[Kind, int], ...] = (
    ("delayed", 8),
    ("fails_once", 8),
    ("dies", 2),
    ("snoozes", 4),
    ("strict", 8),
    ("capped", 8),
    ("thread", 6),
    ("long", 8),
    ("large", 2),
    ("urgent", 4),
)
CAPS = {"strict": 1, "capped": 3}
GROUPS = 5
"""Number of groups of each kind in every queue."""

LEASE_S = 2.0
GRACE_S = 5.0
LONGEST_PAUSE_S = 2.5 * LEASE_S

CHILDREN = 3
ATTEMPTS = 3
FATAL_ATTEMPTS = 2
LARGE = 5_000


class Planned(NamedTuple):
    """One job of the storm. ``result`` is what it must return; ``None``: it must fail."""

    n: int
    id: str
    queue: str
    kind: Kind
    mode: Mode
    group: str
    result: int | None

    @property
    def pad(self) -> str:
        """Text that makes the payload large."""
        return "x" * LARGE if self.kind == "large" else ""


def mode_of(unit: int) -> Mode:
    return MODES[unit // PRODUCERS % len(MODES)]


def numbers_of(unit: int, jobs: int) -> range:
    """The numbers of a unit. A flow is never cut, so the last unit may reach past ``jobs``."""
    first = unit * UNIT
    return range(first, first + UNIT if mode_of(unit) == "flow" else min(first + UNIT, jobs))


def units(producer: int, jobs: int) -> range:
    """The units that a producer enqueues."""
    return range(producer, -(-jobs // UNIT), PRODUCERS)


def planned(n: int) -> Planned:
    unit = n // UNIT
    mode, queue = mode_of(unit), unit % len(QUEUES)
    kind = "plain" if mode in ("flow", "dedup") else _kind_of(n)
    if mode == "flow" and not is_root(n) and root_of(n) // (CHILDREN + 1) % 2:
        queue = (queue + 1) % len(QUEUES)  # every other flow has its children in another queue
    group = f"{kind}-{n % GROUPS}" if kind in CAPS else ""
    return Planned(n, f"job-{n}", QUEUES[queue], kind, mode, group, _result(n, kind, mode))


def number_of(id: str) -> int | None:
    """The number of a job by its id; ``None`` if the storm has no such job."""
    prefix, _, digits = id.partition("-")
    return int(digits) if prefix == "job" and digits.isdecimal() else None


def is_root(n: int) -> bool:
    """Whether the job is the parent of its flow. A flow is a parent, then its children."""
    return n % (CHILDREN + 1) == 0


def root_of(n: int) -> int:
    return n - n % (CHILDREN + 1)


def children_of(root: int) -> range:
    return range(root + 1, root + 1 + CHILDREN)


def dedup_key(n: int) -> str:
    """Neighbours share a key."""
    return f"key-{n // 2}"


def square(n: int) -> int:
    return n * n


def _kind_of(n: int) -> Kind:
    draw = zlib.crc32(b"%d" % n) % 100
    for kind, share in SHARES:
        if draw < share:
            return kind
        draw -= share
    return "plain"


def _result(n: int, kind: Kind, mode: Mode) -> int | None:
    if kind == "dies":
        return None
    if kind == "large":
        return square(n) + LARGE
    if mode == "flow" and is_root(n):
        return square(n) + sum(map(square, children_of(n)))
    return square(n)
