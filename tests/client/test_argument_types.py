"""Arguments are checked when they are enqueued, with the decoder that the worker uses."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

import pytest

from penstock import App, InvalidInput


@dataclass
class Row:
    number: int
    text: str = ""


class Colour(StrEnum):
    RED = "red"


def send(to: str, copies: int = 1, weight: float = 0.0) -> None: ...
def load(rows: list[Row], *, mode: Literal["fast", "slow"] = "fast") -> None: ...
def pair(point: tuple[int, int], tags: dict[str, Any] | None = None) -> None: ...
def paint(colour: str, at: datetime | None = None) -> None: ...
def spread(*numbers: int, **names: str) -> None: ...
def anything(value: Any, other=None) -> None: ...


@pytest.mark.parametrize("serde", ["json", "msgpack"])
@pytest.mark.parametrize(
    ("function", "args", "kwargs", "words"),
    [
        (send, (5,), {}, ("'to'", "got 5", "Expected `str`, got `int`", "to: str")),
        (send, ("ada", "2"), {}, ("'copies'", "got '2'", "Expected `int`")),
        (send, ("ada", True), {}, ("'copies'", "got True", "Expected `int`")),
        (send, ("ada",), {"weight": "heavy"}, ("'weight'", "got 'heavy'", "Expected `float`")),
        (send, (None,), {}, ("'to'", "got None")),
        (load, ([Row(1), {"number": "2"}],), {}, ("'rows'", "$[1].number", "Expected `int`, got `str`")),
        (load, ([],), {"mode": "quick"}, ("'mode'", "got 'quick'")),
        (pair, ((1, 2, 3),), {}, ("'point'", "length 2")),
        (pair, ((1, 2),), {"tags": ["a"]}, ("'tags'", "got ['a']")),
        (spread, (1, "2"), {}, ("'numbers'", "Expected `int`, got `str`")),
        (spread, (), {"a": 1}, ("'names'", "Expected `str`, got `int`")),
    ],
)
async def test_an_argument_of_the_wrong_type_is_refused_when_it_is_enqueued(
    memory_app: App, serde: str, function: Any, args: Any, kwargs: Any, words: tuple[str, ...]
) -> None:
    task: Any = memory_app.task(serde=serde)(function)
    for make in (task.enqueue, task.call):
        with pytest.raises(InvalidInput) as refusal:
            await make(*args, **kwargs)
        assert [word for word in words if word not in str(refusal.value)] == []
    with pytest.raises(InvalidInput):
        task.job(*args, **kwargs)
    assert await memory_app.queue("default").open() == 0


@pytest.mark.parametrize("serde", ["json", "msgpack"])
@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (send, ("ada", 2, 3), {}),
        (send, (Colour.RED,), {"weight": 2**40}),
        (load, ([Row(1), {"number": 2, "text": "x"}],), {}),
        (load, ((Row(1),),), {"mode": "slow"}),
        (pair, ([1, 2],), {"tags": {"a": 1}}),
        (pair, ([1, 2],), {}),
        (paint, (Colour.RED,), {"at": "2030-01-01T00:00:00Z"}),
        (paint, ("red", None), {}),
        (spread, (1, 2), {"a": "b"}),
        (anything, ({"a": [1]},), {"other": [1]}),
    ],
)
async def test_what_the_worker_would_accept_is_accepted(
    memory_app: App, serde: str, function: Any, args: Any, kwargs: Any
) -> None:
    task: Any = memory_app.task(serde=serde, name="x")(function)
    spec = task.job(*args, **kwargs)
    task.signature.unpack(spec.job.payload, task.serde)


async def test_the_arguments_of_a_partial_are_checked_without_the_first(memory_app: App) -> None:
    task = memory_app.task(load)
    pairs: Any = memory_app.task(pair)

    assert task.partial(mode="slow").takes_result
    with pytest.raises(InvalidInput, match="'tags'"):
        pairs.partial(tags=5)
