"""Results that the store still has when the output does not, and what a run without a display says."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.errors import FleetFailed
from penstock.spark.processing import running
from penstock.spark.processing.progress import Tally, open_progress
from penstock.spark.processing.workers import RunWorkers
from tests.spark.test_process import calls, do, load_tasks, rows_of


def test_results_of_a_deleted_output_are_counted_as_reused_or_made_again_as_asked(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = load_tasks(url, tmp_path, monkeypatch)
    output, df = tmp_path / "spent", spark.range(3).selectExpr("id AS n")
    first = do(df, tasks.spend, output)
    assert (first.completed, first.reused, first.cost) == (3, 0, 3.0)

    shutil.rmtree(output)
    second = do(df, tasks.spend, output, workers=0)
    assert (second.completed, second.reused, second.failed, second.cost) == (0, 3, 0, 0.0)
    assert len(rows_of(spark, output)) == len(calls(tmp_path)) == 3

    shutil.rmtree(output)
    third = do(df, tasks.spend, output, reuse_results=False)
    assert (third.completed, third.reused, third.cost) == (3, 0, 3.0)
    assert len(calls(tmp_path)) == 6


def test_a_run_without_a_display_logs_that_no_worker_runs(
    spark: SparkSession,
    file_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks: ModuleType = load_tasks(file_url, tmp_path, monkeypatch)
    monkeypatch.setattr(running, "_NOBODY_S", 0.1)
    deadline = time.monotonic() + 60

    def check(_: Any) -> None:
        if "no worker is claiming from queue 'tables'" in caplog.text:
            raise FleetFailed("it was said")
        assert time.monotonic() < deadline, "nothing was logged"

    monkeypatch.setattr(RunWorkers, "check", check)
    with caplog.at_level(logging.WARNING, "penstock.spark"), pytest.raises(FleetFailed, match="it was said"):
        do(spark.range(1).selectExpr("id AS n"), tasks.spend, tmp_path / "spent", workers=0)


def test_a_run_does_not_complain_about_its_own_workers_while_they_start(
    spark: SparkSession,
    file_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks: ModuleType = load_tasks(file_url, tmp_path, monkeypatch)
    # A worker needs longer than this before it claims.
    monkeypatch.setattr(running, "_NOBODY_S", 0.1)
    with caplog.at_level(logging.WARNING, "penstock.spark"):
        assert do(spark.range(1).selectExpr("id AS n"), tasks.spend, tmp_path / "spent").completed == 1
    assert "no worker" not in caplog.text


@pytest.mark.parametrize("style", ["none", "lines"])
def test_warnings_go_to_the_logger_whatever_is_shown(style: Any, caplog: pytest.LogCaptureFixture) -> None:
    open_progress(style, "score").warn("no worker is claiming")
    assert [record.getMessage() for record in caplog.records] == ["no worker is claiming"]


def test_the_summary_of_a_run_says_how_many_rows_were_reused() -> None:
    assert ", 2 reused" in str(Tally(3, completed=1, reused=2))
