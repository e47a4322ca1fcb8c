"""Run storms and print what happened: ``make test-storm ARGS='--engine valkey --jobs 20000 --kills 40'``."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.processes import leave_nothing_behind
from tests.storm.stores import STORES
from tests.storm.storm import OF_PROCESSES, Outcome, Plan, rage

ENGINES = {"sqlite": ("sqlite",), "valkey": ("server", "sentinel", "cluster")}
FAULTS = {
    "kill": "SIGKILLs",
    "pause": "pauses past the lease",
    "stop": "graceful stops",
    "server": "server kills",
    "network": "network faults",
    "sentinel": "Sentinel failovers",
    "cluster": "cluster failovers",
    "slots": "slot moves",
    "crash": "failovers by a crash",
}
FIGURES = ("accepted", "calls", "events", "rescued", "killed while they held jobs")


def main() -> int:
    leave_nothing_behind()
    arguments = _parser().parse_args()
    folder = Path(tempfile.mkdtemp(prefix="penstock-storm-"))
    outcomes = []
    for plan in plans(arguments):
        (place := folder / plan.store).mkdir()
        print(
            f"storm on {plan.store}: {plan.jobs} jobs, {plan.kills} kills, {plan.seconds:.0f} s, in {place}",
            flush=True,
        )
        outcomes.append(asyncio.run(rage(plan, place)))
        print("\n".join(outcomes[-1].verdict.lines()), flush=True)
    print(table(outcomes))
    holds = all(outcome.verdict.holds for outcome in outcomes)
    if holds and not arguments.keep:
        shutil.rmtree(folder)
    else:
        print(f"kept: {folder}")
    return 0 if holds else 1


def plans(arguments: argparse.Namespace) -> Iterator[Plan]:
    """A storm for every store that the engines and faults ask for; they share jobs, kills and seconds evenly."""
    faults = frozenset(arguments.faults)
    for engine in ENGINES if arguments.engine == "all" else [arguments.engine]:
        of_engine = ENGINES.get(engine, (engine,))
        stores = [name for name in of_engine if STORES[name][1] & faults] or of_engine[:1]
        for store in stores:
            yield Plan(
                store=store,
                jobs=arguments.jobs // len(stores),
                kills=arguments.kills // len(stores),
                seconds=arguments.seconds / len(stores),
                faults=faults & (OF_PROCESSES | STORES[store][1]),
                seed=arguments.seed,
                most_seconds=arguments.most_seconds / len(stores),
                replicas=arguments.replicas if store in ("sentinel", "cluster") else 0,
            )


def table(outcomes: Sequence[Outcome]) -> str:
    """The figures of every storm, side by side."""
    others = sorted({name for outcome in outcomes for name in outcome.verdict.figures}.difference(FIGURES))
    rows = [
        ["", *(outcome.plan.store for outcome in outcomes)],
        ["jobs", *(str(outcome.plan.jobs) for outcome in outcomes)],
        *(
            [name, *(str(outcome.verdict.figures[name]) for outcome in outcomes)]
            for name in (*FIGURES, *others)
        ),
        *([title, *(str(outcome.faults[name]) for outcome in outcomes)] for name, title in FAULTS.items()),
        ["starts repeated", *(str(outcome.faults["starts repeated"]) for outcome in outcomes)],
        ["seconds", *(f"{outcome.seconds:.0f}" for outcome in outcomes)],
        ["lost by failover", *(str(sum(map(len, outcome.verdict.lost.values()))) for outcome in outcomes)],
        ["verdict", *("holds" if outcome.verdict.holds else "VIOLATED" for outcome in outcomes)],
    ]
    first, *columns = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(
        "  ".join(
            [row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], columns, strict=True))]
        )
        for row in rows
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__)
    parser.add_argument(
        "--engine",
        choices=["all", *ENGINES, *ENGINES["valkey"]],
        default="all",
        help="an engine, or one kind of Valkey store (default: %(default)s)",
    )
    parser.add_argument("--jobs", type=int, default=20_000, help="jobs per engine (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=40, help="SIGKILLs per engine (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=120.0, help="time per engine (default: %(default)s)")
    parser.add_argument(
        "--most-seconds",
        type=float,
        default=0.0,
        help="take that long on a slow machine, then end with fewer jobs (default: four times --seconds, at least 120)",
    )
    parser.add_argument(
        "--faults",
        type=_faults,
        default=[*FAULTS][:-1],
        help=f"some of {','.join(FAULTS)} (default: all but crash, which may lose writes that were acknowledged)",
    )
    parser.add_argument("--replicas", type=int, default=0, help="wait for that many replicas (default: none)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the folder even if everything holds")
    return parser


def _faults(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names).difference(FAULTS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return names


if __name__ == "__main__":
    sys.exit(main())
