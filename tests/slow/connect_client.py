"""A client of Spark Connect, in a process of its own: Python's Spark is classic or a client, for good.

What it has found is in ``found.json`` of the directory it is given.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import penstock.spark as ps
from penstock.cli.main import run
from penstock.spark.local import find_java
from tests.slow.spark_tasks import app, cube
from tests.spark.quick import QUICK


def main(directory: Path) -> dict[str, Any]:
    spark = _connected()
    assert ps.session() is spark
    table = spark.range(20).selectExpr("id AS n")
    options = {"url": app.url, "queue": "written", "keyColumns": "n"}
    table.write.format("penstock").options(**options).option("writeId", "save").mode("append").save()
    written = spark.read.format("penstock").options(url=app.url, queue="written").load()
    given: dict[str, Any] = {"key": "n", "output": directory / "cubes", "fleet": "spark", "progress": "none"}
    runs = [ps.process(spark.range(count).selectExpr("id AS n"), cube, **given) for count in (10, 15)]
    rows = ps.latest(spark.read.parquet(str(directory / "cubes"))).select("n", "penstock_value").collect()
    archived = ps.archive(spark, app.url, "rows", directory / "archive", older_than=0)
    found = {
        "classic": hasattr(spark, "sparkContext") or hasattr(spark, "_jvm"),
        "accepted": ps.write_report(app.url, "save").accepted,
        "read": sorted(json.loads(row["payload"])["n"] for row in written.select("payload").collect()),
        "done": [[run.plan.done, run.completed] for run in runs],
        "cubes": sorted([row["n"], row["penstock_value"]] for row in rows),
        "archived": [archived.archived, spark.read.parquet(str(directory / "archive")).count()],
        "cancelled": ps.cancel(written, app.url, "written").cancelled,
    }
    # Last, for it ends the session.
    return found | {"commanded": _command(directory)}


def _command(directory: Path) -> list[int]:
    """The same by the command line: its exit code, and how many rows there are then."""
    (directory / "numbers.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(5)))
    process = [
        "spark",
        "process",
        str(directory / "numbers.jsonl"),
        str(directory / "more"),
        "--progress",
        "none",
    ]
    process += ["--task", "tests.slow.spark_tasks:cube", "--key", "n", "--fleet", "spark"]
    code = run([*process, "--remote", "sc://localhost"])
    return [code, pq.read_table(directory / "more").num_rows]


def _connected() -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    home = find_java()
    if home is not None:
        os.environ["JAVA_HOME"] = str(home)
    builder = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false")
    for name, value in QUICK.items():
        builder = builder.config(name, value)
    fast = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    return builder.config("spark.driver.extraJavaOptions", fast).getOrCreate()


if __name__ == "__main__":
    found = main(Path(sys.argv[1]))
    Path(sys.argv[1], "found.json").write_text(json.dumps(found))
