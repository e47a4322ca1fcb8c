"""`history.sync` of a few new events into small and large histories, on a disk or an S3 server on the loopback.

CPU is that of the whole process tree without the S3 server. New events fall on the last day, or on the first: another
queue's clock is still there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from penstock.spark import history, session
from penstock.spark.history.tables import open_history
from tests.spark.busywork import fill_days
from tests.spark.comparing import differences, events_by_queue
from tests.spark.objectstore import BUCKET, object_store

from .install import project_version
from .machine import core_speed, tree_cpu, wait_quiet
from .place import RESULTS, save
from .spark import scratch
from .spark_stage import CORES
from .table import markdown, spread

STORES = ("disk", "s3")
LAST, FIRST = "last", "first"
"""The queues, named after the day that their new events fall on."""
STEPS = ("bronze", "silver and gold")
WANTED_RATIO = 1.3
DAY_MS = 86_400_000


def main() -> int:
    args = parse()
    run: dict[str, Any] = {
        "run": time.strftime("%Y%m%d-%H%M%S"),
        "version": project_version(),
        "cpus": os.cpu_count(),
        "samples": [],
        "faults": [],
        **{name: getattr(args, name) for name in ("events", "days", "store", "increment", "rounds")},
    }
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        options = stack.enter_context(object_store()) if args.store == "s3" else {}
        spark = session("bench", cores=CORES)
        stack.callback(spark.stop)
        places = [Place(spark, folder / str(count), count, args.days, options) for count in args.events]
        for number in range(args.rounds):
            for place in places:
                for queue in (LAST, FIRST):
                    for sample in place.grow(queue, args.increment):
                        run["samples"].append(sample | {"round": number})
                        print(f"# {number + 1}/{args.rounds} {sample}", file=sys.stderr, flush=True)
        run["files"] = {str(place.count): place.files() for place in places}
        if args.verify:
            run["faults"] = [fault for place in places for fault in place.faults()]
    text = page(run)
    print(text)
    print(f"# written: {save('history', run, text, args.out)}", file=sys.stderr)
    return 1 if run["faults"] or (args.check and not all(verdicts(run))) else 0


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench/history", description=__doc__)
    p.add_argument("-n", "--events", help="comma list: events that are there before (default 300000,3300000)")
    p.add_argument("-d", "--days", type=int, default=1, help="days that they are spread over (default 1)")
    p.add_argument("-i", "--increment", type=int, help="new events of a sync (default 10,000)")
    p.add_argument("-r", "--rounds", type=int, default=3, help="rounds over everything (default 3)")
    p.add_argument(
        "-s", "--store", choices=STORES, default="disk", help="where the history is (default disk)"
    )
    p.add_argument(
        "--verify", action="store_true", help="at the end, count each event and compare with a recomputation"
    )
    p.add_argument("--quick", action="store_true", help="smoke test: 3,000 and 9,000 events, one round")
    p.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the .md and .json go")
    p.add_argument("--check", action="store_true", help="exit 1 unless the target was reached")
    args = p.parse_args()
    given = args.events or ("3000,9000" if args.quick else "300000,3300000")
    args.events = [int(count) for count in given.split(",")]
    args.increment = args.increment or (600 if args.quick else 10_000)
    args.rounds = 1 if args.quick else args.rounds
    return args


class Place:
    """A store whose queues have `count` events, and a history of them."""

    def __init__(
        self, spark: SparkSession, folder: Path, count: int, days: int, options: Mapping[str, str]
    ) -> None:
        folder.mkdir()
        self.spark, self.count, self.folder, self.options = spark, count, folder, options
        self.url = f"sqlite:///{folder}/jobs.db"
        self.path = f"s3://{BUCKET}/history-{count}" if options else str(folder / "history")
        self.server = server_of(options)
        began = time.perf_counter()
        # Both begin at the next midnight, so that a day is a day.
        start_ms = DAY_MS - time.time_ns() // 1_000_000 % DAY_MS
        fill_days(
            self.url, FIRST, events=min(count // 100, 10_000), start_ms=start_ms, length_ms=DAY_MS // 24
        )
        fill_days(self.url, LAST, events=count, start_ms=start_ms, length_ms=days * DAY_MS * 9 // 10)
        filled = time.perf_counter()
        report = self.sync()
        took = time.perf_counter() - filled
        print(
            f"# {report.events:,} events: made in {filled - began:.0f} s, synced in {took:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        # Java compiles, Python starts.
        for queue in (LAST, FIRST):
            self.grow(queue, 600)

    def sync(self, path: str = "", **options: Any) -> history.SyncReport:
        return history.sync(
            self.url, path or self.path, spark=self.spark, storage_options=dict(self.options), **options
        )

    def grow(self, queue: str, count: int) -> list[dict[str, Any]]:
        """Add events to a queue and sync, first bronze, then what follows from it. Return what each took."""
        fill_days(self.url, queue, events=count, start_ms=0, length_ms=60_000)
        wait_quiet(2)
        samples = []
        for step in STEPS:
            cpu, began = self._cpu(), time.perf_counter()
            report = self.sync(upto="bronze" if step == "bronze" else "gold")
            label = {"events": self.count, "day": queue, "step": step, "core_speed": core_speed()}
            taken = {"seconds": time.perf_counter() - began, "cpu": self._cpu() - cpu}
            samples.append(label | taken)
            if step == "bronze" and report.events < count // 3 * 3:
                raise RuntimeError(f"{report.events} of {count} events were new")
        return samples

    def _cpu(self) -> float:
        return tree_cpu(os.getpid()) - (tree_cpu(self.server) if self.server else 0)

    def files(self) -> dict[str, int]:
        """Return how many files each table has."""
        opened = open_history(self.path, self.options, create=False)
        return {
            name: len(getattr(opened, name).load().files) for name in ("bronze", "silver", "gold", "causes")
        }

    def faults(self) -> list[str]:
        """Return what is wrong with the history, compared with the logs and with one made at once."""
        again = f"{self.path}-again" if self.options else str(self.folder / "again")
        self.sync(again)
        ours, theirs = (
            history.tables(self.spark, path, storage_options=dict(self.options))
            for path in (self.path, again)
        )
        found = events_by_queue(self.url, ours.bronze)
        for name in ("silver", "gold", "causes"):
            found += [f"{name}: {row}" for row in differences(getattr(ours, name), getattr(theirs, name))]
        if not self.options:
            shutil.rmtree(again)
        return [f"{self.count:,} events: {fault}" for fault in found]


def server_of(options: Mapping[str, str]) -> int:
    """Return the process id of the S3 server; 0 if there is none."""
    import psutil

    if not options:
        return 0
    port = int(options["aws_endpoint_url"].rpartition(":")[2])
    children = psutil.Process().children()
    return next(
        child.pid
        for child in children
        for at in child.net_connections()
        if at.laddr and at.laddr.port == port
    )


def values(run: dict[str, Any], what: str, **wanted: Any) -> list[float]:
    return [s[what] for s in run["samples"] if all(s[key] == value for key, value in wanted.items())]


def ratio(run: dict[str, Any], day: str, step: str) -> float:
    """Return CPU on the largest history to that on the smallest: of the least over the rounds, since other load only
    ever adds."""
    small, large = (
        min(values(run, "cpu", events=count, day=day, step=step))
        for count in (min(run["events"]), max(run["events"]))
    )
    return large / small


def verdicts(run: dict[str, Any]) -> list[bool]:
    return [ratio(run, day, "silver and gold") <= WANTED_RATIO for day in (LAST, FIRST)]


def page(run: dict[str, Any]) -> str:
    counts = run["events"]
    head = ["new events on the", "step", *(f"{count:,} events" for count in counts), "large to small"]
    lines = [
        [
            f"{day} day",
            step,
            *(
                f"{spread(values(run, 'cpu', events=count, day=day, step=step))} s CPU, "
                f"{spread(values(run, 'seconds', events=count, day=day, step=step))} s"
                for count in counts
            ),
            f"{ratio(run, day, step):.2f}x",
        ]
        for day in (LAST, FIRST)
        for step in STEPS
    ]
    files = [[f"{int(count):,}", *map(str, found.values())] for count, found in run["files"].items()]
    faults = [f"- {fault}" for fault in run["faults"]]
    return "\n".join(
        [
            f"# The history, {run['run']}\n",
            f"Penstock {run['version']}; {run['cpus']} CPUs; {run['store']}; {run['days']} days; "
            f"{run['increment']:,} new events; {run['rounds']} rounds.\n",
            *markdown(head, lines),
            "\nFiles at the end:\n",
            *markdown(["events", "bronze", "silver", "gold", "causes"], files),
            *(["\nWrong:\n", *faults] if faults else []),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
