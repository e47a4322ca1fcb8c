"""The input of a run, read once: every row with its job's id, its payload and its fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, BooleanType, StringType, StructField, StructType

from penstock.core.job import NewJob
from penstock.spark.cells import column_values
from penstock.spark.rows import Layout, Refused, new_jobs, placements
from penstock.spark.schemas import quoted

__all__ = ["SNAPSHOT", "fingerprint", "snapshot"]

_TEXT: Final = StringType()
SNAPSHOT: Final = StructType(
    [
        StructField("job_id", _TEXT),
        StructField("fingerprint", _TEXT),
        StructField("payload", BinaryType()),
        StructField("placement", _TEXT),
        StructField("key_json", _TEXT),
        StructField("refused", _TEXT),
        StructField("bad_key", BooleanType()),
    ]
)
_ARROW: Final = pa.schema(
    [
        ("job_id", pa.string()),
        ("fingerprint", pa.string()),
        ("payload", pa.binary()),
        ("placement", pa.string()),
        ("key_json", pa.string()),
        ("refused", pa.string()),
        ("bad_key", pa.bool_()),
    ]
)
# A key that cannot be encoded is reported, and shown as text.
_encode = msgspec.json.Encoder(enc_hook=repr).encode


def fingerprint(payload: bytes, version: str) -> str:
    """What a row's result is a result of: its payload, and the version of the task."""
    return blake2b(
        payload, digest_size=16, person=blake2b(version.encode(), digest_size=16).digest()
    ).hexdigest()


def snapshot(df: DataFrame, layout: Layout) -> DataFrame:
    """The rows of ``df`` as ``SNAPSHOT``. To be written down before it is used: ``df`` may differ when read again."""
    needed = tuple(dict.fromkeys((*layout.key, *layout.payload, *layout.placement.values())))
    # Spark hands no column to Python whose name has a dot or a backtick.
    columns = [F.col(quoted(name)).alias(f"c{number}") for number, name in enumerate(needed)]
    return df.select(*columns).mapInArrow(_taker(layout, needed), SNAPSHOT)


def _taker(
    layout: Layout, names: tuple[str, ...]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def take(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for plain in batches:
            batch = pa.RecordBatch.from_arrays(plain.columns, names=list(names))
            keys = _texts(batch, layout.key)
            rows = zip(new_jobs(batch, layout), keys, placements(batch, layout), strict=True)
            columns = list(zip(*(_row(layout, *row) for row in rows), strict=True))
            arrays = [
                pa.array(values, type=field.type) for values, field in zip(columns, _ARROW, strict=True)
            ]
            if arrays:
                yield pa.RecordBatch.from_arrays(arrays, schema=_ARROW)

    return take


def _texts(batch: pa.RecordBatch, columns: tuple[str, ...]) -> Iterator[str]:
    """The columns of each row as a JSON object."""
    values = zip(*(column_values(batch.column(name)) for name in columns), strict=True)
    return (_encode(dict(zip(columns, row, strict=True))).decode() for row in values)


def _row(layout: Layout, job: NewJob | Refused, key: str, given: dict[str, Any]) -> tuple[Any, ...]:
    if isinstance(job, Refused):
        return job.id or None, "", None, None, key, f"{job.key}: {job.why}", not job.id
    placement = _encode(given).decode() if given else None
    return job.id, fingerprint(job.payload, layout.options.version), job.payload, placement, key, None, False
