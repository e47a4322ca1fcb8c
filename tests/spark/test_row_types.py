"""Every type of Spark: into the task and back into the result, or refused before anything is enqueued."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

import penstock.spark as ps
from penstock.errors import InvalidInput
from penstock.spark.cells import column_values
from penstock.spark.columntypes import KINDS, check_columns
from penstock.spark.processing.snapshot import snapshot
from penstock.spark.processing.types import hinted_types
from penstock.spark.rows import Layout
from tests.spark import type_tasks
from tests.spark.arrowdata import columns

# Spark parses the types that tests write down.
pytestmark = pytest.mark.usefixtures("spark")


@pytest.fixture
def tasks(file_url: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("PENSTOCK_TABLES_URL", file_url)
    return importlib.reload(type_tasks)


EVERYTHING = """
SELECT 1L AS k, true AS yes, 7Y AS tiny, float(0.1) AS single, 1.5D AS double, 12.345678901234567890BD AS exact,
  'größe' AS text, CAST('ab' AS char(4)) AS short, X'00FF' AS raw, DATE'1812-06-24' AS day,
  TIMESTAMP'2026-03-01 12:00:00.123456Z' AS at,
  array(named_struct('a', 1, 'b', array(0.5D, NULL)), NULL) AS many, map('x', 2.5D) AS named,
  map(7, map('d', DATE'2026-01-02')) AS numbered, NULL AS nothing, parse_json('{"v": [1, "x"]}') AS free,
  INTERVAL '1 02:03:04.5' DAY TO SECOND AS lasting
"""


def test_every_type_reaches_the_task_and_comes_back_in_the_result(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = str(tmp_path / "echoes")
    df = spark.sql(EVERYTHING)
    done = ps.process(df, tasks.echo, key="k", output=output, workers=1, progress="none")
    (row,) = spark.read.parquet(output).collect()
    assert (done.completed, row["penstock_error"]) == (1, None)
    (sent,) = df.drop("free", "lasting").collect()
    back = row["penstock_value"].asDict(recursive=True)
    assert back.pop("lasting") == "P1DT7384.5S"
    assert back == sent.asDict(recursive=True)


def test_a_map_column_fits_a_parameter_that_takes_a_dict(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    output = str(tmp_path / "maps")
    df = spark.sql("SELECT id AS k, map('a', id / 2) AS m FROM range(2)")
    assert ps.process(df, tasks.named, key="k", output=output, workers=1, progress="none").completed == 2
    rows = spark.read.parquet(output).orderBy("k").collect()
    assert [row["penstock_value"] for row in rows] == [{"a": 0.0}, {"a": 0.5}]


@settings(max_examples=2, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.lists(columns(), min_size=8, max_size=8))
def test_columns_of_any_type_are_the_same_payload_by_way_of_spark(
    spark: SparkSession, made: list[pa.Array]
) -> None:
    size = len(made[0])
    names = [f"c{number}" for number in range(len(made))]
    table = pa.table([pa.array(range(size)), *made], names=["k", *names])
    layout = Layout(namespace="", task="t", key=("k",), payload=tuple(names))
    # Spark takes an Arrow timestamp without a zone for one of its own zone, unless told otherwise.
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        df = spark.createDataFrame(table)
    finally:
        spark.conf.unset("spark.sql.timestampType")
    found = snapshot(df, layout).orderBy("key_json").collect()
    expected = zip(*(column_values(column) for column in made), strict=True)
    for row, values in zip(found, expected, strict=True):
        payload = msgspec.json.encode(dict(zip(names, values, strict=True)))
        assert (row["refused"], row["payload"]) == (None, bytearray(payload))


def schema(ddl: str) -> StructType:
    made = StructType.fromDDL(ddl)
    assert isinstance(made, StructType)
    return made


@pytest.mark.parametrize(
    ("ddl", "said"),
    [
        (
            "x interval year to month",
            r"column 'x' has type interval year to month, which a job cannot hold",
        ),
        ("x struct<a: array<interval month>>", r"column 'x.a\[\]' has type interval month"),
        ("x map<string, interval year>", r"column 'x\{\}' has type interval year"),
        ("x map<boolean, int>", r"column 'x \(keys\)' has type boolean, which cannot be a key in JSON"),
        ("x map<struct<a: int>, int>", r"column 'x \(keys\)' has type struct<a:int>"),
        ("x struct<a: int, a: int>", r"column 'x' has type struct<a:int,a:int>, with two members"),
        ("x int, X int", r"2 columns named 'x', 'X'"),
    ],
)
def test_a_type_that_no_job_can_hold_is_refused_by_its_path_and_name(ddl: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        check_columns(schema(ddl), ["x"], ignore_case=True)


def test_columns_that_differ_in_case_are_fine_where_spark_tells_them_apart() -> None:
    check_columns(schema("x int, X int"), ["x", "X"])


@pytest.mark.parametrize(
    ("type", "part"),
    [
        ("map<string, int>", "'x' has type map"),
        ("interval day", "'x' has type interval day"),
        ("void", "'x' has type void"),
        ("variant", "'x' has type variant"),
        ("struct<a: array<variant>>", r"'x\.a\[\]' has type variant"),
    ],
)
def test_a_key_that_cannot_identify_a_row_is_refused_by_its_type(type: str, part: str) -> None:
    with pytest.raises(InvalidInput, match=f"key column {part}.*which cannot identify a row"):
        check_columns(schema(f"x {type}"), [], key=["x"])


def test_a_month_interval_is_refused_before_anything_is_enqueued(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    df = spark.sql("SELECT 1L AS k, INTERVAL '3' MONTH AS m")
    with pytest.raises(InvalidInput, match=r"column 'm\[\]' has type interval month"):
        ps.process(df.selectExpr("k", "array(m) AS m"), tasks.echo, key="k", output=str(tmp_path / "out"))
    options: dict[str, Any] = {"url": tasks.app.url, "queue": "types", "keyColumns": "k"}
    writer = df.write.format("penstock").mode("append").options(**options)
    with pytest.raises(Exception, match="column 'm' has type interval month"):
        writer.save()


def test_the_documented_table_of_types_is_the_one_in_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    for kind in KINDS:
        assert kind.name in rows, f"docs/spark.md does not list {kind.name}"


def test_text_for_a_parameter_that_takes_bytes_stays_base64() -> None:
    @type_tasks.app.task(queue="types", name="take_bytes")
    def take(raw: bytes, n: int) -> None: ...

    assert list(hinted_types(take, ["raw", "n"])) == ["n"]
