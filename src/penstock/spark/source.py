"""The Spark format ``penstock``, which ``pyspark_penstock`` registers: entry points of reads, writes and streams."""

from __future__ import annotations

import pyspark
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from penstock.errors import InvalidOption
from penstock.spark.schemas import read_options, schema_of, write_options


class PenstockSource(DataSource):
    """The data source. Spark creates one on the driver for each read or write.

    It sends readers and writers to the executors. Their modules are imported on demand, because Spark imports this
    module at every start.
    """

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> StructType:
        options = read_options(self.options)
        return schema_of(options.kind, options.payload_format)

    def reader(self, schema: StructType) -> DataSourceReader:
        from penstock.spark.reader import reader_of

        return reader_of(read_options(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        _require_streaming("readStream", instead="spark.read, with startingOffsets")
        from penstock.spark.stream import EventStream

        return EventStream(read_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from penstock.spark.sink import PenstockWriter, target_of

        return PenstockWriter(target_of(write_options(self.options), schema, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        _require_streaming("writeStream", instead="foreachBatch, with a writeId of the batch's number")
        from penstock.spark.sink import StreamWriter, target_of

        return StreamWriter(target_of(write_options(self.options), schema, overwrite=overwrite))


def _require_streaming(what: str, *, instead: str) -> None:
    """Require pyspark 4.2. Older releases cannot limit a Python stream or write Arrow batches to one."""
    if tuple(map(int, pyspark.__version__.split(".")[:2])) < (4, 2):
        raise InvalidOption(
            f"{what} with the format penstock needs pyspark 4.2 or newer, got {pyspark.__version__}."
            f" Upgrade pyspark, or use {instead}."
        )
