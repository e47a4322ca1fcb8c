"""Filters that a read applies by itself: it reads less, and gives the same."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from penstock.spark.schemas import Kind, schema_of
from penstock.spark.source import PenstockSource
from tests.spark.stores import ask, fill

QUEUE = "numbers"


def rows(url: str, kind: Kind, filters: Sequence[Any] = (), **options: str) -> tuple[list[Any], list[Any]]:
    """What is read with these filters pushed, before Spark has filtered anything; and the filters left to Spark."""
    given = {"url": url, "subscribe": f"{QUEUE},other", "kind": kind, **options}
    reader = PenstockSource(given).reader(schema_of(kind))
    left = list(reader.pushFilters(list(filters)))
    received = pickle.loads(pickle.dumps(reader))
    batches: list[Any] = [batch for part in reader.partitions() for batch in received.read(part)]
    return [row for batch in batches for row in batch.to_pylist()], left


def ids(url: str, *filters: Any, kind: Kind = "jobs", **options: str) -> list[str]:
    found, left = rows(url, kind, filters, **options)
    assert not left
    return sorted(row["id"] for row in found)


@pytest.fixture
def full(url: str) -> str:
    fill(url, QUEUE, waiting=2, completed=2, failed=2)
    fill(url, "other", failed=1)
    return url


def test_jobs_by_id_state_and_queue_are_all_that_is_read(full: str) -> None:
    assert len(ids(full)) == 7
    assert ids(full, EqualTo(("id",), "f0")) == ["f0", "f0"]
    assert ids(full, EqualTo(("id",), "f0"), EqualTo(("queue",), QUEUE)) == ["f0"]
    assert ids(full, In(("id",), ("c1", "w0", "nobody", None))) == ["c1", "w0"]
    assert ids(full, EqualTo(("state",), "failed")) == ["f0", "f0", "f1"]
    assert ids(full, In(("state",), ("failed", "waiting")), EqualTo(("queue",), QUEUE)) == [
        "f0",
        "f1",
        "w0",
        "w1",
    ]
    assert ids(full, In(("id",), ("c1", "w0")), EqualTo(("state",), "waiting")) == ["w0"]


def test_filters_that_leave_nothing_read_nothing(full: str) -> None:
    assert ids(full, EqualTo(("state",), "waiting"), EqualTo(("state",), "failed")) == []
    assert ids(full, EqualTo(("state",), "no such state")) == []
    assert ids(full, EqualTo(("state",), "waiting"), kind="failed") == []
    assert ids(full, EqualTo(("queue",), "nowhere")) == []
    assert ids(full, EqualTo(("id",), "c0"), EqualTo(("id",), "c1")) == []


def test_filters_of_other_kinds_are_left_to_spark(full: str) -> None:
    others = [IsNotNull(("id",)), Not(EqualTo(("id",), "c0")), EqualTo(("runs",), 1), EqualTo(("id",), 7)]
    found, left = rows(full, "jobs", [EqualTo(("state",), "failed"), *others])
    assert left == others
    assert len(found) == 3


def test_events_are_read_within_the_times_of_the_filters(url: str) -> None:
    fill(url, QUEUE, waiting=3)
    ask(url, lambda storage: storage.shift_clock(QUEUE, 60_000))
    fill(url, QUEUE, completed=1)
    everything, _ = rows(url, "events")
    times = [row["at"] for row in everything]
    assert len(times) == 6
    late: datetime = times[3]
    filters = [GreaterThanOrEqual(("at",), late), LessThanOrEqual(("at",), times[-1])]
    found, left = rows(url, "events", filters)
    assert [row["seq"] for row in found] == [4, 5, 6]
    assert left == filters, "Spark knows the microseconds"
    early, _ = rows(url, "events", [LessThan(("at",), late - timedelta(seconds=30))])
    assert [row["seq"] for row in early] == [1, 2, 3]
    long_ago = datetime(1969, 1, 1, tzinfo=UTC)
    assert len(rows(url, "events", [GreaterThanOrEqual(("at",), long_ago)])[0]) == 6
    assert rows(url, "events", [EqualTo(("queue",), "other")])[0] == []


def test_where_the_user_has_said_where_to_begin_it_begins_there(url: str) -> None:
    fill(url, QUEUE, waiting=3)
    since = [GreaterThanOrEqual(("at",), datetime(2020, 1, 1, tzinfo=UTC))]
    found, _ = rows(url, "events", since, startingOffsets=f'{{"{QUEUE}": 2}}')
    assert [row["seq"] for row in found] == [3]


def test_a_session_that_pushes_nothing_down_takes_the_reader_for_one_that_cannot(file_url: str) -> None:
    """Spark would refuse every read otherwise."""
    for kind in ("jobs", "events"):
        reader = PenstockSource({"url": file_url, "queue": QUEUE, "kind": kind}).reader(schema_of(kind))
        assert getattr(reader.pushFilters, "__func__", None) is DataSourceReader.pushFilters


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_spark_gives_the_same_rows_whether_it_pushes_filters_down_or_not(
    spark: SparkSession, full: str, capsys: pytest.CaptureFixture[str]
) -> None:
    conf = "spark.sql.python.filterPushdown.enabled"
    before = spark.conf.get(conf)
    jobs = spark.read.format("penstock").options(url=full, subscribe=f"{QUEUE},other")
    chosen = "id IN ('c0', 'f0', 'f1', 'w0') AND state = 'failed' AND queue = 'numbers' AND runs > 0"
    found = {}
    plans = {}
    try:
        for enabled in ("true", "false"):
            spark.conf.set(conf, enabled)
            table = jobs.load().where(chosen)
            table.explain()
            plans[enabled] = capsys.readouterr().out
            found[enabled] = sorted(row["id"] for row in table.collect())
    finally:
        spark.conf.set(conf, str(before))
    assert found == {"true": ["f0", "f1"], "false": ["f0", "f1"]}
    assert "= failed" not in plans["true"], "it was told that this is done"
    assert "= failed" in plans["false"]
