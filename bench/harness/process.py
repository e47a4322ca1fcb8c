"""`process` over settled rows, beside a bare Spark scan, hash and anti-join of the same tables in the same run.

CPU is that of the whole process tree: Python, Java, workers and the server. What grows with the number of settled rows
is the difference between the large and the small table.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from penstock.spark import session

from .install import project_version
from .machine import core_speed, tree_cpu, wait_quiet
from .place import RESULTS, save
from .process_place import Place
from .server import Server
from .spark import scratch
from .spark_stage import CORES
from .table import figure, markdown, spread

ENGINES = ("valkey", "sqlite")
STEPS = ("bare", "re-run", "increment")
SINCE = ("re-run, since=", "increment, since=")
WANTED_RATIO = 1.5
WANTED_SINCE = 1.3
WANTED_SERVER_US = 70.0
WANTED_P99_MS = 10.0


def main() -> int:
    args = parse()
    run: dict[str, Any] = {
        "run": time.strftime("%Y%m%d-%H%M%S"),
        "version": project_version(),
        "cpus": os.cpu_count(),
        "samples": [],
        **{name: getattr(args, name) for name in ("engines", "small", "large", "increment", "new", "rounds")},
    }
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        spark = session("bench", cores=CORES)
        stack.callback(spark.stop)
        for engine in args.engines:
            measure_engine(engine, spark, folder, args, run["samples"])
    text = page(run)
    print(text)
    print(f"# written: {save('process', run, text, args.out)}", file=sys.stderr)
    return 1 if args.check and not all(verdicts(run)) else 0


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench/process", description=__doc__)
    p.add_argument("-s", "--small", type=int, help="settled rows of the small table (default 100,000)")
    p.add_argument("-l", "--large", type=int, help="settled rows of the large table (default 1,000,000)")
    p.add_argument("-i", "--increment", type=int, default=200, help="new rows of an increment (default 200)")
    p.add_argument("-n", "--new", type=int, help="new rows for the server's time per row (default 20,000)")
    p.add_argument("-r", "--rounds", type=int, default=3, help="rounds over everything (default 3)")
    p.add_argument("-e", "--engines", default=",".join(ENGINES), help="comma list of: " + " ".join(ENGINES))
    p.add_argument("--quick", action="store_true", help="smoke test: 1,000 and 5,000 rows, one round")
    p.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the .md and .json go")
    p.add_argument("--check", action="store_true", help="exit 1 unless every target was reached")
    args = p.parse_args()
    args.small = args.small or (1000 if args.quick else 100_000)
    args.large = args.large or (5000 if args.quick else 1_000_000)
    args.new = args.new or (1000 if args.quick else 20_000)
    args.rounds = 1 if args.quick else args.rounds
    args.engines = args.engines.split(",")
    if unknown := set(args.engines) - set(ENGINES):
        p.error(f"unknown: {', '.join(sorted(unknown))}")
    return args


def measure_engine(
    engine: str, spark: SparkSession, folder: Path, args: argparse.Namespace, samples: list[dict[str, Any]]
) -> None:
    server = Server() if engine == "valkey" else None
    places: dict[str, Place] = {}
    try:
        for name, rows in {"one row": 1, "small": args.small, "large": args.large}.items():
            print(f"# {engine} {name}: making {rows:,} settled rows", file=sys.stderr)
            here = folder / f"{engine}-{name.replace(' ', '-')}"
            here.mkdir()
            places[name] = Place(spark, url_of(server, here), here, rows=rows)
            # Java compiles, Python starts: what is measured is a warm session on an output that has seen a run.
            for step in (*STEPS, *STEPS, *SINCE, *SINCE):
                take(places[name], step, args.increment if rows > 1 else 1)
        for number in range(args.rounds):
            if server:
                here = folder / f"new-{number}"
                here.mkdir()
                new = Place(spark, url_of(server, here), here, rows=0)
                server.client.config_resetstat()
                used = server.cpu()
                sample = take(new, "increment", args.new) | server_time(server, used, args.new)
                samples.append(
                    sample | {"engine": engine, "table": "new", "step": "increment", "round": number}
                )
                shutil.rmtree(here, ignore_errors=True)
            for name, place in places.items():
                for step in STEPS[1:] if name == "one row" else (*STEPS, *SINCE):
                    wait_quiet(2)
                    count = 1 if name == "one row" else args.increment
                    sample = take(place, step, count)
                    label = {"engine": engine, "table": name, "step": step, "round": number}
                    samples.append(sample | label | {"core_speed": core_speed()})
                    print(f"# {number + 1}/{args.rounds} {engine} {name} {step}: {sample}", file=sys.stderr)
        for name, place in places.items():
            found = {"files": place.files(), "increments": place.increments}
            samples.append({"engine": engine, "table": name, "step": "files", **found})
    finally:
        if server:
            server.stop()
        for place in places.values():
            shutil.rmtree(place.output.parent, ignore_errors=True)


def url_of(server: Server | None, folder: Path) -> str:
    if server is None:
        return f"sqlite:///{folder}/jobs.db"
    return f"valkey://127.0.0.1:{server.port}/0?namespace={folder.name}"


def take(place: Place, step: str, count: int) -> dict[str, Any]:
    """Return what one step took: CPU, wall time and Spark jobs."""
    if step.startswith("increment"):
        place.add(count)
    steps: dict[str, Callable[[], None]] = {
        "bare": lambda: expect(place.bare(), 0),
        "re-run": lambda: expect(place.process().plan.todo, 0),
        "increment": lambda: expect(place.process().completed, count),
        # The keys grow, so they say which rows are new.
        "re-run, since=": lambda: expect(place.process(since="k").plan.todo, 0),
        "increment, since=": lambda: expect(place.process(since="k").completed, count),
    }
    cpu, began, jobs = tree_cpu(os.getpid()), time.perf_counter(), jobs_run(place.spark)
    steps[step]()
    return {
        "seconds": time.perf_counter() - began,
        "cpu": tree_cpu(os.getpid()) - cpu,
        "jobs": jobs_run(place.spark) - jobs,
    }


def expect(found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"{wanted} rows were to be done, and {found} were")


def jobs_run(spark: SparkSession) -> int:
    """Return how many Spark jobs the session has run so far."""
    return int(spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs())


def server_time(server: Server, cpu: float, rows: int) -> dict[str, float]:
    """Return the server's CPU per row since it had used `cpu`, and the longest 99th percentile of a call of a function
    in `INFO latencystats` since the last `CONFIG RESETSTAT`. The percentile is wall time: other load adds to it."""
    late = server.client.info("latencystats")
    slow = [stats["p99"] for name, stats in late.items() if name.startswith("latency_percentiles_usec_fcall")]
    return {
        "server_us": (server.cpu() - cpu) / rows * 1e6,
        "p99_ms": max(map(float, slow), default=0.0) / 1000,
    }


def values(run: dict[str, Any], what: str, **wanted: str) -> list[float]:
    return [s[what] for s in run["samples"] if what in s and all(s[k] == v for k, v in wanted.items())]


def growth(run: dict[str, Any], engine: str, step: str) -> float:
    """Return how much more CPU the large table takes than the small one: of the least over the rounds, since other load
    only ever adds."""
    small, large = (
        min(values(run, "cpu", engine=engine, step=step, table=name)) for name in ("small", "large")
    )
    return large - small


def ratio(run: dict[str, Any], engine: str, step: str) -> float:
    """Return the growth to that of the bare job; with ``since=``, CPU on the large table to that on the small one."""
    if step in SINCE:
        small, large = (
            min(values(run, "cpu", engine=engine, step=step, table=name)) for name in ("small", "large")
        )
        return large / small
    return growth(run, engine, step) / max(growth(run, engine, "bare"), 0.01)


def verdicts(run: dict[str, Any]) -> list[bool]:
    wanted = dict.fromkeys(STEPS[1:], WANTED_RATIO) | dict.fromkeys(SINCE, WANTED_SINCE)
    found = [ratio(run, engine, step) <= limit for engine in run["engines"] for step, limit in wanted.items()]
    server, late = values(run, "server_us", table="new"), values(run, "p99_ms", table="new")
    if server:
        found += [statistics.median(server) <= WANTED_SERVER_US, statistics.median(late) <= WANTED_P99_MS]
    return found


def page(run: dict[str, Any]) -> str:
    head = ["engine", "step", f"{run['small']:,} rows", f"{run['large']:,} rows", "growth", "ratio"]
    lines = [
        [
            engine,
            step,
            *(
                spread(values(run, "cpu", engine=engine, step=step, table=name)) + " s"
                for name in ("small", "large")
            ),
            f"{growth(run, engine, step):.2f} s",
            "" if step == "bare" else f"{ratio(run, engine, step):.2f}x",
        ]
        for engine in run["engines"]
        for step in (*STEPS, *SINCE)
    ]
    ones = [
        [
            engine,
            step,
            *(
                spread(values(run, what, engine=engine, step=step, table="one row"))
                for what in ("jobs", "seconds")
            ),
        ]
        for engine in run["engines"]
        for step in STEPS[1:]
    ]
    files = [
        f"{engine}: {values(run, 'files', engine=engine, table='large')[0]:g} files after "
        f"{values(run, 'increments', engine=engine, table='large')[0]:g} increments."
        for engine in run["engines"]
    ]
    server = values(run, "server_us", table="new")
    said = (
        f"Valkey: {spread(server)} us of server time per new row, p99 of a call "
        f"{figure(statistics.median(values(run, 'p99_ms', table='new')))} ms."
        if server
        else ""
    )
    return "\n".join(
        [
            f"# process over settled rows, {run['run']}\n",
            f"Penstock {run['version']}; {run['cpus']} CPUs; {run['increment']} new rows; {run['rounds']} rounds.\n",
            *markdown(head, lines),
            "\nOne row on a warm session:\n",
            *markdown(["engine", "step", "Spark jobs", "seconds"], ones),
            f"\n{said}\n",
            "Output of the large table: " + " ".join(files),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
