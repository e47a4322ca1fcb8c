"""Where the log of a store that went back in time parts from what bronze has of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from penstock.spark.history.manifest import BronzeManifest, Place
from penstock.storage.base import Storage

__all__ = ["common_until"]

_TELLING = ("at", "type", "id", "incarnation", "token", "run", "worker")


async def common_until(
    storage: Storage, queue: str, *, place: Place, bronze: BronzeManifest, folder: Path
) -> int:
    """The number of the last event that the store's log and bronze have in common.

    Both are copies of one log up to some event and differ from there, so that it can be bisected. What is trimmed
    in the store cannot be compared and counts as common.
    """
    page = await storage.read_entries(queue, after=0, limit=1)
    low, high = (page.gap.last if page.gap else 0), min(place.seq, page.last)
    low = min(low, high)
    while low < high:
        middle = (low + high + 1) // 2
        theirs = await _theirs(storage, queue, middle)
        if theirs is not None and theirs == _ours(bronze, folder, queue, middle):
            low = middle
        else:
            high = middle - 1
    return low


async def _theirs(storage: Storage, queue: str, seq: int) -> tuple[Any, ...] | None:
    events = (await storage.read_events(queue, after=seq - 1, limit=1)).events
    if not events or events[0].seq != seq:
        return None
    found = events[0]
    return (
        found.at_ms,
        str(found.type),
        found.id,
        found.incarnation,
        found.token,
        found.run,
        found.worker,
    )


def _ours(bronze: BronzeManifest, folder: Path, queue: str, seq: int) -> tuple[Any, ...] | None:
    for epoch in reversed(bronze.epochs.get(queue, ())):
        for file in bronze.files:
            for part in file.ranges:
                if part.queue == queue and part.epoch == epoch and part.first <= seq <= part.last:
                    return _row(folder / file.path, queue, epoch, seq)
    return None


def _row(path: Path, queue: str, epoch: str, seq: int) -> tuple[Any, ...]:
    wanted = [("queue", "=", queue), ("epoch", "=", epoch), ("seq", "=", seq)]
    (row,) = pq.read_table(path, columns=list(_TELLING), filters=wanted).to_pylist()
    row["at"] = int(row["at"].timestamp() * 1000 + 0.5)
    return tuple(row[name] for name in _TELLING)
