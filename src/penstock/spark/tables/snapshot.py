"""The input of a run, read once: every row with its job's id, its payload and its fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, BooleanType, StringType, StructField, StructType

from penstock.core.job import NewJob
from penstock.spark.cells import canonical_maker, column_values
from penstock.spark.rows import Layout, Refused, new_jobs, payload_columns, placements, rows_of
from penstock.spark.schemas import quoted

__all__ = ["SNAPSHOT", "fingerprint", "fingerprint_in", "former_fingerprint", "snapshot"]

# Fingerprints of earlier versions have none.
_MARK: Final = "v2-"
_LENGTH: Final = len(_MARK) + 32

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
        # The fingerprint as earlier versions made it; null unless asked for.
        StructField("former", _TEXT),
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
        ("former", pa.string()),
    ]
)
# A key that cannot be encoded is reported, and shown as text.
_encode = msgspec.json.Encoder(enc_hook=repr).encode


def fingerprint(canonical: bytes, version: str) -> str:
    """Return what a result is a result of: the canonical form of its row, and the version of the task."""
    return f"{_MARK}{former_fingerprint(canonical, version)}"


def former_fingerprint(payload: bytes, version: str) -> str:
    """Return the fingerprint as earlier versions made it: of the payload, with the columns in the table's order."""
    return blake2b(
        payload, digest_size=16, person=blake2b(version.encode(), digest_size=16).digest()
    ).hexdigest()


def fingerprint_in(write_id: str) -> str | None:
    """Return the fingerprint that a ``write_id`` begins with, or ``None`` if ``process`` did not make it."""
    return write_id[:_LENGTH] if write_id.startswith(_MARK) and len(write_id) >= _LENGTH else None


def snapshot(df: DataFrame, layout: Layout, *, with_former: bool = False) -> DataFrame:
    """Return the rows of ``df`` as ``SNAPSHOT``; ``with_former``, also with the fingerprints of earlier versions. Write
    it to a file before use: ``df`` may differ when it is read again."""
    needed = tuple(dict.fromkeys((*layout.key, *layout.payload, *layout.placement.values())))
    # Spark hands no column to Python whose name has a dot or a backtick.
    columns = [F.col(quoted(name)).alias(f"c{number}") for number, name in enumerate(needed)]
    return df.select(*columns).mapInArrow(_taker(layout, needed, with_former=with_former), SNAPSHOT)


def _taker(
    layout: Layout, names: tuple[str, ...], *, with_former: bool
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def take(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for plain in batches:
            batch = pa.RecordBatch.from_arrays(plain.columns, names=list(names))
            canonical = canonical_maker(
                layout.payload, [batch.schema.field(name).type for name in layout.payload]
            )
            row = _row_maker(layout, canonical, with_former=with_former)
            values = payload_columns(batch, layout)
            rows = zip(
                new_jobs(batch, layout, values),
                rows_of(values, batch.num_rows),
                _texts(batch, layout.key),
                placements(batch, layout),
                strict=True,
            )
            columns = list(zip(*(row(*given) for given in rows), strict=True))
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


def _row_maker(
    layout: Layout, canonical: Callable[[Sequence[Any]], bytes], *, with_former: bool
) -> Callable[[NewJob | Refused, tuple[Any, ...], str, dict[str, Any]], tuple[Any, ...]]:
    version = layout.options.version

    def row(
        job: NewJob | Refused, values: tuple[Any, ...], key: str, given: dict[str, Any]
    ) -> tuple[Any, ...]:
        if isinstance(job, Refused):
            return job.id or None, "", None, None, key, f"{job.key}: {job.why}", not job.id, None
        placement = _encode(given).decode() if given else None
        made = fingerprint(canonical(values), version)
        former = former_fingerprint(job.payload, version) if with_former else None
        return job.id, made, job.payload, placement, key, None, False, former

    return row
