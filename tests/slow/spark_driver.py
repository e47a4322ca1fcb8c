"""A driver on a cluster of two executors on this machine, whose executors get killed.

Does what it reads from standard input, a word a line; what has ended well is a file of that name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

import penstock.spark as ps
from tests.slow.spark_tasks import app, cube
from tests.spark.quick import QUICK

ROWS = 40_000
JOBS = 1500


def main(directory: Path) -> None:
    _make_home(directory / "spark")
    config = {
        **QUICK,
        "spark.master": "local-cluster[2,1,1024]",
        "spark.executor.memory": "1g",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    spark = ps.session("kills", config=config)
    for line in sys.stdin:
        role = line.strip()
        _ROLES[role](spark, directory)
        (directory / f"{role}.done").touch()
    spark.stop()


def _make_home(home: Path) -> None:
    """Executors leave their logs in Spark's home: not in that of the package."""
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        (home / entry.name).symlink_to(entry)
    os.environ["SPARK_HOME"] = str(home)


def _write(spark: SparkSession, directory: Path) -> None:
    table = spark.range(0, ROWS, 1, 20).selectExpr("id AS n")
    options = {"url": app.url, "queue": "written", "keyColumns": "n", "batchSize": "100", "writeId": "kills"}
    table.write.format("penstock").options(**options).mode("append").save()


def _fleet(spark: SparkSession, directory: Path) -> None:
    ps.fleet(spark, app, queues=["worked"], size=2, concurrency=10, lease="3s").wait()


def _process(spark: SparkSession, directory: Path) -> None:
    table = spark.range(0, JOBS, 1, 4).selectExpr("id AS n")
    done = ps.process(
        table, cube, key="n", output=directory / "cubes", fleet="spark", concurrency=10, progress="none"
    )
    assert (done.completed, done.failed) == (JOBS, 0), done


_ROLES = {"write": _write, "fleet": _fleet, "process": _process}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
