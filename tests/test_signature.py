from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.codec import Json, MessagePack, Raw, Serde
from penstock.client.signature import Signature
from penstock.errors import InvalidInput, InvalidOption, SerializationError

if TYPE_CHECKING:
    from somewhere import JobContext  # type: ignore[import-not-found]

JSON = Json()
SHARED: list[int] = [1]


class Context:
    __penstock_context__ = True


@dataclass
class User:
    name: str
    since: datetime


ADA = User("Ada", datetime(1843, 1, 1, tzinfo=UTC))


class OwnSerde:
    """Knows nothing of types: what a user may write in five lines."""

    name = "own"

    def encode(self, value: Any) -> bytes:
        return json.dumps(value).encode()

    def decode(self, data: bytes, type: Any = Any) -> Any:
        return json.loads(data)


def send(to: str, template: str = "hello") -> str:
    return f"{to} {template}"


def by_name(a: int, *, b: int, c: int = 3) -> tuple[int, int, int]:
    return a, b, c


def anything(a: int, /, b: int = 2, *args: int, c: int = 5, **kwargs: int) -> Any:
    return a, b, args, c, kwargs


def context_first(ctx: Context, a: int, b: int = 2) -> Any:
    return ctx, a, b


def context_amid(a: int, ctx: Context | None = None, *args: int, b: int = 0) -> Any:
    return a, ctx, args, b


def context_by_name(a: int, *, ctx: Context, b: int = 0) -> Any:
    return a, ctx, b


def context_unseen(ctx: JobContext, a: int) -> Any:
    return ctx, a


def round_trip(
    function: Callable[..., Any], *args: Any, serde: Serde = JSON, context: Any = None, **kwargs: Any
) -> Any:
    """What the function returns when called by way of bytes."""
    signature = Signature.of(function)
    given_args, given_kwargs = signature.unpack(
        signature.encode(args, kwargs, serde=serde), serde, context=context
    )
    return function(*given_args, **given_kwargs)


def test_a_payload_is_an_object_by_parameter_name_without_the_defaults() -> None:
    signature = Signature.of(send)
    assert signature.encode(("ada",), {}, serde=JSON) == b'{"to":"ada"}'
    assert signature.encode(("ada", "x"), {}, serde=JSON) == b'{"to":"ada","template":"x"}'
    assert signature.encode(("ada",), {"template": "hello"}, serde=JSON) == b'{"to":"ada","template":"hello"}'
    assert JSON.encode(signature.pack((), {"template": "x", "to": "ada"})) == b'{"to":"ada","template":"x"}'


def test_it_says_what_the_function_takes_and_gives() -> None:
    signature = Signature.of(context_first)
    assert (signature.name, signature.parameters, signature.context_parameter) == (
        "context_first",
        ("a", "b"),
        "ctx",
    )
    assert Signature.of(send).result_type is str
    assert Signature.of(send).context_parameter is None
    assert Signature.of(lambda: None).result_type is Any


CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (send, ("ada",), {}),
    (send, ("ada", "x"), {}),
    (send, (), {"template": "x", "to": "ada"}),
    (by_name, (1,), {"b": 2}),
    (by_name, (1,), {"c": 5, "b": 2}),
    (anything, (1,), {}),
    (anything, (1, 2, 3, 4), {"c": 6, "d": 7}),
    (anything, (1,), {"b": 9, "a": 8, "kwargs": 1, "args": 2}),
    (partial(send, template="bound"), ("ada",), {}),
    (lambda: 5, (), {}),
]


@pytest.mark.parametrize("serde", [JSON, MessagePack(), OwnSerde()], ids=lambda serde: serde.name)
@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS)
def test_a_call_by_way_of_bytes_is_the_call_itself(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], serde: Serde
) -> None:
    signature = Signature.of(function)
    given_args, given_kwargs = signature.unpack(signature.encode(args, kwargs, serde=serde), serde)
    assert function(*given_args, **given_kwargs) == function(*args, **kwargs)


@given(st.lists(st.integers(0, 9), max_size=4), st.dictionaries(st.sampled_from("abcdxy"), st.integers(0, 9)))
def test_a_call_is_refused_exactly_if_python_would_refuse_it(args: list[int], kwargs: dict[str, int]) -> None:
    for function in (by_name, anything, lambda a, b=1: (a, b), lambda *, a, **y: (a, y), lambda *x: x):
        try:
            expected = function(*args, **kwargs)
        except TypeError:
            with pytest.raises(InvalidInput):
                Signature.of(function).pack(args, kwargs)
        else:
            signature = Signature.of(function)
            unpacked, named = signature.unpack(signature.encode(args, kwargs, serde=JSON), JSON)
            assert function(*unpacked, **named) == expected


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((), {}, "'to'"),
        (("a", "b", "c"), {}, "Extra"),
        (("a",), {"to": "b"}, "'to'"),
        (("a",), {"zz": 1}, "'zz'"),
    ],
)
def test_a_wrong_call_is_refused_with_the_parameter_and_the_signature(
    args: tuple[Any, ...], kwargs: dict[str, Any], named: str
) -> None:
    with pytest.raises(
        InvalidInput, match=rf"send cannot be called .*{named}.*send\(to: str, template: str = 'hello'\)"
    ):
        Signature.of(send).pack(args, kwargs)


def test_arguments_come_back_in_their_annotated_types() -> None:
    def task(user: User, friends: list[User] | None, data: bytes, untyped, *more: User, **named: User) -> Any:
        return user, friends, data, untyped, more, named

    assert round_trip(task, ADA, [ADA], b"\xff", {"x": 1}, ADA, one=ADA) == (
        (ADA, [ADA], b"\xff", {"x": 1}, (ADA,), {"one": ADA})
    )


def test_a_payload_of_other_types_or_names_is_refused() -> None:
    signature = Signature.of(send)
    for data in (b'{"to":1}', b"{}", b'{"to":"a","zz":1}', b"[]", b"nonsense", b""):
        with pytest.raises(SerializationError, match="send"):
            signature.unpack(data, JSON)


@pytest.mark.parametrize(
    ("serde", "said"),
    [
        (
            JSON,
            r"argument 'template' of send: a value of type list cannot .* as json: .*at \$\[1\], of type object",
        ),
        (MessagePack(), r"argument 'template' of send: .* as msgpack: .*at \$\[1\], of type object"),
    ],
)
def test_what_cannot_be_encoded_is_named_with_its_argument_and_task(serde: Serde, said: str) -> None:
    with pytest.raises(SerializationError, match=said):
        Signature.of(send).encode(("a", [1, object()]), {}, serde=serde)


def test_an_argument_that_is_not_finite_or_not_bytes_is_named() -> None:
    with pytest.raises(SerializationError, match=r"argument 'to' of send: the value nan at \$ "):
        Signature.of(send).encode((float("nan"),), {}, serde=JSON)

    def one(data: bytes) -> None: ...

    with pytest.raises(SerializationError, match=r"argument 'data' of .*one: a value of type str .* raw"):
        Signature.of(one).encode(("text",), {}, serde=Raw())


def test_defaults_are_the_workers_and_the_very_objects() -> None:
    def task(a: int | None = None, b: list[int] = SHARED, c: User = ADA, d: str = None) -> Any:  # type: ignore[assignment]  # noqa: RUF013
        return a, b, c, d

    a, b, c, d = round_trip(task)
    assert (a, d) == (None, None)
    assert b is SHARED
    assert c is ADA
    assert round_trip(task, d=None) == (None, SHARED, ADA, None)


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (context_first, (1,), {}, ("ctx", 1, 2)),
        (context_first, (1,), {"b": 5}, ("ctx", 1, 5)),
        (context_amid, (1, 8, 9), {"b": 7}, (1, "ctx", (8, 9), 7)),
        (context_amid, (), {"a": 1}, (1, "ctx", (), 0)),
        (context_by_name, (1,), {"b": 4}, (1, "ctx", 4)),
        (context_unseen, (1,), {}, ("ctx", 1)),
    ],
)
def test_the_context_is_passed_in_its_place_and_is_not_in_the_payload(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], expected: Any
) -> None:
    assert Signature.of(function).context_parameter == "ctx"
    assert round_trip(function, *args, context="ctx", **kwargs) == expected


def test_the_context_cannot_be_given_by_the_caller() -> None:
    with pytest.raises(InvalidInput, match="ctx"):
        Signature.of(context_first).pack((1,), {"ctx": 5})


def test_takes_context_means_the_first_parameter_without_an_annotation() -> None:
    signature = Signature.of(lambda job, a: (job, a), takes_context=True)
    assert signature.context_parameter == "job"
    assert signature.unpack(b'{"a":1}', JSON, context="ctx") == (("ctx", 1), {})
    assert Signature.of(context_by_name, takes_context=True).context_parameter == "ctx"


def test_two_contexts_or_none_to_take_are_refused() -> None:
    def two(a: Context, b: Context) -> None: ...

    with pytest.raises(InvalidOption, match="a, b"):
        Signature.of(two)
    with pytest.raises(InvalidOption, match="none"):
        Signature.of(lambda: None, takes_context=True)


def test_an_annotation_that_cannot_be_resolved_counts_as_any() -> None:
    @dataclass
    class Local:
        x: int

    def task(a: Local, b: Missing, c: list[Missing], d: datetime) -> Missing:  # type: ignore[name-defined]  # noqa: F821
        return a, b, c, d

    assert Signature.of(task).result_type is Any
    assert round_trip(task, Local(1), 2, [3], ADA.since) == ({"x": 1}, 2, [3], ADA.since)


def test_a_local_class_that_the_function_uses_is_found() -> None:
    @dataclass
    class Local:
        x: int

    def task(a: Local) -> tuple[Local, Local]:
        return a, Local(2)

    assert round_trip(task, Local(1)) == (Local(1), Local(2))


def test_methods_and_callable_objects_are_functions_too() -> None:
    class Sender:
        def send(self, user: User) -> User:
            return user

        def __call__(self, user: User) -> User:
            return user

    assert round_trip(Sender().send, ADA) == ADA
    assert round_trip(Sender(), ADA) == ADA


def test_a_type_no_payload_can_say_is_refused_when_the_task_is_defined() -> None:
    def task(a: str | bytes) -> None: ...

    with pytest.raises(SerializationError, match=r"parameter 'a' of .*task"):
        Signature.of(task)


def test_names_that_structs_reserve_are_refused() -> None:
    with pytest.raises(InvalidOption, match="'__a'"):
        Signature.of(lambda __a: __a)


def test_raw_bytes_are_the_one_argument() -> None:
    def task(ctx: Context, data: bytes) -> Any:
        return ctx, data

    signature = Signature.of(task)
    assert signature.encode((b"\x00",), {}, serde=Raw()) == b"\x00"
    assert signature.unpack(b"\x00", Raw(), context="ctx") == (("ctx", b"\x00"), {})
    for use in (lambda s: s.encode(("a",), {}, serde=Raw()), lambda s: s.unpack(b"", Raw())):
        with pytest.raises(InvalidOption, match=r"exactly one parameter, and send.* has 2"):
            use(Signature.of(send))


def test_a_custom_serde_that_returns_another_type_is_reported() -> None:
    with pytest.raises(SerializationError, match="decoded the payload of send to a list"):
        Signature.of(send).unpack(b"[1]", OwnSerde())
    with pytest.raises(SerializationError, match="does not fit send"):
        Signature.of(send).unpack(b'{"zz": 1}', OwnSerde())


def test_a_local_function_may_refer_to_a_name_that_has_no_value_yet() -> None:
    def again(n: int) -> object:
        return later if n else None

    assert Signature.of(again).parameters == ("n",)
    later = again
