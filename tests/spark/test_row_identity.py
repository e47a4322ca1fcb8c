"""What makes a row another one, and what does not: rows that stay the same are not paid for again."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from penstock.spark.processing.snapshot import fingerprint_in, former_fingerprint
from tests.spark.test_process import do, load_tasks


@pytest.fixture
def tasks(file_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_tasks(file_url, tmp_path, monkeypatch)


def test_neither_order_nor_width_nor_a_null_column_makes_a_row_another_one(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "counts"
    df = spark.sql("SELECT id AS k, int(id) AS a, named_struct('x', 1, 'y', 'z') AS b FROM range(2)")
    assert do(df, tasks.count, output).completed == 2
    moved = df.selectExpr(
        "named_struct('y', b.y, 'n', NULL, 'x', 1L) AS b", "NULL AS new", "bigint(a) AS a", "k"
    )
    assert do(moved, tasks.count, output, key="k", dry_run=True).plan.done == 2
    changed = df.selectExpr("k", "a + 1 AS a", "b")
    assert do(changed, tasks.count, output, dry_run=True).plan.changed == 2


def as_before(output: Path) -> None:
    """Rewrite an output as an earlier version left it: fingerprints of payloads in the table's order."""
    (file,) = output.glob("*.parquet")
    table = pq.read_table(file)
    former = [
        former_fingerprint(msgspec.json.encode({"row": {"k": k, "b": 2 * k, "a": "x"}}), "")
        for k in table.column("k").to_pylist()
    ]
    names = [name.removeprefix("penstock_") for name in table.column_names]
    table = table.rename_columns(names)
    table = table.set_column(names.index("fingerprint"), "fingerprint", pa.array(former))
    pq.write_table(table, file, use_deprecated_int96_timestamps=True)
    Path(file.parent, f".{file.name}.crc").unlink(missing_ok=True)


def test_rows_that_an_earlier_version_has_done_are_not_paid_for_again(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = tmp_path / "counts"
    df = spark.sql("SELECT id AS k, 2 * id AS b, 'x' AS a FROM range(3)")
    assert do(df, tasks.count, output).completed == 3
    as_before(output)
    more = spark.sql("SELECT id AS k, 2 * id AS b, 'x' AS a FROM range(4)")
    assert do(more, tasks.count, output).plan.done == 3
    assert do(more, tasks.count, output).plan.done == 4
    changed = spark.sql("SELECT id AS k, 3 * id AS b, 'x' AS a FROM range(4)")
    assert do(changed, tasks.count, output, dry_run=True).plan.changed == 3


def test_a_fingerprint_is_read_from_the_write_id_that_process_made() -> None:
    made = f"v2-{'0' * 32}"
    assert fingerprint_in(made) == fingerprint_in(f"{made}-run") == made
    assert fingerprint_in("0" * 32) is fingerprint_in("v2-short") is None
