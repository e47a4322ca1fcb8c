from __future__ import annotations

import os
import random
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import names
from penstock.core.names import content_id, uuid7
from penstock.errors import InvalidOption, SerializationError

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('abé\n"{'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc"), inner),
    max_leaves=10,
)


def test_uuid7_is_a_uuid_of_version_7_with_the_time_in_front() -> None:
    before = time.time_ns() // 1_000_000
    made = uuid7()
    after = time.time_ns() // 1_000_000
    parsed = uuid.UUID(made)
    assert len(made) == 32
    assert made == made.lower()
    assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
    assert before <= parsed.int >> 80 <= after + 1


def test_uuid7_rises_strictly_within_a_process() -> None:
    made = [uuid7() for _ in range(50_000)]
    assert all(a < b for a, b in pairwise(made))


def test_uuid7_rises_when_the_clock_is_set_back_or_a_millisecond_is_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(names, "_sequence", names._Sequence())
    first = uuid7()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    second = uuid7()
    names._sequence.last = names._sequence.limit
    third = uuid7()
    assert first < second < third
    assert int(third, 16) >> 80 == (int(second, 16) >> 80) + 1
    assert uuid.UUID(third).version == 7


def test_uuid7_is_unique_over_threads() -> None:
    made: list[str] = []
    threads = [
        threading.Thread(target=lambda: made.extend([uuid7() for _ in range(5_000)])) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 40_000


def test_a_seeded_program_still_gets_ids_of_its_own() -> None:
    random.seed(1)
    first = uuid7()
    random.seed(1)
    assert first[12:] != uuid7()[12:]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_of_a_fork_neither_deadlocks_nor_repeats_its_parent() -> None:
    reading, writing = os.pipe()
    with names._sequence.lock:  # as if another thread of the parent were in the middle of it
        child = os.fork()
        if child == 0:
            os.write(writing, "".join(uuid7() for _ in range(100)).encode())
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    text = os.read(reading, 10_000).decode()
    os.close(reading)
    os.close(writing)
    childs = {text[i : i + 32] for i in range(0, len(text), 32)}
    parents = {uuid7() for _ in range(100)}
    assert len(childs) == 100
    assert {i[12:] for i in childs}.isdisjoint({i[12:] for i in parents})


def shuffled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(value)}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@given(plain)
def test_content_id_does_not_depend_on_the_order_of_keys(value: Any) -> None:
    assert content_id(value) == content_id(shuffled(value))


@given(plain, plain)
def test_content_ids_are_equal_exactly_if_the_json_is(a: Any, b: Any) -> None:
    order = "sorted"
    same = msgspec.json.encode(a, order=order) == msgspec.json.encode(b, order=order)  # type: ignore[arg-type]
    assert (content_id(a) == content_id(b)) is same


def test_content_id_sees_the_content_and_not_the_class() -> None:
    pydantic = pytest.importorskip("pydantic")

    @dataclass
    class Data:
        b: int
        a: datetime

    class Struct(msgspec.Struct):
        a: datetime
        b: int

    model = pydantic.create_model("Model", b=(int, ...), a=(datetime, ...))
    when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    values = [{"a": when, "b": 1}, Data(1, when), Struct(when, 1), model(a=when, b=1)]
    assert len({content_id({"in": [value]}) for value in values}) == 1


def test_content_id_is_the_same_in_every_release() -> None:
    assert content_id({"to": "ada", "n": [1, None, {3, 1}]}) == "4f4e05da4f8c43746fb633909c346353"


def test_a_shorter_content_id_is_the_beginning_of_the_longer() -> None:
    assert content_id("x", length=128).startswith(content_id("x", length=16))
    assert len(content_id("x")) == 32


@pytest.mark.parametrize("length", [0, 15, 17, 129, -2])
def test_content_id_refuses_lengths_that_collide_or_cannot_be(length: int) -> None:
    with pytest.raises(InvalidOption, match="16 to 128"):
        content_id("x", length=length)


@pytest.mark.parametrize("payload", [object(), {"a": [1.0, float("nan"), None]}, [float("inf")], {(1, 2): 3}])
def test_content_id_refuses_what_json_cannot_say(payload: Any) -> None:
    with pytest.raises(SerializationError, match="has no content id"):
        content_id(payload)
