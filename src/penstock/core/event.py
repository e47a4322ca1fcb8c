"""Events, and the packed entries that the event log stores.

An entry is MessagePack: a list of *groups*, each a map of columns. A column is one value for all events of the
group, or a list with one value per event; a single value is never a list. The group's ``n`` is its number of
events. An entry is stored under the sequence number of its last event; the others count back from there. All
engines write the same format, so one reader serves them all (docs/event-format.md).

``unpack`` returns an entry's events as objects. ``columns`` returns them as lists, for readers that build tables.
``page_of`` returns the page of a reader, and says which events are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import astuple

from penstock.core.lifecycle import EventType
from penstock.core.names import ref_of

FORMAT: Final = 1

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[dict[str, Any]])


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event. ``id`` is empty for events of the queue itself.

    ``type`` is a plain string if a newer version wrote a type that this one does not know. ``state`` is the job's
    state afterwards (empty if its record is gone). ``run_ms`` is how long the run took, ``wait_ms`` how long the
    job had been ready before its claim. ``size`` is that of the payload (enqueued) or the result (completed).
    ``data`` is JSON: the progress, or the new configuration. ``by`` is the person who acted, if any.
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


# The column names in an entry. They are short because every event of every job is stored under them.
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
    """Return the entry of these groups. A list of equal values is stored as one value."""
    return _encoder.encode([_collapse(group) for group in groups])


def _collapse(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value[0] if isinstance(value, list) and value.count(value[0]) == len(value) else value
        for name, value in group.items()
    }


def unpack(entry: bytes, *, last_seq: int, queue: str) -> list[Event]:
    """Return the events of an entry, in order. Unknown columns are ignored."""
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


# Columns

NAMES: Final = Event.__struct_fields__
"""The columns, in order: the fields of ``Event``."""

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
    """Return the events of packed entries (last sequence number, bytes) with ``after < seq <= until`` as columns.

    The result has one list for each of ``names``, by default for every field of ``Event``. Values and defaults are
    those of ``unpack``, but ``type`` is always a plain string. Columns that are not in ``names`` are not decoded.
    Raise ``KeyError`` for an unknown name.
    """
    selected = tuple(NAMES if names is None else names)
    shorts = tuple(_SHORT[name] for name in selected if name not in ("seq", "queue"))
    decode = _decoder_of(shorts)
    table: dict[str, list[Any]] = {name: [] for name in selected}
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
    """Append the events of a group from ``start`` to ``end`` to each column."""
    count, is_whole = end - start, end - start == group.n
    # The first field of the group is n, which is not a column.
    for column, value in zip(stored, astuple(group)[1:], strict=True):
        if type(value) is list:
            column.extend(value if is_whole else value[start:end])
        elif count == 1:
            column.append(value)
        else:
            column.extend([value] * count)


@lru_cache(64)
def _decoder_of(shorts: tuple[str, ...]) -> Callable[[bytes], list[Any]]:
    """Return a decoder of entries that reads only these columns."""
    fields: list[Any] = [("n", int), *((short, Any, _DEFAULTS.get(COLUMNS[short])) for short in shorts)]
    group = msgspec.defstruct("Group", fields, gc=False)
    return msgspec.msgpack.Decoder(list[group]).decode  # type: ignore[valid-type]


# Pages of the log


class Gap(NamedTuple):
    """Events ``first`` to ``last`` are no longer kept."""

    first: int
    last: int


class EventPage(msgspec.Struct, frozen=True):
    """Events in order after the requested offset. ``next`` is the offset to continue from, ``last`` the newest offset.

    ``gap`` names the events that were trimmed before they could be read. ``epoch`` changes when the store may have
    gone back in time; offsets of another epoch are meaningless.
    """

    events: list[Event]
    next: int
    last: int
    epoch: str
    gap: Gap | None = None


LOST: Final = "lost"
"""The type of events that replace those of a damaged or missing entry."""


class _Group(msgspec.Struct):
    """The columns that every group of an entry has."""

    t: str
    n: int


_groups: Final = msgspec.msgpack.Decoder(list[_Group])


def count_events(entry: bytes) -> int:
    """Return the number of events in an entry; 0 if it is damaged or replaces lost events."""
    try:
        groups = _groups.decode(entry)
    except (ValueError, RecursionError):
        return 0
    is_sound = all(group.n > 0 and group.t != LOST for group in groups)
    return sum(group.n for group in groups) if is_sound else 0


def count_lost(entry: bytes) -> int:
    """Return the number of lost events that an entry replaces; 0 for other entries."""
    try:
        groups = _groups.decode(entry)
    except (ValueError, RecursionError):
        return 0
    return groups[0].n if len(groups) == 1 and groups[0].t == LOST else 0


class EntryPage(msgspec.Struct, frozen=True):
    """Stored entries: the number of the last event of each, and its bytes (see ``core.event``).

    The first entry may begin before the requested offset. The other fields are those of ``EventPage``.
    """

    entries: list[tuple[int, bytes]]
    next: int
    last: int
    epoch: str
    gap: Gap | None = None

    def events(self, queue: str, *, after: int) -> EventPage:
        """Return the page with the events after the offset unpacked.

        The page ends before an entry that cannot be unpacked. If that is the first one, the page skips it and
        reports a gap.
        """
        unpacked: list[Event] = []
        gap, reached = self.gap, after
        for last_seq, entry in self.entries:
            try:
                events = unpack(entry, last_seq=last_seq, queue=queue)
            except (ValueError, LookupError, TypeError):
                if unpacked:
                    return EventPage(unpacked, reached, self.last, self.epoch, gap)
                gap = Gap(after + 1, last_seq)
            else:
                unpacked += [event for event in events if event.seq > after]
            reached = last_seq
        return EventPage(unpacked, self.next, self.last, self.epoch, gap)


def page_of(
    rows: Iterable[tuple[int, bytes]], *, after: int, limit: int, last: int, epoch: str, trimmed: int = 0
) -> EntryPage:
    """Return the page of these rows, each the number of the last event of an entry and its bytes.

    The page ends before a damaged or missing entry. If that is the first one, the page skips it and reports a gap.
    ``trimmed`` is the number of the last event known to be gone.
    """
    entries: list[tuple[int, bytes]] = []
    gap, start, reached = None, after, max(after, min(trimmed, last))
    is_empty = True
    for last_seq, entry in rows:
        is_empty = False
        count = count_events(entry)
        before = last_seq - count
        if entries and (not count or before > reached or reached - start >= limit):
            break
        if count and not entries:
            start = reached = max(reached, before)
            gap = Gap(after + 1, start) if start > after else None
        if count:
            entries.append((last_seq, entry))
        reached = last_seq
    if not entries and reached < last and is_empty:
        reached = last
    if not entries and reached > after:
        gap = Gap(after + 1, reached)
    return EntryPage(entries, reached, last, epoch, gap)
