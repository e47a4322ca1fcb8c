"""A snapshot of a run's input: every row with the id of its job, its payload and its fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyspark.sql.types as T
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from penstock.core.job import EMPTY_EXTRAS, NewJob
from penstock.spark.cells import arrow_schema, canonical_maker, column_values
from penstock.spark.rows import Layout, Refused, new_jobs, payload_columns, placements, rows_of
from penstock.spark.schemas import quoted

# The version of the fingerprint algorithm. The first version had no prefix.
FINGERPRINTS: Final = "v2-"
_LENGTH: Final = len(FINGERPRINTS) + 32

_TEXT: Final = T.StringType()
SNAPSHOT: Final = T.StructType(
    [
        T.StructField("job_id", _TEXT),
        T.StructField("fingerprint", _TEXT),
        T.StructField("payload", T.BinaryType()),
        T.StructField("placement", _TEXT),
        T.StructField("key_json", _TEXT),
        T.StructField("refused", _TEXT),
        T.StructField("bad_key", T.BooleanType()),
        # The fingerprint as earlier versions computed it, if requested.
        T.StructField("former", _TEXT),
        # The hashes that Spark computed (``row_hashes``); null if it cannot.
        T.StructField("first", T.LongType()),
        T.StructField("second", T.LongType()),
    ]
)
_ARROW: Final = arrow_schema(SNAPSHOT)
# A key that cannot be encoded is shown as text in the error.
_encode = msgspec.json.Encoder(enc_hook=repr).encode


def fingerprint(canonical: bytes, version: str) -> str:
    """Return the fingerprint of a row: a hash of its canonical form and the version of the task."""
    return f"{FINGERPRINTS}{former_fingerprint(canonical, version)}"


def former_fingerprint(payload: bytes, version: str) -> str:
    """Return the fingerprint as earlier versions computed it: of the payload, in the column order of the table."""
    return blake2b(
        payload, digest_size=16, person=blake2b(version.encode(), digest_size=16).digest()
    ).hexdigest()


def fingerprint_in(write_id: str) -> str | None:
    """Return the fingerprint that a ``write_id`` begins with, or ``None`` if ``process`` did not make it."""
    return write_id[:_LENGTH] if write_id.startswith(FINGERPRINTS) and len(write_id) >= _LENGTH else None


def needed_columns(layout: Layout) -> tuple[str, ...]:
    """Return the names of the columns that a snapshot needs."""
    return tuple(dict.fromkeys((*layout.key, *layout.payload, *layout.placement.values())))


def snapshot(
    df: DataFrame, layout: Layout, *, with_former: bool = False, hashes: Sequence[Column] | None = None
) -> DataFrame:
    """Return the rows of ``df`` as ``SNAPSHOT``. ``with_former`` adds the fingerprints of earlier versions. Write the
    snapshot to a file before use, because ``df`` may differ when it is read again."""
    needed = needed_columns(layout)
    # Spark cannot pass a column to Python if its name has a dot or a backtick.
    columns = [F.col(quoted(name)).alias(f"c{number}") for number, name in enumerate(needed)]
    first, second = hashes or (F.lit(None).cast("long"),) * 2
    return df.select(*columns, first.alias("first"), second.alias("second")).mapInArrow(
        _mapper(layout, needed, with_former=with_former), SNAPSHOT
    )


def _mapper(
    layout: Layout, names: tuple[str, ...], *, with_former: bool
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def take(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for plain in batches:
            *values, first, second = plain.columns
            batch = pa.RecordBatch.from_arrays(values, names=list(names))
            canonical = canonical_maker(
                layout.payload, [batch.schema.field(name).type for name in layout.payload]
            )
            row = _row_maker(layout, canonical, with_former=with_former)
            payload = payload_columns(batch, layout)
            rows = zip(
                new_jobs(batch, layout, payload),
                rows_of(payload, batch.num_rows),
                _texts(batch, layout.key),
                placements(batch, layout),
                strict=True,
            )
            columns = list(zip(*(row(*fields) for fields in rows), strict=True))
            made = list(_ARROW)[:-2]
            arrays = [pa.array(cells, type=field.type) for cells, field in zip(columns, made, strict=False)]
            if arrays:
                yield pa.RecordBatch.from_arrays([*arrays, first, second], schema=_ARROW)

    return take


def _texts(batch: pa.RecordBatch, columns: tuple[str, ...]) -> Iterator[str]:
    """Yield the columns of each row as a JSON object."""
    values = zip(*(column_values(batch.column(name)) for name in columns), strict=True)
    return (_encode(dict(zip(columns, row, strict=True))).decode() for row in values)


def _options_of(job: NewJob) -> dict[str, Any]:
    """Return the options of a job that its columns and the rules of its task have set."""
    extras = job.extras or EMPTY_EXTRAS
    options: dict[str, Any] = {
        "group": extras.group,
        "cost": extras.cost if extras.cost != 1 else None,
        "priority": job.priority,
        "delay": job.delay_ms / 1000,
        "ttl": job.ttl_ms / 1000,
    }
    return {name: value for name, value in options.items() if value or (name == "cost" and value is not None)}


def _row_maker(
    layout: Layout, canonical: Callable[[Sequence[Any]], bytes], *, with_former: bool
) -> Callable[[NewJob | Refused, tuple[Any, ...], str, dict[str, Any]], tuple[Any, ...]]:
    version = layout.options.version

    def row(
        job: NewJob | Refused, values: tuple[Any, ...], key: str, options: dict[str, Any]
    ) -> tuple[Any, ...]:
        if isinstance(job, Refused):
            return job.id or None, "", None, None, key, f"{job.key}: {job.why}", not job.id, None
        if layout.rules is not None or layout.fields:
            options = _options_of(job)
        placement = _encode(options).decode() if options else None
        made = fingerprint(canonical(values), version)
        former = former_fingerprint(job.payload, version) if with_former else None
        return job.id, made, job.payload, placement, key, None, False, former

    return row
