"""One Spark session for all tests of this folder, and a store for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.spark import session
from tests.spark.preloading import use_preloaded_workers
from tests.spark.quick import QUICK
from tests.spark.versions import HAS_PUSHDOWN, HAS_STREAMS

use_preloaded_workers()

collect_ignore: list[str] = []
if not HAS_STREAMS:
    collect_ignore += ["test_stream.py", "test_stream_results.py"]
if not HAS_PUSHDOWN:
    collect_ignore += ["test_pushdown.py"]


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    made = session("tests", cores=2, memory="1g", config=QUICK)
    yield made
    made.stop()


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/spark.db"


@pytest.fixture(params=["sqlite", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "sqlite":
        return str(request.getfixturevalue("file_url"))
    server: str = request.getfixturevalue("valkey_url")
    return f"{server}?namespace=spark-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def database(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """A database of the session's catalog, for this test."""
    name = f"test_{uuid.uuid4().hex[:8]}"
    spark.sql(f"CREATE DATABASE {name} LOCATION '{tmp_path / 'warehouse'}'")
    yield name
    spark.sql(f"DROP DATABASE IF EXISTS {name} CASCADE")
