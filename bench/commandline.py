"""What the command line costs: jobs from standard input beside the engine's own bulk enqueue, and the help.

    python bench/commandline.py [--jobs 100000] [--rounds 3]

Both ways put the same commands into SQLite files of their own, in turn, so that slow and fast spells of the machine
meet both. The command line's time is all of it: the interpreter's start, reading, checking, writing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from penstock import App
from penstock.core.command import COMMAND_TASK

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src")}
TARGET_RATIO = 0.5
TARGET_HELP_S = 0.25


async def engine_s(url: str, count: int) -> float:
    """The engine's own way: payloads that are in memory, one call."""
    payloads = [{"command": f"echo {n}", "cwd": os.getcwd()} for n in range(count)]
    async with App(url) as app:
        began = time.perf_counter()
        await app.queue("default").enqueue_many(payloads, task=COMMAND_TASK)
        return time.perf_counter() - began


def command_line_s(url: str, lines: bytes) -> float:
    """``penstock enqueue -``, from start to end."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "penstock", "enqueue", "-", "--url", url]
    subprocess.run(command, input=lines, env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def start_s(*arguments: str) -> float:
    """The median of ten starts of the interpreter."""
    times = []
    for _ in range(10):
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], env=ENVIRONMENT, stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    lines = b"".join(b'{"command": "echo %d"}\n' % n for n in range(given.jobs))
    ratios = []
    print("| round | engine jobs/s | penstock enqueue - jobs/s | ratio |\n|---|---|---|---|")
    for number in range(1, given.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            engine = asyncio.run(engine_s(f"sqlite:///{folder}/engine.db", given.jobs))
            shell = command_line_s(f"sqlite:///{folder}/shell.db", lines)
        ratios.append(engine / shell)
        print(f"| {number} | {given.jobs / engine:,.0f} | {given.jobs / shell:,.0f} | {engine / shell:.2f} |")
    ratio, extra_s = statistics.median(ratios), start_s("-m", "penstock", "--help") - start_s("-c", "pass")
    print(
        f"\nmedian ratio {ratio:.2f} (target {TARGET_RATIO}); help {extra_s:.3f} s over Python (target {TARGET_HELP_S})"
    )
    sys.exit(0 if ratio >= TARGET_RATIO and extra_s <= TARGET_HELP_S else 1)


if __name__ == "__main__":
    main()
