"""Ids of rows: the same for what is the same, whatever it is stored as."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from penstock.spark.errors import BadKey
from penstock.spark.rows import row_id_maker

id_of = row_id_maker("shop", "score")


def test_an_id_is_32_digits_and_depends_on_namespace_task_and_every_column() -> None:
    assert re.fullmatch("[0-9a-f]{32}", id_of((1, "a")))
    ids = {
        id_of((1, "a")),
        id_of(("a", 1)),
        id_of((1,)),
        row_id_maker("shop", "rank")((1, "a")),
        row_id_maker("test", "score")((1, "a")),
    }
    assert len(ids) == 5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (Decimal("1.50"), Decimal("1.5")),
        (Decimal("100"), Decimal("1E+2")),
        (datetime(2026, 1, 1, 12, tzinfo=UTC), datetime(2026, 1, 1, 13, tzinfo=timezone(timedelta(hours=1)))),
        ([1, 2], [1, 2]),
    ],
)
def test_equal_values_have_equal_ids(one: Any, other: Any) -> None:
    assert id_of((one,)) == id_of((other,))


def test_values_of_different_kinds_have_different_ids() -> None:
    values = [1, "1", 1.0, True, Decimal(1), b"1", [1], {"a": 1}, date(1970, 1, 2)]
    values += [datetime(1970, 1, 2), datetime(1970, 1, 2, tzinfo=UTC)]
    assert len({id_of((value,)) for value in values}) == len(values)


@pytest.mark.parametrize("value", [None, float("nan"), [None], timedelta(1)])
def test_what_cannot_name_a_row_is_refused(value: Any) -> None:
    with pytest.raises(BadKey):
        id_of((1, value))
