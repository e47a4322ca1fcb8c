"""Where the log of a store that went back in time parts from what bronze has of it."""

from __future__ import annotations

from penstock.core.event import Event
from penstock.spark.delta import Snapshot, Table
from penstock.spark.history.state import Place
from penstock.storage.base import Storage

__all__ = ["common_until"]

_TELLING = ("type", "id", "incarnation", "token", "run", "worker")


async def common_until(
    storage: Storage, queue: str, place: Place, *, bronze: Table, snapshot: Snapshot
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
        if _is_known(await _event(storage, queue, middle), bronze, snapshot):
            low = middle
        else:
            high = middle - 1
    return low


async def _event(storage: Storage, queue: str, seq: int) -> Event | None:
    events = (await storage.read_events(queue, after=seq - 1, limit=1)).events
    return events[0] if events and events[0].seq == seq else None


def _is_known(event: Event | None, bronze: Table, snapshot: Snapshot) -> bool:
    """Return whether bronze has that very event, of any epoch."""
    if event is None:
        return False
    wanted = [("queue", "=", event.queue), ("seq", "=", event.seq)]
    told = tuple(str(event.type) if name == "type" else getattr(event, name) for name in _TELLING)
    return any(
        (round(row.pop("at").timestamp() * 1000), *row.values()) == (event.at_ms, *told)
        for file in snapshot.files
        if file.low <= event.at_ms <= file.high
        for row in bronze.folder.read(file.path, ["at", *_TELLING], filters=wanted).to_pylist()
    )
