"""Streams: the event log as it grows, and tables that become jobs batch by batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from penstock.storage.contract import Storage
from tests.spark.stores import ask, fill

QUEUE = "numbers"


class Sink:
    """What a query has brought, batch by batch; with ``name``, the checkpoint it goes on from."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        self._spark = spark
        self._url = url
        self._folder = folder
        self.batches: list[list[int]] = []

    def run(self, **options: Any) -> None:
        given = {"url": self._url, "queue": QUEUE, **options}
        stream = self._spark.readStream.format("penstock").schema("seq long").options(**given).load()
        query = (
            stream.writeStream.foreachBatch(self._keep)
            .option("checkpointLocation", str(self._folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    def _keep(self, batch: DataFrame, number: int) -> None:
        self.batches.append(sorted(row["seq"] for row in batch.collect()))


def test_a_stream_brings_every_event_once_in_bounded_batches_and_goes_on_from_its_checkpoint(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    fill(url, QUEUE, waiting=10)
    sink = Sink(spark, url, tmp_path)
    sink.run(maxEventsPerTrigger=4)
    assert list(chain(*sink.batches)) == list(range(1, 11))
    assert max(map(len, sink.batches)) <= 4
    fill(url, QUEUE, completed=2)
    sink.run(maxEventsPerTrigger=100)
    assert list(chain(*sink.batches)) == list(range(1, 17))


def test_a_named_consumer_holds_the_log_back_until_the_query_is_done_with_it(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    fill(url, QUEUE, waiting=6)
    Sink(spark, url, tmp_path).run(maxEventsPerTrigger=3, consumerName="lake")
    consumers = ask(url, lambda storage: storage.consumers(QUEUE))
    assert [(consumer.name, consumer.offset) for consumer in consumers] == [("lake", 3)]


def test_a_stream_that_fell_behind_what_is_kept_says_which_events_are_gone(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    fill(url, QUEUE, waiting=3)
    sink = Sink(spark, url, tmp_path)
    sink.run()
    fill(url, QUEUE, completed=3)
    ask(url, _trimmer(1))
    with pytest.raises(PySparkException, match=r"events 4 to \d+ are no longer kept"):
        sink.run()
    fill(url, QUEUE, failed=1)
    sink.run(failOnDataLoss="false")
    page = ask(url, lambda storage: storage.read_entries(QUEUE, after=0, limit=1))
    assert sink.batches[-1][-1] == page.last


def _trimmer(keep: int) -> Callable[[Storage], Any]:
    async def trim(storage: Storage) -> None:
        from msgspec.structs import replace

        await storage.configure(QUEUE, replace(await storage.settings(QUEUE), events_count=keep))
        await storage.sweep(QUEUE)

    return trim


def test_every_row_of_a_streaming_table_becomes_one_job_even_if_batches_are_repeated(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    table = str(tmp_path / "table")
    options = {"url": url, "queue": QUEUE, "task": "double", "keyColumns": "n"}

    def run(checkpoint: str) -> None:
        rows = spark.readStream.schema("n long").parquet(table)
        query = (
            rows.writeStream.format("penstock").options(**options).option("checkpointLocation", checkpoint)
        )
        query.trigger(availableNow=True).start().awaitTermination()

    spark.range(5).selectExpr("id AS n").write.parquet(table)
    run(str(tmp_path / "first"))
    spark.range(3, 8).selectExpr("id AS n").write.mode("append").parquet(table)
    run(str(tmp_path / "first"))
    assert ask(url, lambda storage: storage.counts(QUEUE)).waiting == 8
    # A query that has lost its checkpoint repeats everything under another name: the ids are the same.
    run(str(tmp_path / "second"))
    assert ask(url, lambda storage: storage.counts(QUEUE)).waiting == 8
