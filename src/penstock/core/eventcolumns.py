"""Entries of the event log as columns, for readers that want tables and no objects.

An entry is columnar already (``core.event``): what is the same for all events of a group is repeated, the rest
is joined. No ``Event`` is made, and columns that are not asked for are not even decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec.structs import astuple

from penstock.core.event import COLUMNS, Event

__all__ = ["NAMES", "columns"]

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
    decode = _decoder(shorts)
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
def _decoder(shorts: tuple[str, ...]) -> Callable[[bytes], list[Any]]:
    """What decodes these columns of an entry and passes over all others."""
    fields: list[Any] = [("n", int), *((short, Any, _DEFAULTS.get(COLUMNS[short])) for short in shorts)]
    group = msgspec.defstruct("Group", fields, gc=False)
    return msgspec.msgpack.Decoder(list[group]).decode  # type: ignore[valid-type]
