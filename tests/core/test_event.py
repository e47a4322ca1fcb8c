"""Entries of the log: what is packed is what is unpacked."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.event import COLUMNS, Event, pack, unpack
from penstock.core.lifecycle import EventType

TEXT = st.text(max_size=20)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "t": st.sampled_from([kind.value for kind in EventType]),
    **dict.fromkeys(["at", "inc", "enq", "run", "tok", "ms", "wait", "size"], st.integers(0, 2**53)),
    **dict.fromkeys(["id", "rid", "task", "ver", "st", "w", "et", "em", "grp", "data"], TEXT),
    "pri": st.integers(-(2**31), 2**31),
    "cost": st.floats(0, 1e9),
}


@st.composite
def groups(draw: Any) -> dict[str, Any]:
    """A group as an engine writes it: the type is one for all; other columns are one value, or a list of them."""
    count = draw(st.integers(1, 5))
    group = {"n": count, "t": draw(VALUES["t"]), "at": draw(VALUES["at"])}
    for name in draw(st.sets(st.sampled_from(sorted(VALUES.keys() - {"t", "at"})))):
        one, many = VALUES[name], st.lists(VALUES[name], min_size=count, max_size=count)
        group[name] = draw(one | many)
    return group


def rows(group: dict[str, Any]) -> list[dict[str, Any]]:
    columns = {COLUMNS[name]: value for name, value in group.items() if name != "n"}
    return [
        {name: value[i] if isinstance(value, list) else value for name, value in columns.items()}
        for i in range(group["n"])
    ]


@given(st.lists(groups(), min_size=1, max_size=4), st.integers(1000, 2**40))
def test_what_was_packed_is_unpacked_in_order_and_counted_back_from_the_last(
    written: list[dict[str, Any]], last_seq: int
) -> None:
    expected = [row for group in written for row in rows(group)]

    events = unpack(pack(written), last_seq=last_seq, queue="mail")

    assert [event.seq for event in events] == list(range(last_seq - len(expected) + 1, last_seq + 1))
    for event, row in zip(events, expected, strict=True):
        assert event == Event(seq=event.seq, queue="mail", **{**row, "type": EventType(row["type"])})


def test_equal_values_are_stored_once() -> None:
    ids = [f"job-{i}" for i in range(100)]
    same = pack([{"n": 100, "t": "enqueued", "at": 1, "id": ids, "task": ["a-long-name-of-a-task"] * 100}])
    once = pack([{"n": 100, "t": "enqueued", "at": 1, "id": ids, "task": "a-long-name-of-a-task"}])

    assert same == once


def test_columns_of_a_newer_version_are_passed_over() -> None:
    entry = msgspec.msgpack.encode([{"n": 1, "t": "claimed", "at": 5, "id": "job", "colour": "green"}])

    [event] = unpack(entry, last_seq=7, queue="mail")

    assert (event.seq, event.type, event.id, event.at_ms) == (7, EventType.CLAIMED, "job", 5)


def test_every_column_names_a_field_of_an_event_and_no_field_is_left_out() -> None:
    fields = set(Event.__struct_fields__) - {"seq", "queue"}

    assert set(COLUMNS.values()) == fields
    assert len(set(COLUMNS.values())) == len(COLUMNS)


def test_a_type_of_a_newer_writer_is_read_as_it_stands() -> None:
    entry = pack([{"t": "teleported", "at": 1, "n": 1, "id": "a"}])
    assert [event.type for event in unpack(entry, last_seq=1, queue="q")] == ["teleported"]
