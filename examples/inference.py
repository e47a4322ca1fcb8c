"""Batch inference over a table: every ticket is a call of a model, within its limits and a cap on what it costs.

    python examples/inference.py [--rows 250] [--cap 0.04]

The model (``fakemodel.py``, on the loopback) takes so many tokens a second, and says 429 with Retry-After beyond that.
Our side has two workers that share one rate limit, and back off together. The first run ends when its money is spent;
the second goes on with what is missing, and nothing is paid for twice. What it leaves is in ``./penstock-inference``:
started again, the script pays for nothing at all.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec
from fakemodel import COMPLETION_USD, PROMPT_USD, FakeModel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table

import penstock.spark
from penstock import App, JobContext, RateLimited, Unrecoverable

FOLDER = Path("penstock-inference")
console = Console()
app = App(f"sqlite:///{FOLDER}/penstock.db")


class Label(msgspec.Struct):
    """The facts we want about a ticket. In the output it is a struct, ``penstock_value``."""

    label: str
    urgent: bool


@app.task(queue="tickets", attempts=4, backoff="200ms", timeout="10s")
def classify(ticket_id: int, text: str, context: JobContext) -> Label:
    """Call the model once. Report the cost as soon as it is known."""
    answer = ask(text)
    used = answer["usage"]
    context.use(
        tokens=used["total_tokens"],
        usd=used["prompt_tokens"] * PROMPT_USD + used["completion_tokens"] * COMPLETION_USD,
    )
    return msgspec.json.decode(answer["choices"][0]["message"]["content"], type=Label)


def ask(text: str) -> Any:
    """The model's answer. A 429 holds up the whole queue, for all workers, and is nobody's failure."""
    body = {"model": "fake-1", "messages": [{"role": "user", "content": text}]}
    request = Request(
        f"{os.environ['MODEL_URL']}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urlopen(request, timeout=10) as response:
            return json.load(response)
    except HTTPError as error:
        with error:
            match error.code:
                case 429:
                    raise RateLimited(float(error.headers["Retry-After"]), scope="queue") from None
                case 400:
                    raise Unrecoverable(json.load(error)["error"]["message"]) from None
                case _:
                    raise


def tickets(spark: SparkSession, count: int) -> DataFrame:
    """Made-up tickets. One in fifty is about something that the model will not talk about."""
    subject = "array('refund', 'password', 'parcel', 'crash', 'weather')[int(id * 7 % 5)]"
    length = "repeat('and so on, ', int(id % 9))"
    urgency = "IF(id % 6 = 0, 'please answer at once', 'take your time')"
    text = f"concat('Ticket ', id, ': my ', {subject}, ' is not what I hoped for, ', {length}, {urgency})"
    return spark.range(count).selectExpr(
        "id AS ticket_id", f"IF(id % 50 = 17, concat('lottery ', id), {text}) AS text"
    )


def run(table: DataFrame, cap_usd: float) -> None:
    """All tickets through the model, by two processes with four calls each at a time."""
    done = penstock.spark.process(
        table, classify, key="ticket_id", output=FOLDER / "labels", max_cost=cap_usd, workers=2, concurrency=4
    )
    why = f"stopped by {done.stopped}" if done.stopped else "nothing is left to do"
    console.print(
        f"{done.plan.done + done.plan.failed} were done before; now {done.completed} answered, {done.failed} failed, "
        f"for {done.cost:.4f} of at most {cap_usd} USD: {why}."
    )


def show(labels: DataFrame) -> float:
    """The output in a few lines. Gives what it cost, all in all."""
    table = Table(title=f"The output, {FOLDER / 'labels'}, by label", title_justify="left")
    for column in ("state", "label, or why not", "tickets", "urgent", "runs", "tokens", "usd"):
        table.add_column(column, justify="left" if column.startswith(("state", "label")) else "right")
    label = F.coalesce("penstock_value.label", "penstock_error").alias("label")
    counted = labels.groupBy("penstock_state", label).agg(
        F.count("*").alias("tickets"),
        F.count_if("penstock_value.urgent").alias("urgent"),
        F.sum("penstock_runs").alias("runs"),
        F.sum(F.col("penstock_usage")["tokens"]).alias("tokens"),
        F.sum("penstock_cost").alias("usd"),
    )
    rows = counted.orderBy("penstock_state", F.desc("tickets")).collect()
    for row in rows:
        state, label, *numbers, usd = row
        table.add_row(state, label, *(f"{number or 0:,.0f}" for number in numbers), f"{usd or 0:.4f}")
    console.print(table)
    return sum(row["usd"] or 0 for row in rows)


def compare(bill: dict[str, Any], paid_usd: float) -> None:
    """Compare the model's own count with our table."""
    statuses = ", ".join(f"{count} × {status}" for status, count in bill["statuses"].items()) or "nothing"
    console.print(f"The model answered: {statuses}.")
    console.print(f"Tickets it answered twice: {bill['answered_twice']}.")
    console.print(f"It wants {bill['usd']:.4f} USD for this; the whole output says {paid_usd:.4f} USD.")


@contextmanager
def step(title: str) -> Iterator[None]:
    """A heading, and how long it took."""
    console.rule(f"[bold]{title}", align="left")
    began_at = time.monotonic()
    yield
    console.print(f"[dim]{time.monotonic() - began_at:.0f} s[/]")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=250)
    parser.add_argument("--cap", type=float, default=0.04, help="USD for the first run")
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with FakeModel() as model:
        os.environ["MODEL_URL"] = model.url  # The workers have it from us.
        with step("Starting Spark"):
            spark = penstock.spark.session("inference")
            table = tickets(spark, given.rows)
        app.queue("tickets").sync.limit(rate="60/s")
        with step(f"{given.rows} tickets, at most 60 calls a second in all, and {given.cap} USD"):
            run(table, given.cap)
        with step("The same with a higher cap: only what is missing is paid for"):
            run(table, 20 * given.cap)
        with step("What came out"):
            paid_usd = show(penstock.spark.latest(spark.read.parquet(str(FOLDER / "labels"))))
            compare(model.bill(), paid_usd)
        spark.stop()


if __name__ == "__main__":  # Workers load this script, too.
    main()
