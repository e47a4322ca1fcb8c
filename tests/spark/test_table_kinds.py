"""Tables that are not Spark's: pandas, Polars and Arrow tables reach the task as Spark's tables do."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import DecimalType, LongType, StringType, TimestampNTZType, TimestampType

import penstock.spark as ps
from penstock.errors import InvalidInput, InvalidOption
from penstock.spark.processing.inputs import as_dataframe
from tests.spark.test_process import do, load_tasks, numbers, rows_of


@pytest.fixture
def tasks(file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_tasks(file_url, tmp_path, monkeypatch)


COLUMNS: dict[str, list[Any]] = {"k": ["a", "b"], "n": [1, 2]}
ARROW = pa.table(COLUMNS)
KINDS = {
    "pandas": pd.DataFrame(COLUMNS),
    "polars": pl.DataFrame(COLUMNS),
    "lazy": pl.LazyFrame(COLUMNS),
    "arrow": ARROW,
    "batch": ARROW.to_batches()[0],
}


def test_rows_are_the_same_rows_whatever_kind_of_table_brings_them(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "doubles"
    first = ps.process(
        KINDS["pandas"], tasks.double, key="k", output=output, workers=1, progress="none", spark=spark
    )
    assert (first.plan.new, first.completed) == (2, 2)
    assert {key: row["penstock_value"] for key, row in rows_of(spark, output).items()} == {"a": 2, "b": 4}
    # By the active session, which is this one.
    again = ps.process(KINDS["polars"], tasks.double, key="k", output=output, dry_run=True)
    assert (again.plan.done, again.plan.todo) == (2, 0)


@pytest.mark.parametrize("table", [*KINDS.values(), ARROW.to_reader()], ids=[*KINDS, "reader"])
def test_every_kind_of_table_has_the_same_rows_and_types(spark: SparkSession, table: Any) -> None:
    df = as_dataframe(table, spark)
    assert df.dtypes == [("k", "string"), ("n", "bigint")]
    assert [tuple(row) for row in df.collect()] == [("a", 1), ("b", 2)]


ODD: Any = pa.table(
    {
        "large": pa.array(["x", None], pa.large_string()),
        "view": pa.array(["x", None], pa.string_view()),
        "coded": pa.array(["x", None]).dictionary_encode(),
        "unsigned": pa.array([2**64 - 1, None], pa.uint64()),
        "small": pa.array([200, None], pa.uint8()),
        "half": pa.array([np.float16(0.5), None], pa.float16()),
        "list": pa.array([["x"], None], pa.large_list(pa.large_string())),
        "fixed": pa.array([[1, 2], None], pa.list_(pa.uint32(), 2)),
        "named": pa.array([{"a": "x"}, None], pa.struct([("a", pa.string_view())])),
        "map": pa.array([[("x", 1)], None], pa.map_(pa.large_string(), pa.uint16())),
        "day": pa.array([date(2026, 1, 2), None], pa.date64()),
        "nanos": pa.array([datetime(2026, 1, 2), None], pa.timestamp("ns")),
        "zoned": pa.array([datetime(2026, 1, 2, tzinfo=UTC), None], pa.timestamp("s", "Europe/Berlin")),
        "lasting": pa.array([timedelta(seconds=1), None], pa.duration("ns")),
        "exact": pa.array([Decimal("1.5"), None], pa.decimal256(20, 2)),
        "nothing": pa.nulls(2),
    }
)


def test_types_of_arrow_that_spark_lacks_become_the_nearest_that_holds_every_value(
    spark: SparkSession,
) -> None:
    df = as_dataframe(ODD, spark)
    kinds = {field.name: field.dataType for field in df.schema}
    assert [kinds[name] for name in ("large", "view", "coded")] == [StringType()] * 3
    assert kinds["unsigned"] == DecimalType(20, 0)
    assert kinds["fixed"].simpleString() == "array<bigint>"
    assert kinds["map"].simpleString() == "map<string,int>"
    assert (kinds["nanos"], kinds["zoned"]) == (TimestampNTZType(), TimestampType())
    row, empty = df.collect()
    assert set(empty.asDict().values()) == {None}
    assert row["unsigned"] == 2**64 - 1
    assert (row["named"]["a"], row["map"], row["list"], row["fixed"]) == ("x", {"x": 1}, ["x"], [1, 2])
    assert (row["day"], row["nanos"]) == (date(2026, 1, 2), datetime(2026, 1, 2))
    assert (row["lasting"], row["exact"]) == (timedelta(seconds=1), Decimal("1.5"))


def test_pandas_keeps_named_indexes_as_columns_and_its_nan_is_null(spark: SparkSession) -> None:
    plain = pd.DataFrame({"n": [1.5, None], "text": pd.Categorical(["x", None])}, index=[7, 8])
    df = as_dataframe(plain, spark)
    assert df.columns == ["n", "text"]
    assert [tuple(row) for row in df.collect()] == [(1.5, "x"), (None, None)]
    named = as_dataframe(plain.rename_axis("k"), spark)
    assert (named.columns, named.schema["k"].dataType) == (["k", "n", "text"], LongType())


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ([1, 2], "must be a Spark, pandas, Polars or Arrow table, got list"),
        (pd.Series([1]), "got pandas.*Series.*to_frame"),
        (pd.DataFrame({"x": [1, "a"]}), "the pandas table cannot be converted to Arrow: .*column x"),
        (pd.DataFrame([[1, 2]], columns=["x", "x"]), "[Dd]uplicate column names"),
        (pa.table({"x": [datetime.now().replace(microsecond=1)]}).cast(
            pa.schema([("x", pa.timestamp("ns"))])
        ).set_column(0, "x", pa.array([1], pa.timestamp("ns"))), "column 'x'.*microseconds"),
        (pa.table({"x": pa.UnionArray.from_sparse(
            pa.array([0], pa.int8()), [pa.array([1])]
        )}), "column 'x' has the Arrow type sparse_union.*Spark has no"),
    ],
)  # fmt: skip
def test_a_table_that_spark_cannot_hold_is_refused_with_the_column(
    spark: SparkSession, table: Any, said: str
) -> None:
    with pytest.raises(InvalidInput, match=said):
        as_dataframe(table, spark)


def test_a_spark_table_keeps_its_session(spark: SparkSession, tasks: ModuleType, tmp_path: Path) -> None:
    table = numbers(spark, 1)
    assert as_dataframe(table, spark) is table
    with pytest.raises(InvalidOption, match="belongs to another Spark session"):
        do(table, tasks.double, tmp_path / "out", spark=spark.newSession())
