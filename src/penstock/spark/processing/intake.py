"""The intake of a run: it reads the input once, counts the rows that the index knows to be settled, and takes a
snapshot of the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final, TypeAlias

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F

from penstock.spark.processing.ledger import Ledger
from penstock.spark.processing.settled import COMPLETED, FAILED, SettledIndex, row_hashes
from penstock.spark.processing.snapshot import SNAPSHOT, needed_columns, snapshot
from penstock.spark.rows import Layout
from penstock.spark.schemas import quoted

# Up to this many rows and bytes, this process plans without Spark, which would take longer to start.
_FEW: Final = 1000
_FEW_BYTES: Final = 8 << 20
# For a larger index, Spark chooses the join.
_MAX_BROADCAST: Final = 2_000_000
_OTHER: Final = 0
_BUCKET_BITS: Final = 32_768

# Bitmaps by kind and bucket.
_Bitmaps: TypeAlias = dict[int, dict[int, int]]


class IntakeRows:
    """The rows of an input. ``done`` and ``failed`` count settled keys, ``duplicate`` further rows of these keys.
    ``rows`` is a snapshot of all other rows. ``few`` has the same rows as an Arrow table if that is small."""

    def __init__(
        self,
        rows: DataFrame,
        few: pa.Table | None,
        *,
        count: int,
        known: _Bitmaps | None = None,
        settled_rows: int = 0,
    ) -> None:
        self.rows = rows
        self.few = few
        self.count = count
        self._known = known or {}
        self.done = _ones(self._known.get(COMPLETED, {}))
        self.failed = _ones(self._known.get(FAILED, {}))
        self.duplicate = settled_rows - self.done - self.failed

    def has_settled(self, entries: DataFrame) -> bool:
        """Return whether the input has one of these entries of the index."""
        entry_bits = _bitmaps(entries.withColumn("kind", F.lit(_OTHER)))[0].get(_OTHER, {})
        return any(
            bits & known.get(bucket, 0)
            for known in self._known.values()
            for bucket, bits in entry_bits.items()
        )


class Intake:
    """Reads the rows of ``df`` for one run, with temporary files in ``folder``. With ``expects_few``, the rows are
    probably few, although the index may be large."""

    def __init__(
        self, df: DataFrame, layout: Layout, ledger: Ledger, folder: str, *, expects_few: bool = False
    ) -> None:
        self._expects_few = expects_few
        self._df = df
        self._layout = layout
        self._ledger = ledger
        self._folder = folder
        self._hashes = row_hashes(df.schema, layout)

    @cached_property
    def index(self) -> SettledIndex | None:
        """Return the index of the output; ``None`` if the output or the input does not support one."""
        if self._hashes is None or not self._ledger.has_index:
            return None
        index = SettledIndex(self._df.sparkSession, self._ledger.output, self._ledger.files)
        return index if index.is_possible else None

    @cached_property
    def entries(self) -> DataFrame | None:
        """Return the valid entries of the index."""
        if self.index is None or not self.index.contents.keys:
            return None
        newer = self._ledger.outcomes(self.index.newer) if self.index.newer else None
        return self.index.read(newer)

    def take(self, *, retry_failed: bool) -> IntakeRows:
        """Return the rows. With ``retry_failed``, failed rows do not count as settled."""
        entries, index = self.entries, self.index
        if entries is None or index is None or self._hashes is None:
            return self.take_all()
        settled = entries if not retry_failed else entries.where(F.col("settled") == COMPLETED)
        if self._expects_few and (taken := self._take_few(settled)) is not None:
            return taken
        known = settled.select("first", F.col("second").alias("was"), "settled", "position")
        if index.contents.keys <= _MAX_BROADCAST:
            known = F.broadcast(known)
        marked = materialize(self._marked(self._hashes, known), f"{self._folder}/marked")
        bitmaps, counts = _bitmaps(marked)
        rest = marked.where(F.col("kind") == _OTHER).select("row.*", "first", "second")
        fresh = self._snapshot(rest, (F.col("first"), F.col("second")))
        count = counts.pop(_OTHER, 0)
        bitmaps.pop(_OTHER, None)
        few = fresh.toArrow() if count <= _FEW else None
        rows = materialize(fresh, f"{self._folder}/input") if few is None else self._frame(few)
        return IntakeRows(rows, _small(few), count=count, known=bitmaps, settled_rows=sum(counts.values()))

    def _take_few(self, settled: DataFrame) -> IntakeRows | None:
        """Look the rows up in the index and return them; return ``None`` if there are many rows. The join in ``take``
        would load the whole index for a few rows."""
        few = self._snapshot(self._df, self._hashes).limit(_FEW + 1).toArrow()
        if few.num_rows > _FEW:
            return None
        firsts = self._df.sparkSession.createDataFrame(few.select(["first"])).distinct()
        entries = settled.join(F.broadcast(firsts), "first", "left_semi").collect()
        by_hashes = {(row["first"], row["second"]): row for row in entries}
        found = [by_hashes.get(hashes) for hashes in _pairs(few, "first", "second")]
        hits = [row for row in found if row is not None]
        known = {
            kind: _bitmaps_of(row["position"] for row in hits if row["settled"] == kind)
            for kind in {row["settled"] for row in hits}
        }
        rest = few.filter(pa.array([row is None for row in found], pa.bool_()))
        return IntakeRows(
            self._frame(rest), _small(rest), count=rest.num_rows, known=known, settled_rows=len(hits)
        )

    def take_all(self) -> IntakeRows:
        """Return all rows, without using the index."""
        seen = Observation()
        fresh = self._snapshot(self._df, self._hashes).observe(seen, F.count(F.lit(1)).alias("count"))
        rows = materialize(fresh, f"{self._folder}/input")
        count = int(seen.get["count"])
        few = rows.toArrow() if count <= _FEW else None
        return IntakeRows(rows if few is None else self._frame(few), _small(few), count=count)

    def _snapshot(self, df: DataFrame, hashes: Sequence[Column] | None) -> DataFrame:
        former = self._ledger.has_former_fingerprints()
        return snapshot(df, self._layout, with_former=former, hashes=hashes)

    def _frame(self, few: pa.Table) -> DataFrame:
        return self._df.sparkSession.createDataFrame(few, SNAPSHOT)

    def _marked(self, hashes: Sequence[Column], known: DataFrame) -> DataFrame:
        """Return the rows with ``kind``, which says how the index entry at ``position`` settles them. The other columns
        of settled rows are null."""
        first, second = hashes
        columns = [F.col(quoted(name)) for name in needed_columns(self._layout)]
        hashed = self._df.select(
            F.struct(*columns).alias("row"), first.alias("first"), second.alias("second")
        )
        joined = hashed.join(known, "first", "left")
        is_known = F.col("second").eqNullSafe(F.col("was"))
        kind = F.when(is_known, F.col("settled")).otherwise(F.lit(_OTHER)).cast("tinyint")
        hidden = [F.when(~is_known, F.col(name)).alias(name) for name in ("row", "first", "second")]
        return joined.select(
            kind.alias("kind"), F.when(is_known, F.col("position")).alias("position"), *hidden
        )


def materialize(rows: DataFrame, path: str) -> DataFrame:
    """Write the rows to a file and return them from there, so that they cannot change."""
    rows.write.mode("overwrite").parquet(path)
    return rows.sparkSession.read.schema(rows.schema).parquet(path)


def _small(few: pa.Table | None) -> pa.Table | None:
    return few if few is not None and few.nbytes <= _FEW_BYTES else None


def _bitmaps(rows: DataFrame) -> tuple[_Bitmaps, dict[int, int]]:
    """Return the positions of each ``kind`` as bitmaps by bucket, and the number of rows. A distinct count would make
    Spark sort all rows; bitmaps are small."""
    place = F.coalesce(F.col("position"), F.lit(0))
    buckets = (
        rows.groupBy("kind", F.bitmap_bucket_number(place).alias("bucket"))
        .agg(
            F.bitmap_construct_agg(F.bitmap_bit_position(place)).alias("bits"),
            F.count(F.lit(1)).alias("rows"),
        )
        .collect()
    )
    bitmaps: _Bitmaps = defaultdict(dict)
    counts: dict[int, int] = defaultdict(int)
    for row in buckets:
        bitmaps[row["kind"]][row["bucket"]] = int.from_bytes(row["bits"])
        counts[row["kind"]] += row["rows"]
    return dict(bitmaps), dict(counts)


def _bitmaps_of(positions: Iterable[int]) -> dict[int, int]:
    """Return positions as bitmaps by bucket, as ``_bitmaps`` does."""
    bitmaps: dict[int, int] = defaultdict(int)
    for position in positions:
        # Spark counts positions from 1.
        bucket, bit = divmod(position - 1, _BUCKET_BITS) if position else (-1, 0)
        byte = _BUCKET_BITS // 8 - 1 - bit // 8
        bitmaps[bucket + 1] |= 1 << (8 * byte + bit % 8)
    return dict(bitmaps)


def _pairs(table: pa.Table, *names: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(table.column(name).to_pylist() for name in names), strict=True)


def _ones(bitmap: dict[int, int]) -> int:
    return sum(bits.bit_count() for bits in bitmap.values())
