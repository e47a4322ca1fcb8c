"""What every contestant of bench/duel shares: the work of a row, the count of paid calls, and the command line."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["IN_FLIGHT", "ROWS", "Contestant", "answers", "main", "work"]

FOLDER = Path(os.environ["DUEL_FOLDER"])
ROWS = FOLDER / "rows.parquet"
IN_FLIGHT = int(os.environ["DUEL_IN_FLIGHT"])
WORK_S = float(os.environ["DUEL_WORK_MS"]) / 1000
_paid: list[int] = []


async def work(key: int) -> int:
    """Stand for one call of a paid service: write down that the row was paid for, wait, answer."""
    if not _paid:
        _paid.append(os.open(FOLDER / "paid", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    os.write(_paid[0], b"%d\n" % key)
    await asyncio.sleep(WORK_S)
    return key * 2


async def answers(keys: Iterable[int], in_flight: int = IN_FLIGHT) -> list[int]:
    """Do the work of all keys, at most ``in_flight`` at a time, and return the answers in order."""
    found: dict[int, int] = {}
    left = iter(keys)

    async def lane() -> None:
        for key in left:
            found[key] = await work(key)

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(lane())
    return list(found.values())


class Contestant:
    """One way to run an async function on every row of a Parquet file."""

    def open(self) -> None:
        """Start what a user would have running already: a session, a cluster, a worker."""

    def run(self, rows: Path, result: Path) -> None:
        """Write a row with ``key`` and ``value`` into ``result`` for every row of ``rows``."""
        raise NotImplementedError

    def close(self) -> None:
        """End what ``open`` started."""

    def keys(self, result: Path) -> Iterable[int]:
        """Return the keys of the rows that have a result."""
        import pyarrow.parquet

        return (
            pyarrow.parquet.read_table(result, columns=["key"])["key"].to_pylist() if result.exists() else []
        )


def main(contestant: Contestant) -> None:
    """Do what the harness asks for: ``timed`` warms up first, ``run`` does not, ``count`` counts rows with a result."""
    role, result = sys.argv[1], FOLDER / "result"
    if role == "count":
        print(len(set(contestant.keys(result))))
        return
    contestant.open()
    try:
        if role == "timed":
            contestant.run(FOLDER / "warm.parquet", FOLDER / "warm")
        began = time.perf_counter()
        contestant.run(ROWS, result)
        print(time.perf_counter() - began, flush=True)
    finally:
        contestant.close()
