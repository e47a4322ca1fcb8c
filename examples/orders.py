"""The main job on the embedded default: a few thousand jobs, failures among them, on one SQLite file.

    python examples/orders.py [--jobs 3000] [--url sqlite:///demo.db]

Orders are "shipped" by a flaky carrier: some fail and are retried, some can never succeed, some are asked for twice.
At the end, what became of each order stands in ``outcomes.csv``.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock import App, JobHandle, Unrecoverable
from penstock.core.lifecycle import State

console = Console()


def make_app(url: str) -> App:
    """An app with one task, as a user would write it."""
    app = App(url)

    @app.task(name="ship", queue="orders", attempts=4, backoff="100ms", timeout="5s")
    async def ship(order: int, country: str) -> str:
        await asyncio.sleep(0.005)
        if country == "atlantis":
            raise Unrecoverable("no carrier goes there")
        if random.random() < 0.12:
            raise ConnectionError("the carrier did not answer")
        return f"{country}-{order:05d}"

    return app


def orders(count: int) -> list[dict[str, object]]:
    """Made-up orders; one in fifty cannot be delivered."""
    countries = ["se", "no", "ch", "at", "pt"]
    return [
        {"order": n, "country": "atlantis" if n % 50 == 7 else countries[n % len(countries)]}
        for n in range(count)
    ]


async def enqueue(app: App, count: int) -> list[JobHandle]:
    """All orders, the first tenth of them twice: an id is enqueued once."""
    ship = app.tasks["ship"]
    specs = [ship.options(id=f"order-{order['order']}").job(**order) for order in orders(count)]
    started = time.perf_counter()
    handles: list[JobHandle] = await ship.enqueue_many(specs + specs[: count // 10])
    answers = Counter(handle.status for handle in handles)
    console.print(
        f"Enqueued [bold]{answers['queued']}[/] jobs in {time.perf_counter() - started:.2f} s; "
        f"{answers['duplicate']} were duplicates and are not run twice."
    )
    return handles[:count]


async def watch(app: App, count: int) -> None:
    """The live display: how many jobs have ended, and how."""
    queue = app.queue("orders")
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[states]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("working", total=count, states="")
        while True:
            counts = await queue.counts()
            shown = {"waiting": counts.waiting, "retrying": counts.scheduled, "failed": counts.failed}
            states = "  ".join(f"{name} {number}" for name, number in shown.items())
            progress.update(bar, completed=count - counts.open, states=states)
            if counts.open == 0:
                return
            await asyncio.sleep(0.1)


async def tell(app: App, handles: list[JobHandle], folder: Path) -> None:
    """Print a table of outcomes by cause, and write every order to a file."""
    jobs = [
        job
        for job in await app.queue("orders").get_many([handle.id for handle in handles])
        if job is not None
    ]
    outcomes = folder / "outcomes.csv"
    with outcomes.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "state", "runs", "failures", "result", "error"])
        for job in jobs:
            error = job.failure.message if job.failure and job.state is State.FAILED else ""
            writer.writerow([job.id, job.state, job.runs, job.failures, job.result or "", error])
    table = Table(title="Outcomes")
    for column in ("state", "after", "cause", "jobs"):
        table.add_column(column, justify="right" if column == "jobs" else "left")
    for (state, runs, cause), number in sorted(Counter(map(describe, jobs)).items()):
        table.add_row(state, f"{runs} run{'s' if runs > 1 else ''}", cause, str(number))
    console.print(table)
    console.print(f"Every order, one line each: [bold]{outcomes}[/]")


def describe(job: object) -> tuple[str, int, str]:
    """State, runs and cause of a finished job."""
    failure = getattr(job, "failure", None)
    state: State = job.state  # type: ignore[attr-defined]
    cause = f"{failure.type}: {failure.message}" if failure and state is State.FAILED else ""
    return str(state), job.runs, cause  # type: ignore[attr-defined]


async def run(count: int, url: str, folder: Path) -> None:
    async with make_app(url) as app:
        handles = await enqueue(app, count)
        worker = app.worker(queues=["orders"], concurrency=100, burst=True)
        await asyncio.gather(worker.run(), watch(app, count))
        await tell(app, handles, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--url", help="another store; a new SQLite file if not given")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="penstock-demo-"))
    url = arguments.url or f"sqlite:///{folder}/orders.db"
    console.print(f"Store: [bold]{url}[/]")
    asyncio.run(run(arguments.jobs, url, folder))


if __name__ == "__main__":
    main()
