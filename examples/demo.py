"""The whole way on the embedded default: a table, jobs, results as a table, the history of it all as tables and a page.

    make demo            or: python examples/demo.py [--rows 2000]

``PENSTOCK_DEMO`` names the folder for what it leaves; else it is a temporary one.

Reviews are sent to a flaky, rate-limited classifier. Some calls fail and are tried again, some reviews can never be
classified; both show in the output. Then everything is run again, and nothing is paid for twice.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table

import penstock.spark
from penstock import App, JobContext, Unrecoverable
from penstock.spark import history

console = Console()
FOLDER = Path(os.environ.get("PENSTOCK_DEMO") or tempfile.mkdtemp(prefix="penstock-demo-"))
# Its workers are processes that load this file, too.
os.environ["PENSTOCK_DEMO"] = str(FOLDER)

app = App(f"sqlite:///{FOLDER}/penstock.db")
WORDS = ["good", "bad", "fine", "awful", "lovely", "late", "broken", "quick"]


@app.task(queue="reviews", attempts=4, backoff="100ms", timeout="10s")
async def classify(review_id: int, text: str, context: JobContext) -> str:
    """A classifier that costs money, takes a while, and is away now and then."""
    await asyncio.sleep(0.005)
    context.use(usd=0.0002)
    if not text:
        raise Unrecoverable("there is nothing to classify")
    if random.random() < 0.1:
        raise ConnectionError("the classifier did not answer")
    return "happy" if {"good", "fine", "lovely", "quick"} & set(text.split()) else "unhappy"


def reviews(spark: SparkSession, count: int) -> DataFrame:
    """Made-up reviews; one in a hundred is empty."""
    words = f"array({', '.join(repr(word) for word in WORDS)})"
    text = f"concat_ws(' ', {words}[int(id % 8)], {words}[int(id * 7 % 5)])"
    return spark.range(count).selectExpr("id AS review_id", f"IF(id % 100 = 42, '', {text}) AS text")


def run(spark: SparkSession, count: int) -> penstock.spark.Processed:
    """All reviews through the classifier, by two worker processes."""
    return penstock.spark.process(
        reviews(spark, count), classify, key="review_id", output=FOLDER / "labels", workers=2
    )


def show(labels: DataFrame) -> None:
    """Print the outcomes in a few lines."""
    table = Table(title=f"The output: {FOLDER / 'labels'}")
    for column in ("state", "label", "error", "runs", "rows", "usd"):
        table.add_column(column)
    kinds = labels.groupBy("penstock_state", "penstock_value", "penstock_error", "penstock_runs")
    counted = kinds.agg(F.count("*").alias("rows"), F.sum("penstock_cost").alias("usd"))
    for row in counted.orderBy("penstock_state", F.desc("rows")).collect():
        state, label, error, runs, rows, usd = row
        table.add_row(state, label, error, str(runs), str(rows), f"{usd:.4f}")
    console.print(table)


@contextmanager
def step(title: str) -> Iterator[None]:
    """A heading, and how long it took."""
    console.rule(f"[bold]{title}", align="left")
    began_at = time.monotonic()
    yield
    console.print(f"[dim]{time.monotonic() - began_at:.0f} s[/]")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2000)
    count: int = parser.parse_args().rows
    FOLDER.mkdir(parents=True, exist_ok=True)
    with step("Starting Spark"):
        spark = penstock.spark.session("demo")
    with step(f"{count} reviews, at most 500 a second, whatever the number of workers"):
        app.queue("reviews").sync.limit(rate="500/s")
        done = run(spark, count)
        console.print(f"{done.completed} classified, {done.failed} failed, for {done.cost:.2f} USD.")
        show(penstock.spark.latest(spark.read.parquet(str(FOLDER / "labels"))))
    with step("The same again, with ten more: only those are paid for"):
        again = run(spark, count + 10)
        console.print(
            f"{again.plan.done} were done before, {again.plan.todo} to do, for {again.cost:.4f} USD."
        )
    with step("What happened in the queue, as tables and a page"):
        report = history.sync(app.url, FOLDER / "history", queues=["reviews"], spark=spark)
        page = history.report(FOLDER / "history", FOLDER / "report.html", title="Demo")
        console.print(f"{report.events} events. Open [bold]{page}[/] in a browser.")
    spark.stop()


if __name__ == "__main__":
    main()
