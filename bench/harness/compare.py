"""Penstock beside its peers: every workload of every system, repeats interleaved, one table."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .install import Installation
from .machine import Foreign, core_speed, wait_quiet
from .measure import Bench, Sample
from .place import CACHE, RESULTS, save
from .report import report
from .results import Results
from .server import Server
from .stage import Stage
from .systems import WORKLOADS, System, choose, load_systems
from .table import figure
from .targets import TARGETS, judge

QUICK_SCALE = 0.05
SAID = ("rate", "p50", "p99", "bytes", "client_us", "server_us", "commands")


def main() -> int:
    args = parse()
    systems = load_systems()
    if args.list:
        for s in systems:
            print(f"{s.name:18} {'optional' if s.optional else '':8} n={s.n:<7} {s.note}")
        return 0
    if args.report:
        run = json.loads(args.report.read_text())
        print(page(run, systems))
        return 0
    try:
        chosen = choose(systems, args.systems)
    except ValueError as e:
        print(e, file=sys.stderr)
        return 2
    run = {
        "run": time.strftime("%Y%m%d-%H%M%S"),
        "cpus": os.cpu_count(),
        "scale": args.scale,
        "repeats": args.repeat,
    }
    run |= {"versions": {}, "packages": {}, "samples": []}
    ready = [s for s in chosen if install(s, run)]
    with Server() as server:
        run["server"] = server.version
        try:
            measure_all(ready, server, args, run["samples"])
        except KeyboardInterrupt:
            print("# interrupted: the table shows what there is", file=sys.stderr)
    text = page(run, systems)
    print(text)
    print(f"# written: {save('compare', run, text, args.out)}", file=sys.stderr)
    verdicts = [judge(t, Results(run["samples"], systems)) for t in TARGETS]
    return 1 if args.check and not all(v.passed for v in verdicts) else 0


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench/run", description=__doc__)
    p.add_argument(
        "systems",
        nargs="*",
        help="names or the part before the colon: penstock saq huey:sqlite (default: all)",
    )
    p.add_argument("-r", "--repeat", type=int, help="repeats (default 3)")
    p.add_argument("-s", "--scale", type=float, help="multiply every number of jobs")
    p.add_argument(
        "-w", "--workloads", default=",".join(WORKLOADS), help="comma list of: " + " ".join(WORKLOADS)
    )
    p.add_argument(
        "--quick",
        action="store_true",
        help=f"smoke test: one repeat, {QUICK_SCALE:.0%} of the jobs, no waiting",
    )
    p.add_argument(
        "--quiet-wait",
        type=float,
        metavar="S",
        help="wait up to S seconds for a calm machine before each measurement",
    )
    p.add_argument(
        "--timeout", type=float, default=120, metavar="S", help="give a measurement up after S seconds"
    )
    p.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="where the .md and .json go (default: the cache)",
    )
    p.add_argument("--check", action="store_true", help="exit 1 unless every target is reached")
    p.add_argument("--report", type=Path, metavar="JSON", help="only print the tables of an earlier run")
    p.add_argument("--list", action="store_true", help="only list the systems")
    args = p.parse_args()
    args.workloads = args.workloads.split(",")
    if unknown := set(args.workloads) - set(WORKLOADS):
        p.error(f"unknown workload {', '.join(sorted(unknown))}; known: {', '.join(WORKLOADS)}")
    repeat, scale, wait = (1, QUICK_SCALE, 0.0) if args.quick else (3, 1.0, 10.0)
    args.repeat = repeat if args.repeat is None else args.repeat
    args.scale = scale if args.scale is None else args.scale
    args.quiet_wait = wait if args.quiet_wait is None else args.quiet_wait
    return args


def install(system: System, run: dict[str, Any]) -> bool:
    """Make its environment and note its versions; a system that cannot be installed is told and left out."""
    try:
        installation = Installation(system)
        installation.ensure()
        packages = installation.packages()
        run["packages"][system.name] = packages
        run["versions"][system.name] = installation.version(packages)
        return True
    except (OSError, RuntimeError) as e:
        print(f"# {system.name}: cannot install: {e}", file=sys.stderr)
        run["samples"].append({"system": system.name, "workload": "install", "error": str(e)})
        return False


def measure_all(
    systems: Sequence[System], server: Server, args: argparse.Namespace, samples: list[Sample]
) -> None:
    """Round-robin over the systems; a workload that failed once is not tried again."""
    stage = Stage(CACHE / f"scratch-{os.getpid()}", server, timeout=args.timeout)
    bench = Bench(stage, server, args.scale)
    failed: set[tuple[str, str]] = set()
    try:
        for repeat in range(args.repeat):
            for system in systems:
                for workload in planned(system, args.workloads):
                    if (system.name, workload) in failed:
                        continue
                    wait_quiet(args.quiet_wait)
                    sample = observed(bench, server, system, workload) | {"repeat": repeat}
                    samples.append(sample)
                    if "error" in sample:
                        failed |= {(system.name, workload)} | (
                            {(system.name, "drain")} if workload == "bulk" else set()
                        )
                    tell(sample, f"{repeat + 1}/{args.repeat}")
    finally:
        stage.remove()


def planned(system: System, wanted: Sequence[str]) -> list[str]:
    """In order, with the bulk run that a drain needs, without what the system does not have."""
    return [
        w for w in WORKLOADS if w not in system.skip and (w in wanted or (w == "bulk" and "drain" in wanted))
    ]


def observed(bench: Bench, server: Server, system: System, workload: str) -> Sample:
    """One sample, with how much of the machine others took and how fast a core was."""
    before, foreign = core_speed(), Foreign(server)
    try:
        sample = bench.measure(system, workload)
    except Exception as e:  # one adapter's failure must not end the run
        sample = {"error": f"{type(e).__name__}: {e}"}
    return sample | {
        "system": system.name,
        "workload": workload,
        "at": time.time(),
        "foreign": round(foreign.share(), 3),
        "speed": round((before + core_speed()) / 2, 2),
    }


def tell(sample: Sample, turn: str) -> None:
    figures = " ".join(f"{k}={figure(sample[k])}" for k in SAID if k in sample)
    words = figures or sample["error"].strip().splitlines()[0]
    print(
        f"# {turn} {sample['system']:18} {sample['workload']:8} {words}  "
        f"[others {sample['foreign']:.0%}, speed {sample['speed']}]",
        file=sys.stderr,
        flush=True,
    )


def page(run: dict[str, Any], systems: Sequence[System]) -> str:
    head = (
        f"# Penstock and its peers, {run['run']}\n\n{run['server']}, {run['cpus']} CPUs, "
        f"{run['repeats']} interleaved repeats, {run['scale']:g}x the usual number of jobs. "
        f"Cells: median (min..max).\n\n"
    )
    return head + report(Results(run["samples"], systems), run["versions"], smoke=run["scale"] < 0.5)


if __name__ == "__main__":
    sys.exit(main())
