"""``process``: a table in, a table out, paid for once."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import penstock.spark as ps
from tests.spark import table_tasks


@pytest.fixture
def tasks(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("PENSTOCK_TABLES_URL", url)
    monkeypatch.setenv("PENSTOCK_TABLES_CALLS", str(tmp_path / "calls"))
    return importlib.reload(table_tasks)


def users(spark: SparkSession, count: int = 10) -> DataFrame:
    return spark.range(count).selectExpr("id AS user_id", "concat('user', id) AS name", "id % 2 AS odd")


def calls(tmp_path: Path) -> list[str]:
    log = tmp_path / "calls"
    return log.read_text().split() if log.exists() else []


def do(df: DataFrame, tasks: ModuleType, tmp_path: Path, **options: Any) -> ps.Processed:
    given = {"key": "user_id", "output": tmp_path / "scores", "workers": 1, "progress": "none", **options}
    return ps.process(df, tasks.score, **given)


def test_every_row_has_a_result_or_an_error_and_a_second_run_pays_nothing(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    first = do(users(spark), tasks, tmp_path)
    assert (first.plan.new, first.completed, first.failed) == (10, 9, 1)
    assert first.cost == pytest.approx(0.12)
    rows = {row["user_id"]: row for row in ps.latest(spark.read.parquet(str(tmp_path / "scores"))).collect()}
    assert rows[4]["value"].asDict() == {"points": 6.0, "label": "USER4"}
    assert (rows[3]["state"], rows[3]["error_type"], rows[3]["error"]) == (
        "failed",
        "RuntimeError",
        "no score for user3",
    )
    assert (rows[5]["state"], rows[5]["runs"]) == ("completed", 2)
    paid = len(calls(tmp_path))
    assert paid == 12

    again = do(users(spark, 12), tasks, tmp_path)
    assert (again.plan.new, again.plan.done, again.plan.failed) == (2, 9, 1)
    assert len(calls(tmp_path)) == paid + 2
