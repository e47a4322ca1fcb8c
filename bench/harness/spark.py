"""The pipeline on Spark beside plain processes that do the same: writes, history and fleet, interleaved."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from penstock.spark import session

from .install import project_version
from .machine import core_speed, wait_quiet
from .place import CACHE, RESULTS, save
from .spark_fleet import FleetPart
from .spark_history import HistoryPart
from .spark_report import spark_report, verdicts
from .spark_stage import CORES, Part, Stage
from .spark_write import WritePart
from .table import figure

ENGINES = ("valkey", "sqlite")
PARTS: dict[str, type[Part]] = {"write": WritePart, "history": HistoryPart, "fleet": FleetPart}
SYSTEMS = ("plain", "spark")
SMALL = 20_000
"""Rows of the first, discarded measurements: Spark starts its Python processes, and Java compiles."""


def main() -> int:
    args = parse()
    run: dict[str, Any] = {
        "run": time.strftime("%Y%m%d-%H%M%S"),
        "version": project_version(),
        "cpus": os.cpu_count(),
        "samples": [],
        **{name: getattr(args, name) for name in ("engines", "parts", "rows", "jobs", "rounds")},
    }
    with ExitStack() as stack:
        parts = open_parts(stack, args)
        try:
            for number in range(args.rounds):
                measure_round(parts, args, number, run["samples"])
        except KeyboardInterrupt:
            print("# interrupted: the table shows what there is", file=sys.stderr)
    text = page(run)
    print(text)
    print(f"# written: {save('spark', run, text, args.out)}", file=sys.stderr)
    return 1 if args.check and not all(verdicts(run)) else 0


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench/spark", description=__doc__)
    p.add_argument(
        "-n", "--rows", type=int, help="rows to write, and events of the history (default 1,000,000)"
    )
    p.add_argument("-j", "--jobs", type=int, help="jobs for the fleet (default: a tenth of the rows)")
    p.add_argument("-r", "--rounds", type=int, default=3, help="rounds over everything (default 3)")
    p.add_argument("-e", "--engines", default=",".join(ENGINES), help="comma list of: " + " ".join(ENGINES))
    p.add_argument("-p", "--parts", default=",".join(PARTS), help="comma list of: " + " ".join(PARTS))
    p.add_argument("--quick", action="store_true", help="smoke test: 20,000 rows, one round")
    p.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the .md and .json go")
    p.add_argument("--check", action="store_true", help="exit 1 unless every target was reached")
    args = p.parse_args()
    args.rows = args.rows or (SMALL if args.quick else 1_000_000)
    args.jobs = args.jobs or max(args.rows // 10, 1000)
    args.rounds = 1 if args.quick else args.rounds
    args.engines, args.parts = args.engines.split(","), args.parts.split(",")
    unknown = set(args.parts) - set(PARTS) | set(args.engines) - set(ENGINES)
    if unknown:
        p.error(f"unknown: {', '.join(sorted(unknown))}")
    return args


def open_parts(stack: ExitStack, args: argparse.Namespace) -> dict[tuple[str, str], Part]:
    """A part on an engine each, on a store of its own, once warm."""
    folder = stack.enter_context(scratch())
    spark = session("bench", cores=CORES)
    stack.callback(spark.stop)
    pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(CORES))
    parts = {}
    for engine in args.engines:
        for name in args.parts:
            stage = stack.enter_context(Stage(engine, spark, pool, folder / f"{engine}-{name}"))
            print(f"# {engine} {name}: making what is measured", file=sys.stderr)
            parts[engine, name] = part = PARTS[name](stage, rows=args.rows, jobs=args.jobs)
            for system in SYSTEMS:
                part.measure(system, warming=True)
    return parts


@contextmanager
def scratch() -> Iterator[Path]:
    folder = CACHE / f"spark-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_round(
    parts: dict[tuple[str, str], Part], args: argparse.Namespace, number: int, samples: list[dict[str, Any]]
) -> None:
    """Every part on every engine, both systems one right after the other and in turn first."""
    for (engine, name), part in parts.items():
        for system in SYSTEMS[::-1] if number % 2 else SYSTEMS:
            # What was written before is not to reach the disk on somebody else's time.
            os.sync()
            wait_quiet(2)
            label = {"engine": engine, "system": system, "round": number, "core_speed": core_speed()}
            for what, sample in part.measure(system).items():
                said = f"{sample['seconds']:.2f} s, {figure(sample['count'] / sample['seconds'])}/s"
                print(
                    f"# {number + 1}/{args.rounds} {engine} {name} {system} {what}: {said}", file=sys.stderr
                )
                samples.append(sample | label | {"what": what})


def page(run: dict[str, Any]) -> str:
    return (
        f"# The pipeline on Spark, {run['run']}\n\nPenstock {run['version']}; {run['cpus']} CPUs; {run['rows']:,} rows "
        f"and events, {run['jobs']:,} jobs for the fleet; {run['rounds']} rounds in turn, on {CORES} cores. Cells: "
        f"median (least..most).\n\n{spark_report(run)}"
    )


if __name__ == "__main__":
    sys.exit(main())
