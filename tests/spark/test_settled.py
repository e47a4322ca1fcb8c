"""The index of settled rows: what it knows costs little, and it never knows better than the output."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import penstock.spark as ps
from penstock.errors import InvalidInput
from penstock.spark.processing import intake, plan
from penstock.spark.processing.ledger import Ledger
from penstock.spark.processing.request import Request
from penstock.spark.processing.settled import row_hashes
from penstock.spark.rows import Layout
from tests.spark import table_tasks

INDEX = "_penstock_index"


@pytest.fixture
def tasks(file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("PENSTOCK_TABLES_URL", file_url)
    monkeypatch.setenv("PENSTOCK_TABLES_CALLS", str(tmp_path / "calls"))
    return importlib.reload(table_tasks)


@pytest.fixture(params=["few rows", "many rows", "few new rows"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan the rows in this process, or have Spark do it; look the rows up in the index, or the index in the rows."""
    if request.param == "many rows":
        monkeypatch.setattr(intake, "_FEW", -1)
    elif request.param == "few new rows":
        monkeypatch.setattr(Request, "follows", True)


def numbers(spark: SparkSession, *pairs: tuple[str, int]) -> DataFrame:
    return spark.createDataFrame(list(pairs), "k string, n long")


def calls(tmp_path: Path) -> list[str]:
    log = tmp_path / "calls"
    return log.read_text().split() if log.exists() else []


def do(df: DataFrame, task: Any, output: Path, **options: Any) -> ps.Processed:
    given = {"key": df.columns[0], "output": output, "workers": 1, "progress": "none", **options}
    return ps.process(df, task, **given)


def jobs_of(spark: SparkSession) -> int:
    return int(spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs())


@pytest.mark.usefixtures("size")
def test_a_row_is_settled_by_its_newest_end_whatever_the_index_knew_before(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "doubles"
    assert do(numbers(spark, ("a", 1), ("b", 2)), tasks.double, output).completed == 2
    assert do(numbers(spark, ("a", 1), ("b", 2)), tasks.double, output).plan.done == 2
    shutil.copytree(output / INDEX, tmp_path / "older")
    assert do(numbers(spark, ("a", 10), ("b", 2)), tasks.double, output).plan.changed == 1
    # As a run leaves it that was killed before it came to the index.
    shutil.rmtree(output / INDEX)
    shutil.copytree(tmp_path / "older", output / INDEX)
    plan = do(numbers(spark, ("a", 1), ("b", 2)), tasks.double, output, dry_run=True).plan
    assert (plan.changed, plan.done) == (1, 1)
    again = do(numbers(spark, ("a", 10), ("b", 2), ("c", 3)), tasks.double, output)
    assert (again.plan.done, again.completed) == (2, 1)
    plan = do(numbers(spark, ("a", 1), ("b", 2), ("c", 3)), tasks.double, output, dry_run=True).plan
    assert (plan.changed, plan.done) == (1, 2)
    assert sorted(calls(tmp_path)) == ["1", "10", "2", "3"]


@pytest.mark.usefixtures("size")
def test_duplicates_failures_and_the_expected_cost_are_counted_with_rows_that_the_index_knows(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "scores"
    users = spark.range(10).selectExpr("id AS user_id", "concat('user', id) AS name")
    assert do(users, tasks.score, output).failed == 1
    twice = users.unionByName(users.where("user_id < 5")).unionByName(
        spark.sql("SELECT 20L AS user_id, 'new' AS name UNION ALL SELECT 20L, 'new'")
    )
    plan = do(twice, tasks.score, output, dry_run=True).plan
    assert (plan.new, plan.done, plan.failed, plan.duplicate) == (1, 9, 1, 6)
    assert plan.estimated_cost == pytest.approx(0.012)
    assert do(twice, tasks.score, output, retry_failed=True).plan.todo == 2
    plan = do(twice, tasks.score, output, dry_run=True).plan
    assert (plan.new, plan.done, plan.failed) == (0, 10, 1)


@pytest.mark.usefixtures("size")
def test_a_key_with_a_settled_and_another_payload_is_refused(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "doubles"
    do(numbers(spark, ("a", 1), ("b", 2)), tasks.double, output)
    with pytest.raises(InvalidInput, match="1 keys have rows with different payloads"):
        do(numbers(spark, ("a", 1), ("a", 10), ("b", 2)), tasks.double, output)


def test_the_first_run_of_an_output_judges_no_row_and_its_index_holds(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "_FEW", -1)
    output, rows = tmp_path / "doubles", numbers(spark, ("a", 1), ("b", 2))
    with monkeypatch.context() as patch:
        for name in ("_check_rows", "_with_verdicts", "_newest_rows"):
            patch.setattr(plan, name, None)
        assert do(rows, tasks.double, output).completed == 2
    again = do(rows.union(numbers(spark, ("c", 3), ("c", 3))), tasks.double, output)
    assert (again.plan.done, again.plan.duplicate, again.completed) == (2, 1, 1)
    assert sorted(calls(tmp_path)) == ["1", "2", "3"]
    twice = do(numbers(spark, ("a", 1), ("a", 1)), tasks.double, tmp_path / "other")
    assert (twice.plan.new, twice.plan.duplicate) == (1, 1)


def test_rows_whose_files_are_gone_are_not_settled(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "doubles"
    do(numbers(spark, ("a", 1)), tasks.double, output)
    do(numbers(spark, ("a", 1), ("b", 2)), tasks.double, output)
    first, _ = sorted(output.glob("*.parquet"))
    first.unlink()
    plan = do(numbers(spark, ("a", 1), ("b", 2)), tasks.double, output, dry_run=True).plan
    assert (plan.new, plan.done) == (1, 1)


def test_settled_rows_are_neither_taken_nor_looked_up(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "doubles"
    rows = [(f"k{n}", n) for n in range(50)]
    do(numbers(spark, *rows), tasks.double, output)
    asked: list[int] = []
    look_up = Ledger.newest_outcomes

    def count(self: Ledger, ids: list[str]) -> Any:
        asked.append(len(ids))
        return look_up(self, ids)

    monkeypatch.setattr(Ledger, "newest_outcomes", count)
    assert do(numbers(spark, *rows), tasks.double, output).plan.done == 50
    assert do(numbers(spark, *rows, ("new", 1)), tasks.double, output).completed == 1
    assert asked == [0, 1]


def test_positions_make_the_bitmaps_that_spark_makes(spark: SparkSession) -> None:
    positions = [0, 1, 2, 9, 32_767, 32_768, 32_769, 65_536, 65_537, 1_000_000]
    frame = spark.createDataFrame([(0, position) for position in positions], "kind int, position long")
    ((_, expected),) = intake._bitmaps(frame)[0].items()
    assert intake._bitmaps_of(positions) == expected


def test_a_run_of_one_row_takes_few_spark_jobs(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "doubles"
    do(numbers(spark, ("a", 1)), tasks.double, output)
    before = jobs_of(spark)
    assert do(numbers(spark, ("a", 1)), tasks.double, output).plan.done == 1
    again = jobs_of(spark)
    assert do(numbers(spark, ("a", 1), ("b", 2)), tasks.double, output).completed == 1
    # Half of what it took when the ledger was read for every question.
    assert again - before <= 12
    assert jobs_of(spark) - again <= 18


def test_values_that_differ_have_different_hashes(spark: SparkSession) -> None:
    """Spark's own hash of a row passes over nulls, the sign of zero and the ends of arrays."""
    pairs = {
        "x int, y int": ("(null, 1)", "(1, null)"),
        "x double": ("(0.0D)", "(-0.0D)"),
        "x array<int>": ("(array(1, null))", "(array(null, 1))"),
        "x array<array<int>>": ("(array(array(1), array(2)))", "(array(array(1, 2)))"),
        "x array<string>": ("(null)", "(array())"),
        "x struct<a: string, b: string>": (
            "(named_struct('a', 'x', 'b', null))",
            "(named_struct('a', null, 'b', 'x'))",
        ),
        "x map<string, int>": ("(map('a', null, 'b', 1))", "(map('a', 1, 'b', null))"),
        "x string, y string": ("('ab', 'c')", "('a', 'bc')"),
        "x string collate utf8_lcase": ("('a')", "('A')"),
    }
    for schema, (one, other) in pairs.items():
        table = spark.createDataFrame([], schema)
        rows = spark.sql(f"SELECT * FROM VALUES {one}, {other}").toDF(*table.columns).to(table.schema)
        layout = Layout(namespace="", task="t", key=(), payload=tuple(rows.columns))
        hashes = row_hashes(rows.schema, layout)
        assert hashes is not None
        made = rows.select(*hashes).collect()
        assert [len({row[n] for row in made}) for n in (0, 1)] == [2, 2], schema


def test_rows_that_spark_cannot_hash_are_looked_up_in_the_output(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    df = spark.sql("SELECT 1L AS k, parse_json('{\"a\": 1}') AS v")
    assert do(df, tasks.count, tmp_path / "counts").completed == 1
    assert do(df, tasks.count, tmp_path / "counts").plan.done == 1
    assert not (tmp_path / "counts" / INDEX).exists()
