"""Outputs of ``process`` and ``archive`` as Delta tables: without a jar, on a disk and in an object store."""

from __future__ import annotations

import importlib
from collections import Counter
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import duckdb
import duckdb_extension_delta  # type: ignore[import-untyped]
import polars as pl
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

import penstock.spark as ps
from penstock.errors import InvalidInput, InvalidOption
from penstock.spark.deltaoutput import DeltaOutput
from penstock.spark.processing.quarantine import Quarantine
from penstock.spark.publishing import NameTaken
from tests.slow.drivers import Driver, let_leases_end
from tests.slow.table_run import QUEUE
from tests.spark import table_tasks
from tests.spark.objectstore import object_store
from tests.spark.stores import ask, fill

ROWS, KILLS = 1500, 3


@pytest.fixture
def tasks(file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("PENSTOCK_TABLES_URL", file_url)
    monkeypatch.setenv("PENSTOCK_TABLES_CALLS", str(tmp_path / "calls"))
    return importlib.reload(table_tasks)


def numbers(spark: SparkSession, *values: int) -> DataFrame:
    return spark.createDataFrame([(f"k{value}", value) for value in values], "k string, n long")


def do(df: DataFrame, task: Any, output: object, **options: Any) -> ps.Processed:
    given = {"key": df.columns[0], "output": output, "workers": 1, "progress": "none", **options}
    return ps.process(df, task, format="delta", **given)


def calls(folder: Path) -> list[str]:
    log = folder / "calls"
    return log.read_text().split() if log.exists() else []


def values_by_duckdb(path: Path) -> dict[str, int]:
    with duckdb.connect() as connection:
        (extension,) = Path(duckdb_extension_delta.__file__).parent.rglob("delta.duckdb_extension")
        connection.execute(f"LOAD '{extension}'")
        rows = connection.execute(f"SELECT k, penstock_value FROM delta_scan('{path}')").fetchall()
    return dict(rows)


def test_an_output_in_delta_is_continued_and_read_by_duckdb_and_polars(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "doubles"
    assert do(numbers(spark, 1, 2), tasks.double, output).completed == 2
    again = do(numbers(spark, 1, 2, 3), tasks.double, output)
    assert (again.plan.done, again.completed) == (2, 1)
    assert do(numbers(spark, 1, 2, 3), tasks.double, output).plan.done == 3
    assert sorted(calls(tmp_path)) == ["1", "2", "3"]
    expected = {"k1": 2, "k2": 4, "k3": 6}
    assert values_by_duckdb(output) == expected
    assert dict(pl.read_delta(str(output)).select("k", "penstock_value").rows()) == expected
    assert {row["k"]: row["penstock_value"] for row in again.results.collect()} == expected
    with pytest.raises(InvalidInput, match="is a Delta table"):
        ps.process(numbers(spark, 1), tasks.double, key="k", output=output)
    with pytest.raises(InvalidInput, match="penstock_value as bigint"):
        do(numbers(spark, 1), tasks.spell, output)


def test_a_folder_with_other_files_is_not_made_a_delta_table(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    numbers(spark, 1).write.parquet(str(tmp_path / "other"))
    with pytest.raises(InvalidInput, match="is not a Delta table, and not empty"):
        do(numbers(spark, 1), tasks.double, tmp_path / "other")
    named = numbers(spark, 1).withColumnRenamed("k", "the key")
    with pytest.raises(InvalidInput, match="cannot have the column 'the key'"):
        do(named, tasks.double, tmp_path / "odd")


def test_an_output_without_rows_is_a_delta_table_that_can_be_read(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    do(numbers(spark, 1).limit(0), tasks.double, tmp_path / "none")
    assert pl.read_delta(str(tmp_path / "none")).height == 0
    assert do(numbers(spark, 1), tasks.double, tmp_path / "none").completed == 1


def test_a_number_is_committed_once_and_a_commit_of_somebody_else_is_noticed(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = spark.sql("SELECT current_timestamp() AS at, 1L AS n")
    output = DeltaOutput(spark, str(tmp_path / "table"), ranged="at", stats=())
    output.append(rows, number=1)
    with pytest.raises(NameTaken):
        output.append(rows, number=1)
    with pytest.raises(NameTaken):
        output.append(rows, number=3)
    DeltaTable(str(tmp_path / "table")).optimize.compact()
    output.append(rows, number=2)
    assert output.load().number == 2
    assert output.read(rows.schema).count() == 2


def test_a_replacement_is_one_numbered_commit_with_columns_of_its_own(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table"
    output = DeltaOutput(spark, str(path), ranged="at", stats=())
    output.replace(spark.sql("SELECT current_timestamp() AS at, 1L AS n"))
    output.replace(
        spark.sql("SELECT current_timestamp() AS at, TIMESTAMP_NTZ'2026-01-01' AS `a day`, 'x' AS n")
    )
    table = DeltaTable(str(path))
    assert output.load().number == 2
    assert table.to_pyarrow_table().select(["a day", "n"]).to_pylist() == [
        {"a day": datetime(2026, 1, 1), "n": "x"}
    ]
    late = output.load()
    output.replace(spark.sql("SELECT current_timestamp() AS at WHERE false"))
    assert (output.load().number, DeltaTable(str(path)).to_pyarrow_table().num_rows) == (3, 0)
    monkeypatch.setattr(output, "load", lambda: late)
    with pytest.raises(NameTaken):
        output.replace(spark.sql("SELECT current_timestamp() AS at"))


def test_a_quarantine_in_a_store_that_ignores_conditional_puts_is_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with object_store(is_careless=True) as options:
        for name, value in options.items():
            monkeypatch.setenv(name.upper(), value)
        with pytest.raises(InvalidOption, match="does not support conditional puts"):
            Quarantine(spark, "s3://bucket/bad", "delta").replace(
                spark.sql("SELECT 1 AS n, now() AS penstock_finished_at")
            )


def test_an_output_in_an_object_store_needs_no_jar(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with object_store() as options:
        for name, value in options.items():
            monkeypatch.setenv(name.upper(), value)
        output = "s3://bucket/doubles"
        assert do(numbers(spark, 1, 2), tasks.double, output).completed == 2
        again = do(numbers(spark, 1, 2, 3), tasks.double, output, since="n")
        assert (again.plan.done, again.completed) == (2, 1)
        assert do(numbers(spark, 1, 2, 3), tasks.double, output, since="n").plan.done == 1
        with pytest.raises(InvalidOption, match=r"an object store.*Set checkpoint="):
            do(spark.readStream.format("rate").load(), tasks.double, output, key="value")
        found = DeltaTable(output, storage_options=options).to_pyarrow_table()
        assert sorted(found["k"].to_pylist()) == ["k1", "k2", "k3"]
    assert sorted(calls(tmp_path)) == ["1", "2", "3"]


@pytest.mark.slow
@pytest.mark.timeout(300)  # it starts four drivers
def test_a_killed_run_doubles_no_row_of_a_delta_output_and_pays_for_none_again(tmp_path: Path) -> None:
    url, output = f"sqlite:///{tmp_path}/killed.db", tmp_path / "output"
    drivers: list[Driver] = []

    def start() -> Driver:
        settings = {"PENSTOCK_URL": url, "CALLS": str(tmp_path / "calls")}
        log = tmp_path / f"driver-{len(drivers)}.log"
        drivers.append(Driver("tests.slow.table_run", str(ROWS), str(output), "delta", log=log, **settings))
        return drivers[-1]

    try:
        standby = start()
        for kill in range(KILLS):
            driver, standby = standby, start()
            enough = (kill + 1) * ROWS // (KILLS + 2)
            driver.go()
            driver.wait_until(lambda enough=enough: len(calls(tmp_path)) > enough)  # type: ignore[misc]
            (driver.kill if kill % 2 == 0 else driver.kill_all)()
            let_leases_end(url, output, QUEUE)
        standby.go()
        standby.finish()
    finally:
        for driver in drivers:
            driver.end()
    rows = DeltaTable(str(output)).to_pyarrow_table(columns=["n", "penstock_result"]).to_pylist()
    assert sorted((row["n"], row["penstock_result"]) for row in rows) == [
        (n, str(2 * n)) for n in range(ROWS)
    ]
    made = Counter(calls(tmp_path))
    # Rows that were under way when their worker was killed run again, and every hundredth fails once.
    assert made.total() <= ROWS + ROWS // 100 + KILLS * 2 * 20


def test_an_archive_in_delta_moves_each_job_once(
    spark: SparkSession, file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "archive"
    fill(file_url, "mail", completed=5, failed=2)
    append = DeltaOutput.append

    def fail(self: DeltaOutput, rows: DataFrame, *, number: int) -> None:
        """Free the jobs, and be killed before the commit."""
        with monkeypatch.context() as patch:
            patch.setattr("penstock.spark.delta.Table.commit", _killed)
            append(self, rows, number=number)

    monkeypatch.setattr(DeltaOutput, "append", fail)
    with pytest.raises(_Killed):
        ps.archive(spark, file_url, "mail", output, older_than=0, format="delta")
    assert ask(file_url, lambda storage: storage.counts("mail")).completed == 0
    monkeypatch.setattr(DeltaOutput, "append", append)
    fill(file_url, "mail", completed=3)
    done = ps.archive(spark, file_url, "mail", output, older_than=0, format="delta")
    assert (done.archived, done.recovered) == (10, 7)
    ids = pl.read_delta(str(output))["id"].to_list()
    assert Counter(ids) == Counter(["c0", "c1", "c2", *(f"c{n}" for n in range(5)), "f0", "f1"])


class _Killed(Exception):
    pass


def _killed(*_: object, **__: object) -> None:
    raise _Killed
