"""Reading, writing and processing work from pyspark 4.0, streams from 4.2; before, it is said what to do."""

from __future__ import annotations

import pyspark
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StructField, StructType

from penstock import InvalidOption
from penstock.spark.source import PenstockSource
from tests.spark.versions import HAS_STREAMS

NUMBERS = StructType([StructField("n", LongType())])


def test_streams_of_a_pyspark_that_is_too_old_are_refused_with_what_to_do(
    file_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyspark, "__version__", "4.1.4")
    source = PenstockSource({"url": file_url, "queue": "numbers", "task": "square"})
    with pytest.raises(InvalidOption, match=r"needs pyspark 4\.2 or newer, got 4\.1\.4\. .* use spark\.read"):
        source.streamReader(NUMBERS)
    with pytest.raises(
        InvalidOption, match=r"needs pyspark 4\.2 or newer, got 4\.1\.4\. .* use foreachBatch"
    ):
        source.streamWriter(NUMBERS, overwrite=False)


@pytest.mark.skipif(HAS_STREAMS, reason="this pyspark has streams")
def test_spark_tells_so(spark: SparkSession, file_url: str) -> None:
    with pytest.raises(Exception, match=r"readStream .* needs pyspark 4\.2 or newer"):
        spark.readStream.format("penstock").options(
            url=file_url, queue="numbers", kind="events"
        ).load().writeStream.format("noop").start().awaitTermination(60)
