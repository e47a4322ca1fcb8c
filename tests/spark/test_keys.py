"""Ids of rows: the same for what is the same, whatever it is stored as."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.errors import BadKey
from penstock.spark.rows import row_id_maker
from tests.spark.test_process import do, load_tasks

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


KEYS = """
SELECT 1 AS n, true AS yes, 7Y AS tiny, float(0.1) AS single, -0.0D AS double, 12.50BD AS exact, 'größe\\\\"' AS text,
  X'00FF' AS raw, DATE'0001-01-01' AS day, TIMESTAMP'1583-03-01 12:00:00.123456Z' AS at,
  TIMESTAMP_NTZ'2026-03-29 02:30:00' AS local, array(1, 2) AS many, named_struct('a', 1, 'b', X'01') AS both
UNION ALL
SELECT 2, false, -8Y, float(3.4e38), 5e-324D, -0.01BD, '', X'', DATE'9999-12-31',
  TIMESTAMP'9999-12-31 23:59:59.999999Z', TIMESTAMP_NTZ'0001-01-01 00:00:00', array(), named_struct('a', 2, 'b', X'')
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("format", ["parquet", "delta", "json"])
def test_a_key_of_any_type_comes_back_as_it_was_and_is_known_again(
    spark: SparkSession, file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    tasks: ModuleType = load_tasks(file_url, tmp_path, monkeypatch)
    df = spark.sql(KEYS)
    keys = df.columns[1:]
    options = {"key": keys, "format": format}
    done = do(df, tasks.double, tmp_path / "doubles", **options)
    assert done.completed == 2
    found = done.joined.orderBy("n").collect()
    assert [row["penstock_value"] for row in found] == [2, 4]
    kept = {row["penstock_value"]: row for row in done.results.collect()}
    for row in df.collect():
        assert [kept[2 * row["n"]][name] for name in keys] == [row[name] for name in keys]
    assert do(df, tasks.double, tmp_path / "doubles", **options).plan.done == 2
