"""The input of a run, read once: rows that the index knows are counted, the others are taken as a snapshot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Final, TypeAlias

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F

from penstock.spark.rows import Layout
from penstock.spark.schemas import quoted
from penstock.spark.tables.ledger import Ledger
from penstock.spark.tables.rowhash import row_hashes
from penstock.spark.tables.settled import COMPLETED, FAILED, Settled
from penstock.spark.tables.snapshot import SNAPSHOT, needed_columns, snapshot

__all__ = ["Intake", "Taken", "written"]

# The most rows, and bytes of them, that this process plans by itself: Spark would take longer to begin.
_FEW: Final = 1000
_FEW_BYTES: Final = 8 << 20
# A larger index is not sent to every executor: Spark decides how to join it.
_MOST_BROADCAST: Final = 2_000_000
_OTHER: Final = 0

# By kind and bucket.
_Bitmaps: TypeAlias = dict[int, dict[int, int]]


class Taken:
    """The rows of an input. ``done`` and ``failed`` keys are settled, with ``duplicate`` more rows of the same keys;
    ``rows`` are all others as a snapshot, and ``few`` is the same if there are only few of them."""

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
        """Tell whether one of the entries of the index was found in the input."""
        asked = _bitmaps(entries.withColumn("kind", F.lit(_OTHER)))[0].get(_OTHER, {})
        return any(
            bits & known.get(bucket, 0) for known in self._known.values() for bucket, bits in asked.items()
        )


class Intake:
    """Takes the rows of ``df`` for one run, which keeps its files in ``folder``."""

    def __init__(self, df: DataFrame, layout: Layout, ledger: Ledger, folder: str) -> None:
        self._df = df
        self._layout = layout
        self._ledger = ledger
        self._folder = folder
        self._hashes = row_hashes(df.schema, layout)

    @cached_property
    def index(self) -> Settled | None:
        """The index of the output; ``None`` if the output or the table cannot have one."""
        if self._hashes is None or not self._ledger.has_index:
            return None
        index = Settled(self._df.sparkSession, self._ledger.output, self._ledger.files)
        return index if index.is_possible else None

    @cached_property
    def entries(self) -> DataFrame | None:
        """The entries of the index that hold."""
        if self.index is None or not self.index.contents.keys:
            return None
        newer = self._ledger.ends(self.index.newer) if self.index.newer else None
        return self.index.read(newer)

    def take(self, *, retry_failed: bool) -> Taken:
        """Return the rows; those that failed are not settled if they are to be run again."""
        entries, index = self.entries, self.index
        if entries is None or index is None or self._hashes is None:
            return self.take_all()
        settled = entries if not retry_failed else entries.where(F.col("settled") == COMPLETED)
        known = settled.select("first", F.col("second").alias("was"), "settled", "position")
        if index.contents.keys <= _MOST_BROADCAST:
            known = F.broadcast(known)
        marked = written(self._marked(self._hashes, known), f"{self._folder}/marked")
        bitmaps, counts = _bitmaps(marked)
        rest = marked.where(F.col("kind") == _OTHER).select("row.*", "first", "second")
        fresh = self._snapshot(rest, (F.col("first"), F.col("second")))
        count = counts.pop(_OTHER, 0)
        bitmaps.pop(_OTHER, None)
        few = fresh.toArrow() if count <= _FEW else None
        rows = written(fresh, f"{self._folder}/input") if few is None else self._frame(few)
        return Taken(rows, _small(few), count=count, known=bitmaps, settled_rows=sum(counts.values()))

    def take_all(self) -> Taken:
        """Return all rows, without a look at the index."""
        seen = Observation()
        fresh = self._snapshot(self._df, self._hashes).observe(seen, F.count(F.lit(1)).alias("count"))
        rows = written(fresh, f"{self._folder}/input")
        count = int(seen.get["count"])
        few = rows.toArrow() if count <= _FEW else None
        return Taken(rows if few is None else self._frame(few), _small(few), count=count)

    def _snapshot(self, df: DataFrame, hashes: Sequence[Column] | None) -> DataFrame:
        former = self._ledger.has_former_fingerprints()
        return snapshot(df, self._layout, with_former=former, hashes=hashes)

    def _frame(self, few: pa.Table) -> DataFrame:
        return self._df.sparkSession.createDataFrame(few, SNAPSHOT)

    def _marked(self, hashes: Sequence[Column], known: DataFrame) -> DataFrame:
        """The rows with ``kind``: how they are settled, by the entry at ``position``. Only those that are not have
        their columns."""
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


def written(rows: DataFrame, path: str) -> DataFrame:
    """The same rows, from a file: whatever they come from, they stay what they are."""
    rows.write.mode("overwrite").parquet(path)
    return rows.sparkSession.read.schema(rows.schema).parquet(path)


def _small(few: pa.Table | None) -> pa.Table | None:
    return few if few is not None and few.nbytes <= _FEW_BYTES else None


def _bitmaps(rows: DataFrame) -> tuple[_Bitmaps, dict[int, int]]:
    """Return which positions there are of each ``kind``, as bitmaps by bucket, and how many rows. Counting them apart
    would have Spark sort all rows; bitmaps are small."""
    place = F.coalesce(F.col("position"), F.lit(0))
    found = (
        rows.groupBy("kind", F.bitmap_bucket_number(place).alias("bucket"))
        .agg(
            F.bitmap_construct_agg(F.bitmap_bit_position(place)).alias("bits"),
            F.count(F.lit(1)).alias("rows"),
        )
        .collect()
    )
    bitmaps: _Bitmaps = defaultdict(dict)
    counts: dict[int, int] = defaultdict(int)
    for row in found:
        bitmaps[row["kind"]][row["bucket"]] = int.from_bytes(row["bits"])
        counts[row["kind"]] += row["rows"]
    return dict(bitmaps), dict(counts)


def _ones(bitmap: dict[int, int]) -> int:
    return sum(bits.bit_count() for bits in bitmap.values())
