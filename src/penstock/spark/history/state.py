"""The state that each commit of a history records: how far it has read, and which events it found missing."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from penstock.spark.delta import Snapshot

S = TypeVar("S", "BronzeState", "FoldState")


class Range(msgspec.Struct, frozen=True, kw_only=True, rename={"first": "from", "last": "to"}):
    """Events ``first`` to ``last`` of a queue, both included."""

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
    """The store went back in time. Both epochs agree up to ``common``. The events of ``before`` from there up to
    ``read`` happened, but the store no longer knows them."""

    queue: str
    before: str
    after: str
    common: int
    read: int
    found_at_ms: int


class Place(msgspec.Struct, frozen=True):
    """The last event of a queue that a table holds."""

    epoch: str
    seq: int


class BronzeState(msgspec.Struct, frozen=True, kw_only=True):
    """The last event of each queue in bronze. ``epochs`` has those of each queue in their order."""

    places: dict[str, Place] = {}
    epochs: dict[str, tuple[str, ...]] = {}
    losses: tuple[Loss, ...] = ()
    changes: tuple[EpochChange, ...] = ()


class FoldState(msgspec.Struct, frozen=True, kw_only=True):
    """How much of bronze is in a table that follows from it: its commits up to ``bronze``, its events up to ``places``,
    so many of its ``losses`` and ``changes``. Gold also keeps how many jobs of each queue are ``open``."""

    bronze: int = 0
    places: dict[str, Place] = {}
    losses: int = 0
    changes: int = 0
    open: dict[str, int] = {}


def state_of(snapshot: Snapshot, kind: type[S]) -> S | None:
    """Return what the last commit said; None for a new table, or one whose log no longer goes back to it."""
    return None if snapshot.state is None else msgspec.json.decode(snapshot.state, type=kind)
