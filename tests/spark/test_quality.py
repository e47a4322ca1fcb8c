"""Quality gates of ``process``: expectations on results, a share of failures, and a table of what went wrong."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from penstock.errors import InvalidInput, InvalidOption, TooManyFailures
from penstock.spark.processing.progress import Tally
from penstock.spark.processing.result import open_expectations
from penstock.spark.processing.running import Limits
from tests.spark.test_process import calls, do, load_tasks, numbers, rows_of, users


@pytest.fixture
def tasks(file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_tasks(file_url, tmp_path, monkeypatch)


def below_four(value: int) -> bool:
    return value < 4


@pytest.mark.timeout(300)
def test_an_unexpected_result_fails_its_row_and_is_paid_again_only_on_request(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output, quarantine = tmp_path / "doubles", tmp_path / "bad"
    given: dict[str, Any] = {"expect": below_four, "quarantine": quarantine}
    df = numbers(spark, 1, 2).selectExpr("*", "NULL AS nothing", "'x' AS note")
    done = do(df, tasks.double, output, **given)
    assert (done.completed, done.failed) == (1, 1)
    row = rows_of(spark, output)["k2"]
    assert (row["penstock_state"], row["penstock_error_type"]) == ("failed", "ExpectationFailed")
    assert row["penstock_error"] == "the result does not meet the expectation below_four: 4"
    assert (row["penstock_value"], row["penstock_result"]) == (None, "4")
    (held,) = spark.read.parquet(str(quarantine)).collect()
    assert (held["k"], held["note"], held["penstock_error_type"]) == ("k2", "x", "ExpectationFailed")

    assert do(df, tasks.double, output, **given).plan.failed == 1
    assert sorted(calls(tmp_path)) == ["1", "2"]
    mended = do(df, tasks.double, output, retry_failed=True, quarantine=quarantine)
    assert (mended.completed, sorted(calls(tmp_path))) == (1, ["1", "2", "2"])
    assert spark.read.parquet(str(quarantine)).count() == 0


def test_a_result_that_is_too_large_for_its_column_fails_its_row(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    done = do(numbers(spark, 1, 2**62), tasks.double, tmp_path / "doubles")
    assert (done.completed, done.failed) == (1, 1)
    row = rows_of(spark, tmp_path / "doubles")[f"k{2**62}"]
    assert (row["penstock_error_type"], row["penstock_value"]) == ("ResultTooLarge", None)
    assert row["penstock_error"] == f"the result does not fit the column penstock_value (bigint): {2**63}"
    assert row["penstock_result"] == str(2**63)


def test_expectations_get_the_typed_result_and_say_which_of_them_complains(tasks: ModuleType) -> None:
    expected = open_expectations(
        {"positive": lambda score: score.points > 0, "short": lambda score: len(score.label) < 5}, tasks.score
    )
    assert expected._complaint(b'{"points":1.5,"label":"x"}') == ""
    assert "the expectation positive: {" in expected._complaint(b'{"points":-1,"label":"x"}')
    assert "the expectation short: {" in expected._complaint(b'{"points":1,"label":"too long"}')
    raising = open_expectations("tests.spark.test_quality:below_four", tasks.spell)
    assert "below_four raised TypeError: '<' not supported" in raising._complaint(b'"x"')


@pytest.mark.parametrize("expect", [5, {"a": 5}, "tests.spark.test_quality:nobody", "tests.spark:__name__"])
def test_an_expectation_must_be_a_function(tasks: ModuleType, expect: Any) -> None:
    with pytest.raises(InvalidOption, match=r"must be a function|cannot be found|not a function"):
        open_expectations(expect, tasks.score)


@pytest.mark.parametrize(
    ("failed", "completed", "total", "stopped"),
    [
        (1, 0, 1000, ""),
        (2, 0, 1000, ""),
        (3, 0, 1000, "max_failure_rate"),
        (10, 90, 1000, ""),
        (11, 89, 1000, "max_failure_rate"),
        (1, 3, 4, "max_failure_rate"),
    ],
)
def test_a_rate_of_failures_is_judged_from_twenty_rows_on_or_by_all_there_are(
    failed: int, completed: int, total: int, stopped: str
) -> None:
    tally = Tally(total, completed=completed, failed=failed, cancelled=5)
    assert Limits(max_failure_rate=0.1).stop_for(tally) == stopped


def test_a_run_stops_at_a_rate_of_failures_and_leaves_the_failed_rows_in_quarantine(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(TooManyFailures, match=r"1 of 4 rows failed, more than max_failure_rate=0.1"):
        do(
            users(spark, 4),
            tasks.score,
            tmp_path / "scores",
            max_failure_rate=0.1,
            quarantine=tmp_path / "bad",
        )
    (held,) = spark.read.parquet(str(tmp_path / "bad")).collect()
    assert (held["user_id"], held["name"], held["penstock_state"]) == (3, "user3", "failed")


def test_a_quarantine_does_not_replace_what_is_not_one(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    df = numbers(spark, 1)
    df.write.parquet(str(tmp_path / "mine"))
    cases: list[tuple[type[Exception], dict[str, Any], str]] = [
        (InvalidInput, {"quarantine": tmp_path / "mine"}, "mine is not a quarantine"),
        (InvalidOption, {"quarantine": tmp_path / "out"}, "quarantine and output must differ"),
        (InvalidOption, {"max_failure_rate": 5}, "from 0 to below 1, got 5"),
    ]
    for error, options, said in cases:
        with pytest.raises(error, match=said):
            do(df, tasks.double, tmp_path / "out", **options)
    assert calls(tmp_path) == []


def test_a_quarantine_of_a_delta_output_is_a_delta_table(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"format": "delta", "quarantine": tmp_path / "bad", "expect": below_four}
    assert do(numbers(spark, 1, 2), tasks.double, tmp_path / "doubles", **given).failed == 1
    assert DeltaTable(tmp_path / "bad").to_pyarrow_table().column("k").to_pylist() == ["k2"]
    del given["expect"]
    assert (
        do(numbers(spark, 1, 2), tasks.double, tmp_path / "doubles", retry_failed=True, **given).failed == 0
    )
    assert DeltaTable(tmp_path / "bad").to_pyarrow_table().num_rows == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_a_run_on_new_rows_keeps_the_others_in_quarantine(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path, format: str
) -> None:
    output, bad = tmp_path / "doubles", tmp_path / "bad"
    given: dict[str, Any] = {"format": format, "quarantine": bad, "since": "n", "expect": below_four}

    def held() -> list[str]:
        table = DeltaTable(bad).to_pyarrow_table() if format == "delta" else pq.read_table(bad)
        return sorted(table.column("k").to_pylist())

    do(numbers(spark, 1, 2, 3), tasks.double, output, **given)
    assert held() == ["k2", "k3"]
    done = do(numbers(spark, 3, 4), tasks.double, output, **given)
    assert (done.plan.new, held()) == (1, ["k2", "k3", "k4"])
    del given["expect"]
    mended = spark.createDataFrame([("k2", 5)], "k string, n long")
    do(mended, tasks.double, output, **given)
    assert held() == ["k3", "k4"]
    assert done.retry_failed().failed == 2
    assert held() == ["k3", "k4"]
    done = do(numbers(spark, 4), tasks.double, output, **{**given, "since": None})
    assert (done.retry_failed().completed, held()) == (1, [])


@pytest.mark.timeout(300)
def test_a_quarantine_has_the_rows_of_all_batches_of_a_stream(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    for n in (1, 2, 3):
        numbers(spark, n).coalesce(1).write.mode("append").parquet(str(tmp_path / "in"))
    reader = spark.readStream.schema("k string, n long").option("maxFilesPerTrigger", 1)
    given: dict[str, Any] = {"quarantine": tmp_path / "bad", "expect": below_four}
    done = do(reader.parquet(str(tmp_path / "in")), tasks.double, tmp_path / "doubles", **given)
    assert (done.completed, done.failed) == (1, 2)
    assert sorted(pq.read_table(tmp_path / "bad").column("k").to_pylist()) == ["k2", "k3"]


def test_the_estimate_counts_what_failed_rows_cost_and_any_name_of_a_cost(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "scores"
    first = do(users(spark, 4).where("user_id >= 2"), tasks.score, output)
    assert (first.completed, first.failed) == (1, 1)
    planned = do(users(spark, 12), tasks.score, output, dry_run=True)
    assert planned.plan.estimated_cost == pytest.approx(10 * 0.015)
    assert do(users(spark, 12), tasks.score, output, dry_run=True, cost_name="eur").plan.estimated_cost == 0
