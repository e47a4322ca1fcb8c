"""What ``process`` returns: counts, tables, a summary, and a second try for the rows that failed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.core.outcome import Complete
from penstock.spark.processing import running
from penstock.spark.processing.enqueue import Batch, enqueue_rows
from penstock.spark.store import Store
from penstock.storage.values import Settlement, Take
from tests.spark.test_process import calls, do, load_tasks, numbers, rows_of, users


@pytest.fixture
def tasks(file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_tasks(file_url, tmp_path, monkeypatch)


@pytest.mark.timeout(300)
def test_the_tables_of_a_result_are_the_input_with_what_became_of_its_rows(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    bad = spark.sql("SELECT 20L AS user_id, repeat('x', 2000000) AS name, 0L AS odd")
    done = do(users(spark, 5).unionByName(bad), tasks.score, tmp_path / "scores", group="odd")
    assert (done.completed, done.failed, done.rejected) == (4, 1, 1)
    joined = {row["user_id"]: row for row in done.joined.collect()}
    assert joined.keys() == {0, 1, 2, 3, 4, 20}
    assert (joined[4]["name"], joined[4]["penstock_value"]["points"]) == ("user4", 6.0)
    assert done.completed_rows.count() == 4
    (failed,), (rejected,) = done.failed_rows.collect(), done.rejected_rows.collect()
    assert (failed["name"], failed["penstock_error_type"]) == ("user3", "RuntimeError")
    assert (rejected["user_id"], rejected["penstock_error_type"]) == (20, "BadRow")
    assert done.results.count() == 6

    costs = [(row["odd"], row["completed"], row["failed"], row["cost"]) for row in done.cost_by().collect()]
    assert costs == [(0, 3, 0, pytest.approx(0.03)), (1, 1, 1, pytest.approx(0.03))]
    (total,) = done.cost_by("user_id").where("user_id = 3").collect()
    assert (total["day"], total["cost"]) == (failed["penstock_finished_at"].date(), pytest.approx(0.02))

    again = do(done.joined, tasks.score, tmp_path / "scores", dry_run=True, payload=["user_id", "name"])
    assert again.plan.done == 4
    assert again.joined.columns == done.joined.columns
    assert again.cost_by().count() == 0
    (total,) = again.cost_by(all_runs=True).agg({"cost": "sum"}).collect()
    assert total[0] == pytest.approx(0.06)


def test_tables_of_a_dry_run_on_a_new_output_have_no_results(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    planned = do(numbers(spark, 1), tasks.double, tmp_path / "doubles", dry_run=True)
    (row,) = planned.joined.collect()
    assert (row["n"], row["penstock_state"], row["penstock_value"]) == (1, None, None)
    assert planned.results.count() == 0
    assert "1 new; 1 to do" in str(planned)


def test_a_summary_is_plain_text_html_and_json(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    done = do(spark.range(2).selectExpr("id AS n"), tasks.spend, tmp_path / "a<b", max_cost=5)
    assert f"{tasks.spend.name}: 2 completed, 0 failed, 2 usd, in " in str(done)
    assert str(done) == repr(done)
    assert "a&lt;b" in done._repr_html_()
    summary = msgspec.json.decode(msgspec.json.encode(done.summary()))
    assert (summary["completed"], summary["plan"]["new"], summary["cost"]) == (2, 2, 2.0)


@pytest.mark.timeout(300)
def test_only_failed_rows_are_run_again(spark: SparkSession, tasks: ModuleType, tmp_path: Path) -> None:
    first = do(users(spark, 8).where("user_id > 2"), tasks.score, tmp_path / "scores", limit=5)
    assert first.plan.todo == first.plan.new == 5
    before = calls(tmp_path)
    again = first.retry_failed()
    assert (again.plan.new, again.plan.failed, again.plan.todo, again.failed) == (0, 1, 1, 1)
    assert calls(tmp_path)[len(before) :] == ["3", "3"]
    assert again.retry_failed().retry_failed().failed == 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("format", ["parquet", "json"])
def test_rows_that_were_mended_are_completed_in_the_tables_of_their_run(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path, format: str
) -> None:
    output, df = tmp_path / "doubles", numbers(spark, 1, 2, 3)
    first = do(df, tasks.double, output, format=format, expect=lambda value: value < 4)
    assert first.failed == 2
    again = do(first.failed_rows.where("n = 2"), tasks.double, output, format=format, retry_failed=True)
    # The input reads the output as it was, the result as it is.
    assert [(row["k"], row["penstock_state"]) for row in again.joined.collect()] == [("k2", "completed")]
    assert first.failed_rows.count() == 1
    retried = do(df, tasks.double, output, format=format).retry_failed()
    assert [row["k"] for row in retried.completed_rows.collect()] == ["k3"]
    assert retried.failed_rows.count() == 0


def test_a_failed_row_that_is_run_again_by_a_killed_run_is_waited_for(
    spark: SparkSession, tasks: ModuleType, file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, df = tmp_path / "scores", users(spark, 4).where("user_id = 3")
    first = do(df, tasks.score, output)
    assert (first.failed, len(calls(tmp_path))) == (1, 2)
    leases: list[Any] = []

    def put_claim_and_end(rows: DataFrame, batch: Batch) -> int:
        enqueue_rows(rows, batch)
        with Store(file_url) as store:
            leases.extend(store.run(store.storage.claim(batch.queue, Take("worker", 1, 600_000))).leases)
        raise RuntimeError("it has ended")

    def put_and_complete(rows: DataFrame, batch: Batch) -> int:
        count = enqueue_rows(rows, batch)
        ended = Settlement(leases[0].id, leases[0].token, Complete(b'{"points":1,"label":"mine"}'))
        with Store(file_url) as store:
            store.run(store.storage.settle(batch.queue, [ended]))
        return count

    monkeypatch.setattr(running, "enqueue_rows", put_claim_and_end)
    with pytest.raises(RuntimeError, match="it has ended"):
        do(df, tasks.score, output, workers=0, retry_failed=True)
    monkeypatch.setattr(running, "enqueue_rows", put_and_complete)
    assert first.retry_failed().completed == 1
    with Store(file_url) as store:
        assert store.run(store.storage.counts("tables")).open == 0
    assert len(calls(tmp_path)) == 2
    assert rows_of(spark, output)[3]["penstock_value"]["label"] == "mine"
