"""``spark.read.format("penstock")``: jobs, results, failures and events as tables."""

from __future__ import annotations

from datetime import UTC, timedelta
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from penstock.core.lifecycle import State
from tests.spark.stores import ask, fill

QUEUE = "numbers"


def read(spark: SparkSession, url: str, /, schema: str = "", **options: Any) -> DataFrame:
    reader = spark.read.format("penstock").options(**{"url": url, "queue": QUEUE, **options})
    return (reader.schema(schema) if schema else reader).load()


def test_jobs_of_every_state_are_rows(spark: SparkSession, url: str) -> None:
    fill(url, QUEUE, waiting=3, completed=2, failed=1)
    rows = {row["id"]: row for row in read(spark, url, numPartitions=3).collect()}
    assert sorted(rows) == ["c0", "c1", "f0", "w0", "w1", "w2"]
    assert (rows["c1"]["state"], rows["c1"]["payload"], rows["c1"]["result"]) == ("completed", '{"n":1}', "2")
    assert (rows["f0"]["error_type"], rows["f0"]["error"], rows["f0"]["runs"]) == ("ValueError", "no", 1)
    assert rows["w0"]["finished_at"] is None
    assert rows["c0"]["finished_at"] >= rows["c0"]["enqueued_at"]
    assert {row["task"] for row in rows.values()} == {"double"}


def test_results_and_failures_are_tables_of_their_own(spark: SparkSession, url: str) -> None:
    fill(url, QUEUE, waiting=1, completed=2, failed=1)
    assert sorted(row["result"] for row in read(spark, url, kind="results").collect()) == ["0", "2"]
    assert [row["id"] for row in read(spark, url, kind="failed").collect()] == ["f0"]
    assert [row["id"] for row in read(spark, url, state="waiting,scheduled").collect()] == ["w0"]


def test_a_narrow_schema_gets_its_columns_in_its_types(spark: SparkSession, url: str) -> None:
    fill(url, QUEUE, completed=2)
    schema = "id string, payload struct<n: int, missing: string>, result long, payload_bytes binary"
    rows = read(spark, url, schema, payloadFormat="typed").orderBy("id").collect()
    assert [tuple(row) for row in rows] == [
        ("c0", (0, None), 0, bytearray(b'{"n":0}')),
        ("c1", (1, None), 2, bytearray(b'{"n":1}')),
    ]


def test_payloads_can_be_variants(spark: SparkSession, url: str) -> None:
    fill(url, QUEUE, completed=1)
    (row,) = (
        read(spark, url, payloadFormat="variant")
        .selectExpr("variant_get(payload, '$.n', 'int') AS n", "result::int AS r")
        .collect()
    )
    assert (row["n"], row["r"]) == (0, 0)


def test_events_are_rows_without_gaps_or_repetitions(spark: SparkSession, url: str) -> None:
    fill(url, QUEUE, waiting=40, completed=30)
    events = read(spark, url, kind="events", numPartitions=4)
    rows = events.orderBy("seq").collect()
    assert [row["seq"] for row in rows] == list(range(1, 131))
    kinds = [row["type"] for row in rows]
    assert (kinds.count("enqueued"), kinds.count("claimed"), kinds.count("completed")) == (70, 30, 30)
    middle = read(
        spark,
        url,
        "seq long",
        kind="events",
        startingOffsets=f'{{"{QUEUE}": 10}}',
        endingOffsets=f'{{"{QUEUE}": 20}}',
    )
    assert sorted(row["seq"] for row in middle.collect()) == list(range(11, 21))


def test_events_can_be_those_from_one_instant_on_to_before_another(spark: SparkSession, url: str) -> None:
    instants = []
    for waiting in (2, 4, 6):
        fill(
            url, QUEUE, waiting=waiting
        )  # two that are new; each after the next millisecond, for the read takes longer
        last = max(row["at"] for row in read(spark, url, kind="events").collect())
        instants.append(last.astimezone(UTC) + timedelta(microseconds=1))

    def seqs(**options: Any) -> list[int]:
        return sorted(row["seq"] for row in read(spark, url, "seq long", kind="events", **options).collect())

    first, second, third = instants
    assert seqs(startingTimestamp=first.isoformat()) == [3, 4, 5, 6]
    assert seqs(endingTimestamp=second.isoformat()) == [1, 2, 3, 4]
    second_ms = round(second.timestamp() * 1000) + 1
    assert seqs(startingTimestamp=first.isoformat(), endingTimestamp=str(second_ms)) == [3, 4]
    assert seqs(startingTimestamp=third.isoformat()) == []


def test_queues_can_be_several(spark: SparkSession, url: str) -> None:
    fill(url, "a-1", waiting=1)
    fill(url, "a-2", waiting=2)
    fill(url, "b", waiting=4)
    assert read(spark, url, queue="", subscribe="a-1, b").count() == 5
    assert read(spark, url, queue="", subscribePattern="a-.*").count() == 3
    assert read(spark, url, queue="", subscribePattern="none").count() == 0


def test_missing_events_are_reported_with_their_range(spark: SparkSession, url: str) -> None:
    fill(url, QUEUE, waiting=5)

    async def trim(storage: Any) -> None:
        from msgspec.structs import replace

        await storage.configure(QUEUE, replace(await storage.settings(QUEUE), events_count=1))
        await storage.enqueue(QUEUE, [])
        await storage.sweep(QUEUE)

    fill(url, QUEUE, completed=1)
    ask(url, trim)
    begin = f'{{"{QUEUE}": 0}}'
    with pytest.raises(PySparkException, match=r"events 1 to \d+ are no longer kept"):
        read(spark, url, kind="events", startingOffsets=begin).collect()
    assert read(spark, url, kind="events").count() > 0
    assert read(spark, url, kind="events", startingOffsets=begin, failOnDataLoss="false").count() > 0


@pytest.mark.parametrize(
    ("options", "schema", "said"),
    [
        ({"queue": ""}, "", "set exactly one of the options queue"),
        ({"subscribe": "b"}, "", "got 2"),
        ({"kind": "job"}, "", "kind='job' is invalid"),
        ({"state": "done"}, "", f"The states are: {', '.join(State)}"),
        ({"kind": "results", "state": "failed"}, "", "only completed jobs"),
        ({"queue": "", "subscribePattern": "("}, "", "not a valid regular expression"),
        ({"kind": "events", "startingOffsets": "first"}, "", "startingOffsets='first' is invalid"),
        ({"kind": "events", "startingTimestamp": "noon"}, "", "startingTimestamp must be an ISO 8601 time"),
        ({"numPartitions": "-1"}, "", "numPartitions must be >= 1, got -1"),
        ({}, "id string, colour string", "has no column 'colour'"),
        ({"kind": "events"}, "payload string", "has no column 'payload'"),
    ],
)
def test_bad_options_are_refused(
    spark: SparkSession, tmp_path: Any, options: dict[str, str], schema: str, said: str
) -> None:
    url = f"sqlite:///{tmp_path}/read.db"
    fill(url, QUEUE, waiting=1)
    with pytest.raises(PySparkException, match=said):
        read(spark, url, schema, **options).collect()
