"""Flat cost with a large backlog against a small one, interleaved; an idle worker's cost and wake-up."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

from .flat import Backlog
from .idle import idle_cost, wake_latency
from .install import Installation
from .machine import wait_quiet
from .place import CACHE, RESULTS, save
from .scale_report import scale_report, verdicts
from .server import Server
from .stage import Stage
from .systems import System, choose, load_systems
from .table import figure

PARTS = ("flat", "idle", "wake")
USUAL = {"repeat": 5, "k": 20_000, "small": 10_000, "large": 1_000_000, "idle_seconds": 20.0, "wakes": 200}
QUICK = {"repeat": 1, "k": 1_000, "small": 1_000, "large": 10_000, "idle_seconds": 3.0, "wakes": 30}
SAID = ("client_us", "server_us", "commands", "rate", "jobs")


def main() -> int:
    args = parse()
    try:
        chosen = choose(load_systems(), args.systems or ["penstock"])
    except ValueError as e:
        print(e, file=sys.stderr)
        return 2
    run: dict[str, Any] = {
        "run": time.strftime("%Y%m%d-%H%M%S"),
        "cpus": os.cpu_count(),
        "sizes": [args.small, args.large],
        "k": args.k,
        "systems": [s.name for s in chosen],
        "versions": {},
    }
    run |= {part: [] for part in (*PARTS, "errors")}
    for system in chosen:
        try:
            measure(system, args, run)
        except KeyboardInterrupt:
            print("# interrupted: the tables show what there is", file=sys.stderr)
            break
        except Exception as e:  # one system's failure must not hide the other's figures
            run["errors"].append(f"{system.name}: {type(e).__name__}: {e}")
            print(f"# {run['errors'][-1]}", file=sys.stderr)
    text = page(run)
    print(text)
    print(f"# written: {save('scale', run, text, args.out)}", file=sys.stderr)
    return 1 if args.check and (run["errors"] or not all(verdicts(run))) else 0


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench/scale", description=__doc__)
    p.add_argument(
        "systems", nargs="*", help="default: penstock, on both engines; saq and litequeue work too"
    )
    p.add_argument("-r", "--repeat", type=int, help="rounds at each backlog (default 5)")
    p.add_argument("-k", type=int, help="jobs added and worked off per round (default 20,000)")
    p.add_argument("--small", type=int, help="the small backlog (default 10,000)")
    p.add_argument("--large", type=int, help="the large backlog (default 1,000,000)")
    p.add_argument(
        "--idle-seconds", type=float, metavar="S", help="how long to watch an idle worker (default 20)"
    )
    p.add_argument("--wakes", type=int, metavar="N", help="jobs for the wake-up time (default 200)")
    p.add_argument("-p", "--parts", default=",".join(PARTS), help="comma list of: " + " ".join(PARTS))
    p.add_argument("--quick", action="store_true", help="smoke test: backlogs of 1,000 and 10,000, one round")
    p.add_argument("--timeout", type=float, default=300, metavar="S", help="give a step up after S seconds")
    p.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help="where the .md and .json go (default: the cache)",
    )
    p.add_argument("--check", action="store_true", help="exit 1 unless every limit is kept")
    args = p.parse_args()
    usual = {
        "repeat": 5,
        "k": 20_000,
        "small": 10_000,
        "large": 1_000_000,
        "idle_seconds": 20.0,
        "wakes": 200,
    }
    quick = {"repeat": 1, "k": 1_000, "small": 1_000, "large": 10_000, "idle_seconds": 3.0, "wakes": 30}
    for name, value in (quick if args.quick else usual).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        p.error(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    args.quiet_wait = 0.0 if args.quick else 10.0
    return args


def measure(system: System, args: argparse.Namespace, run: dict[str, Any]) -> None:
    """Everything about one system, into the run."""
    installation = Installation(system)
    installation.ensure()
    run["versions"][system.name] = installation.version(installation.packages())
    if "flat" in args.parts:
        measure_flat(system, args, run["flat"])
    if "idle" in args.parts or "wake" in args.parts:
        measure_idle(system, args, run)


def measure_flat(system: System, args: argparse.Namespace, samples: list[dict[str, Any]]) -> None:
    """Fill both backlogs, one round each that does not count, then rounds in turn."""
    with ExitStack() as stack:
        backlogs = [open_backlog(stack, system, size, args) for size in (args.small, args.large)]
        for backlog in backlogs:
            backlog.fill()
            backlog.enqueue(args.k // 4)
            backlog.drain(args.k // 4)
        for repeat in range(args.repeat):
            for backlog in backlogs if repeat % 2 == 0 else backlogs[::-1]:
                for phase, go in (("enqueue", backlog.enqueue), ("drain", backlog.drain)):
                    wait_quiet(args.quiet_wait)
                    sample = go(args.k)
                    said = " ".join(f"{key}={figure(sample[key])}" for key in SAID if key in sample)
                    print(
                        f"# {repeat + 1}/{args.repeat} {system.name} at {backlog.size:,} {phase}: {said}",
                        file=sys.stderr,
                    )
                    samples.append(sample | label(system, backlog, phase) | {"repeat": repeat})
        for backlog in backlogs if system.kind == "sqlite" else []:
            for phase, count in backlog.statements(args.k // 4).items():
                samples.append({"statements": count} | label(system, backlog, phase))


def open_backlog(stack: ExitStack, system: System, size: int, args: argparse.Namespace) -> Backlog:
    directory = CACHE / f"scratch-{os.getpid()}-{size}"
    return stack.enter_context(closing(Backlog(system, size, directory, timeout=args.timeout)))


def label(system: System, backlog: Backlog, phase: str) -> dict[str, Any]:
    return {"system": system.name, "size": backlog.size, "phase": phase}


def measure_idle(system: System, args: argparse.Namespace, run: dict[str, Any]) -> None:
    with Server() if system.kind == "redis" else nullcontext() as server:
        stage = Stage(CACHE / f"scratch-{os.getpid()}", server, timeout=args.timeout)
        try:
            if "idle" in args.parts:
                run["idle"].append({"system": system.name} | idle_cost(stage, system, args.idle_seconds))
            if "wake" in args.parts:
                run["wake"].append({"system": system.name} | wake_latency(stage, system, args.wakes))
        finally:
            stage.remove()


def page(run: dict[str, Any]) -> str:
    versions: Sequence[str] = [f"{name} {version}" for name, version in run["versions"].items()]
    return (
        f"# Flat cost, idle cost and wake-up, {run['run']}\n\n{', '.join(versions)}; {run['cpus']} CPUs. "
        f"Each round adds and works off {run['k']:,} jobs at that backlog; rounds interleaved. "
        f"Cells: median (min..max).\n\n{scale_report(run)}"
    )


if __name__ == "__main__":
    sys.exit(main())
