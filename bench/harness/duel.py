"""An async function on every row of a table: throughput of Penstock and its rivals, and what a SIGKILL costs them."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from .duel_report import duel_page, verdicts
from .install import Installation, project_version
from .machine import core_speed, wait_quiet
from .place import BENCH, CACHE, RESULTS, save
from .server import Server
from .systems import choose, load_systems

CONTESTANTS = BENCH / "contestants"
WARM_ROWS = 200
LONGEST_S = 900


def main() -> int:
    args = parse()
    systems = choose(load_systems(CONTESTANTS), args.systems)
    run: dict[str, Any] = {
        "run": time.strftime("%Y%m%d-%H%M%S"),
        "version": project_version(),
        "cpus": os.cpu_count(),
        **{name: getattr(args, name) for name in ("rows", "rounds", "in_flight", "work_ms")},
        "systems": [{"name": system.name, "note": system.note} for system in systems],
        "samples": [],
    }
    with ExitStack() as stack:
        ring = Ring(args, stack.enter_context(Server()), make_tables(stack, args.rows))
        installed = [Installation(system) for system in systems]
        for installation in installed:
            installation.ensure()
        try:
            for number in range(args.rounds):
                for installation in installed[:: -1 if number % 2 else 1]:
                    run["samples"] += sampled(ring.race, installation, round=number)
            for installation in installed if args.kill else ():
                run["samples"] += sampled(ring.kill, installation)
        except KeyboardInterrupt:
            print("# interrupted: the table shows what there is", file=sys.stderr)
    text = duel_page(run)
    print(text)
    print(f"# written: {save('duel', run, text, args.out)}", file=sys.stderr)
    return 1 if args.check and not all(verdicts(run)) else 0


def sampled(
    measure: Callable[[Installation], dict[str, Any]], installation: Installation, **label: int
) -> list[dict[str, Any]]:
    """Return a sample, or none if the contestant fails: the run goes on without it."""
    try:
        return [measure(installation) | label]
    except RuntimeError as error:
        print(f"# left out: {error}", file=sys.stderr)
        return []


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench/duel", description=__doc__)
    p.add_argument("systems", nargs="*", help="contestants (default: all)")
    p.add_argument("-n", "--rows", type=int, default=20_000, help="rows of the table (default 20,000)")
    p.add_argument("-r", "--rounds", type=int, default=3, help="rounds over all contestants (default 3)")
    p.add_argument("--work-ms", type=float, default=5.0, help="how long a row's call waits (default 5)")
    p.add_argument("--in-flight", type=int, default=50, help="rows under way at a time (default 50)")
    p.add_argument("--no-kill", dest="kill", action="store_false", help="leave out the SIGKILL half-way")
    p.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the .md and .json go")
    p.add_argument("--check", action="store_true", help="exit 1 unless every target was reached")
    return p.parse_args()


def make_tables(stack: ExitStack, rows: int) -> Path:
    """Write the table, and a small one for warming, into a folder that goes with ``stack``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    CACHE.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="duel-", dir=CACHE))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    for name, count in (("rows", rows), ("warm", WARM_ROWS)):
        # Rows for warming have keys of their own.
        first = 0 if name == "rows" else 1_000_000_000
        pq.write_table(pa.table({"key": range(first, first + count)}), folder / f"{name}.parquet")
    return folder


class Ring:
    """Where contestants run, one at a time, each in a folder of its own."""

    def __init__(self, args: argparse.Namespace, server: Server, tables: Path) -> None:
        self.args, self.server, self.tables = args, server, tables

    def race(self, installation: Installation) -> dict[str, Any]:
        """Run all rows on a warm system and return the seconds."""
        with self._place(installation) as place:
            os.sync()
            wait_quiet(2)
            speed = core_speed()
            with place.start("timed") as process:
                said, _ = process.communicate(timeout=LONGEST_S)
            place.check(process, said)
            seconds = float(said.split()[-1])
            lost = self.args.rows - place.count()
        return self._sample(installation, "race", seconds=seconds, lost=lost, core_speed=speed)

    def kill(self, installation: Installation) -> dict[str, Any]:
        """SIGKILL the run and all its processes once half of the rows are paid, run again, and count."""
        with self._place(installation) as place:
            with place.start("run") as process:
                while place.paid().total() < self.args.rows / 2:
                    if process.poll() is not None:
                        place.check(process, process.communicate()[0])
                        raise RuntimeError(
                            f"{installation.system.name} ended before half of its rows were paid"
                        )
                    time.sleep(0.005)
                kill_tree(process.pid)
            began = time.monotonic()
            with place.start("run") as process:
                said, _ = process.communicate(timeout=LONGEST_S)
            place.check(process, said)
            paid = place.paid()
            twice = sum(times - 1 for times in paid.values())
            lost = self.args.rows - place.count()
        seconds = time.monotonic() - began
        return self._sample(installation, "kill", seconds=seconds, twice=twice, lost=lost)

    def _sample(self, installation: Installation, what: str, **figures: float) -> dict[str, Any]:
        name = installation.system.name
        print(f"# {name} {what}: {figures}", file=sys.stderr, flush=True)
        return {"system": name, "what": what, "rows": self.args.rows, **figures}

    @contextmanager
    def _place(self, installation: Installation) -> Iterator[Place]:
        self.server.flush()
        folder = Path(tempfile.mkdtemp(dir=self.tables))
        for table in self.tables.glob("*.parquet"):
            os.link(table, folder / table.name)
        url = f"sqlite:///{folder}/jobs.db" if installation.system.kind == "sqlite" else self.server.url
        environment = {
            "DUEL_FOLDER": str(folder),
            "DUEL_URL": url,
            "DUEL_IN_FLIGHT": str(self.args.in_flight),
            "DUEL_WORK_MS": str(self.args.work_ms),
            "PYTHONPATH": installation.python_path(),
        }
        try:
            yield Place(folder, installation, os.environ | environment)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class Place:
    """One contestant's folder: its table, its result, and a line in ``paid`` for every call that it made."""

    def __init__(self, folder: Path, installation: Installation, environment: dict[str, str]) -> None:
        self.folder, self.installation, self.environment = folder, installation, environment

    @contextmanager
    def start(self, role: str) -> Iterator[subprocess.Popen[str]]:
        """Start the contestant; whatever it leaves running ends with the block."""
        command = self.installation.command(role)
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env=self.environment, cwd=self.folder, text=True
            )
        try:
            yield process
        finally:
            kill_tree(process.pid)
            process.wait()
            if process.stdout:
                process.stdout.close()

    def check(self, process: subprocess.Popen[str], said: str) -> None:
        if process.returncode:
            raise RuntimeError(
                f"{self.installation.system.name} failed: {said}{(self.folder / 'log').read_text()[-2000:]}"
            )

    def count(self) -> int:
        """Return how many rows have a result."""
        with self.start("count") as process:
            said, _ = process.communicate(timeout=LONGEST_S)
        self.check(process, said)
        return int(said.split()[-1])

    def paid(self) -> Counter[str]:
        """Return how often each row of the table was paid for."""
        path = self.folder / "paid"
        return Counter(path.read_text().split()) if path.exists() else Counter()


def kill_tree(pid: int) -> None:
    """SIGKILL a process and everything it started."""
    try:
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.send_signal(signal.SIGSTOP)
        except psutil.NoSuchProcess:
            pass
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(family[:-1], timeout=10)


if __name__ == "__main__":
    sys.exit(main())
