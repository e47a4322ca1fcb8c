"""Durable steps per second, beside plain jobs on the same engine in the same run, and beside DBOS on SQLite."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .install import project_version
from .place import CACHE, LIB, RESULTS, save
from .server import Server
from .table import figure, markdown, spread

ENGINES = ("valkey", "sqlite")
DBOS = "dbos==3.4.0"
WANTED_SHARE = 0.5
"""Steps, to plain jobs of the same engine."""
WANTED_LEAD = 10.0
"""Steps on SQLite, to those of DBOS."""


def main() -> int:
    args = parse()
    run: dict[str, Any] = {
        "run": time.strftime("%Y%m%d-%H%M%S"),
        "version": project_version(),
        "cpus": os.cpu_count(),
        "count": args.count,
        "rounds": args.rounds,
        "samples": [],
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=CACHE)))
        peers: dict[str, subprocess.Popen[str]] = {}
        for engine in args.engines:
            server = stack.enter_context(Server()) if engine == "valkey" else None
            url = f"valkey://127.0.0.1:{server.port}" if server else f"sqlite:///{folder}/penstock.db"
            peers[engine] = started(stack, [sys.executable, str(LIB / "steps_peer.py"), url])
        if args.dbos and (python := dbos_python()):
            peers["dbos"] = started(stack, [str(python), str(LIB / "dbos_peer.py"), f"{folder}/dbos.db"])
        for number in range(-1, args.rounds):  # the first is to warm up
            for name, peer in peers.items():
                kinds = ("steps",) if name == "dbos" else ("plain", "steps")
                for kind in kinds:
                    count = min(args.count, args.dbos) if name == "dbos" else args.count
                    spent = asked(peer, f"{kind} {count if number >= 0 else count // 10}")
                    sample = {"peer": name, "kind": kind, "round": number, "rate": count / spent["seconds"]}
                    sample["cpu_us"] = spent["cpu"] / count * 1e6
                    if number >= 0:
                        run["samples"].append(sample)
                        print(f"# {number + 1}/{args.rounds} {sample}", file=sys.stderr)
    text = page(run)
    print(text)
    print(f"# written: {save('steps', run, text, args.out)}", file=sys.stderr)
    return 1 if args.check and not all(ok for *_, ok in wants(run)) else 0


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench/steps", description=__doc__)
    p.add_argument("-n", "--count", type=int, help="plain jobs, and steps, of a measurement (default 20,000)")
    p.add_argument("-r", "--rounds", type=int, help="rounds (default 5)")
    p.add_argument("-e", "--engines", default=",".join(ENGINES), help="comma list of: " + " ".join(ENGINES))
    p.add_argument(
        "--dbos", type=int, default=1000, metavar="N", help="steps of DBOS; 0: without it (default 1,000)"
    )
    p.add_argument("--quick", action="store_true", help="smoke test: 500 steps, one round, without DBOS")
    p.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the .md and .json go")
    p.add_argument("--check", action="store_true", help="exit 1 unless every target was reached")
    args = p.parse_args()
    args.count = args.count or (500 if args.quick else 20_000)
    args.rounds = args.rounds or (1 if args.quick else 5)
    args.dbos = 0 if args.quick else args.dbos
    args.engines = args.engines.split(",")
    if unknown := set(args.engines) - set(ENGINES):
        p.error(f"unknown: {', '.join(sorted(unknown))}")
    CACHE.mkdir(parents=True, exist_ok=True)
    return args


def started(stack: ExitStack, command: list[str]) -> subprocess.Popen[str]:
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(peer.wait, 30)
    assert peer.stdin is not None
    stack.callback(peer.stdin.close)
    return peer


def asked(peer: subprocess.Popen[str], line: str) -> dict[str, float]:
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write(line + "\n")
    peer.stdin.flush()
    if not (answer := peer.stdout.readline()):
        raise RuntimeError(f"{line}: the process ended with {peer.wait()}")
    spent: dict[str, float] = json.loads(answer)
    return spent


def dbos_python() -> Path | None:
    """The interpreter of an environment with DBOS; ``None`` if it cannot be installed."""
    home = CACHE / DBOS.replace("==", "-")
    python = home / "bin/python"
    if not python.exists():
        venv.create(home, with_pip=True)
    try:
        subprocess.run([str(python), "-m", "pip", "install", "-q", DBOS], check=True, stdout=sys.stderr)
    except subprocess.CalledProcessError as error:
        print(f"# without DBOS: {error}", file=sys.stderr)
        return None
    return python


def rates(run: dict[str, Any], peer: str, kind: str, key: str = "rate") -> list[float]:
    return [s[key] for s in run["samples"] if (s["peer"], s["kind"]) == (peer, kind)]


def wants(run: dict[str, Any]) -> list[tuple[str, float, float, bool]]:
    """The targets: what, measured, wanted, whether it was reached. The median of the ratios of each round."""
    found = []
    for engine in ENGINES:
        pairs = zip(rates(run, engine, "steps"), rates(run, engine, "plain"), strict=True)
        if shares := [steps / plain for steps, plain in pairs]:
            share = statistics.median(shares)
            found.append((f"{engine}: steps to plain jobs", share, WANTED_SHARE, share >= WANTED_SHARE))
    pairs = zip(rates(run, "sqlite", "steps"), rates(run, "dbos", "steps"), strict=False)
    if leads := [steps / theirs for steps, theirs in pairs]:
        lead = statistics.median(leads)
        found.append(("sqlite: steps to those of DBOS", lead, WANTED_LEAD, lead >= WANTED_LEAD))
    return found


def page(run: dict[str, Any]) -> str:
    peers = list(dict.fromkeys((s["peer"], s["kind"]) for s in run["samples"]))
    rows = [
        [f"{peer} {kind}", spread(rates(run, peer, kind)), spread(rates(run, peer, kind, "cpu_us"))]
        for peer, kind in peers
    ]
    targets = [
        [what, f"{measured:.2f}", figure(wanted), "pass" if ok else "**fail**"]
        for what, measured, wanted, ok in wants(run)
    ]
    return "\n".join(
        [
            f"# Durable steps, {run['run']}",
            "",
            f"Penstock {run['version']}; {run['cpus']} CPUs; {run['count']:,} jobs or steps, {run['rounds']} rounds. "
            "One worker, 100 slots; five steps in a job.",
            "",
            *markdown(["", "per second", "us of its process"], rows),
            "",
            *markdown(["figure", "measured", "wanted", ""], targets),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
