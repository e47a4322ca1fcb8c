"""``process`` on tables that grow: by a column, by the version of a Delta table, and as streams."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame, SparkSession

import penstock.spark as ps
from penstock.errors import InvalidInput, TooManyFailures
from penstock.spark.processing import running
from penstock.spark.processing.enqueue import Batch, cancel_rows, enqueue_rows
from penstock.spark.processing.inputs import delta_dataframe
from penstock.spark.store import Store
from tests.spark.test_process import calls, do, load_tasks, rows_of


@pytest.fixture
def tasks(file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_tasks(file_url, tmp_path, monkeypatch)


def events(spark: SparkSession, *ns: int) -> DataFrame:
    rows = [(f"k{n}", n, datetime(2026, 1, 1, 0, n, tzinfo=UTC)) for n in ns]
    return spark.createDataFrame(rows, "k string, n long, at timestamp")


@pytest.mark.timeout(300)
def test_a_run_looks_only_at_rows_from_the_highest_value_on_that_was_seen(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output, zone = tmp_path / "doubles", "spark.sql.session.timeZone"
    before = str(spark.conf.get(zone))
    part = do(events(spark, 1, 2, 3), tasks.double, output, since="at", limit=1)
    assert part.completed == 1
    # What the limit had left out is not lost.
    assert do(events(spark, 1, 2, 3), tasks.double, output, since="at").completed == 2
    try:
        spark.conf.set(zone, "America/New_York")
        more = do(events(spark, 0, 1, 2, 3, 4), tasks.double, output, since="at")
    finally:
        spark.conf.set(zone, before)
    # Row 0 has come too late, row 3 has the highest value itself.
    assert (more.plan.new, more.plan.done, more.completed) == (1, 1, 1)
    assert do(events(spark, 0, 4), tasks.double, output, since="at", dry_run=True).plan.todo == 0
    late = do(events(spark, 0, 4), tasks.double, output, since="at", retry_failed=True)
    assert late.completed == 1
    assert sorted(calls(tmp_path), key=int) == ["0", "1", "2", "3", "4"]


def test_rows_of_a_stopped_run_and_rows_without_a_value_are_found_again(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "scores"
    df = spark.sql("SELECT id AS user_id, 'x' AS name, if(id < 3, NULL, id) AS change FROM range(6)")
    with pytest.raises(TooManyFailures):
        do(df.where("user_id = 3"), tasks.score, output, since="change", max_failures=0)
    assert do(df, tasks.score, output, since="change").plan.new == 5
    assert do(df, tasks.score, output, since="change").plan.done == 4


def test_values_that_are_not_finite_hide_no_later_row(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    df = spark.sql(
        "SELECT id AS n, if(id < 2, double(array('NaN', 'Infinity')[int(id)]), id) AS change FROM range(4)"
    )
    assert do(df.where("n < 3"), tasks.double, tmp_path / "doubles", since="change").completed == 3
    more = do(df, tasks.double, tmp_path / "doubles", since="change")
    assert (more.plan.new, more.plan.done) == (1, 3)


def test_a_row_whose_job_was_cancelled_is_found_again(
    spark: SparkSession, tasks: ModuleType, file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put_and_cancel(rows: DataFrame, batch: Batch) -> int:
        with Store(file_url) as store:
            store.run(store.storage.pause("tables"))
            count = enqueue_rows(rows, batch)
            cancel_rows(rows.where("key_json LIKE '%k1%'"), batch)
            store.run(store.storage.resume("tables"))
        return count

    with monkeypatch.context() as patch:
        patch.setattr(running, "enqueue_rows", put_and_cancel)
        lost = do(events(spark, 1, 2), tasks.double, tmp_path / "doubles", since="at")
    assert (lost.completed, lost.stopped) == (1, "")
    more = do(events(spark, 1, 2), tasks.double, tmp_path / "doubles", since="at")
    assert (more.plan.new, more.plan.done, more.completed) == (1, 1, 1)


def grow(path: Path, *ns: int) -> None:
    table = pa.table({"k": [f"k{n}" for n in ns], "n": list(ns), "day of": [f"d {n % 2}" for n in ns]})
    write_deltalake(path, table, mode="append", partition_by=["day of"])


@pytest.mark.timeout(300)
def test_a_run_reads_only_the_files_that_a_delta_table_gained(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    source, output = tmp_path / "numbers", tmp_path / "doubles"
    grow(source, 1, 2)
    given: dict[str, Any] = {"key": "k", "output": output, "workers": 1, "progress": "none", "spark": spark}
    first = ps.process(DeltaTable(source), tasks.double, since="version", **given)
    assert (first.completed, first.joined.where("`day of` = 'd 1'").count()) == (2, 1)
    grow(source, 3)
    more = ps.process(DeltaTable(source), tasks.double, since="version", **given)
    assert (more.plan.new, more.plan.done, more.completed) == (1, 0, 1)
    assert ps.process(DeltaTable(source), tasks.double, since="version", **given).plan.done == 0
    by_number = ps.process(DeltaTable(source), tasks.double, since=0, dry_run=True, **given)
    assert (by_number.plan.new, by_number.plan.done) == (0, 1)
    whole = ps.process(DeltaTable(source), tasks.double, dry_run=True, **given)
    assert whole.plan.done == 3
    assert {row["penstock_value"] for row in rows_of(spark, output).values()} == {2, 4, 6}
    DeltaTable(source).optimize.compact()
    assert ps.process(DeltaTable(source), tasks.double, since="version", **given).plan.todo == 0
    with pytest.raises(InvalidInput, match="since=9 is later than version"):
        ps.process(DeltaTable(source), tasks.double, since=9, **given)
    assert sorted(calls(tmp_path)) == ["1", "2", "3"]


def test_files_that_are_older_than_a_column_have_nulls_there(spark: SparkSession, tmp_path: Path) -> None:
    grow(tmp_path / "t", 1)
    more = pa.table({"k": ["k2"], "n": [2], "day of": ["d 0"], "at": [datetime(2026, 1, 1, tzinfo=UTC)]})
    write_deltalake(tmp_path / "t", more, mode="append", schema_mode="merge", partition_by=["day of"])
    rows = delta_dataframe(DeltaTable(tmp_path / "t"), spark).orderBy("n").collect()
    assert [(row["n"], row["at"] is None) for row in rows] == [(1, True), (2, False)]


@pytest.mark.timeout(300)
def test_a_stream_is_done_batch_by_batch_into_one_output(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    source, output = tmp_path / "in", tmp_path / "doubles"
    for n in (1, 2):
        events(spark, n).coalesce(1).write.mode("append").parquet(str(source))

    def stream() -> DataFrame:
        reader = spark.readStream.schema("k string, n long, at timestamp")
        return reader.option("maxFilesPerTrigger", 1).parquet(str(source))

    first = do(stream(), tasks.double, output)
    assert (first.plan.new, first.completed) == (2, 2)
    assert sorted(row["penstock_value"] for row in first.joined.collect()) == [2, 4]
    with pytest.raises(InvalidInput, match="a stream cannot be read again"):
        first.retry_failed()
    assert do(stream(), tasks.double, output).plan.done == 0
    events(spark, 2, 3).coalesce(1).write.mode("append").parquet(str(source))
    more = do(stream(), tasks.double, output)
    assert (more.plan.new, more.plan.done, more.completed) == (1, 1, 1)
    assert sorted(calls(tmp_path)) == ["1", "2", "3"]


@pytest.mark.timeout(300)
def test_a_stream_that_goes_on_is_done_until_its_query_is_stopped(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    source, output = tmp_path / "in", tmp_path / "doubles"
    events(spark, 1).coalesce(1).write.parquet(str(source))
    stream = spark.readStream.schema("k string, n long, at timestamp").parquet(str(source))

    def add_and_stop() -> None:
        until(lambda: calls(tmp_path) == ["1"])
        events(spark, 2).coalesce(1).write.mode("append").parquet(str(source))
        until(lambda: len(list(output.glob("*.parquet"))) == 2)
        for query in spark.streams.active:
            query.stop()

    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(add_and_stop)
        done = do(stream, tasks.double, output, every="100ms", checkpoint=tmp_path / "offsets")
        adding.result()
    assert (done.completed, done.stopped) == (2, "")
    assert (tmp_path / "offsets" / "commits").exists()
    assert sorted(calls(tmp_path)) == ["1", "2"]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_batch_of_a_stream_that_failed_comes_again(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    source, output = tmp_path / "in", tmp_path / "scores"
    users = spark.sql("SELECT id AS user_id, 'x' AS name FROM range(5)")
    users.write.parquet(str(source))
    stream = spark.readStream.schema(users.schema).parquet(str(source))
    with pytest.raises(TooManyFailures):
        do(stream, tasks.score, output, max_failures=0)
    again = do(spark.readStream.schema(users.schema).parquet(str(source)), tasks.score, output)
    assert again.plan.done + again.plan.failed + again.completed == 5
    assert not spark.streams.active
