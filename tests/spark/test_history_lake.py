"""The tables of a history as Delta tables: on a disk and in an object store, read by other engines."""

from __future__ import annotations

import os
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import duckdb_extension_delta  # type: ignore[import-untyped]
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import InvalidOption
from penstock.spark import history
from penstock.spark.delta import Conflict, Table, open_folder
from penstock.spark.history.bronze import bronze_state
from penstock.spark.history.folding import file_bounds, owners_of
from penstock.spark.history.measures import bucket_of, percentile_rows
from penstock.spark.history.tables import open_history
from tests.spark.busywork import happen
from tests.spark.objectstore import object_store

QUEUES = ("mail", "report")
SCHEMA = pa.schema({"at": pa.timestamp("us", "UTC"), "name": pa.string()})


def rows(frame: DataFrame) -> list[str]:
    return sorted(str(row) for row in frame.collect())


def delta_table(path: Path) -> Table:
    table = Table(open_folder(path, None), SCHEMA, ranged="at", stats=("name",))
    table.create()
    return table


def named(*names: str) -> pa.Table:
    return pa.table({"at": [1_800_000_000_000_000 + n for n in range(len(names))], "name": names}).cast(
        SCHEMA
    )


def test_of_two_commits_on_the_same_version_one_wins(tmp_path: Path) -> None:
    table = delta_table(tmp_path / "table")
    first, second = table.load(), table.load()
    table.commit(first, add=[table.write(named("a"), 1)], state="first")
    with pytest.raises(Conflict):
        table.commit(second, add=[table.write(named("b"), 1)], state="second")
    now = table.load()
    assert (now.number, now.state, [file.rows for file in now.files]) == (1, "first", [1])


def test_a_commit_of_somebody_else_hides_neither_state_nor_number(tmp_path: Path) -> None:
    table = delta_table(tmp_path / "table")
    table.commit(table.load(), add=[table.write(named("a"), 1)], state="ours")
    table.vacuum(table.load())
    assert (table.load().number, table.load().state) == (1, "ours")


@pytest.mark.parametrize("configured", ["interval 0 hours", "interval 30 days", None])
def test_files_of_the_last_week_are_kept_whatever_the_table_says(
    tmp_path: Path, configured: str | None
) -> None:
    table = delta_table(tmp_path / "table")
    old = table.write(named("a"), 1)
    table.commit(table.load(), add=[old], state="1")
    if configured is not None:
        lake = table.load().table
        assert lake is not None
        lake.alter.set_table_properties({"delta.deletedFileRetentionDuration": configured})
    table.commit(table.load(), add=[table.write(named("b"), 2)], remove=[old], state="2")
    table.vacuum(table.load())
    assert Path(table.folder.root, old.path).exists()


def test_files_that_were_replaced_more_than_a_week_ago_are_removed(tmp_path: Path) -> None:
    table = delta_table(tmp_path / "table")
    left = Path(table.folder.root, table.write(named("a"), 1).path)
    table.commit(table.load(), add=[table.write(named("b"), 1)], state="1")
    long_ago = time.time() - 8 * 86_400
    os.utime(left, (long_ago, long_ago))
    table.vacuum(table.load())
    assert not left.exists()


def test_duckdb_and_polars_read_what_spark_reads(spark: SparkSession, tmp_path: Path) -> None:
    url, out = f"sqlite:///{tmp_path}/jobs.db", tmp_path / "history"
    happen(url, seed=3, steps=60, queues=QUEUES)
    history.sync(url, out, spark=spark)
    tables = history.tables(spark, out)
    connection = duckdb.connect()
    (extension,) = Path(duckdb_extension_delta.__file__).parent.rglob("delta.duckdb_extension")
    connection.execute(f"LOAD '{extension}'")
    for name in ("bronze", "silver", "gold", "causes"):
        expected = getattr(tables, name).count()
        found = connection.execute(f"SELECT count(*) FROM delta_scan('{out / name}')").fetchone()
        assert found == (expected,)
        assert pl.scan_delta(str(out / name)).select(pl.len()).collect().item() == expected
    enqueued = "grain = 'day' AND dimension = 'store'"
    (spark_sum,) = tables.gold.where(enqueued).agg({"enqueued": "sum"}).collect()[0]
    duck_sum = connection.execute(f"SELECT sum(enqueued) FROM delta_scan('{out}/gold') WHERE {enqueued}")
    assert duck_sum.fetchone() == (spark_sum,)
    connection.close()


def test_a_history_in_an_object_store_equals_one_on_disk(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    with object_store() as options:
        for seed in (1, 2):
            happen(url, seed=seed, steps=40, queues=QUEUES)
            history.sync(url, "s3://bucket/ours/history", spark=spark, storage_options=options)
        history.sync(url, tmp_path / "disk", spark=spark)
        there = history.tables(spark, "s3://bucket/ours/history", storage_options=options)
        here = history.tables(spark, tmp_path / "disk")
        for name in ("bronze", "silver", "gold", "causes"):
            assert rows(getattr(there, name)) == rows(getattr(here, name)), name
        page = history.report("s3://bucket/ours/history", tmp_path / "page.html", storage_options=options)
        assert "</html>" in page.read_text()


def test_a_store_that_ignores_conditional_puts_is_refused(tmp_path: Path) -> None:
    with object_store(is_careless=True) as options:
        table = Table(open_folder("s3://bucket/history", options), SCHEMA, ranged="at")
        with pytest.raises(InvalidOption, match="does not support conditional puts"):
            table.create()


@pytest.mark.parametrize("name", ["AWS_S3_ALLOW_UNSAFE_RENAME", "allow_unsafe_rename"])
def test_unsafe_renames_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidOption, match=f"{name} is set"):
        open_folder("s3://bucket/history", {name: "true"})
    monkeypatch.setenv("AWS_S3_ALLOW_UNSAFE_RENAME", "true")
    with pytest.raises(InvalidOption, match="AWS_S3_ALLOW_UNSAFE_RENAME is set"):
        open_folder("s3://bucket/history", None)


def test_a_history_from_before_delta_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "bronze").mkdir()
    (tmp_path / "_history.json").write_text("{}")
    with pytest.raises(InvalidOption, match="Sync into a new folder"):
        open_history(tmp_path, create=True)


def test_a_log_that_was_cleaned_up_too_far_is_made_good_from_the_rows(
    spark: SparkSession, tmp_path: Path
) -> None:
    url, out = f"sqlite:///{tmp_path}/jobs.db", tmp_path / "history"
    happen(url, seed=3, steps=40, queues=QUEUES)
    history.sync(url, out, spark=spark, upto="bronze")
    opened = open_history(out, create=False)
    told, forgotten = opened.bronze.load(), opened.bronze.load()
    forgotten.__dict__["state"] = None
    assert bronze_state(opened, forgotten) == bronze_state(opened, told)


def test_tables_that_were_deleted_are_made_again(spark: SparkSession, tmp_path: Path) -> None:
    url, out = f"sqlite:///{tmp_path}/jobs.db", tmp_path / "history"
    happen(url, seed=4, steps=60, queues=QUEUES)
    history.sync(url, out, spark=spark)
    before = [rows(frame) for frame in history.tables(spark, out)[1:]]
    for name in ("silver", "gold", "causes"):
        shutil.rmtree(out / name)
    history.sync(url, out, spark=spark)
    assert [rows(frame) for frame in history.tables(spark, out)[1:]] == before


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 10))
def test_files_are_full_in_order_and_never_share_an_instant(instants: list[int], per_file: int) -> None:
    ordered = np.array(sorted(instants), np.int64)
    bounds = list(file_bounds(ordered, per_file))
    files = [ordered[start:end].tolist() for start, end in bounds]
    assert [value for file in files for value in file] == ordered.tolist()
    for one, other in pairwise(files):
        assert one[-1] < other[0]
    assert all(len(file) <= per_file or len(set(file)) == 1 for file in files)
    lows = np.array([file[0] for file in files], np.int64)
    for number, file in enumerate(files):
        assert set(owners_of(lows, np.array(file, np.int64)).tolist()) == {number}


@given(st.lists(st.integers(0, 10**8), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99]))
def test_percentiles_are_within_one_per_cent(durations: list[int], share: float) -> None:
    values = np.array(sorted(durations), np.int64)
    buckets, times = np.unique(bucket_of(values), return_counts=True)
    (found,) = percentile_rows(np.array([0, len(buckets)]), buckets, times, share)
    exact: Any = values[max(int(np.ceil(share * len(values))), 1) - 1]
    assert abs(found - exact) <= 0.0101 * exact
