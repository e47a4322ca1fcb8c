"""Kill everything that can be killed, for real, and count what came out."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from penstock.storage.contract import Storage
from tests.servers import ValkeyServer
from tests.slow.fleet_names import PRODUCERS, QUEUE
from tests.slow.local_processes import LocalProcesses, check_history, opened, read_log

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

JOBS = 1500
"""Per producer."""
KILLS = 24


async def wait_until_completed(storage: Storage, processes: LocalProcesses, count: int) -> None:
    """At least so many jobs are done."""

    async def reached() -> bool:
        return (await storage.counts(QUEUE)).completed >= count

    await processes.until(reached, seconds=60, state=lambda: storage.counts(QUEUE))


async def wait_until_drained(storage: Storage, processes: LocalProcesses, *, seconds: float) -> None:
    """All producers are done and no job is open."""

    async def reached() -> bool:
        producing = any(processes.running(name) for name in PRODUCERS)
        return not producing and (await storage.counts(QUEUE)).open == 0

    await processes.until(reached, seconds=seconds, state=lambda: storage.counts(QUEUE))
    processes.check()


def accepted_ids(directory: Path) -> set[str]:
    """What the producers' ledgers say was accepted, as job ids."""
    return {
        f"{name}-{line}" for name in PRODUCERS for line in (directory / f"{name}.ledger").read_text().split()
    }


async def check(storage: Storage, directory: Path) -> None:
    """Nothing lost, nothing done twice, and every result is that of the handler."""
    accepted = accepted_ids(directory)
    assert len(accepted) == JOBS * len(PRODUCERS)
    check_history(await read_log(storage, QUEUE), accepted)
    for job in await storage.get(QUEUE, sorted(accepted)):
        assert job is not None
        n = int(job.id.rpartition("-")[2])
        assert job.result == str(n * n).encode()


@pytest.fixture(params=["sqlite", "valkey"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/crash.db"
    url: str = request.getfixturevalue("valkey_url")
    return f"{url}?namespace=crash-{random.randrange(10**9)}"


async def test_nothing_is_lost_when_workers_producers_and_sweepers_are_killed(
    store_url: str, tmp_path: Path
) -> None:
    async with opened(store_url) as storage:
        with LocalProcesses(store_url, tmp_path, seed=1) as processes:
            for name in PRODUCERS:
                processes.launch("producer", name, JOBS)
            for n in range(3):
                processes.launch("worker", f"worker-{n}")
            processes.launch("sweeper", "sweeper")
            for kill in range(1, KILLS + 1):
                # Amid the work, not before or behind it.
                await wait_until_completed(storage, processes, kill * JOBS * len(PRODUCERS) // (KILLS + 2))
                processes.kill_one()
            assert processes.kills >= KILLS // 2, (
                "a producer that has done its part is not there to be killed"
            )
            await wait_until_drained(storage, processes, seconds=120)
        await check(storage, tmp_path)


async def wait_until_at_work(storage: Storage, folder: Path) -> None:
    """Until all have reached the store: one that starts while it is away is told so, and ends."""
    deadline = asyncio.get_running_loop().time() + 60
    ledgers = [folder / f"{name}.ledger" for name in PRODUCERS]
    while len(await storage.workers(QUEUE)) < 2 or not all(
        path.exists() and path.stat().st_size for path in ledgers
    ):
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)


async def test_valkey_killed_and_restarted_under_load_loses_no_accepted_job(tmp_path: Path) -> None:
    with ValkeyServer(aof=True) as server:
        url = f"valkey://127.0.0.1:{server.port}"
        with LocalProcesses(url, tmp_path, seed=2) as processes:
            for name in PRODUCERS:
                processes.launch("producer", name, JOBS)
            for n in range(2):
                processes.launch("worker", f"worker-{n}")
            async with opened(url) as storage:
                await wait_until_at_work(storage, tmp_path)
            for _ in range(5):
                await asyncio.sleep(processes.chance.uniform(1, 2))
                server.kill()
                server.restart()
            async with opened(url) as storage:
                await wait_until_drained(storage, processes, seconds=120)
        async with opened(url) as storage:
            await check(storage, tmp_path)
