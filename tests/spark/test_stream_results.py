"""Streams of results and of failures, read as Spark reads them; ``tests/examples`` has Spark read one."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from penstock import InvalidOption
from penstock.core.outcome import Complete, Fail, Failure
from penstock.errors import EventsLost
from penstock.spark.schemas import schema_of
from penstock.spark.source import PenstockSource
from penstock.storage.contract import Storage
from penstock.storage.values import Settlement, Take
from tests.spark.stores import ask, fill

QUEUE = "numbers"
PAYLOAD = StructField("payload", StructType([StructField("n", LongType())]))
LAST = {"results": StructField("result", LongType()), "failed": StructField("error", StringType())}


class Ends:
    """A stream of ``results`` or of ``failed`` jobs; ``more`` gives what has come since it was last asked."""

    def __init__(self, url: str, kind: str, **options: Any) -> None:
        schema = StructType([StructField("id", StringType()), PAYLOAD, LAST[kind]])
        given = {"url": url, "queue": QUEUE, "kind": kind, "payloadFormat": "typed", **options}
        self._stream = PenstockSource(given).streamReader(schema)
        self._offset = self._stream.initialOffset()

    def more(self) -> list[tuple[Any, ...]]:
        end = self._stream.latestOffset(self._offset, self._stream.getDefaultReadLimit())
        parts = self._stream.partitions(self._offset, end)
        self._offset = end
        batches: list[Any] = [batch for part in parts for batch in self._stream.read(part)]
        rows = [row for batch in batches for row in batch.to_pylist()]
        return sorted((id, payload["n"], last) for id, payload, last in (row.values() for row in rows))


async def end_anew(storage: Storage) -> None:
    """The one that waited fails, is retried and completes; the one that had failed is retried and fails again."""
    fail = Fail(Failure("ValueError", "again"), final=True)
    for id, outcome in (("w0", fail), ("w0", Complete(b"7")), ("f0", fail)):
        await storage.retry(QUEUE, [id])
        await storage.shift_clock(QUEUE, 1000)
        (lease,) = (await storage.claim(QUEUE, Take("w", 1, 60_000))).leases
        assert lease.id == id
        await storage.settle(QUEUE, [Settlement(id, lease.token, outcome)])


@pytest.mark.parametrize("parts", ["1", "5"])
def test_a_stream_brings_every_end_once_with_what_the_job_left(url: str, parts: str) -> None:
    fill(url, QUEUE, waiting=1, completed=2, failed=1)
    done, broken = Ends(url, "results", numPartitions=parts), Ends(url, "failed", numPartitions=parts)
    assert done.more() == [("c0", 0, 0), ("c1", 1, 2)]
    assert broken.more() == [("f0", 0, "no")]
    ask(url, end_anew)
    assert done.more() == [("w0", 0, 7)]
    assert broken.more() == [("f0", 0, "again")]
    assert Ends(url, "failed").more() == [("f0", 0, "again")], "whoever comes late gets the last of its ends"


def test_a_job_that_expired_is_a_failure(url: str) -> None:
    fill(url, QUEUE, waiting=1)
    broken = Ends(url, "failed")
    ask(url, _expire)
    assert [id for id, *_ in broken.more()] == ["x"]


async def _expire(storage: Storage) -> None:
    from penstock.core.job import NewJob, Options

    await storage.enqueue(QUEUE, [NewJob("x", b'{"n":1}', Options(task="double"), ttl_ms=10)])
    await storage.shift_clock(QUEUE, 1000)
    await storage.sweep(QUEUE)
    await storage.claim(QUEUE, Take("w", 10, 60_000))


def test_results_that_expire_unread_are_reported(url: str) -> None:
    fill(url, QUEUE, completed=3)
    ask(url, lambda storage: storage.remove(QUEUE, ["c1"]))
    with pytest.raises(EventsLost, match=r"1 finished jobs are no longer kept, for example 'c1'"):
        Ends(url, "results").more()
    assert [id for id, *_ in Ends(url, "results", failOnDataLoss="false").more()] == ["c0", "c2"]


def test_a_stream_whose_kind_was_not_said_says_which_there_are(file_url: str) -> None:
    source = PenstockSource({"url": file_url, "queue": QUEUE})
    with pytest.raises(InvalidOption, match=r"Set the option kind to 'events', 'results' or 'failed'"):
        source.streamReader(source.schema())
    with pytest.raises(InvalidOption, match="has no column 'epoch'"):
        PenstockSource({"url": file_url, "queue": QUEUE, "kind": "failed"}).streamReader(schema_of("events"))
