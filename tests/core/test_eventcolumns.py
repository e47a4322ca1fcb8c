"""Entries as columns: the same values that unpacking gives, without an event."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.event import NAMES, Event, columns, pack, unpack
from tests.core.test_event import groups

ENTRIES = st.lists(st.lists(groups(), min_size=1, max_size=2), max_size=3)


def stored(written: list[list[dict[str, Any]]]) -> list[tuple[int, bytes]]:
    """Entries as an engine has them, from the first event on."""
    seq, entries = 0, []
    for entry in written:
        seq += sum(group["n"] for group in entry)
        entries.append((seq, pack(entry)))
    return entries


def unpacked(entries: list[tuple[int, bytes]]) -> list[Event]:
    return [event for seq, entry in entries for event in unpack(entry, last_seq=seq, queue="mail")]


@given(ENTRIES, st.integers(0, 20), st.none() | st.integers(0, 40))
def test_columns_hold_what_unpacking_gives(
    written: list[list[dict[str, Any]]], after: int, until: int | None
) -> None:
    entries = stored(written)
    events = [
        event for event in unpacked(entries) if event.seq > after and (until is None or event.seq <= until)
    ]

    table = columns(entries, queue="mail", after=after, until=until)

    assert table == {name: [getattr(event, name) for event in events] for name in NAMES}


@given(ENTRIES, st.sets(st.sampled_from(NAMES)))
def test_only_the_named_columns_are_given(written: list[list[dict[str, Any]]], names: set[str]) -> None:
    entries = stored(written)
    whole = columns(entries, queue="mail")

    assert columns(entries, queue="mail", names=sorted(names)) == {name: whole[name] for name in names}


def test_a_type_of_a_newer_writer_and_its_columns_are_passed_on_and_over() -> None:
    entry = pack([{"n": 2, "t": "teleported", "at": 5, "id": ["a", "b"], "from": ["x", "y"]}])

    table = columns([(9, entry)], queue="mail", after=7, names=["seq", "type", "id", "group"])

    assert table == {"seq": [8, 9], "type": ["teleported"] * 2, "id": ["a", "b"], "group": ["", ""]}


def test_a_name_that_is_not_a_column_is_refused() -> None:
    with pytest.raises(KeyError, match="colour"):
        columns([], queue="mail", names=["colour"])
