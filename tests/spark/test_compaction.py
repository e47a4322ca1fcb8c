"""Outputs keep a bounded number of files. A kill while they are put together loses no row and doubles none."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

import penstock.spark as ps
from penstock.spark import compaction
from penstock.spark.compaction import FOLDS, finish_folds, fold, piles
from penstock.spark.deltaoutput import DeltaOutput
from penstock.spark.processing import settled
from penstock.spark.publishing import append_files, commit_name, compact_files
from tests.slow.drivers import Driver, let_leases_end
from tests.slow.local_processes import ROOT
from tests.spark import table_tasks


@pytest.fixture
def tasks(file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("PENSTOCK_TABLES_URL", file_url)
    monkeypatch.setenv("PENSTOCK_TABLES_CALLS", str(tmp_path / "calls"))
    return importlib.reload(table_tasks)


def numbers(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(count).selectExpr("concat('k', id) AS k", "id AS n")


def do(df: DataFrame, task: Any, output: object, **options: Any) -> ps.Processed:
    given = {"key": "k", "output": output, "progress": "none", "workers": 1, **options}
    return ps.process(df, task, **given)


def shown(output: Path) -> list[Path]:
    return [path for path in output.iterdir() if not path.name.startswith(("_", "."))]


def values(spark: SparkSession, output: Path) -> list[tuple[str, int]]:
    rows = spark.read.parquet(str(output)).select("k", "penstock_value").collect()
    return sorted((row[0], row[1]) for row in rows)


def doubles(count: int) -> list[tuple[str, int]]:
    return sorted((f"k{n}", 2 * n) for n in range(count))


def test_only_many_small_files_are_put_together() -> None:
    assert piles({f"f{n}": 10 for n in range(16)}) == []
    assert piles({f"f{n:02}": 10 for n in range(17)}) == [[f"f{n:02}" for n in range(17)]]
    assert piles({f"f{n}": 100 << 20 for n in range(99)}) == []
    large = piles({f"f{n:02}": 7 << 20 for n in range(20)})
    assert [len(pile) for pile in large] == [9, 9, 2]


@pytest.mark.parametrize(("format", "most", "increments"), [("parquet", 6, 9), ("delta", 4, 7)])
def test_many_small_increments_leave_few_files_and_the_index_holds(
    spark: SparkSession,
    tasks: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format: str,
    most: int,
    increments: int,
) -> None:
    monkeypatch.setattr(compaction, "_MANY", most)
    output = tmp_path / "doubles"
    for count in range(1, increments + 1):
        done = do(numbers(spark, count), tasks.double, output, format=format)
        assert (done.plan.done, done.completed) == (count - 1, 1)
        files = shown(output) if format == "parquet" else DeltaTable(str(output)).file_uris()
        assert len(files) <= most, count
    read = spark.read.parquet if format == "parquet" else None
    rows = read(str(output)).toArrow() if read else DeltaTable(str(output)).to_pyarrow_table()
    found = zip(rows["k"].to_pylist(), rows["penstock_value"].to_pylist(), strict=True)
    assert sorted(found) == doubles(increments)
    names = [path.name for path in shown(output)] if format == "parquet" else _delta_files(output)
    index = settled.SettledIndex(spark, str(output), lambda: names)
    assert (index.contents.keys, index.newer) == (increments, [])
    assert do(numbers(spark, increments), tasks.double, output, format=format).plan.done == increments
    assert len((tmp_path / "calls").read_text().split()) == increments


def _delta_files(output: Path) -> list[str]:
    return [Path(uri).name for uri in DeltaTable(str(output)).file_uris()]


def test_a_fold_that_is_killed_at_any_change_leaves_every_row_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.spark.folding_child", str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert said.returncode == 0, said.stderr
    assert int(said.stdout) > 40


def test_a_run_that_was_away_in_the_middle_of_a_fold_changes_nothing(tmp_path: Path) -> None:
    names = [f"{commit_name(number)}-00000.parquet" for number in (1, 2)]
    for number, name in enumerate(names):
        pq.write_table(pa.table({"n": [number]}), tmp_path / name)
    made = tmp_path / "_made"
    pq.write_table(pa.table({"n": [0, 1]}), made)
    with pytest.raises(FileNotFoundError):
        # Another run takes over after the check.
        fold(tmp_path, names, made=made, name="new.parquet", check=lambda: finish_folds(tmp_path))
    assert sorted(path.name for path in shown(tmp_path)) == names
    assert not (tmp_path / FOLDS).exists()


def test_a_commit_that_was_put_together_with_others_cannot_be_made_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "_MANY", 2)
    row, output = spark.range(1).coalesce(1), str(tmp_path)

    def take_over() -> None:
        """What another run does while this one is away between its check and its commit."""
        for number in (1, 2, 3):
            append_files(row, output, format="parquet", name=commit_name(number))
        moved = compact_files(spark, output, check=lambda: None)
        assert moved is not None
        assert len(moved.gone) == 3

    with pytest.raises(FileNotFoundError):
        append_files(row, output, format="parquet", name=commit_name(1), check=take_over)
    assert spark.read.parquet(output).count() == 3
    assert len(shown(tmp_path)) == 1


def test_files_with_more_columns_are_put_together_with_older_ones(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "_MANY", 1)
    older = spark.sql("SELECT 1 AS n, named_struct('a', 1) AS value")
    newer = spark.sql("SELECT 2 AS n, named_struct('a', 2, 'b', timestamp'2026-01-01 00:00:00') AS value")
    append_files(older, str(tmp_path), format="parquet", name=commit_name(1))
    append_files(newer, str(tmp_path), format="parquet", name=commit_name(2))
    expected = spark.read.option("mergeSchema", "true").parquet(str(tmp_path)).toArrow().sort_by("n")
    assert compact_files(spark, str(tmp_path), check=lambda: None) is not None
    assert spark.read.parquet(str(tmp_path)).toArrow().sort_by("n") == expected


def test_a_commit_of_a_delta_table_that_was_put_together_is_refused_to_others(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "_MANY", 2)
    rows = spark.sql("SELECT current_timestamp() AS at, map('a', 1L) AS m")
    output = DeltaOutput(spark, str(tmp_path / "table"), ranged="at", stats=())
    for number in (1, 2, 3):
        output.append(rows, number=number)
    before = pl.read_delta(str(tmp_path / "table")).sort("at")
    moved = output.compact()
    assert moved is not None
    assert (len(moved.gone), len(moved.made)) == (3, 1)
    assert output.files() == moved.made
    assert output.load().number == 4
    assert pl.read_delta(str(tmp_path / "table")).sort("at").equals(before)
    assert output.compact() is None


# The first renames turn the names into links, the fifth turns all links around.
@pytest.mark.slow
@pytest.mark.parametrize("change", [3, 6])
def test_a_driver_that_is_killed_while_it_puts_files_together_loses_and_doubles_nothing(
    spark: SparkSession, tasks: ModuleType, file_url: str, tmp_path: Path, change: int
) -> None:
    output = tmp_path / "doubles"
    driver = Driver("tests.spark.compacting_run", str(output), str(change), log=tmp_path / "log")
    try:
        driver.go()
        with pytest.raises(AssertionError):
            driver.wait_until(lambda: False)
    finally:
        driver.end()
    links = [path for path in shown(output) if path.is_symlink()]
    assert links
    assert os.readlink(next((output / FOLDS).iterdir()) / "now") == ("before" if change == 3 else "after")
    assert values(spark, output) == doubles(3)
    let_leases_end(file_url, output, "tables")
    done = do(numbers(spark, 3), tasks.double, output)
    assert (done.plan.done, done.plan.new) == (3, 0)
    assert values(spark, output) == doubles(3)
    assert not (output / FOLDS).exists()
    assert not any(path.is_symlink() for path in output.iterdir())
    assert do(numbers(spark, 5), tasks.double, output).completed == 2
    assert values(spark, output) == doubles(5)
