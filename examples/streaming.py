"""A table that grows -> jobs -> tables of results that grow with it, by Spark's streams.

    python examples/streaming.py [--orders 200]

Orders arrive as Parquet files. One query makes every new row a job, a worker asks a flaky carrier what each delivery
costs, and another query adds the results to the table of quotes. Each goes on where it was, from its checkpoint. Here
they run until they have caught up (``availableNow``), twice; with any other trigger they run for ever. What it leaves
is in ``./penstock-streaming``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import penstock.spark
from penstock import App, Unrecoverable

FOLDER = Path("penstock-streaming")
console = Console()
app = App(f"sqlite:///{FOLDER}/penstock.db")


@app.task(queue="orders", attempts=5, backoff="100ms", result_ttl="1d")
async def quote(order_id: int, country: str, kilos: float) -> float:
    """Return the price of a delivery, if the carrier answers."""
    await asyncio.sleep(0.02)
    if country == "atlantis":
        raise Unrecoverable("no carrier goes there")
    if random.random() < 0.1:
        raise ConnectionError("the carrier did not answer")
    return round(3 + 1.2 * kilos, 2)


def arrive(spark: SparkSession, first: int, count: int) -> None:
    """More orders, in a file of their own. One in forty cannot be delivered."""
    country = "IF(id % 40 = 7, 'atlantis', array('se', 'no', 'ch', 'pt')[int(id % 4)])"
    orders = spark.range(first, first + count, 1, 1).selectExpr(
        "id AS order_id", f"{country} AS country", "id % 17 + 0.5D AS kilos"
    )
    orders.write.mode("append").parquet(str(FOLDER / "orders"))


def orders_to_jobs(spark: SparkSession) -> StreamingQuery:
    """Every row that is new a job; one whose order is known is none."""
    rows = spark.readStream.schema("order_id long, country string, kilos double").parquet(
        str(FOLDER / "orders")
    )
    jobs = rows.writeStream.format("penstock").options(
        url=app.url, task="streaming:quote", keyColumns="order_id"
    )
    return run(jobs, "orders")


def results_to_table(spark: SparkSession) -> StreamingQuery:
    """Every result that is new a row of the quotes, with the order it is for."""
    results = (
        spark.readStream.format("penstock")
        .options(url=app.url, queue="orders", kind="results", payloadFormat="typed")
        .schema("payload struct<order_id: long, country: string>, result double, runs int")
        .load()
    )
    table = results.selectExpr("payload.*", "result AS price", "runs").writeStream.format("parquet")
    return run(table.option("path", str(FOLDER / "quotes")), "quotes")


def run(writer: DataStreamWriter, name: str) -> StreamingQuery:
    """Until it has caught up, from where it was."""
    return (
        writer.option("checkpointLocation", str(FOLDER / "checkpoints" / name))
        .trigger(availableNow=True)
        .start()
    )


@contextmanager
def worker() -> Iterator[None]:
    """`penstock worker streaming:app`, as it runs anywhere; here until the end of the block."""
    command = [
        sys.executable,
        "-m",
        "penstock",
        "worker",
        "run",
        "streaming:app",
        "--queues",
        "orders",
        "--no-live",
    ]
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield
        finally:
            process.terminate()


def wait() -> None:
    """Until no job is open: only so that there is something to see afterwards."""
    queue = app.queue("orders").sync
    with Progress(console=console) as progress:
        bar = progress.add_task("jobs", total=None)
        while not progress.finished:
            counts = queue.counts()
            ended = counts.completed + counts.failed
            progress.update(bar, total=ended + counts.open, completed=ended)
            time.sleep(0.1)


def play(spark: SparkSession, first: int, count: int) -> None:
    """A round: orders come, jobs are done, results are added."""
    arrive(spark, first, count)
    orders_to_jobs(spark).awaitTermination()
    wait()
    results_to_table(spark).awaitTermination()
    show(spark)


def show(spark: SparkSession) -> None:
    """The tables as they are now."""
    orders, quotes = (spark.read.parquet(str(FOLDER / name)) for name in ("orders", "quotes"))
    failed = spark.read.format("penstock").options(url=app.url, queue="orders", kind="failed").load()
    table = Table(title="Quotes by country", title_justify="left")
    for column in ("country", "quotes", "orders", "runs", "least", "mean", "most"):
        table.add_column(column, justify="left" if column == "country" else "right")
    counts = (F.count("*"), F.count_distinct("order_id"), F.sum("runs"))
    prices = (F.min("price"), F.mean("price"), F.max("price"))
    rows = quotes.groupBy("country").agg(*counts, *prices).orderBy("country").collect()
    for country, *figures in rows:
        table.add_row(country, *map(str, figures[:3]), *(f"{price:.2f}" for price in figures[3:]))
    console.print(table)
    console.print(
        f"{orders.count()} rows of orders, {sum(row[1] for row in rows)} of quotes; {failed.count()} jobs failed: "
        f"{', '.join(row.error for row in failed.select('error').distinct().collect())}."
    )


@contextmanager
def step(title: str) -> Iterator[None]:
    """A heading, and how long it took."""
    console.rule(f"[bold]{title}", align="left")
    began_at = time.monotonic()
    yield
    console.print(f"[dim]{time.monotonic() - began_at:.0f} s[/]")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--orders", type=int, default=200)
    count: int = parser.parse_args().orders
    FOLDER.mkdir(exist_ok=True)
    with worker():
        with step("Starting Spark"):
            spark = penstock.spark.session("streaming")
        with step(f"{count} orders arrive"):
            play(spark, 0, count)
        with step(f"{count // 2} more arrive, and {count // 10} that are known: they are asked for once"):
            play(spark, count - count // 10, count // 2 + count // 10)
        spark.stop()


if __name__ == "__main__":  # Workers and Spark load this script, too.
    main()
