"""Types of columns and values of them, for Hypothesis: what a payload can hold and what a result can bring back."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, TypeVar

import pyarrow as pa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import VariantVal

__all__ = ["columns", "drawn", "types", "values_of", "variant"]

T = TypeVar("T")

VARIANT: Final = pa.struct(
    [
        pa.field("value", pa.binary(), nullable=False),
        pa.field("metadata", pa.binary(), nullable=False, metadata={"variant": "true"}),
    ]
)


def variant(text: str) -> dict[str, bytes]:
    """The value of a column of variants that holds this JSON."""
    made = VariantVal.parseJson(text)
    return {"value": made.value, "metadata": made.metadata}


# Spark reads older dates by another calendar in places; Python has none after the year 9999.
_DATES: Final = st.dates(date(1600, 1, 1), date(9999, 12, 31))
_TIMES: Final = st.datetimes(datetime(1600, 1, 1), datetime(9999, 12, 31))

SCALARS: Final[dict[pa.DataType, st.SearchStrategy[Any]]] = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-(2**7), 2**7 - 1),
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float32(): st.floats(width=32, allow_nan=False, allow_infinity=False),
    pa.float64(): st.floats(allow_nan=False, allow_infinity=False),
    pa.decimal128(38, 18): st.decimals(
        Decimal(-(10**20) + 1), Decimal(10**20 - 1), places=18, allow_nan=False, allow_infinity=False
    ),
    pa.decimal128(10, 2): st.decimals(-(10**8) + 1, 10**8 - 1, places=2),
    pa.decimal128(20, 0): st.decimals(-(10**20) + 1, 10**20 - 1, places=0),
    pa.string(): st.text(st.characters(codec="utf-8"), max_size=8),
    pa.binary(): st.binary(max_size=8),
    pa.date32(): _DATES,
    pa.timestamp("us", "UTC"): _TIMES.map(lambda at: at.replace(tzinfo=UTC)),
    pa.timestamp("us"): _TIMES,
}
# These reach a task, and their results are text.
TIMES_OF_DAY: Final = st.times()
JSON: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=2), inner, max_size=3)
    ),
    max_leaves=5,
)
DURATIONS: Final = st.timedeltas(timedelta(days=-100_000), timedelta(days=100_000))
_NO_KEYS: Final = (pa.bool_(), pa.float32(), pa.float64())
_NAMES: Final = st.sampled_from(["a", "b", "a b", "größe", "x.y", "null"])


def drawn(strategy: st.SearchStrategy[T], count: int) -> list[T]:
    """Many values, for a test that takes too long to run with each of them."""
    values: list[T] = []

    @settings(
        max_examples=count, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def collect(value: T) -> None:
        values.append(value)

    collect()
    return values


def types(depth: int = 3) -> st.SearchStrategy[pa.DataType]:
    """Types that round-trip, nested up to ``depth``."""
    scalars = st.sampled_from(list(SCALARS))
    if depth == 0:
        return scalars
    inner = types(depth - 1)
    keys = st.sampled_from([kind for kind in SCALARS if kind not in _NO_KEYS])
    structs = st.dictionaries(_NAMES, inner, min_size=1, max_size=3)
    return st.one_of(
        scalars,
        inner.map(pa.list_),
        st.tuples(keys, inner).map(lambda pair: pa.map_(*pair)),
        structs.map(lambda members: pa.struct(list(members.items()))),
    )


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type, and null."""
    return st.none() | _values(kind)


def _values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_list(kind):
        return st.lists(values_of(kind.value_type), max_size=3)
    if pa.types.is_map(kind):
        return st.dictionaries(SCALARS[kind.key_type], values_of(kind.item_type), max_size=3)
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({field.name: values_of(field.type) for field in kind})
    return SCALARS[kind]


def columns(*, size: int = 4) -> st.SearchStrategy[pa.Array]:
    """Columns of any type."""
    return types().flatmap(
        lambda kind: st.lists(values_of(kind), min_size=size, max_size=size).map(
            lambda values: pa.array(values, type=kind)
        )
    )
