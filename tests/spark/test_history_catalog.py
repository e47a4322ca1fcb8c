"""The tables of a history by name: always at one version, and mended by the next sync."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.errors import InvalidOption
from penstock.spark import history
from penstock.spark.history.catalog import Catalog
from penstock.spark.history.folder import open_history
from penstock.spark.history.shown import Shown
from tests.spark.busywork import happen

# Many of Spark's small jobs, which take a while where the machine is busy.
pytestmark = pytest.mark.timeout(300)

QUEUES = ("mail", "report")
NAMES = ("bronze", "silver", "gold", "causes")


def rows(frame: DataFrame) -> list[str]:
    return sorted(str(row) for row in frame.collect())


def shown(spark: SparkSession, database: str) -> dict[str, list[str]]:
    return {name: rows(spark.table(f"{database}.{name}").drop("day")) for name in NAMES}


def kept(spark: SparkSession, folder: Path) -> dict[str, list[str]]:
    return {name: rows(frame) for name, frame in history.tables(spark, folder)._asdict().items()}


class Killed(Exception):
    """As if the process had been killed at that point."""


def test_views_show_what_the_folder_has_also_after_a_sync_that_was_killed(
    spark: SparkSession, file_url: str, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "history"
    happen(file_url, seed=1, steps=30, queues=QUEUES)
    history.sync(file_url, folder, spark=spark, catalog=database)
    first = shown(spark, database)
    assert first == kept(spark, folder)
    assert all(first[name] for name in ("bronze", "silver", "gold"))

    happen(file_url, seed=2, steps=30, queues=QUEUES)
    with monkeypatch.context() as patch:
        before = Catalog._put_view

        def put_the_first(self: Catalog, shown: Shown, number: int) -> None:
            if shown.name != "bronze":
                raise Killed
            before(self, shown, number)

        patch.setattr(Catalog, "_put_view", put_the_first)
        # The folder has all of it, the catalog one table, when it ends.
        with pytest.raises(Killed):
            history.sync(file_url, folder, spark=spark, catalog=database)
    torn = shown(spark, database)
    assert torn["silver"] == first["silver"]
    assert torn["bronze"] == kept(spark, folder)["bronze"] != first["bronze"]

    assert history.sync(file_url, folder, spark=spark, catalog=database).events == 0
    assert shown(spark, database) == kept(spark, folder)


def test_tables_that_were_written_and_not_marked_are_written_again_without_a_row_more(
    spark: SparkSession, file_url: str, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "history"
    happen(file_url, seed=3, steps=30, queues=QUEUES)
    with monkeypatch.context() as patch:
        before = Catalog._run

        def fail_to_mark(self: Catalog, statement: str) -> None:
            if statement.startswith("ALTER TABLE"):
                raise Killed
            before(self, statement)

        patch.setattr(Catalog, "_run", fail_to_mark)
        with pytest.raises(Killed):
            history.sync(file_url, folder, spark=spark, catalog=database, format="parquet")
    assert rows(spark.table(f"{database}.bronze").drop("day")) == kept(spark, folder)["bronze"]
    happen(file_url, seed=4, steps=20, queues=QUEUES)
    history.sync(file_url, folder, spark=spark, catalog=database, format="parquet")
    assert shown(spark, database) == kept(spark, folder)


def test_a_reader_of_a_view_is_not_disturbed_and_old_versions_go_after_an_hour(
    spark: SparkSession, file_url: str, tmp_path: Path, database: str
) -> None:
    folder = tmp_path / "history"
    happen(file_url, seed=4, steps=20, queues=QUEUES)
    history.sync(file_url, folder, spark=spark, catalog=database)
    reader = spark.table(f"{database}.silver")
    count = reader.count()
    happen(file_url, seed=5, steps=20, queues=QUEUES)
    history.sync(file_url, folder, spark=spark, catalog=database)
    assert reader.count() == count
    versions = sorted(path.name for path in (folder / "catalog").iterdir())
    assert {"silver-1", "silver-2"} <= set(versions)
    long_ago = time.time() - 3700
    for path in (folder / "catalog").iterdir():
        os.utime(path, (long_ago, long_ago))
    history.sync(file_url, folder, spark=spark, catalog=database)
    left = {path.name for path in (folder / "catalog").iterdir()}
    assert "silver-1" not in left
    assert "silver-2" in left
    assert shown(spark, database) == kept(spark, folder)


def test_names_of_somebody_else_are_left_alone(
    spark: SparkSession, file_url: str, tmp_path: Path, database: str
) -> None:
    happen(file_url, seed=6, steps=5, queues=QUEUES)
    spark.sql(f"CREATE VIEW {database}.gold AS SELECT 'mine' AS whose")
    with pytest.raises(InvalidOption, match="no view of this history"):
        history.sync(file_url, tmp_path / "history", spark=spark, catalog=database)
    assert spark.table(f"{database}.gold").first() == ("mine",)
    assert open_history(tmp_path / "history", create=False).bronze.newest().number == 0
    with pytest.raises(InvalidOption, match="Give catalog="):
        history.sync(file_url, tmp_path / "history", spark=spark, format="delta")
    with pytest.raises(InvalidOption, match="refused"):
        history.sync(file_url, tmp_path / "other", spark=spark, catalog="nowhere.at.all")
