"""What each feature costs per job, beside plain jobs: enqueue and drain by storage calls, interleaved."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .features_report import features_report, verdicts
from .flat import Meter
from .install import Installation, project_version
from .place import CACHE, LIB, PROJECT, RESULTS, save
from .server import Server
from .systems import choose, load_systems
from .table import figure

ENGINES = ("valkey", "sqlite")
FEATURES = (
    *("plain", "groups", "groups-capped", "queue-rate", "queue-concurrency", "flows", "flows-budget"),
    *("dedup", "usage", "steps", "budget", "tracing"),
)
BEFORE = "plain-before"
WARM_UP = 500
PLAIN_EVERY = 4
"""So many features come between two measurements of plain jobs, which all ratios are to."""


@dataclass(frozen=True)
class Peer:
    """A process of lib/storage_peer.py: one engine, one checkout."""

    process: subprocess.Popen[str]
    server: Server | None

    def ask(self, line: str) -> dict[str, Any]:
        """Have it do this; what it cost per job."""
        meter = Meter(self.server)
        to, back = lines(self.process.stdin), lines(self.process.stdout)
        to.write(line + "\n")
        to.flush()
        answer = back.readline()
        if not answer:
            raise RuntimeError(f"{line}: the process ended with {self.process.wait()}")
        said = json.loads(answer)
        used = meter.per_job(said["jobs"]) | {"python_us": said["cpu"] / said["jobs"] * 1e6}
        return used | ({"cpu_us": used["server_us"] + used["python_us"]} if self.server else {})

    def measure(self, feature: str, jobs: int) -> dict[str, dict[str, Any]]:
        """By phase. The server is empty before and after."""
        self.ask(f"begin {feature} {jobs}")
        figures = {phase: self.ask(phase) for phase in ("enqueue", "drain")}
        if self.server:
            self.server.client.flushall()
        return figures

    def close(self) -> None:
        lines(self.process.stdin).close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main() -> int:
    args = parse()
    run: dict[str, Any] = {
        "run": time.strftime("%Y%m%d-%H%M%S"),
        "cpus": os.cpu_count(),
        "jobs": args.jobs,
        "rounds": args.rounds,
        "engines": args.engines,
        "version": project_version(),
        "against": str(args.against) if args.against else "",
        "samples": [],
    }
    with ExitStack() as stack:
        peers = {engine: open_peers(stack, engine, args.against) for engine in args.engines}
        try:
            for number in range(args.rounds):
                measure_round(peers, args, number, run["samples"])
        except KeyboardInterrupt:
            print("# interrupted: the tables show what there is", file=sys.stderr)
    text = page(run)
    print(text)
    print(f"# written: {save('features', run, text, args.out)}", file=sys.stderr)
    return 1 if args.check and not all(verdicts(run)) else 0


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench/features", description=__doc__)
    p.add_argument(
        "features", nargs="*", help="some of: " + " ".join(FEATURES) + "; plain is always among them"
    )
    p.add_argument("-r", "--rounds", type=int, help="rounds over all features (default 9)")
    p.add_argument("-n", "--jobs", type=int, help="jobs of each measurement (default 4,000)")
    p.add_argument("-e", "--engines", default=",".join(ENGINES), help="comma list of: " + " ".join(ENGINES))
    p.add_argument(
        "--against", type=Path, metavar="DIR", help="another checkout, whose plain jobs are measured in turn"
    )
    p.add_argument("--quick", action="store_true", help="smoke test: 440 jobs, one round")
    p.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the .md and .json go")
    p.add_argument("--check", action="store_true", help="exit 1 unless every limit is kept")
    args = p.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 9)
    args.jobs = args.jobs or (440 if args.quick else 4_000)
    args.engines = args.engines.split(",")
    args.features = list(dict.fromkeys(["plain", *(args.features or FEATURES)]))
    unknown = set(args.features) - set(FEATURES) | set(args.engines) - set(ENGINES)
    if unknown:
        p.error(f"unknown: {', '.join(sorted(unknown))}")
    if args.against and not (args.against / "src/penstock").is_dir():
        p.error(f"{args.against} is no checkout: it has no src/penstock")
    return args


def open_peers(stack: ExitStack, engine: str, against: Path | None) -> dict[str, Peer]:
    """A process for plain jobs, one for those of the other checkout, one for features: the first two differ in nothing
    but the checkout. On one server, or a file each."""
    server = stack.enter_context(Server()) if engine == "valkey" else None
    checkouts = {"plain": PROJECT, "features": PROJECT} | ({BEFORE: against.resolve()} if against else {})
    peers = {}
    for name, checkout in checkouts.items():
        url = f"valkey://127.0.0.1:{server.port}/0" if server else f"sqlite:///{scratch(stack, name)}/db"
        peers[name] = stack.enter_context(closing(open_peer(checkout, url, server)))
        peers[name].measure("plain", WARM_UP)
    return peers


def scratch(stack: ExitStack, name: str) -> Path:
    directory = CACHE / f"features-{os.getpid()}-{name}"
    directory.mkdir(parents=True)
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    return directory


def open_peer(checkout: Path, url: str, server: Server | None) -> Peer:
    installation = Installation(choose(load_systems(), ["penstock:valkey"])[0])
    installation.ensure()
    # Each checkout brings the adapter that knows its own interface.
    own = checkout / "bench/lib/storage_peer.py"
    adapter = own if own.exists() else LIB / "storage_peer.py"
    process = subprocess.Popen(
        [str(installation.home / "bin/python"), str(adapter), url],
        env=os.environ | {"PYTHONPATH": str(checkout / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Peer(process, server)


def measure_round(
    peers: dict[str, dict[str, Peer]], args: argparse.Namespace, number: int, samples: list[dict[str, Any]]
) -> None:
    """Every feature on every engine once, and plain jobs between them."""
    for engine, by_name in peers.items():
        for name in order_of(args.features, number, with_before=BEFORE in by_name):
            peer = by_name.get(name, by_name["features"])
            for phase, sample in peer.measure("plain" if name == BEFORE else name, args.jobs).items():
                said = " ".join(f"{key}={figure(value)}" for key, value in sample.items())
                print(f"# {number + 1}/{args.rounds} {engine} {name} {phase}: {said}", file=sys.stderr)
                label = {"engine": engine, "feature": name, "round": number, "phase": phase}
                samples.append(sample | label)


def order_of(features: list[str], number: int, *, with_before: bool) -> list[str]:
    """One round: plain jobs, of both checkouts one right after the other and in turn first, between the features."""
    others = [feature for feature in features if feature != "plain"]
    order: list[str] = []
    for turn, at in enumerate(range(0, max(len(others), 1), PLAIN_EVERY)):
        plain = ["plain", BEFORE] if with_before else ["plain"]
        order += [*(plain[::-1] if (turn + number) % 2 else plain), *others[at : at + PLAIN_EVERY]]
    return order


def page(run: dict[str, Any]) -> str:
    against = f", against {run['against']}" if run["against"] else ""
    return (
        f"# What features cost, {run['run']}\n\nPenstock {run['version']}{against}; {run['cpus']} CPUs; "
        f"{run['jobs']:,} jobs, {run['rounds']} rounds in turn. Cells: the least over the rounds, per job, and in "
        f"brackets the median of the rounds' ratios to plain jobs.\n\n{features_report(run)}"
    )


def lines(stream: IO[str] | None) -> IO[str]:
    """The stream of a process started with pipes."""
    assert stream is not None
    return stream


if __name__ == "__main__":
    sys.exit(main())
