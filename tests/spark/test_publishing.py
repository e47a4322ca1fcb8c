"""What a driver that was killed has left in an output, or still does there, is no part of what others write."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import penstock.spark as ps
from penstock.spark.processing.ledger import Ledger
from penstock.spark.publishing import STAGING, NameTaken, append_files, append_table, fresh_path, fresh_table
from tests.spark.test_process import calls, do, numbers, tasks  # noqa: F401


def leave_behind(folder: Path, file: Path) -> None:
    """A finished task of a write whose driver was killed before the commit."""
    task = folder / "_temporary" / "0" / "task_202601010000001234_0000_m_000000"
    task.mkdir(parents=True)
    shutil.copy(file, task / "part-00000-left.c000.snappy.parquet")


def values(spark: SparkSession, path: Path) -> list[int]:
    return sorted(row["n"] for row in spark.read.parquet(str(path)).collect())


def test_a_write_takes_up_nothing_that_a_killed_one_has_left(spark: SparkSession, tmp_path: Path) -> None:
    one = spark.range(1).selectExpr("id AS n").coalesce(1)
    output = tmp_path / "output"
    append_files(one, str(output), format="parquet", name="first")
    (file,) = output.glob("*.parquet")
    leave_behind(output, file)
    append_files(one.selectExpr("n + 1 AS n"), str(output), format="parquet", name="second")
    assert values(spark, output) == [0, 1]
    assert sorted(path.name.split(".")[0] for path in output.glob("*.parquet")) == [
        "first-00000",
        "second-00000",
    ]
    assert list((output / STAGING).iterdir()) == []

    spark.sql(f"CREATE TABLE kept (n BIGINT) USING parquet LOCATION '{tmp_path}/kept'")
    try:
        append_table(one, "kept", format="parquet")
        leave_behind(tmp_path / "kept", file)
        append_table(one.selectExpr("n + 1 AS n"), "kept", format="parquet")
        assert sorted(row["n"] for row in spark.table("kept").collect()) == [0, 1]
    finally:
        spark.sql("DROP TABLE kept")


def test_a_name_can_be_had_once(spark: SparkSession, tmp_path: Path) -> None:
    one = spark.range(1).selectExpr("id AS n").coalesce(1)
    append_files(one, str(tmp_path), format="parquet", name="first")
    with pytest.raises(NameTaken, match="first-00000"):
        append_files(one.selectExpr("n + 1 AS n"), str(tmp_path), format="parquet", name="first")
    assert values(spark, tmp_path) == [0]


def test_two_runs_that_both_take_the_output_for_theirs_write_no_row_twice(
    spark: SparkSession,
    tasks: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = Ledger.append

    def append(self: Ledger, rows: Any, **how: Any) -> None:
        """One that was away makes the same commit a moment before."""
        monkeypatch.setattr(Ledger, "append", written)
        written(self, rows, **how)
        written(self, rows, **how)

    monkeypatch.setattr(Ledger, "append", append)
    assert do(numbers(spark, 1, 2, 3), tasks.double, tmp_path / "doubles").completed == 3
    rows = spark.read.parquet(str(tmp_path / "doubles")).collect()
    assert sorted((row["k"], row["penstock_value"]) for row in rows) == [("k1", 2), ("k2", 4), ("k3", 6)]
    assert len(calls(tmp_path)) == 3
    assert len(ps.latest(spark.read.parquet(str(tmp_path / "doubles"))).collect()) == 3


def test_what_the_session_has_cached_of_an_output_is_not_taken_for_it(
    spark: SparkSession,
    tasks: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    output = tmp_path / "doubles"
    do(numbers(spark, 1), tasks.double, output)
    cached = spark.read.option("mergeSchema", "true").parquet(str(output)).cache()
    assert cached.count() == 1
    try:
        assert do(numbers(spark, 1, 2), tasks.double, output).completed == 1
        assert cached.count() == 2
    finally:
        cached.unpersist()


def test_what_others_have_written_is_read_whatever_the_session_remembers(
    spark: SparkSession, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    assert fresh_path(spark, str(folder), spark.read.parquet) is None
    assert fresh_table(spark, "kept") is None
    spark.range(1).coalesce(1).write.parquet(str(folder))
    spark.sql(f"CREATE TABLE kept USING parquet LOCATION '{folder}'")
    cached = spark.read.parquet(str(folder)).cache()
    try:
        assert (cached.count(), spark.table("kept").count()) == (1, 1)
        (file,) = folder.glob("*.parquet")
        shutil.copy(file, folder / "others.parquet")
        by_path, by_name = fresh_path(spark, str(folder), spark.read.parquet), fresh_table(spark, "kept")
        assert by_path is not None
        assert by_path.count() == 2
        assert by_name is not None
        assert by_name.count() == 2
    finally:
        cached.unpersist()
        spark.sql("DROP TABLE kept")
