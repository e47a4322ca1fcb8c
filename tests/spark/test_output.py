"""The output of ``process`` as a table that others read: its names, its types, and that it is there at all."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import penstock.spark as ps
from penstock.errors import InvalidInput
from tests.spark.test_process import do, load_tasks, numbers, rows_of
from tests.spark.test_row_identity import as_before


@pytest.fixture
def tasks(file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_tasks(file_url, tmp_path, monkeypatch)


def test_an_output_of_no_rows_can_be_read_and_continued(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "doubles"
    assert do(numbers(spark, 1).where("n > 1"), tasks.double, output).completed == 0
    empty = spark.read.parquet(str(output))
    assert (empty.count(), empty.schema["penstock_value"].dataType.simpleString()) == (0, "bigint")
    assert do(numbers(spark, 1).where("n > 1"), tasks.double, output).completed == 0
    assert do(numbers(spark, 1), tasks.double, output).completed == 1
    assert rows_of(spark, output)["k1"]["penstock_value"] == 2


def test_a_json_output_of_no_rows_can_be_read_and_continued(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "doubles"
    none = numbers(spark, 1).where("n > 1")
    for _ in range(2):
        done = do(none, tasks.double, output, format="json")
        assert (done.completed, done.results.count(), done.results.columns[0]) == (0, 0, "k")
        assert spark.read.json(str(output)).count() == 0
    assert spark.read.schema("k string, penstock_value long").json(str(output)).collect() == []
    assert do(numbers(spark, 1), tasks.double, output, format="json").completed == 1
    (row,) = spark.read.json(str(output)).collect()
    assert (row["k"], row["penstock_value"]) == ("k1", 2)


def test_timestamps_are_microseconds(spark: SparkSession, tasks: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "doubles"
    before = spark.conf.get("spark.sql.parquet.outputTimestampType")
    do(numbers(spark, 1), tasks.double, output)
    (file,) = output.glob("*.parquet")
    columns = pq.ParquetFile(file).schema
    kinds = {columns.column(number).name: columns.column(number) for number in range(len(columns.names))}
    assert kinds["penstock_finished_at"].physical_type == "INT64"
    assert "micro" in str(kinds["penstock_finished_at"].logical_type)
    assert spark.conf.get("spark.sql.parquet.outputTimestampType") == before


def test_a_key_may_have_the_name_of_anything_that_we_say_of_a_row(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    names = ["state", "value", "error", "result", "task", "cost", "job_id", "commit"]
    df = spark.createDataFrame([(*"abcdefgh", 5)], [*names, "n"])
    output = tmp_path / "doubles"
    assert do(df, tasks.double, output, key=names).completed == 1
    (row,) = ps.latest(spark.read.parquet(str(output))).collect()
    assert [row[name] for name in names] == list("abcdefgh")
    assert (row["penstock_state"], row["penstock_value"]) == ("completed", 10)
    assert do(df, tasks.double, output, key=names).plan.done == 1


def test_an_output_that_an_earlier_version_began_keeps_its_names(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "counts"
    df = spark.sql("SELECT id AS k, 2 * id AS b, 'x' AS a FROM range(2)")
    do(df.where("k = 0"), tasks.count, output)
    as_before(output)
    assert do(df, tasks.count, output).completed == 1
    found = spark.read.parquet(str(output))
    assert not [name for name in found.columns if name.startswith("penstock_")]
    assert sorted((row["k"], row["state"], row["value"]) for row in ps.latest(found).collect()) == [
        (0, "completed", 3),
        (1, "completed", 3),
    ]


def test_input_that_cannot_be_processed_is_reported_in_plain_words(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    table, output = numbers(spark, 1), tmp_path / "out"
    stream = spark.readStream.format("rate").load().selectExpr("CAST(value AS string) AS k", "value AS n")
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (table, numbers, {}, r"task must be a task of an app.*got numbers.*Decorate"),
        (table, 5, {}, "task must be a task of an app.*got 5"),
        ([("k1", 1)], tasks.double, {}, "must be a Spark, pandas, Polars or Arrow table, got list"),
        (stream, tasks.double, {"limit": 1}, "limit and since do not apply to streams"),
        (table, tasks.double, {"every": "1m"}, "every and checkpoint apply only to streams"),
        (table, tasks.double, {"since": "nobody"}, "since='nobody' is not a column of the table"),
        (
            table,
            tasks.double,
            {"since": 3},
            "since=3 is the version of a Delta table, but the table is not one",
        ),
        (table, tasks.double, {"format": "iceberg"}, "lacks a jar: .*iceberg.*spark.jars.packages"),
        (
            table,
            tasks.double,
            {"output": "s3a://bucket/out"},
            "s3a://bucket/out, because its session lacks a jar",
        ),
        (table, tasks.double, {"scratch": "s3a://bucket/own"}, "s3a://bucket/own/.*lacks a jar"),
    ]
    for df, task, options, said in cases:
        with pytest.raises(InvalidInput, match=said):
            ps.process(df, task, **{"key": "k", "output": output, **options})
