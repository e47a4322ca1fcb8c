"""``process`` killed again and again: every row has its result, and what was done is not done again."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.core.lifecycle import EventType, State
from penstock.storage import open_storage
from tests.slow.crew import read_log
from tests.slow.table_run import CONCURRENCY, QUEUE, WORKERS

pytestmark = [pytest.mark.slow_spark, pytest.mark.timeout(900)]

ROWS, KILLS = 20_000, 5


def start(url: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.slow.table_run", str(ROWS), str(folder / "output")],
        env={**os.environ, "PENSTOCK_URL": url, "CALLS": str(folder / "calls")},
        stdout=subprocess.PIPE,
        text=True,
    )


def calls(folder: Path) -> Counter[int]:
    log = folder / "calls"
    return Counter(map(int, log.read_text().split())) if log.exists() else Counter()


def kill_amid(process: subprocess.Popen[str], folder: Path, chance: random.Random) -> None:
    """Once it has begun to work, after a while."""
    before = calls(folder).total()
    deadline = time.monotonic() + 120
    while calls(folder).total() <= before + chance.randrange(1500):
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.communicate()


async def forget_results(url: str) -> None:
    """All that the store may forget of what is done; what is held for the output, it may not."""
    storage = open_storage(url)
    await storage.open()
    cursor = ""
    while True:
        done = await storage.clean(QUEUE, State.COMPLETED, cursor=cursor)
        if not (cursor := done.cursor):
            break
    await storage.close()


def test_a_run_that_is_killed_pays_only_for_what_is_missing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/killed.db"
    chance = random.Random(7)
    for _ in range(KILLS):
        process = start(url, tmp_path)
        kill_amid(process, tmp_path, chance)
        asyncio.run(forget_results(url))
    last = start(url, tmp_path)
    said, _ = last.communicate(timeout=300)
    assert last.returncode == 0, said

    table = pq.read_table(tmp_path / "output", columns=["n", "state", "result", "job_id", "finished_at"])
    rows = table.to_pylist()
    assert {row["n"]: row["result"] for row in rows} == {n: str(2 * n) for n in range(ROWS)}
    assert {row["state"] for row in rows} == {"completed"}
    ends = Counter((row["job_id"], row["finished_at"]) for row in rows)
    assert max(ends.values()) == 1

    made = calls(tmp_path)
    retries, in_flight = ROWS // 100, KILLS * WORKERS * CONCURRENCY
    assert set(made) == set(range(ROWS))
    assert made.total() <= ROWS + retries + in_flight
    asyncio.run(check_log(url))


async def check_log(url: str) -> None:
    """No job was claimed again after it had completed."""
    storage = open_storage(url)
    await storage.open()
    completed: set[str] = set()
    for event in await read_log(storage, QUEUE):
        if event.type is EventType.COMPLETED:
            completed.add(event.id)
        elif event.type is EventType.CLAIMED:
            assert event.id not in completed, event
    assert len(completed) == ROWS
    await storage.close()
