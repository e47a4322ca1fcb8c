"""Values of columns into payloads and back from results, on Arrow data, without Spark."""

from __future__ import annotations

import random
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.job import NewJob
from penstock.spark.cells import canonical_maker, column_values, is_too_large, result_array
from penstock.spark.rows import Layout, Refused, new_jobs
from tests.spark.arrowdata import DURATIONS, VARIANT, columns, types, values_of, variant

LAYOUT = Layout(namespace="", task="t", key=("k",), payload=("x",))


def jobs_of(column: pa.Array) -> list[NewJob | Refused]:
    batch = pa.record_batch({"k": pa.array(range(len(column))), "x": column})
    return list(new_jobs(batch, LAYOUT))


def payload_of(job: NewJob | Refused) -> Any:
    assert isinstance(job, NewJob)
    return msgspec.json.decode(job.payload)["x"]


@given(columns())
def test_values_of_every_type_reach_the_payload_and_come_back_as_results(column: pa.Array) -> None:
    texts = [msgspec.json.encode(payload_of(job)).decode() for job in jobs_of(column)]
    back = result_array(texts, column.type)
    assert back.type == column.type
    assert back.to_pylist() == column.to_pylist()


def test_a_map_is_an_object() -> None:
    column = pa.array([{"a": 1.5}, {}, None], type=pa.map_(pa.string(), pa.float64()))
    assert [payload_of(job) for job in jobs_of(column)] == [{"a": 1.5}, {}, None]
    nested = pa.array(
        [[{"m": {7: "x"}}]], type=pa.list_(pa.struct([("m", pa.map_(pa.int32(), pa.string()))]))
    )
    assert payload_of(jobs_of(nested)[0]) == [{"m": {"7": "x"}}]


@given(st.lists(DURATIONS, min_size=1, max_size=4))
def test_intervals_and_times_of_day_are_texts_that_the_hints_read(values: list[timedelta]) -> None:
    texts = [payload_of(job) for job in jobs_of(pa.array(values, type=pa.duration("us")))]
    assert msgspec.convert(texts, list[timedelta]) == values
    noon = jobs_of(pa.array([time(12, 0, 1, 500_000)], type=pa.time64("ns")))
    assert msgspec.convert(payload_of(noon[0]), time) == time(12, 0, 1, 500_000)


def test_a_variant_is_what_it_holds_at_any_depth() -> None:
    text = '{"a":[1,2.5,"2.5",2.0,1e3,null],"b":12345678901234567890.123}'
    stored = variant(text)
    (job,) = jobs_of(pa.array([stored], type=VARIANT))
    assert isinstance(job, NewJob)
    assert job.payload == b'{"x":' + text.replace("1e3", "1000.0").encode() + b"}"
    assert payload_of(jobs_of(pa.array([[stored, None]], type=pa.list_(VARIANT)))[0])[1] is None


def test_a_number_in_a_variant_is_another_value_than_its_text() -> None:
    number, text, same = (
        canonical({"x": (variant(value), VARIANT)})
        for value in ("[2.5, 2.0]", '["2.5", 2.0]', "[2.50, 2.00]")
    )
    assert number == same != text


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("value", "kind", "path"),
    [
        (NAN, pa.float64(), "x"),
        (INF, pa.float32(), "x"),
        ([1.0, -INF], pa.list_(pa.float64()), "x[1]"),
        ({"a": {"b": NAN}}, pa.struct([("a", pa.struct([("b", pa.float64())]))]), "x.a.b"),
        ({"k": [NAN]}, pa.map_(pa.string(), pa.list_(pa.float64())), "x.k[0]"),
        ({NAN: 1}, pa.map_(pa.float64(), pa.int64()), "x[nan]"),
    ],
)
def test_a_number_that_json_lacks_is_refused_at_any_depth(value: Any, kind: pa.DataType, path: str) -> None:
    good, bad = jobs_of(pa.array([None, value], type=kind))
    assert isinstance(good, NewJob)
    assert isinstance(bad, Refused)
    assert f"column {path!r} is " in bad.why


def test_values_that_python_cannot_represent_cost_only_their_own_row() -> None:
    late = pa.array([0, 3_000_000], type=pa.int32()).cast(pa.date32())
    good, bad = jobs_of(late)
    assert payload_of(good) == "1970-01-01"
    assert isinstance(bad, Refused)
    assert "column 'x' holds a value that Python cannot represent" in bad.why
    torn = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.array([0, 1, 2], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff")]
    )
    assert [type(job) for job in jobs_of(torn)] == [NewJob, Refused]


def test_a_result_that_does_not_fit_its_type_is_null_and_the_others_stay() -> None:
    texts = ["1", '"x"', str(2**70), None, "3"]
    assert result_array(texts, pa.int64()).to_pylist() == [1, None, None, None, 3]
    assert result_array([], pa.int64()).to_pylist() == []


MONEY = pa.decimal128(38, 18)


def test_decimals_of_results_are_rounded_to_the_scale_of_their_column() -> None:
    third, texts = Decimal(1) / Decimal(3), ['"0.1234567890123456785"', '"-2"', '"1e19"']
    assert result_array([msgspec.json.encode(third).decode()], MONEY).to_pylist() == [
        Decimal("0." + 18 * "3")
    ]
    assert result_array(texts, MONEY).to_pylist() == [
        Decimal("0.123456789012345679"),
        Decimal(-2),
        Decimal(10**19),
    ]
    nested = pa.list_(pa.struct([("a", pa.map_(pa.string(), MONEY))]))
    (found,) = result_array(['[null,{"a":{"x":"0.1234567890123456785"}},{"a":null}]'], nested).to_pylist()
    assert found[1] == {"a": [("x", Decimal("0.123456789012345679"))]}
    assert not is_too_large('[{"a":{"x":"0.1234567890123456785"}}]', nested)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f'"{10**20}"', MONEY),
        ('"1E+999999"', MONEY),
        ('"NaN"', MONEY),
        (f'[{{"a":1,"b":"{10**20}"}}]', pa.list_(pa.struct([("a", pa.int64()), ("b", MONEY)]))),
        (str(2**63), pa.int64()),
    ],
)
def test_a_result_of_the_right_type_that_exceeds_its_column_is_told_from_one_of_another_type(
    text: str, kind: pa.DataType
) -> None:
    assert is_too_large(text, kind)
    assert result_array([text], kind).to_pylist() == [None]
    assert not is_too_large('"x"', kind)
    assert not is_too_large("null", kind)


def canonical(row: dict[str, tuple[Any, pa.DataType]]) -> bytes:
    arrays = [pa.array([value], type=kind) for value, kind in row.values()]
    make = canonical_maker(list(row), [array.type for array in arrays])
    return make([column_values(array)[0] for array in arrays])


@st.composite
def rows(draw: st.DrawFn) -> dict[str, tuple[Any, pa.DataType]]:
    kinds = draw(st.dictionaries(st.sampled_from("abcde"), types(2), min_size=1, max_size=4))
    return {name: (draw(values_of(kind)), kind) for name, kind in kinds.items()}


def shuffled(value: Any, kind: pa.DataType, order: random.Random) -> tuple[Any, pa.DataType]:
    """The same value with the members of structs in another order."""
    if not pa.types.is_struct(kind):
        return value, kind
    fields = list(kind)
    order.shuffle(fields)
    return value, pa.struct(fields)


@given(rows(), st.randoms(use_true_random=False))
def test_the_canonical_form_knows_neither_order_nor_columns_that_are_null(
    row: dict[str, tuple[Any, pa.DataType]], order: random.Random
) -> None:
    items = [(name, shuffled(*cell, order)) for name, cell in row.items()]
    order.shuffle(items)
    assert canonical({**dict(items), "new": (None, pa.string())}) == canonical(row)


@given(types(2).flatmap(lambda kind: st.tuples(st.just(kind), values_of(kind), values_of(kind))))
def test_rows_have_one_canonical_form_only_if_their_payloads_say_the_same(
    drawn: tuple[pa.DataType, Any, Any],
) -> None:
    kind, one, other = drawn
    if canonical({"x": (one, kind)}) == canonical({"x": (other, kind)}):
        assert pa.array([one], type=kind).to_pylist() == pa.array([other], type=kind).to_pylist()


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ((1, pa.int32()), (1, pa.int64()), True),
        ((0.5, pa.float32()), (0.5, pa.float64()), True),
        ((Decimal("1.50"), pa.decimal128(10, 2)), (Decimal("1.5000"), pa.decimal128(20, 4)), True),
        ((date(2026, 1, 2), pa.date32()), ("2026-01-02", pa.string()), True),
        ((1, pa.int64()), (1.0, pa.float64()), False),
        ((1, pa.int64()), ("1", pa.string()), False),
        ((1, pa.int64()), (True, pa.bool_()), False),
        (([None], pa.list_(pa.int64())), ([], pa.list_(pa.int64())), False),
        (({"a": None}, pa.map_(pa.string(), pa.int64())), ({}, pa.map_(pa.string(), pa.int64())), False),
    ],
)
def test_the_canonical_form_is_what_the_task_receives(one: Any, other: Any, is_same: bool) -> None:
    assert (canonical({"x": one}) == canonical({"x": other})) is is_same


def test_long_decimals_keep_all_their_digits() -> None:
    kind = pa.decimal128(38, 0)
    one, other = Decimal(10**37 + 1), Decimal(10**37 + 2)
    assert canonical({"x": (one, kind)}) != canonical({"x": (other, kind)})
