"""The state that each commit of a history records: its position in the logs, and the losses found."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from penstock.spark.delta import Snapshot

S = TypeVar("S", "BronzeState", "FoldState")


class Range(msgspec.Struct, frozen=True, kw_only=True, rename={"first": "from", "last": "to"}):
    """Events ``first`` to ``last`` of a queue, inclusive."""

    queue: str
    epoch: str
    first: int
    last: int


class Loss(msgspec.Struct, frozen=True, kw_only=True, rename={"first": "from", "last": "to"}):
    """Events that were trimmed before they could be read."""

    queue: str
    epoch: str
    first: int
    last: int
    found_at_ms: int


class EpochChange(msgspec.Struct, frozen=True, kw_only=True):
    """The store was restored to an earlier state. Both epochs agree up to ``common``. The later events of ``before``,
    up to ``read``, happened, but the store no longer has them."""

    queue: str
    before: str
    after: str
    common: int
    read: int
    found_at_ms: int


class Place(msgspec.Struct, frozen=True):
    """The last event of a queue in a table."""

    epoch: str
    seq: int


class BronzeState(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of each queue in bronze. ``epochs`` has the epochs of each queue in order."""

    places: dict[str, Place] = {}
    epochs: dict[str, tuple[str, ...]] = {}
    losses: tuple[Loss, ...] = ()
    changes: tuple[EpochChange, ...] = ()


class FoldState(msgspec.Struct, frozen=True, kw_only=True):
    """The part of bronze that a derived table includes: commits up to ``bronze``, events up to ``places``, and the
    numbers of ``losses`` and ``changes``. Gold also has the number of ``open`` jobs by queue."""

    bronze: int = 0
    places: dict[str, Place] = {}
    losses: int = 0
    changes: int = 0
    open: dict[str, int] = {}


def state_of(snapshot: Snapshot, kind: type[S]) -> S | None:
    """Return the state of the last commit; None for a new table, or if the log no longer has it."""
    return None if snapshot.state is None else msgspec.json.decode(snapshot.state, type=kind)
