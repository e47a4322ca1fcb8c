"""``process`` killed again and again: every row has its result, and what was done is not done again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from penstock.core.lifecycle import EventType, State
from penstock.storage import open_storage
from tests.slow.drivers import Driver, let_leases_end
from tests.slow.local_processes import read_log
from tests.slow.table_run import CONCURRENCY, QUEUE, WORKERS

FIELDS = ("state", "result", "job_id", "finished_at")
# Engine and format of the output.
CASES = [("sqlite", "parquet"), ("sqlite", "delta"), ("valkey", "delta")]
# By hand, with more time: PROCESS_KILLS=20 PROCESS_ROWS=50000 make test-slow ARGS=tests/slow/test_process_kills.py
KILLS = int(os.environ.get("PROCESS_KILLS", "4"))
ROWS = int(os.environ.get("PROCESS_ROWS", "12000"))
PATIENCE_S = 240 + ROWS // 100
# Its JVM is stopped when it is killed, and goes on when the next run is at work.
OUTLIVED = 2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400 + 100 * KILLS)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, str, int], Driver]]:
    drivers: list[Driver] = []

    def start(url: str, format: str, rows: int) -> Driver:
        arguments = (str(rows), str(tmp_path / "output"), format)
        environment = {"PENSTOCK_URL": url, "CALLS": str(tmp_path / "calls")}
        log = tmp_path / f"driver-{len(drivers)}.log"
        drivers.append(Driver("tests.slow.table_run", *arguments, log=log, **environment))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()


def calls(folder: Path) -> Counter[int]:
    log = folder / "calls"
    return Counter(map(int, log.read_text().split())) if log.exists() else Counter()


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


def url_of(engine: str, folder: Path, request: pytest.FixtureRequest) -> str:
    if engine == "sqlite":
        return f"sqlite:///{folder}/killed.db"
    return f"{request.getfixturevalue('valkey_url')}?namespace=killed-{uuid.uuid4().hex[:8]}"


def read(output: Path, format: str) -> pa.Table:
    columns = ["n", *(f"penstock_{name}" for name in FIELDS)]
    if format == "delta":
        return DeltaTable(str(output)).to_pyarrow_table(columns=columns)
    return pq.read_table(output, columns=columns)


@pytest.mark.parametrize(("engine", "format"), CASES)
def test_a_run_that_is_killed_pays_only_for_what_is_missing(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    start: Callable[[str, str, int], Driver],
    *,
    engine: str,
    format: str,
) -> None:
    count, kills = ROWS, KILLS
    url, output = url_of(engine, tmp_path, request), tmp_path / "output"
    chance = random.Random()
    standby, outliving = start(url, format, count), 0
    for kill in range(kills):
        driver, standby = standby, start(url, format, count)
        enough = calls(tmp_path).total() + chance.randrange(count // (2 * kills))
        driver.go()
        driver.wait_until(lambda enough=enough: calls(tmp_path).total() > enough)  # type: ignore[misc]
        if outliving:
            os.kill(outliving, signal.SIGCONT)
            outliving = 0
        if kill == OUTLIVED:
            outliving = driver.jvm
            os.kill(outliving, signal.SIGSTOP)
        # By itself, so that its JVM and its workers find out; or all at once, workers amid their jobs.
        (driver.kill if kill % 2 == 0 else driver.kill_all)()
        let_leases_end(url, output, QUEUE)
        asyncio.run(forget_results(url))
    standby.go()
    standby.finish(PATIENCE_S)

    found = read(output, format).to_pylist()
    rows = [{name.removeprefix("penstock_"): cell for name, cell in row.items()} for row in found]
    assert {row["n"]: row["result"] for row in rows} == {n: str(2 * n) for n in range(count)}
    assert {row["state"] for row in rows} == {"completed"}
    ends = Counter((row["job_id"], row["finished_at"]) for row in rows)
    assert max(ends.values()) == 1
    assert len(rows) == count

    made = calls(tmp_path)
    retries, in_flight = count // 100, kills * WORKERS * CONCURRENCY
    assert set(made) == set(range(count))
    assert made.total() <= count + retries + in_flight
    asyncio.run(check_log(url, count))


async def check_log(url: str, count: int) -> None:
    """No job was claimed again after it had completed."""
    storage = open_storage(url)
    await storage.open()
    completed: set[str] = set()
    for event in await read_log(storage, QUEUE):
        if event.type is EventType.COMPLETED:
            completed.add(event.id)
        elif event.type is EventType.CLAIMED:
            assert event.id not in completed, event
    assert len(completed) == count
    await storage.close()
