"""Limits of a queue, and of the groups in it: how many at a time, how many in a stretch of time, at which cost.

Plain values; ``storage`` keeps to them, docs/verbs.md says how exactly.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from penstock.core.rate import Rate

__all__ = ["EVERY_GROUP", "Bucket", "GroupState", "Limit", "LimitsOfQueue", "Reason", "charged"]

EVERY_GROUP: Final = "*"
"""Stands for the groups that have no limit of their own."""

Reason: TypeAlias = Literal["", "paused", "asked", "concurrency", "rate", "bucket"]


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """Holds up to ``capacity`` tokens; ``refill`` of them come in every ``per_ms``, continuously."""

    capacity: int
    refill: int
    per_ms: int

    def __str__(self) -> str:
        """As ``penstock limit set --bucket`` reads it: ``"100:10/s"``."""
        return f"{self.capacity}:{Rate(self.refill, self.per_ms)}"


class Limit(msgspec.Struct, frozen=True, omit_defaults=True):
    """``None`` is no bound. A queue has no bucket: cost is what a job takes from its group's."""

    concurrency: int | None = None
    rate: Rate | None = None
    bucket: Bucket | None = None


LimitsOfQueue: TypeAlias = dict[str, Limit]
"""Limits by the group they are of: ``""`` is the queue itself, ``"*"`` every group without one of its own."""


class GroupState(msgspec.Struct, frozen=True):
    """A group as it is now. ``held`` are slots of members that will run again; ``why`` it has no room for the first of
    those that are blocked, and the time until then if it is known."""

    key: str
    waiting: int
    active: int
    held: int
    blocked: int
    paused: bool
    why: Reason = ""
    wait_ms: int | None = None


def charged(cost: int, bucket: Bucket) -> int:
    """What a job takes from the bucket: never more than it can hold."""
    return min(cost, bucket.capacity)
