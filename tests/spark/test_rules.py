"""Rules of a task apply to the rows of a table: options that are computed from each row."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import penstock.spark as ps
from penstock.core.job import EMPTY_EXTRAS
from penstock.core.lifecycle import State
from penstock.spark.store import Store
from tests.spark import table_tasks


@pytest.fixture
def tasks(file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("PENSTOCK_TABLES_URL", file_url)
    monkeypatch.setenv("PENSTOCK_TABLES_CALLS", str(tmp_path / "calls"))
    return importlib.reload(table_tasks)


def rows(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame([(1, "berlin"), (2, "rome"), (3, "rome")], "n long, shop string")


def test_a_written_row_follows_the_rules_of_its_task(
    spark: SparkSession, tasks: ModuleType, file_url: str
) -> None:
    given: dict[str, Any] = {"url": file_url, "task": f"{tasks.__name__}:grouped", "keyColumns": "n"}
    rows(spark).write.format("penstock").mode("append").options(**given).save()
    with Store(file_url) as store:
        jobs = store.run(store.storage.list_jobs("tables", State.WAITING, limit=10)).jobs
    # The task is unique by shop.
    placed = sorted((job.extras or EMPTY_EXTRAS).group for job in jobs)
    assert placed == ["shop-berlin", "shop-rome"]
    assert {(job.extras or EMPTY_EXTRAS).cost for job in jobs} <= {1, 2, 3}
    with pytest.raises(PySparkException, match="declares unique or dedup"):
        rows(spark).write.format("penstock").mode("append").options(**given, release="onCommit").save()


def test_process_follows_the_rules_but_unique(spark: SparkSession, tasks: ModuleType, tmp_path: Path) -> None:
    done = ps.process(
        rows(spark), tasks.grouped, key="n", output=tmp_path / "out", workers=1, progress="none"
    )
    assert done.completed == 3
    results = ps.latest(spark.read.parquet(str(tmp_path / "out"))).collect()
    assert sorted(row["penstock_value"] for row in results) == ["shop-berlin 1", "shop-rome 2", "shop-rome 3"]
    columns = rows(spark).withColumnRenamed("shop", "place").selectExpr("*", "'mine' AS g", "n + 5 AS c")
    ps.process(
        columns, tasks.grouped, key="n", output=tmp_path / "other", workers=1, progress="none",
        payload=("n",), group="g", cost="c",
    )  # fmt: skip
    results = ps.latest(spark.read.parquet(str(tmp_path / "other"))).collect()
    assert sorted(row["penstock_value"] for row in results) == ["mine 6", "mine 7", "mine 8"]
