"""The event log's records, and how a batch of them is packed into one entry.

An entry is MessagePack: a list of *groups*, each a map of columns. A column is one value for all events of
the group, or a list with a value for each; no column's value is itself a list. The group's ``n`` says how
many events it holds. An entry is stored under the sequence number of its last event; the others count back
from there. Engines write the same format, so one reader serves them all (docs/event-format.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec.structs import astuple

from penstock.core.lifecycle import EventType
from penstock.core.names import ref_of

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


# Entries of the event log as columns, for readers that want tables and no objects.
#
# An entry is columnar already (``core.event``): what is the same for all events of a group is repeated,
# the rest is joined. No ``Event`` is made, and columns that are not asked for are not even decoded.


NAMES: Final = Event.__struct_fields__
"""The columns there are, in their order: the fields of ``Event``."""

_SHORT: Final = {name: short for short, name in COLUMNS.items()}
_DEFAULTS: Final = dict(zip(NAMES[-len(Event.__struct_defaults__) :], Event.__struct_defaults__, strict=True))


def columns(
    entries: Iterable[tuple[int, bytes]],
    *,
    queue: str,
    after: int = 0,
    until: int | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, list[Any]]:
    """The events of these entries (last sequence number, packed) with ``after < seq <= until``, in order.

    A list for each of ``names``, all of one length; without ``names`` for every field of ``Event``. Values and
    defaults are those of ``unpack``, but ``type`` is always a plain text. A name that is no field is a
    ``KeyError``.
    """
    wanted = tuple(NAMES if names is None else names)
    shorts = tuple(_SHORT[name] for name in wanted if name not in ("seq", "queue"))
    decode = _eventcolumn_decoder(shorts)
    table: dict[str, list[Any]] = {name: [] for name in wanted}
    stored = [table[COLUMNS[short]] for short in shorts]
    numbers = table.get("seq", [])
    for last_seq, entry in entries:
        groups = decode(entry)
        seq = last_seq - sum(group.n for group in groups)
        for group in groups:
            first, end = max(seq, after), seq + group.n if until is None else min(seq + group.n, until)
            if first < end:
                numbers.extend(range(first + 1, end + 1))
                _extend(stored, group, first - seq, end - seq)
            seq += group.n
    if "queue" in table:
        table["queue"] = [queue] * len(numbers)
    return table


def _extend(stored: list[list[Any]], group: Any, start: int, end: int) -> None:
    """Add the events of a group from one place to another to each column."""
    count, is_whole = end - start, end - start == group.n
    # The group begins with n, which is no column.
    for column, value in zip(stored, astuple(group)[1:], strict=True):
        if type(value) is list:
            column.extend(value if is_whole else value[start:end])
        elif count == 1:
            column.append(value)
        else:
            column.extend([value] * count)


@lru_cache(64)
def _eventcolumn_decoder(shorts: tuple[str, ...]) -> Callable[[bytes], list[Any]]:
    """What decodes these columns of an entry and passes over all others."""
    fields: list[Any] = [("n", int), *((short, Any, _DEFAULTS.get(COLUMNS[short])) for short in shorts)]
    group = msgspec.defstruct("Group", fields, gc=False)
    return msgspec.msgpack.Decoder(list[group]).decode  # type: ignore[valid-type]
