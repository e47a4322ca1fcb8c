"""Every type of Spark: into the task and back into the result, or refused before anything is enqueued."""

from __future__ import annotations

import importlib
import json
import re
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DoubleType,
    MapType,
    StringType,
    StructField,
    StructType,
    UserDefinedType,
)

import penstock.spark as ps
from penstock.errors import InvalidInput
from penstock.spark.cells import column_values
from penstock.spark.columntypes import KINDS, check_columns
from penstock.spark.processing.inputs import as_dataframe
from penstock.spark.processing.snapshot import snapshot
from penstock.spark.processing.types import hinted_types, value_type
from penstock.spark.rows import Layout
from tests.spark import type_tasks
from tests.spark.arrowdata import DURATIONS, JSON, TIMES_OF_DAY, columns, drawn, values_of

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


INSTANT, LOCAL = pa.timestamp("us", "UTC"), pa.timestamp("us")
MEMBER = pa.struct([("cents", pa.decimal128(10, 2)), ("at", INSTANT)])
SENT = pa.struct(
    {
        "yes": pa.bool_(),
        "small": pa.int8(),
        "big": pa.int64(),
        "single": pa.float32(),
        "double": pa.float64(),
        "cents": pa.decimal128(10, 2),
        "whole": pa.decimal128(20, 0),
        "fine": pa.decimal128(38, 18),
        "text": pa.string(),
        "raw": pa.binary(),
        "day": pa.date32(),
        "at": INSTANT,
        "local": LOCAL,
        "members": pa.list_(MEMBER),
        "by_day": pa.map_(pa.date32(), pa.decimal128(10, 2)),
    }
)
TEXTS = pa.struct({"clock": pa.time64("us"), "lasting": pa.duration("us"), "free": pa.string()})
ROWS = st.tuples(
    values_of(SENT).filter(bool),
    st.fixed_dictionaries(
        {"clock": st.none() | TIMES_OF_DAY, "lasting": st.none() | DURATIONS, "free": JSON.map(json.dumps)}
    ),
).map(lambda parts: parts[0] | parts[1])


@pytest.mark.timeout(300)
def test_generated_rows_go_through_a_task_and_back_into_the_result(
    spark: SparkSession, tasks: ModuleType, tmp_path: Path
) -> None:
    rows = drawn(ROWS, 300)
    kinds = pa.schema([("k", pa.int64()), *SENT, *TEXTS])
    table = pa.Table.from_pylist([{"k": k, **row} for k, row in enumerate(rows)], schema=kinds)
    df = as_dataframe(table, spark).selectExpr(
        "* EXCEPT (free)", "parse_json(free) AS free", "NULL AS nothing"
    )
    output = tmp_path / "echoes"
    done = ps.process(df, tasks.generated, key="k", output=output, workers=1, progress="none")
    assert (done.completed, done.failed, done.rejected) == (len(rows), 0, 0)
    found = pq.read_table(output).sort_by("k").column("penstock_value").to_pylist()
    for row, back in zip(rows, found, strict=True):
        assert json.loads(back.pop("free")) == json.loads(row.pop("free"))
        assert msgspec.convert(back.pop("clock"), time | None) == row.pop("clock")
        assert msgspec.convert(back.pop("lasting"), timedelta | None) == row.pop("lasting")
        assert back.pop("nothing") is None
        local = row.pop("local")
        assert back.pop("local") == (local and local.replace(tzinfo=UTC))
        (sent,) = pa.array([row], type=SENT).to_pylist()
        assert back == {name: sent[name] for name in back}


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


class Point(UserDefinedType):
    @classmethod
    def sqlType(cls) -> DataType:  # noqa: N802
        return ArrayType(DoubleType())

    def simpleString(self) -> str:  # noqa: N802
        return "point"


@pytest.mark.parametrize(
    ("type", "path"),
    [
        (Point(), "x"),
        (ArrayType(Point()), r"x\[\]"),
        (StructType([StructField("at", MapType(StringType(), Point()))]), r"x\.at\{\}"),
    ],
)
def test_a_type_that_users_define_is_refused_at_any_depth(type: DataType, path: str) -> None:
    with pytest.raises(InvalidInput, match=rf"column '{path}' has type point, which a job cannot hold"):
        check_columns(StructType([StructField("x", type)]), ["x"])
    with pytest.raises(InvalidInput, match="has type point"):
        check_columns(StructType([StructField("x", type)]), [], key=["x"])


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


HINTS: Any = {
    "boolean": bool,
    "tinyint, smallint, int, bigint": int,
    "float, double": float,
    "decimal": Decimal,
    "string, char, varchar": str,
    "date": date,
    "timestamp, timestamp_ntz": datetime,
    "time": time,
    "interval day to second": timedelta,
    "binary": bytes,
    "array": list[int],
    "struct": type_tasks.Inner,
    "map": dict[str, int],
    "variant": Any,
    "void": None,
}


def test_the_documented_table_of_types_is_the_one_in_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
    section = page[page.index("### Types") : page.index("### Changed rows")]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:2] == "| "
    ]
    documented = {name: (key, result) for name, _, _, key, result in rows[1:]}
    assert documented.keys() == HINTS.keys() == {kind.name for kind in KINDS}
    for kind in KINDS:
        key, result = documented[kind.name]
        assert key == ("yes" if kind.is_key else "no"), kind.name
        column = value_type(HINTS[kind.name])
        said = re.split("[,;:] ", result)[0]
        assert said == ("none" if column is None else column.simpleString().partition("<")[0]), kind.name


def test_text_for_a_parameter_that_takes_bytes_stays_base64() -> None:
    @type_tasks.app.task(queue="types", name="take_bytes")
    def take(raw: bytes, n: int) -> None: ...

    assert list(hinted_types(take, ["raw", "n"])) == ["n"]
