from __future__ import annotations

import enum
import math
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client import codec
from penstock.client.codec import Json, MessagePack, Raw, Serde, decodable, register_serde, resolve_serde
from penstock.errors import InvalidName, InvalidOption, SerializationError

pydantic = pytest.importorskip("pydantic")

SERDES = [Json(), MessagePack()]
both = pytest.mark.parametrize("serde", SERDES, ids=lambda serde: serde.name)


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Strict(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    number: int = pydantic.Field(alias="theNumber")
    members: set[int] = pydantic.Field(default_factory=set)
    when: datetime | None = None

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return self.number * 2


class Other(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    text: str
    ratio: float = 1.0
    anything: Any = None


@dataclass
class Point:
    x: int
    y: int = 0


@dataclass
class Place:
    x: int
    name: str
    model: Strict | None = None
    tags: frozenset[str] = field(default_factory=frozenset)


class Item(msgspec.Struct):
    sku: str
    price: Decimal


class Pair(NamedTuple):
    a: int
    b: str


class Row(TypedDict):
    id: int
    at: datetime


class Node(msgspec.Struct):
    children: list[Node] = []


NAIVE = datetime(2026, 1, 2, 3, 4, 5, 678_901)
AWARE = NAIVE.replace(tzinfo=UTC)
MODEL = Strict(theNumber=1, members={1, 2}, when=AWARE)

ROUND_TRIPS: list[tuple[Any, Any]] = [
    (None, Any),
    ({"a": [1, 2.5, "é", None, True]}, Any),
    (NAIVE, datetime),
    (AWARE, datetime),
    (date(2026, 1, 2), date),
    (time(3, 4, 5), time),
    (timedelta(days=1, seconds=2, microseconds=3), timedelta),
    (b"\x00\xff", bytes),
    (UUID(int=7), UUID),
    (Decimal("1.10"), Decimal),
    (Colour.RED, Colour),
    (Level.HIGH, Level),
    ({1, 2}, set[int]),
    (frozenset({"a"}), frozenset[str]),
    ((1, "a"), tuple[int, str]),
    (Pair(1, "b"), Pair),
    ({"id": 1, "at": AWARE}, Row),
    (Node([Node(), Node([Node()])]), Node),
    ({1: "a"}, dict[int, str]),
    ({UUID(int=7): 1}, dict[UUID, int]),
    ({date(2026, 1, 2): 1}, dict[date, int]),
    (5, Annotated[int, msgspec.Meta(gt=1)]),
    ("a", Literal["a", "b"]),
    (Point(1, 2), Point),
    ([Item("x", Decimal("0.1"))], list[Item]),
    (MODEL, Strict),
    ([MODEL, None], list[Strict | None]),
    (Place(1, "a", MODEL, frozenset({"t"})), Place),
    ({"k": (MODEL, NAIVE)}, dict[str, tuple[Strict, datetime]]),
    (None, Point | None),
    (NAIVE, datetime | int | None),
    # Unions that msgspec itself refuses.
    (Place(1, "a"), Point | Place),
    (Point(1, 2), Place | Point),
    ([Point(1), Place(2, "b"), None, 5], list[Point | Place | int | None]),
    (Other(text="a"), Strict | Other),
    (MODEL, Other | Strict | None),
    ({"a": Other(text="a")}, dict[str, Point | Other | str]),
    (Item("x", Decimal(1)), Annotated[Item | Point, "one of them"]),
]


@both
@pytest.mark.parametrize(("value", "type_"), ROUND_TRIPS, ids=lambda part: str(part)[:40])
def test_values_come_back_as_what_the_hints_say(serde: Serde, value: Any, type_: Any) -> None:
    back = serde.decode(serde.encode(value), type_)
    assert back == value
    assert type(back) is type(value)


@both
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.text()
        | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=15,
    )
)
def test_plain_values_come_back_without_hints(serde: Serde, value: Any) -> None:
    assert serde.decode(serde.encode(value)) == value


@given(
    st.lists(st.none() | st.floats() | st.dictionaries(st.text(), st.floats() | st.none() | st.integers()))
)
def test_json_refuses_exactly_what_is_not_finite(value: list[Any]) -> None:
    floats = [v for item in value for v in (item.values() if isinstance(item, dict) else [item])]
    finite = all(math.isfinite(v) for v in floats if isinstance(v, float))
    try:
        assert Json().decode(Json().encode(value)) == value
        assert finite
    except SerializationError:
        assert not finite


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (math.nan, r"nan at \$ "),
        ({"a": [None, {"b": -math.inf}]}, r"-inf at \$\['a'\]\[1\]\['b'\]"),
        (Other(text="a", ratio=math.nan), r"nan at \$\.ratio"),
        ([Place(1, "x", math.inf)], r"inf at \$\[0\]\.model"),  # type: ignore[arg-type]
        ({"big": 2**70, "nan": math.nan}, r"nan at \$\['nan'\]"),
    ],
)
def test_json_says_where_the_number_is_that_is_not_finite(value: Any, path: str) -> None:
    with pytest.raises(SerializationError, match=path):
        Json().encode(value)


def test_json_takes_integers_of_any_size_beside_null() -> None:
    assert Json().decode(Json().encode([2**70, None])) == [2**70, None]


def test_messagepack_keeps_nan() -> None:
    assert math.isnan(MessagePack().decode(MessagePack().encode([math.nan]))[0])


@both
@pytest.mark.parametrize(
    ("value", "path"),
    [
        (object(), r"\(at \$\)"),
        ({"a": [1, {"b": 1j}]}, r"complex .*\(at \$\['a'\]\[1\]\['b'\]"),
        (Place(1, object()), r"object .*\(at \$\.name"),  # type: ignore[arg-type]
        (Other(text="a", anything=object()), r"\(at \$\.anything"),
        ({"a": "\ud800"}, r"surrogates .*\(at \$\['a'\]"),
        ({(1, 2): {None: object}}, "cannot be encoded"),
    ],
)
def test_an_unencodable_value_is_named_with_its_path_and_a_remedy(
    serde: Serde, value: Any, path: str
) -> None:
    with pytest.raises(
        SerializationError, match=rf"(?s)cannot be encoded as {serde.name}\b.*{path}.* custom serde\."
    ):
        serde.encode(value)


@both
def test_a_value_that_contains_itself_is_refused(serde: Serde) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(SerializationError, match="contains itself"):
        serde.encode(loop)


@both
@pytest.mark.parametrize(
    "type_", [int, Point, Strict, list[Point | Place], datetime, Colour, object, complex]
)
@pytest.mark.parametrize("value", ["text", {"x": "no"}])
def test_a_value_of_another_type_is_refused(serde: Serde, type_: Any, value: Any) -> None:
    if type_ is object:
        assert serde.decode(serde.encode(value), type_) == value
    else:
        with pytest.raises(SerializationError, match="cannot be decoded as"):
            serde.decode(serde.encode(value), type_)


@both
@given(st.binary(max_size=30))
def test_any_bytes_are_a_value_or_a_serialization_error(serde: Serde, data: bytes) -> None:
    for type_ in (Any, Point, Strict, list[Point | Place]):
        try:
            serde.decode(data, type_)
        except SerializationError:
            pass


@both
@pytest.mark.parametrize("type_", [str | bytes, datetime | str, dict[str, int] | Point, list[str | UUID]])
def test_unions_that_would_be_guesswork_are_refused(serde: Serde, type_: Any) -> None:
    with pytest.raises(SerializationError, match="Any"):
        serde.decode(serde.encode("x"), type_)
    with pytest.raises(SerializationError):
        decodable(type_)


def test_whatever_the_users_class_raises_is_a_serialization_error() -> None:
    class Odd(pydantic.BaseModel):  # type: ignore[misc, name-defined]
        @classmethod
        def model_validate_json(cls, data: bytes) -> Any:
            raise KeyError("odd")

    with pytest.raises(SerializationError, match="odd"):
        Json().decode(b"{}", Odd)


def test_types_that_cannot_be_hashed_are_decoded_all_the_same() -> None:
    assert Json().decode(b"5", Annotated[int, ["note"]]) == 5


def test_raw_takes_bytes_and_gives_them_back() -> None:
    raw = Raw()
    for value in (b"\x00a", bytearray(b"\x00a"), memoryview(b"\x00a")):
        assert raw.decode(raw.encode(value)) == b"\x00a"
    with pytest.raises(SerializationError, match="bytes only"):
        raw.encode("text")


class Reversed:
    name = "reversed"

    def encode(self, value: Any) -> bytes:
        return str(value)[::-1].encode()

    def decode(self, data: bytes, type: Any = Any) -> Any:
        return data.decode()[::-1]


def test_serdes_are_found_by_name_or_given_as_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_serdes", dict(codec._serdes))
    assert [resolve_serde(name).name for name in ("json", "msgpack", "raw")] == ["json", "msgpack", "raw"]
    own = Reversed()
    assert resolve_serde(own) is own
    assert register_serde(own) is own
    assert register_serde(own) is own
    assert resolve_serde("reversed") is own


@pytest.mark.parametrize("value", ["pickle", "", None, 5, Json, object()])
def test_an_invalid_serde_is_refused(value: Any) -> None:
    with pytest.raises(InvalidOption, match=r"^serde="):
        resolve_serde(value)


def test_a_serde_cannot_take_the_name_of_another_or_a_bad_one() -> None:
    own = Reversed()
    own.name = "json"
    with pytest.raises(InvalidOption, match="registered already"):
        register_serde(own)
    own.name = "no spaces"
    with pytest.raises(InvalidName):
        register_serde(own)


def test_pydantic_is_not_imported_for_those_who_do_not_use_it() -> None:
    code = "import sys, penstock.client.codec, penstock.client.signature; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@both
def test_a_coroutine_is_refused_as_a_missing_await(serde: Serde) -> None:
    async def work() -> None: ...

    coroutine = work()
    with pytest.raises(SerializationError, match=r"a coroutine cannot be encoded .* an `await` is missing"):
        serde.encode([coroutine])
    coroutine.close()
