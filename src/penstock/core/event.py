"""The event log's records, and how a batch of them is packed into one entry.

An entry is MessagePack: a list of *groups*, each a map of columns. A column is one value for all events of
the group, or a list with a value for each; no column's value is itself a list. The group's ``n`` says how
many events it holds. An entry is stored under the sequence number of its last event; the others count back
from there. Engines write the same format, so one reader serves them all (docs/event-format.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from penstock.core.lifecycle import EventType
from penstock.core.names import ref_of

__all__ = ["FORMAT", "Event", "pack", "unpack"]

FORMAT: Final = 1

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[dict[str, Any]])


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened. ``id`` is empty for events of the queue itself.

    ``type`` is a plain text if the writer was newer and knew of more types than we do.
    ``state`` is the job's state afterwards (empty once its record is gone). ``run_ms`` is how long the run
    took, ``wait_ms`` how long the job had been ready before it was claimed. ``size`` is the payload's
    (enqueued) or the result's (completed). ``data`` is JSON: the progress value, or what was configured.
    ``by`` is who acted, if a person did.
    """

    seq: int
    at_ms: int
    type: EventType | str
    queue: str
    id: str = ""
    incarnation: int = 0
    enqueued_at_ms: int = 0
    run_id: str = ""
    task: str = ""
    version: str = ""
    state: str = ""
    run: int = 0
    token: int = 0
    worker: str = ""
    run_ms: int = 0
    wait_ms: int = 0
    error_type: str = ""
    error: str = ""
    group: str = ""
    priority: int = 0
    cost: float = 0
    size: int = 0
    data: str = ""
    by: str = ""

    @property
    def ref(self) -> str:
        """Return the job as ``queue/id``; empty for events of the queue itself."""
        return ref_of(self.queue, self.id) if self.id else ""


# The column names in an entry, short because every event of every job is stored under them.
COLUMNS: Final = {
    "t": "type",
    "at": "at_ms",
    "id": "id",
    "inc": "incarnation",
    "enq": "enqueued_at_ms",
    "rid": "run_id",
    "task": "task",
    "ver": "version",
    "st": "state",
    "run": "run",
    "tok": "token",
    "w": "worker",
    "ms": "run_ms",
    "wait": "wait_ms",
    "et": "error_type",
    "em": "error",
    "grp": "group",
    "pri": "priority",
    "cost": "cost",
    "size": "size",
    "data": "data",
    "by": "by",
}


_TYPES: Final = {kind.value: kind for kind in EventType}


def pack(groups: Sequence[dict[str, Any]]) -> bytes:
    """An entry of these groups. Lists whose values are all equal are stored as one value."""
    return _encoder.encode([_collapse(group) for group in groups])


def _collapse(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value[0] if isinstance(value, list) and value.count(value[0]) == len(value) else value
        for name, value in group.items()
    }


def unpack(entry: bytes, *, last_seq: int, queue: str) -> list[Event]:
    """The events of an entry, in order. Columns this version does not know are passed over."""
    groups = _decoder.decode(entry)
    seq = last_seq - sum(group["n"] for group in groups)
    events: list[Event] = []
    for group in groups:
        count = group["n"]
        columns = {COLUMNS[name]: value for name, value in group.items() if name in COLUMNS}
        columns["type"] = _TYPES.get(columns["type"], columns["type"])
        events.extend(Event(seq=seq + i + 1, queue=queue, **dict(_row(columns, i))) for i in range(count))
        seq += count
    return events


def _row(columns: dict[str, Any], i: int) -> Iterable[tuple[str, Any]]:
    for name, value in columns.items():
        yield name, value[i] if isinstance(value, list) else value
